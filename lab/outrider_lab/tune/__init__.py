"""Find the fastest setting for some prompts: predict all settings, measure those that can win."""
