"""The HTTP server with the APIs of OpenAI, Anthropic and Ollama. Imports the engine and below; the command line imports it.

app        the routes
guard      ASGI middleware before every route: request ids, API key, limits
protocol   request bodies; options: what the operator sets
service    from an HTTP request to requests of the engine
pending    a request in work: one response, or a stream of events
responses  the JSON of responses; tools: tool calls in texts; errors: the JSON of errors
connection a connection that a response can cut
metrics    Prometheus; spans: OpenTelemetry; logs: one line for each request
"""
