"""Saved packed weights: a folder that a model starts from without being quantised or repacked again."""
