"""How the built-in pair `builtin:code` and `builtin:code-draft` is made. Nothing in the library imports this."""
