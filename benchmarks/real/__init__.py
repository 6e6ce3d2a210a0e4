"""Benchmarks on real models: every method against plain decoding, and against llama.cpp on the same file.

sides    outrider's methods, which take turns in one process; the servers of peers as the other sides
journal  one line for each finished round, so that a run can be cut into pieces and goes on where it was
report   medians of ratios with intervals, the result file, Markdown tables
start    a new process: seconds to the first token, and its peak memory
served   several clients: our server and llama.cpp's, the same prompts
"""
