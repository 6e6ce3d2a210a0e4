"""Several ways to write one text, in turns: all write its first few tokens, then all the next few.

A machine with neighbours changes its pace by a factor of two within seconds (docs/performance.md). What is to be compared to
a few per cent must therefore be measured in the same moments, not one whole text after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from outrider.bench.local import Record
from outrider.control import Controller
from outrider.decode import Decoder, Request, Row


@dataclass(frozen=True)
class Way:
    """Who writes what. controller: for decoders that several ways share, a row each; the decoder's own if not given. record: is
    told of every step."""

    decoder: Decoder
    request: Request
    controller: Controller | None = None
    record: Record | None = None


@dataclass(eq=False)
class Written:
    """What one way took. seconds: of each stretch of the text, as many for every way; its prompt aside, but the drafter's own
    reading counts."""

    way: Way
    row: Row
    prompt: float = 0.0  # seconds in which it was read
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    forwards: float = 0.0  # seconds in the two models

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def read(self) -> None:
        start = perf_counter()
        while self.row in self.way.decoder.waiting:
            self.way.decoder.prefill(self.row)
        self.prompt = perf_counter() - start

    def write(self, tokens: int) -> None:
        """Steps until the text has so many tokens, or ends."""
        decoder, before, start = self._decoder(), self.prompt + self.total, perf_counter()
        while self.row.end is None and len(self.row.output) < tokens:
            step = decoder.round([self.row])
            self.steps += 1
            self.drafted += int(step.draft.num_draft_tokens)
            self.forwards += step.seconds["draft"] + step.seconds["target"]
            if self.way.record is not None:
                self.way.record.add(step, 0, self.row, before + perf_counter() - start)
        self.seconds.append(perf_counter() - start)

    def release(self) -> None:
        self._decoder().release(self.row.slot)

    def _decoder(self) -> Decoder:
        """Under the way's own controller."""
        if self.way.controller is not None:
            self.way.decoder.controller = self.way.controller
        return self.way.decoder


def in_turns(ways: Mapping[str, Way], stretch: int = 8) -> dict[str, Written]:
    """Every way writes its request, `stretch` tokens at a time; who is first changes with every stretch. The rows are
    released, also when somebody interrupts. Raises what admitting a request raises."""
    done = dict[str, Written]()
    try:
        for name, way in ways.items():
            done[name] = Written(way, way.decoder.admit(way.request))
            done[name].read()
        order, tokens = list(done.values()), 0
        while any(w.row.end is None for w in order):
            tokens += stretch
            for written in order:
                written.write(tokens)
            order.reverse()
    finally:
        for written in done.values():
            written.release()
    return done
