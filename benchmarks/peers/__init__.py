"""Peers: one way to start, ask and stop their servers (`llama_server`), and the programs for their Pythons."""
