"""Trained heads: drafters that read the hidden states of their target. Each kind has a folder with three files.

`files` reads and writes it, `module` has its settings and what is trained, and `drafter` drafts with it. Medusa's module is in
its drafter. The files here are what kinds share.
"""
