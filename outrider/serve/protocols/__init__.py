"""The protocols that clients speak: each reads its bodies as requests of ours, and writes the parts of an answer."""
