"""The HTTP server with the APIs of OpenAI, Anthropic and Ollama. Imports the engine and below; the command line imports it."""
