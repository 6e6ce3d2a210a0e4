"""The fastest setting for some prompts: record the drafts once, replay all settings, and measure the best of them with `auto`.

`Search` grows while it runs. If it is stopped, its answer follows from what is known so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from outrider.core.intervals import Interval
from outrider_lab.bench.prompts import Prompt
from outrider_lab.tune.forecasts import Forecasts
from outrider_lab.tune.race import Candidate, Racer

# A smaller gain does not matter.
EQUAL = 0.03
# A forecast below this share of the best can still win. So many settings are measured beside plain decoding and the default.
CLOSE, MEASURED = 0.92, 2


class Search:
    """Finds the fastest setting for some prompts. `run` yields a line of progress now and then."""

    def __init__(
        self,
        racer: Racer,
        prompts: Sequence[Prompt],
        methods: Sequence[tuple[str, dict[str, Any]]],
        *,
        whole: dict[str, Any] | None = None,
        verifiers: Sequence[str] = ("match",),
        seconds: float = 120.0,
    ) -> None:
        """A search that has not begun.

        Args:
            methods: Names and configurations to try.
            whole: The configuration that stands for all that fit, "auto". None where the user named methods.
            seconds: To measure for at most, without the recording.
        """
        self.racer, self.prompts, self.whole = racer, list(prompts), whole
        self.verifiers, self.seconds = verifiers, seconds
        self.forecasts = Forecasts(racer, self.prompts, methods)
        self.plain = Candidate("plain", {"method": "none"}, predicted=1.0)
        self.candidates = [self.plain]
        self.default: Candidate | None = None  # the planner with all drafters; None if there is none
        self.complete = False

    @property
    def active(self) -> list[Candidate]:
        return [c for c in self.candidates if not c.dropped]

    def gain(self, candidate: Candidate) -> Interval | None:
        """Speed over plain decoding. None for plain decoding itself, and without a common prompt."""
        return None if candidate is self.plain else candidate.gain(self.plain)

    @property
    def leader(self) -> Candidate:
        """The default, or a setting that is clearly faster. Without a default, the fastest measured setting."""
        measured = [c for c in self.active if c.samples and c is not self.plain]
        best = max(measured, key=lambda c: c.speed, default=self.plain)
        if self.default is None or best is self.default or not self.default.samples:
            return best
        gain = best.gain(self.default)
        return best if gain is not None and gain.low > 1 else self.default

    @property
    def decided(self) -> bool:
        """One candidate is left beside plain decoding, and its gain is known."""
        leader = self.leader
        if [c for c in self.active if c is not self.plain and c is not leader]:
            return False
        gain = self.gain(leader)
        return gain is None or gain.significant or gain.high - gain.low < EQUAL

    @property
    def answer(self) -> Candidate:
        """The leader, if it is significantly faster than plain decoding. The default also if it only looks faster: it stops
        where drafting does not pay. Otherwise the fastest setting that is significantly faster, or plain decoding."""
        leader = self.leader
        gain = self.gain(leader)
        if gain is not None and (gain.low > 1 or (leader is self.default and gain.value > 1 + EQUAL)):
            return leader
        sure = [c for c in self.candidates if (gain := self.gain(c)) is not None and gain.low > 1]
        return max(sure, key=lambda c: c.speed, default=self.plain)

    def drop_slow(self) -> None:
        """Drop every candidate for which a gain of `EQUAL` over the leader is excluded with 95 % confidence."""
        leader = self.leader
        for candidate in self.active:
            if candidate in (leader, self.plain):
                continue
            gain = candidate.gain(leader)
            if gain is not None and gain.high < 1 + EQUAL:
                slower = gain.high < 1
                candidate.drop(f"{gain.value:.2f} x {leader.name}" if slower else f"not faster than {leader.name}")

    def run(self) -> Iterator[str]:
        yield from self.forecasts.run()
        if self.whole and not any(m.config.get("model") == self.whole.get("model") for m in self.forecasts.methods):
            self.whole = {"method": "auto"}  # the draft model cannot draft here; its problem is told
        self.choose(self.forecasts.candidates(self.whole))
        yield from self._measure()
        self.complete = True

    def choose(self, settings: Sequence[Candidate]) -> None:
        """Take the candidates that may win: the default and the best others.

        Args:
            settings: All of them, the fastest in the replay first.
        """
        self.candidates.extend(settings)
        adaptive = [c for c in settings if c.length is None]
        every = [c for c in adaptive if c.config["method"] == "auto"] or adaptive[:1]
        self.default = every[0] if every and "match" in self.verifiers else None
        left = MEASURED
        for candidate in settings:
            close = (candidate.predicted or 0.0) >= CLOSE * max(settings[0].predicted or 0.0, 1.0)
            if candidate is self.default:
                continue
            if left and close:
                left -= 1
            else:
                candidate.drop("slower in the replay")
        if settings and (best := settings[0]).predicted and best.predicted > CLOSE:
            self.candidates.extend(self._with_verifier(best, v) for v in self.verifiers if v != "match")
        if "match" not in self.verifiers:
            for candidate in settings:
                candidate.drop(candidate.dropped or "the verifier match was not asked for")

    def _with_verifier(self, best: Candidate, verifier: str) -> Candidate:
        config = {**best.config, "verifier": verifier}
        candidate = Candidate(f"{best.name} {verifier}", config, best.drafters, best.length, best.predicted)
        try:
            self.racer.llm(candidate)
        except ValueError as error:
            candidate.drop(" ".join(str(error).split()))
        return candidate

    def _measure(self) -> Iterator[str]:
        """Measure all active candidates on prompt after prompt, and drop those that are clearly slower."""
        start = perf_counter()
        if len(self.active) < 2:
            return
        yield f"measuring {', '.join(c.name for c in self.active)}"
        self.racer.race(self.active, self.prompts[0], 0)
        for candidate in self.candidates:
            candidate.samples.clear()  # that was the warm-up
        for repeat in itertools.count():
            self.racer.reset(self.candidates)
            for number, prompt in enumerate(self.prompts):
                self.racer.race(self.active, prompt, repeat)
                leader, left = self.leader, len(self.active)
                yield f"{leader.name} leads with {leader.speed:.0f} tokens/s, {left} settings left"
                if perf_counter() - start > self.seconds:
                    return
                if repeat or number >= min(4, len(self.prompts) - 1):
                    self.drop_slow()
                if self.decided:
                    return

    @property
    def exported(self) -> Candidate:
        """The setting for other engines: the answer, or the best single method where the answer chooses among several."""
        answer = self.answer
        if len(answer.drafters) < 2 and answer.config["method"] != "auto":
            return answer
        return next((c for c in self.candidates if c.length and len(c.drafters) == 1), self.plain)

    def best_depths(self) -> dict[int, int]:
        """The best fixed length of the exported setting for each batch size, by the replay."""
        names = self.exported.drafters
        return self.forecasts.best_lengths(names) if names else {}
