"""Several ways to write one text, in turns: all write its first few tokens, then all the next few.

A machine with neighbours changes its pace by a factor of two within seconds (docs/performance.md). What is to be compared to
a few per cent must therefore be measured in the same moments, not one whole text after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from outrider.decode import Decoder, Request, Row


@dataclass(eq=False)
class Written:
    """What one way took. seconds: of each stretch of the text, as many for every way; its prompt aside, but the drafter's own
    reading counts."""

    row: Row
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    forwards: float = 0.0  # seconds in the two models

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def write(self, decoder: Decoder, tokens: int) -> None:
        """Steps until the text has so many tokens, or ends."""
        start = perf_counter()
        while self.row.end is None and len(self.row.output) < tokens:
            step = decoder.round([self.row])
            self.steps += 1
            self.drafted += int(step.draft.drafted)
            self.forwards += step.seconds["draft"] + step.seconds["target"]
        self.seconds.append(perf_counter() - start)


def in_turns(ways: Mapping[str, tuple[Decoder, Request]], stretch: int = 8) -> dict[str, Written]:
    """Every way writes its request, `stretch` tokens at a time; who is first changes with every stretch. The rows are
    released, so that a decoder can be used again; no decoder may stand twice among the ways."""
    done = {name: Written(decoder.admit(request)) for name, (decoder, request) in ways.items()}
    for decoder, _ in ways.values():
        while decoder.waiting:
            decoder.prefill(decoder.waiting[0])
    names, tokens = list(ways), 0
    while any(w.row.end is None for w in done.values()):
        tokens += stretch
        for name in names:
            done[name].write(ways[name][0], tokens)
        names.reverse()
    for name, (decoder, _) in ways.items():
        decoder.release(done[name].row.slot)
    return done
