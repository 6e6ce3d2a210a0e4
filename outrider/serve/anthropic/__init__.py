"""Anthropic's Messages API: a body becomes a chat request, and the chunks of its answer become Anthropic's events."""
