"""Measure whether speculative decoding helps on the user's own prompts. Imports everything below the command line.

run        the measurement as data: settings, prompts, samples, and the JSON file that holds them
prompts    read prompts from a file, or a set that is installed
schedule   the order of the measurements, and how an interrupted one continues
local      backend: models in this process; remote: servers
stats      tokens per second, acceptance, intervals
report     results and recommendation, terminal tables, HTML page with a comparison of two runs
tune       find the fastest setting: predict all, measure the best
"""
