"""Weights, no code. `outrider.models.builtin.shipped` finds them by the name of this package."""
