"""How attention scores are made, as every attention kernel and every attention form takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the scores of a node are made."""

    scaling: float  # factor of query times key
    window: int | None = None  # tokens that a node attends to, itself counted; None: all
    softcap: float | None = None  # scores become cap * tanh(score / cap); None: they stay
    sinks: Tensor | None = None  # float [head], one more score in each softmax, without a value
    # positions form chunks of so many, and a node attends within its own; None: no chunks. Kernels do not read it.
    chunk: int | None = None
