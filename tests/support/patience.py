"""How long a test waits for a page, a process, a thread or an answer. Nothing is measured with it, and a busy machine is slow."""

PATIENCE = 600.0  # seconds
