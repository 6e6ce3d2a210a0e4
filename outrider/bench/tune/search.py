"""The fastest setting for some prompts: predict all settings, then measure those that can win until one is clearly ahead.

`Search` grows while it runs. If it is stopped, its answer follows from what is known so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from outrider.bench import stats
from outrider.bench.prompts import Prompt
from outrider.bench.tune.predict import CLOSE, MOST, Predictor, budget_config
from outrider.bench.tune.race import Candidate, MethodTrial, Racer, plain_candidate
from outrider.bench.tune.simulate import best_depths
from outrider.calibrate import calibrated, costs_of
from outrider.config import SpeculativeConfig
from outrider.core.types import Budget
from outrider.llm import LLM
from outrider.params import SamplingParams

# A chain of the best methods is measured from this share of the best prediction on: its neighbour can be the best.
CLOSE_CHAIN = 0.75
# A smaller gain does not matter.
EQUAL = 0.03
# Batch sizes for the exports to other engines.
BATCH_SIZES = (1, 2, 4, 8, 16)


class Standings:
    """Measured candidates in comparison. plain: plain decoding, one of the candidates."""

    def __init__(self, plain: Candidate) -> None:
        self.plain, self.candidates = plain, [plain]

    @property
    def active(self) -> list[Candidate]:
        return [c for c in self.candidates if not c.dropped]

    def gain(self, candidate: Candidate) -> stats.Interval | None:
        """Speed over plain decoding. None for plain decoding itself, and without a common prompt."""
        return None if candidate is self.plain else stats.ratio(candidate.samples, self.plain.samples)

    @property
    def leader(self) -> Candidate:
        """The fastest measured candidate. An adaptive candidate wins a near draw, because it stops where drafts do not pay."""
        measured = [c for c in self.active if c.samples]
        best = max(measured, key=lambda c: c.speed)
        if best.config.get("controller") == "fixed":
            for candidate in measured:
                if candidate.adaptive and candidate.speed > (1 - EQUAL / 2) * best.speed:
                    return candidate
        return best

    @property
    def decided(self) -> bool:
        """One candidate is left beside plain decoding, and its gain is known."""
        leader = self.leader
        if [c for c in self.active if c is not self.plain and c is not leader]:
            return False
        rival = leader if leader is not self.plain else next((c for c in self.active if c is not self.plain), None)
        if rival is None:
            return True
        gain = self.gain(rival)
        return gain is not None and (gain.significant or gain.high - gain.low < EQUAL)

    @property
    def answer(self) -> Candidate:
        """The leader, if it is significantly faster than plain decoding. Otherwise an adaptive candidate that looks faster: it
        has nothing to lose. Otherwise plain decoding."""
        leader = self.leader
        gain = self.gain(leader)
        if gain is not None and gain.low > 1:
            return leader
        for candidate in self.candidates:
            gain = self.gain(candidate) if candidate.adaptive else None
            if gain is not None and gain.value > 1 + EQUAL:
                return candidate
        return self.plain

    def drop_slow(self) -> None:
        """Drop every candidate for which a gain of `EQUAL` over the leader is excluded with 95 % confidence."""
        leader = self.leader
        for candidate in self.active:
            if candidate in (leader, self.plain):
                continue
            found = stats.ratio(candidate.samples, leader.samples)
            if found is not None and found.high < 1 + EQUAL:
                slower = found.high < 1
                candidate.dropped = f"{found.value:.2f} x {leader.name}" if slower else f"not faster than {leader.name}"


class Search:
    """Finds the fastest setting for some prompts. `run` yields a line of progress now and then.

    methods: names and configurations to try. seconds: to measure for at most, predictions not included. num_pilots: prompts
    that the predictions are made from.
    """

    def __init__(
        self,
        racer: Racer,
        prompts: Sequence[Prompt],
        methods: Sequence[tuple[str, dict[str, Any]]],
        *,
        verifiers: Sequence[str] = ("match",),
        seconds: float = 120.0,
        num_pilots: int = 6,
    ) -> None:
        self.racer, self.prompts = racer, list(prompts)
        self.verifiers, self.seconds = verifiers, seconds
        self.methods = [MethodTrial(name, config) for name, config in methods]
        self.plain = plain_candidate()
        self.standings = Standings(self.plain)
        self.predictor = Predictor(racer, self.plain, self.prompts[:num_pilots], self.methods)
        self.complete = False

    @property
    def candidates(self) -> list[Candidate]:
        return self.standings.candidates

    @property
    def answer(self) -> Candidate:
        """The setting to use, from what is known so far."""
        return self.standings.answer

    def run(self) -> Iterator[str]:
        yield from self.predictor.run()
        self.candidates.extend(self.predictor.candidates)
        self._choose()
        yield from self._measure()
        self.complete = True

    def _choose(self) -> None:
        """Drop the candidates that cannot win. Add the adaptive controller for the best method, and other verifiers."""
        order = sorted(self.candidates[1:], key=lambda c: -(c.predicted or 0.0))
        fastest = max((c.predicted or 0.0 for c in order), default=0.0)
        threshold = CLOSE * max(fastest, self.plain.speed)
        hopeful = {c.method for c in order if (c.predicted or 0.0) >= threshold}
        for place, candidate in enumerate(order):
            chain = candidate.method in hopeful and candidate.budget.width == 1
            least = CLOSE_CHAIN / CLOSE * threshold if chain else threshold
            if (candidate.predicted or 0.0) < least or place >= 2 * MOST:
                candidate.dropped = "predicted to be slower"
        if not order or order[0].dropped:
            return
        best = order[0]
        assert best.method is not None
        if "match" in self.verifiers:
            limit = best.method.statistics.limit if best.method.statistics else best.budget
            config = {**best.method.config, **budget_config(limit), "controller": "calibrated"}
            name = f"{best.method.name} calibrated"
            self.candidates.append(Candidate(name, config, limit, best.method, best.predicted))
        for verifier in self.verifiers:
            if verifier != "match":
                self.candidates.append(self._with_verifier(best, verifier))
        if "match" not in self.verifiers:
            for candidate in order:
                candidate.dropped = candidate.dropped or "the verifier match was not asked for"

    def _with_verifier(self, best: Candidate, verifier: str) -> Candidate:
        config = {**best.config, "verifier": verifier}
        candidate = Candidate(f"{best.name} {verifier}", config, best.budget, best.method, best.predicted)
        try:
            candidate.decoder = LLM(self.racer.target, speculative_config=config, max_num_seqs=1).decoder
        except ValueError as error:
            candidate.dropped = " ".join(str(error).split())
        return candidate

    def _measure(self) -> Iterator[str]:
        """Measure all active candidates on prompt after prompt, and drop those that are clearly slower."""
        start, num_pilots = perf_counter(), len(self.plain.samples)
        yield f"measuring {', '.join(c.name for c in self.standings.active)}"
        for repeat in itertools.count():
            self.racer.reset(self.candidates)
            for number, prompt in enumerate(self.prompts):
                self.racer.race(self.standings.active, prompt, repeat)
                # The samples of the prediction are older than those they would be paired with.
                self.plain.samples, num_pilots = self.plain.samples[num_pilots:], 0
                leader, left = self.standings.leader, len(self.standings.active)
                yield f"{leader.name} leads with {leader.speed:.0f} tokens/s, {left} left"
                if perf_counter() - start > self.seconds:
                    return
                if repeat or number >= min(4, len(self.prompts) - 1):
                    self.standings.drop_slow()
                if self.standings.decided:
                    return

    def best_depths(self, batch_sizes: Sequence[int] = BATCH_SIZES) -> dict[int, int]:
        """The best chain of the answer's method for each batch size, predicted by the cost model. Measures costs now."""
        method = self.answer.method
        if method is None or method.statistics is None or method.llm is None:
            return {}
        target, sampling = self.racer.target, SamplingParams(**self.racer.sampling)
        names = costs_of(SpeculativeConfig.of({**self.answer.config, "controller": "calibrated"}), target)
        limit = Budget(method.statistics.limit.depth)
        cost = calibrated(target.model, method.llm.drafter_for, names, limit, batch_sizes, sampling=sampling)
        return best_depths(method.statistics, cost, batch_sizes, limit.depth)
