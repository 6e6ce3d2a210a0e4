"""The model over HTTP, as OpenAI's clients know it. Imports the engine and everything below; imported by the command line.

settings: what an operator may choose. protocol: what a request may say. service: from requests to jobs, and from their
updates to answers. app: the routes. guard: what stands before every route. metrics, logs: what may be watched.
"""
