"""Does it help here? Plain against speculative decoding on the user's own prompts. Imports everything below the command line.

run      what a measurement is: settings, prompts, samples, and the JSON file that holds them
"""
