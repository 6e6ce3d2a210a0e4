"""Trained heads: drafters that read the hidden states of their target. `eagle_module` is the maths, `writer` the files."""
