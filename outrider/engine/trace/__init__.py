"""Traces: a file with each step of a run. It can be read, summed up and computed again.

Recorder  writes a trace (`LLM(..., trace=...)`, `--trace FILE`); `Detail` says how much
read      file -> Trace: how the run was configured, its texts, their steps, and sums over them

The laboratory computes recorded steps again (`outrider replay`). The loop does not know this package: a recorder is a reader of
steps.
"""

from __future__ import annotations

from outrider.engine.trace.recorder import Recorder, describe
from outrider.engine.trace.records import (
    DepthAcceptance,
    Detail,
    EndRecord,
    RequestRecord,
    RunRecord,
    StepRecord,
    Trace,
    TracedText,
    read,
)

__all__ = [
    "DepthAcceptance",
    "Detail",
    "EndRecord",
    "Recorder",
    "RequestRecord",
    "RunRecord",
    "StepRecord",
    "Trace",
    "TracedText",
    "describe",
    "read",
]
