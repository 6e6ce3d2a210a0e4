"""OpenAI's protocol: requests, answers, streams, tools and the Responses API."""
