"""Trained heads: drafters that read the hidden states of their target.

`eagle`, `block`, `medusa` and `mtp` draft. `eagle_files` and `block_files` have the settings of a kind and read its folders. The
other files are what kinds share. The laboratory trains and writes heads.
"""
