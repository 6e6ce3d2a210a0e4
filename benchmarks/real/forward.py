"""A forward over several rows against one over a single row: what verification costs. And what a draft token costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.forward import measure, summary
from benchmarks.peers.ours import Ours
from benchmarks.real.sides import WEIGHTS
from outrider.models.load import load

ROWS = (1, 2, 3, 5, 9, 17)
CONTEXT = 256


@dataclass
class Forwards:
    """One model, for `benchmarks.forward.measure`."""

    name: str
    model: Ours

    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        """Seconds of each repeat."""
        return self.model.forward(rows, context, repeats)


def forwards(target: str, draft: str | None, weights: str, rounds: int = 7) -> list[dict[str, Any]]:
    """A record for the target, and for the draft model as it is stored. They take turns. ms: of one row. ratio: by rows."""
    sides = [Forwards("target", Ours(load(target, device="cpu", **WEIGHTS[weights])))]
    if draft:
        sides.append(Forwards("draft model", Ours(load(draft, device="cpu"))))
    times = measure(sides, ROWS, CONTEXT, rounds)
    found = [(side.name, summary(times[side.name])) for side in sides]
    return [
        {"model": name, "context": CONTEXT, "ms": one["ms"], "ratio": {str(m): r for m, r in one["ratio"].items()}}
        for name, one in found
    ]
