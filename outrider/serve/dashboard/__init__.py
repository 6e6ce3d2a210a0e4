"""The live page of a server: what it watches, and the viewers that it tells."""
