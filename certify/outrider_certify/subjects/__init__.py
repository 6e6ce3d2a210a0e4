"""What can be certified: our engine, a verifier function or a callable, transformers, servers with OpenAI's API."""
