"""The laboratory: what measures, tunes, trains, certifies, explains and hands over. The engine and the server never import it."""
