"""Several decoders write texts in turns of a few tokens, and keep the seconds of each turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider_lab.bench.local import SampleRecorder


@dataclass(eq=False)
class TimedRun:
    """One text, written in stretches of tokens, with the time of each.

    Args:
        decoder: writes it.
        request: what is asked for.
        recorder: receives every step.
        prefill: seconds for the prompt.
        seconds: of each stretch, the drafter's own prefill included. All runs of a comparison have as many stretches.
    """

    decoder: Decoder
    request: Request
    recorder: SampleRecorder | None = None
    prefill: float = 0.0
    seconds: list[float] = field(default_factory=list)
    _row: Sequence | None = None

    @property
    def row(self) -> Sequence:
        """The text and its state. Only after `start`."""
        assert self._row is not None
        return self._row

    @property
    def finished(self) -> bool:
        return self.row.finish is not None

    def start(self) -> None:
        """Take a slot and read the prompt. Raises what `Decoder.admit` raises."""
        self._row = self.decoder.start(self.request)
        began = perf_counter()
        for _ in self.decoder.run([self.row], 0):  # reads the prompt
            pass
        self.prefill = perf_counter() - began

    def write(self, tokens: int) -> None:
        """Step until the text has this many tokens, or ends."""
        before, began = self.prefill + sum(self.seconds), perf_counter()
        for step in self.decoder.run([self.row], tokens):
            if self.recorder is not None:
                self.recorder.add(step, 0, self.row, before + perf_counter() - began)
        self.seconds.append(perf_counter() - began)

    def release(self) -> None:
        """Free the slot, if there is one."""
        if self._row is not None:
            self.decoder.release(self._row.slot)


def interleave(runs: Mapping[str, TimedRun], stretch: int = 8) -> Mapping[str, TimedRun]:
    """Write all texts, `stretch` tokens at a time, and return the runs. Their order is reversed with every stretch.

    Frees all slots, also after an interrupt. Raises what `Decoder.admit` raises.
    """
    order, tokens = list(runs.values()), 0
    try:
        for run in order:
            run.start()
        while not all(run.finished for run in order):
            tokens += stretch
            for run in order:
                run.write(tokens)
            order.reverse()
    finally:
        for run in runs.values():
            run.release()
    return runs
