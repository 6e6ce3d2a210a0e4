"""The laboratory: what measures, tunes, certifies, explains and plans. The engine and the server never import it."""
