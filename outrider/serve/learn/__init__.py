"""Learns on the job: the texts that a server writes train its head further in idle time."""
