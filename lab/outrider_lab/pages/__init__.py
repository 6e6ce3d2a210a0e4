"""The page that explains a run: its records, its script and the built-in run."""
