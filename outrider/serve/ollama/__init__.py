"""Ollama's API: a body becomes a chat or a completion request, and the chunks of its answer become lines of JSON."""
