"""Models run by transformers, with our own attention."""
