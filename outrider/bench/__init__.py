"""Does it help here? Plain against speculative decoding on the user's own prompts. Imports everything below the command line.

run       what a measurement is: settings, prompts, samples, and the JSON file that holds them
prompts   what is asked; session, local, remote ask it, in turns, here or of servers
stats     what the samples say, and how sure that is; summary, show and figures put it into a file, a terminal, a page
limits    what the machine allows, and what the cost model expects
verdict   what to do about it, in words; moved: what changed between two runs
page      the report: pictures and charts draw, report.html and report.css lay it out
tune      the setting that is fastest here, by predict from one run; export: what other engines call it
"""
