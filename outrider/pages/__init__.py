"""HTML pages: one file each, with its style, its script and its data. The explainer's page and records are here too."""
