"""What to do with the settings of a measurement, and why: on the terminal, and as one page of HTML."""
