"""Traces: what a run did, step by step, in a file that can be read, summed up and computed again.

Recorder  writes one (`LLM(..., trace=...)`, `--trace FILE`); Detail says how much
read      a file -> Trace: its header, its texts, their steps, and what they add up to
replay    computes a recorded step again, and says why each guess was kept or refused

Above the loop, below whoever runs it. The loop knows nothing of it: a trace is a reader of steps.
"""

from __future__ import annotations

from outrider.trace.reader import Depth, Text, Trace, read
from outrider.trace.recorder import Recorder, describe
from outrider.trace.records import Detail, End, Header, Request, Step
from outrider.trace.replay import Node, Replay, replay

__all__ = [
    "Depth",
    "Detail",
    "End",
    "Header",
    "Node",
    "Recorder",
    "Replay",
    "Request",
    "Step",
    "Text",
    "Trace",
    "describe",
    "read",
    "replay",
]
