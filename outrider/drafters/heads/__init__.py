"""Trained heads: drafters that read the hidden states of their target.

`eagle`, `block`, `medusa` and `mtp` are the kinds: their settings, the reading of their folders, and how they draft. The other
files are what kinds share. The laboratory trains and writes heads.
"""
