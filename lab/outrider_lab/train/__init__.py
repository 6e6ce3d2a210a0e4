"""Trains heads: the target writes its own answers (`prompts`, `answers`), then the head learns what it would say
(`trainer`)."""
