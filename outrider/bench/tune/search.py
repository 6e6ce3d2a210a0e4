"""Which setting is fastest on these prompts: what the cost model expects of all of them, and a measurement of those that
could win, in turns, until one is ahead for sure.

A search is a value that grows; whoever stops it keeps what is known so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from outrider.bench import stats
from outrider.bench.local import Record, forget
from outrider.bench.prompts import Ask
from outrider.bench.run import Sample
from outrider.bench.tune.replay_target import play, watched
from outrider.bench.tune.simulate import Seen, budgets, by_rows, most, steps_seconds
from outrider.bench.turns import Way, in_turns
from outrider.calibrate import calibrated
from outrider.config import SpeculativeConfig
from outrider.control import Adaptive, Calibrated, Controller, CostModel, Fixed
from outrider.core.types import Budget
from outrider.decode import Decoder, Request
from outrider.llm import LLM, costs_of
from outrider.models.load import Loaded
from outrider.params import SamplingParams

TREE = Budget(6, 4, 16)  # the largest that is thought of; those from texts are as deep as chains
TREES = ("draft_model", "quantized_self", "layer_skip", "token_recycling", "suffix", "ngram")  # more than a chain
FREE = ("suffix", "prediction", "ngram")  # from texts, where another level costs nothing: chains of 16, trees as deep
DEAR = ("quantized_self",)  # a level costs half a forward of the target: chains of 4; 8 for all others
FEW, FAR = 2, 1.25  # texts of a first look; so many times faster may a drafter turn out than it says, with trees even
CLOSE, CHAIN = 0.9, 0.75  # of the best prediction: so much may one be wrong, and one of a chain of another length
MOST = 4  # settings of a drafter, and twice as many in all, that are measured
STRETCH = 16  # tokens of a turn
EQUAL = 0.03  # a gain of less than this is not looked for
HOPELESS = "slower than {} even if every guess were right"
ROWS = (1, 2, 4, 8, 16)  # texts side by side, for what other engines are told


@dataclass(eq=False)
class Arm:
    """A setting. predicted: tokens/s. samples: what was measured of it. out: why it is measured no longer."""

    name: str
    config: dict[str, Any]
    budget: Budget
    predicted: float | None = None
    samples: list[Sample] = field(default_factory=list)
    out: str = ""
    decoder: Decoder | None = None  # with the drafter and its memory
    controller: Controller | None = None


@dataclass(eq=False)
class Method:
    """A way to guess, and what was found out about it. seen: None until its guesses were watched."""

    name: str
    config: dict[str, Any]
    problem: str = ""  # why it cannot be used here
    llm: LLM | None = None
    seen: Seen | None = None
    cost: CostModel | None = None
    best: Arm | None = None


class Search:
    """Finds the fastest setting for some prompts. `run` yields a line whenever something is done."""

    def __init__(
        self,
        target: Loaded,
        asks: Sequence[Ask],
        methods: Sequence[tuple[str, dict[str, Any]]],
        sampling: dict[str, Any],
        *,
        verifiers: Sequence[str] = ("match",),
        seconds: float = 120.0,
        pilots: int = 6,
    ) -> None:
        """methods: names and configurations of who may guess. sampling: fields of SamplingParams. seconds: to measure for at
        most, the predictions not counted. pilots: prompts that predictions are made from."""
        self.target, self.asks, self.sampling = target, list(asks), sampling
        self.verifiers, self.patience, self.pilots = verifiers, seconds, list(asks)[:pilots]
        self.methods = [Method(name, config) for name, config in methods]
        self.plain = Arm("plain", {"method": "none"}, Budget(0))
        self.arms = [self.plain]
        self.complete, self.turn = False, 0
        self.overhead = 0.0  # seconds in which the prompts that were watched are read
        self.pace = 1.0  # how much slower plain decoding is in real texts than where costs were measured
        self._reader: LLM | None = None  # knows the tokenizer; decodes plainly

    def run(self) -> Iterator[str]:
        """Predict, then measure."""
        yield from self._predict()
        yield from self._measure()
        self.complete = True

    # what is expected

    def _predict(self) -> Iterator[str]:
        self._reader = LLM(self.target, max_num_seqs=1)
        self.race([self.plain], self.pilots[0], 0)
        self.plain.samples.clear()  # a warm-up
        for ask in self.pilots:
            self.race([self.plain], ask, 0)
        yield f"plain decoding writes {_speed(self.plain.samples):.0f} tokens/s"
        for method in self.methods:
            try:
                yield from self._look(method)
            except (ValueError, OSError, MemoryError) as error:
                method.problem = " ".join(str(error).split())
                yield f"{method.name} cannot be used here: {method.problem}"

    def _look(self, method: Method) -> Iterator[str]:
        """Watch a drafter guess, time it, and predict all its settings."""
        kind = method.config["method"]
        deepest = 16 if kind in FREE else 4 if kind in DEAR else 8
        config = {**method.config, "num_speculative_tokens": deepest, "controller": "fixed"}
        llm = method.llm = LLM(self.target, speculative_config=config, max_num_seqs=MOST + 1)
        tree = Budget(deepest if kind in FREE else min(deepest, TREE.depth), TREE.width, TREE.nodes)
        limit = Budget(deepest, tree.width, tree.nodes) if kind in TREES else Budget(deepest)
        known = next((m.cost for m in self.methods if m.cost is not None), None)
        names = costs_of(SpeculativeConfig.of(config), self.target)
        law, make = SamplingParams(**self.sampling), lambda rows: llm.drafter
        method.cost = calibrated(self.target.model, make, names, limit, known=known, sampling=law)
        plain = _speed(self.plain.samples)
        rivals = [("plain decoding", plain)]
        rivals += [(m.best.name, CLOSE * (m.best.predicted or 0.0)) for m in self.methods if m.best is not None]
        rival, speed = max(rivals, key=lambda pair: pair[1])
        if plain * most(method.cost, deepest) <= speed:
            method.problem = HOPELESS.format(rival)
            yield f"{method.name}: {method.problem}"
            return
        chains, trees = [Budget(deepest)], [tree] if limit.width > 1 else []
        self._watch(method, self.pilots[:FEW], chains)
        if (self._expected(method)[0].predicted or 0.0) * FAR > speed:
            self._watch(method, self.pilots, chains + trees)
        kept = self._expected(method)
        method.best = kept[0]
        self.arms += _ladder(kept)
        speedup = (method.best.predicted or 0.0) / plain
        yield f"{method.best.name}: {method.best.predicted:.0f} tokens/s expected, {speedup:.2f} x plain decoding"

    def _answered(self, count: int) -> tuple[list[Request], list[list[int]]]:
        """The first few requests, and plain decoding's answers."""
        return self._requests(self.pilots[:count]), [s.token_ids or [] for s in self.plain.samples[:count]]

    def _watch(self, method: Method, asks: Sequence[Ask], shapes: Sequence[Budget]) -> None:
        """What the method's guesses are worth along the answers of plain decoding; how long prompts take to be read, and how
        fast the machine is now, from the same answers."""
        assert method.llm is not None
        assert method.cost is not None
        method.seen = watched(self.target, method.llm.drafter, *self._answered(len(asks)), *shapes)
        steps = [sum(s for name, s in sample.phases.items() if name != "rest") for sample in self.plain.samples]
        reading = sum(s.seconds for s in self.plain.samples) - sum(steps)
        self.overhead = reading * len(method.seen.texts) / len(steps)
        usual = steps_seconds(method.seen, method.cost, Budget(0)) / method.seen.tokens
        self.pace = sum(steps) / sum(s.output_tokens for s in self.plain.samples) / usual

    def _expected(self, method: Method) -> list[Arm]:
        """All settings of a method, the best first, by what was watched. What speaks for a tree is looked at more closely."""
        assert method.seen is not None
        assert method.llm is not None
        some = budgets(method.seen.limit, None if method.config["method"] in FREE else TREE.depth)
        for _ in range(MOST):
            best = max(some, key=lambda b: self.expect(method, b).predicted or 0.0)
            if best.width == 1 or best in method.seen.played:
                break
            if not play(method.seen, self.target, method.llm.drafter, *self._answered(len(method.seen.texts)), best):
                break
        return sorted((self.expect(method, b) for b in some), key=lambda a: -(a.predicted or 0.0))

    def expect(self, method: Method, budget: Budget) -> Arm:
        """An arm with its prediction: the model's seconds at the machine's pace, and the time to read prompts, the drafter's
        included."""
        seen, cost = method.seen, method.cost
        assert seen is not None
        assert cost is not None
        reading = sum(text.prompt for text in seen.texts) * cost.prefill
        seconds = self.overhead + self.pace * (reading + steps_seconds(seen, cost, budget))
        shape = {"num_speculative_tokens": budget.depth}
        if budget.width > 1:
            shape |= {"tree_width": budget.width, "tree_nodes": budget.max_nodes}
        name = f"{method.name} k={budget.depth}" + (f" tree of {budget.max_nodes}" if budget.width > 1 else "")
        config = {**method.config, **shape, "controller": "fixed"}
        return Arm(name, config, budget, seen.tokens / seconds)

    # what is measured

    def _measure(self) -> Iterator[str]:
        """All that could win, in turns; who is behind for sure drops out."""
        self._choose()
        start, pilots = perf_counter(), len(self.plain.samples)
        yield f"measuring {', '.join(a.name for a in self.arms if not a.out)}"
        for repeat in itertools.count():
            self.forget(self.arms)
            for number, ask in enumerate(self.asks):
                self.race([a for a in self.arms if not a.out], ask, repeat)
                self.plain.samples, pilots = self.plain.samples[pilots:], 0  # older than what they would be paired with
                yield self._state()
                if perf_counter() - start > self.patience:
                    return
                if repeat or number >= min(4, len(self.asks) - 1):
                    self._drop()
                if self._decided:
                    return

    def _choose(self) -> None:
        """Leave out what cannot win; add the adaptive controller for the best drafter, and other verifiers."""
        guesses = [a for a in self.arms if a.predicted is not None]
        top = max((a.predicted or 0.0 for a in guesses), default=0.0)
        floor = CLOSE * max(top, _speed(self.plain.samples))
        order = sorted(guesses, key=lambda a: -(a.predicted or 0.0))
        hopeful = {_method(arm) for arm in order if (arm.predicted or 0.0) >= floor}
        for place, arm in enumerate(order):
            least = CHAIN / CLOSE * floor if _method(arm) in hopeful and arm.budget.width == 1 else floor
            if (arm.predicted or 0.0) < least or place >= 2 * MOST:
                arm.out = "expected to be slower"
        if not order or order[0].out:
            return
        best = next(m for m in self.methods if m.name == _method(order[0]))
        if "match" in self.verifiers:
            limit = best.seen.limit if best.seen else order[0].budget
            shape = {"num_speculative_tokens": limit.depth}
            shape |= {"tree_width": limit.width, "tree_nodes": limit.max_nodes} if limit.width > 1 else {}
            config = {**best.config, **shape, "controller": "calibrated"}
            self.arms.append(Arm(f"{best.name} calibrated", config, limit, order[0].predicted))
        for verifier in self.verifiers:
            if verifier == "match":
                continue
            config = {**order[0].config, "verifier": verifier}
            arm = Arm(f"{order[0].name} {verifier}", config, order[0].budget, order[0].predicted)
            try:
                arm.decoder = LLM(self.target, speculative_config=config, max_num_seqs=1).decoder
            except ValueError as error:
                arm.out = " ".join(str(error).split())
            self.arms.append(arm)
        if "match" not in self.verifiers:
            for arm in order:
                arm.out = arm.out or "match is not among the verifiers that were asked for"

    def _drop(self) -> None:
        leader = self.leader
        for arm in self.arms:
            if arm is leader or arm is self.plain or arm.out:
                continue
            found = stats.ratio(arm.samples, leader.samples)
            if found is not None and found.high < 1 + EQUAL:
                arm.out = (
                    f"{found.value:.2f} x {leader.name}" if found.high < 1 else f"as fast as {leader.name} at most"
                )

    @property
    def leader(self) -> Arm:
        """Of what is measured, the fastest; an adaptive one wins a near draw, for it also stops where nothing pays."""
        measured = [a for a in self.arms if a.samples and not a.out]
        best = max(measured, key=lambda a: _speed(a.samples))
        for arm in measured:
            near = arm.config.get("controller") == "calibrated" and best.config.get("controller") == "fixed"
            if near and _speed(arm.samples) > (1 - EQUAL / 2) * _speed(best.samples):
                return arm
        return best

    @property
    def _decided(self) -> bool:
        alive = [a for a in self.arms if not a.out]
        leader = self.leader
        if [a for a in alive if a is not self.plain and a is not leader]:
            return False
        against = leader if leader is not self.plain else next((a for a in alive if a is not self.plain), None)
        if against is None:
            return True
        found = stats.ratio(against.samples, self.plain.samples)
        return found is not None and (found.sure or found.high - found.low < EQUAL)

    def over_plain(self, arm: Arm) -> stats.Interval | None:
        """A setting's speed over plain decoding's. None for plain decoding, and where they have no prompt in common."""
        return None if arm is self.plain else stats.ratio(arm.samples, self.plain.samples)

    @property
    def chosen(self) -> Arm:
        """The answer: the leader if it is faster than plain decoding for sure. Where that is not sure, what looks faster and
        has a controller that stops where guesses do not pay, and so has nothing to lose. Else plain decoding."""
        leader = self.leader
        gain = self.over_plain(leader)
        if gain is not None and gain.low > 1:
            return leader
        for arm in self.arms:
            gain = self.over_plain(arm) if arm.config.get("controller") == "calibrated" else None
            if gain is not None and gain.value > 1 + EQUAL:
                return arm
        return self.plain

    def lengths(self, rows: Sequence[int] = ROWS) -> dict[int, int]:
        """The chosen drafter's best chain by the number of texts side by side, as the cost model expects it. Measured now."""
        method = next((m for m in self.methods if m.name == _method(self.chosen)), None)
        if method is None or method.seen is None or method.llm is None:
            return {}
        config = SpeculativeConfig.of({**self.chosen.config, "controller": "calibrated"})
        limit = Budget(method.seen.limit.depth)
        make = method.llm.drafter_for
        law = SamplingParams(**self.sampling)
        cost = calibrated(self.target.model, make, costs_of(config, self.target), limit, rows, sampling=law)
        return by_rows(method.seen, cost, rows, limit.depth)

    def _state(self) -> str:
        leader = self.leader
        return (
            f"{leader.name} leads with {_speed(leader.samples):.0f} tokens/s, {sum(not a.out for a in self.arms)} left"
        )

    # how

    def race(self, arms: Sequence[Arm], ask: Ask, repeat: int) -> None:
        """Arms answer a prompt, in turns of a few tokens."""
        ways, records = dict[str, Way](), dict[str, Record]()
        [request] = self._requests([ask], repeat)
        for arm in arms if self.turn % 2 else arms[::-1]:
            sample = Sample(
                prompt=ask.id, setting=arm.name, repeat=repeat, turn=self.turn, seconds=0, seed=request.seed
            )
            records[arm.name] = Record(sample)
            ways[arm.name] = Way(self._decoder(arm), request, self._controller(arm), records[arm.name])
        self.turn += 1
        in_turns(ways, STRETCH)
        for arm in arms:
            arm.samples.append(records[arm.name].sample)

    def _decoder(self, arm: Arm) -> Decoder:
        """A drafter that remembers the answers has a memory for each arm. All others are there once, with a row for each arm."""
        if arm.decoder is None:
            llm = next((m.llm for m in self.methods if m.name == _method(arm)), None) or self._reader
            assert llm is not None
            if hasattr(llm.drafter, "forget"):
                llm = LLM(self.target, speculative_config=llm.config, max_num_seqs=1)
            arm.decoder = llm.decoder
        return arm.decoder

    def forget(self, arms: Sequence[Arm]) -> None:
        """What these have seen of the answers."""
        for arm in arms:
            if arm.decoder is not None:
                forget(arm.decoder.drafter)

    def _controller(self, arm: Arm) -> Controller:
        """The same for all answers of an arm, as in use."""
        if arm.controller is None:
            cost = next((m.cost for m in self.methods if m.name == _method(arm)), None)
            if arm.config.get("controller") == "calibrated" and cost is not None:
                arm.controller = Adaptive(arm.budget, Calibrated(cost))
            else:
                arm.controller = Fixed(*arm.budget.parts)
        return arm.controller

    def _requests(self, asks: Sequence[Ask], repeat: int = 0) -> list[Request]:
        assert self._reader is not None
        out = list[Request]()
        for ask in asks:
            own: dict[str, Any] = {"seed": self.sampling["seed"] + repeat, "prediction": ask.prediction}
            if ask.max_tokens is not None:
                own["max_tokens"] = ask.max_tokens
            out += self._reader.requests(ask.prompt, SamplingParams(**{**self.sampling, **own}))
        return out


def _method(arm: Arm) -> str:
    return arm.name.split()[0]


def _speed(samples: Sequence[Sample]) -> float:
    """Tokens per second of all answers together."""
    seconds = sum(s.seconds for s in samples)
    return sum(s.output_tokens for s in samples) / seconds if seconds else math.nan


def _ladder(arms: Sequence[Arm]) -> list[Arm]:
    """Of a method's arms, the best first: that one, chains of half and of one and a half times its length, and the best of the
    other kind, chain or tree. Where the price of a node is off by a fifth, the best length is by more than its neighbour."""
    best, depth = arms[0], arms[0].budget.depth
    near = [a for a in arms if a.budget.width == 1 and a.budget.depth in (depth // 2, depth + (depth + 1) // 2)]
    other = next((a for a in arms if (a.budget.width > 1) != (best.budget.width > 1)), best)
    return list(dict.fromkeys([best, *near, other]))
