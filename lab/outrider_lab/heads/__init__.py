"""Trained heads as modules that learn, and their folders as other engines read them."""
