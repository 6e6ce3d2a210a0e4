"""Exports that were really run: every command asked of the engines' own parsers, and servers started with them.

    python -m benchmarks.handover.parsers    every exported command line and file, by the parsers of three engines
    python -m benchmarks.handover.started    exported vLLM commands, started: texts and counters compared with ours

Each engine is installed in an environment of its own, whose Python is named on the command line. docs/guides/handover.md
has the lines.
"""
