"""Exports of `outrider_lab.handover`, by the engines' own parsers: python -m benchmarks.handover.parsers

Each engine is installed in an environment of its own, whose Python is named on the command line.
"""
