"""The predicted speed of every setting of some drafting methods, from a few answers and the cost model of this machine."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from typing import Any

from outrider.bench.prompts import Prompt
from outrider.bench.tune.race import Candidate, MethodTrial, Racer
from outrider.bench.tune.simulate import (
    budgets,
    largest_speedup,
    observe_drafts,
    simulate_trees,
    steps_seconds,
)
from outrider.calibrate import calibrated, costs_of
from outrider.config import SpeculativeConfig
from outrider.core.types import Budget
from outrider.decode import Sequence
from outrider.drafters.registry import find
from outrider.llm import LLM
from outrider.params import SamplingParams

# The largest tree. A lookup that drafts this many tokens in a chain can have trees of the same depth.
TREE = Budget(6, 4, 16)
# Prompts of a first look. A method is dropped if its prediction, times this factor, is slower than the best.
FEW, UNCERTAINTY = 2, 1.25
# A prediction below this share of the best can still win.
CLOSE = 0.9
# Candidates of one method.
MOST = 4
TOO_EXPENSIVE = "slower than {} even if every draft token is accepted"


class Predictor:
    """Predicts all settings of some methods. `run` fills in `candidates`.

    plain: the candidate of plain decoding; its answers are the texts of the prediction. pilots: prompts to predict from.
    """

    def __init__(
        self, racer: Racer, plain: Candidate, pilots: abc.Sequence[Prompt], methods: abc.Sequence[MethodTrial]
    ) -> None:
        self.racer, self.plain, self.pilots, self.methods = racer, plain, list(pilots), methods
        self.candidates = list[Candidate]()
        # Seconds for the target to read the observed prompts, and the machine's time for a plain step over the cost model's.
        self._prefill, self._slowdown = 0.0, 1.0

    def run(self) -> Iterator[str]:
        """Yields a line of progress for each method."""
        self.racer.race([self.plain], self.pilots[0], 0)
        self.plain.samples.clear()  # that was the warm-up
        for prompt in self.pilots:
            self.racer.race([self.plain], prompt, 0)
        yield f"plain decoding: {self.plain.speed:.0f} tokens/s"
        for method in self.methods:
            try:
                yield from self._look_at(method)
            except (ValueError, OSError, MemoryError) as error:
                method.problem = " ".join(str(error).split())
                yield f"{method.name} cannot be used here: {method.problem}"

    def _look_at(self, method: MethodTrial) -> Iterator[str]:
        """Measure the costs of a method, observe its drafts, and predict all its settings."""
        row = find(method.config["method"])
        deepest = row.tune_depth
        config = {**method.config, "num_speculative_tokens": deepest, "controller": "fixed"}
        target, sampling = self.racer.target, SamplingParams(**self.racer.sampling)
        llm = method.llm = LLM(target, speculative_config=config, max_num_seqs=MOST + 1)
        tree_depth = None if deepest >= (TREE.nodes or 0) else TREE.depth
        tree = Budget(min(deepest, tree_depth or deepest), TREE.width, TREE.nodes)
        limit = Budget(deepest, tree.width, tree.nodes) if row.trees else Budget(deepest)
        known = next((m.cost for m in self.methods if m.cost is not None), None)
        names = costs_of(SpeculativeConfig.of(config), target)
        method.cost = calibrated(target.model, lambda rows: llm.drafter, names, limit, known=known, sampling=sampling)
        plain = self.plain.speed
        rivals = [("plain decoding", plain)]
        rivals += [(m.best.name, CLOSE * (m.best.predicted or 0.0)) for m in self.methods if m.best is not None]
        rival, speed = max(rivals, key=lambda pair: pair[1])
        if plain * largest_speedup(method.cost, deepest) <= speed:
            method.problem = TOO_EXPENSIVE.format(rival)
            yield f"{method.name}: {method.problem}"
            return
        chains, trees = [Budget(deepest)], [tree] if limit.width > 1 else []
        self._observe(method, self.pilots[:FEW], chains)
        if (self._predictions(method, tree_depth)[0].predicted or 0.0) * UNCERTAINTY > speed:
            self._observe(method, self.pilots, chains + trees)
        found = self._predictions(method, tree_depth)
        method.best = found[0]
        self.candidates += neighbours(found)
        speedup = (method.best.predicted or 0.0) / plain
        yield f"{method.best.name}: {method.best.predicted:.0f} tokens/s predicted, {speedup:.2f} x plain decoding"

    def _answered(self, count: int) -> tuple[list[Sequence], list[list[int]]]:
        """The first requests, and the answers of plain decoding."""
        return self.racer.requests(self.pilots[:count]), [s.token_ids or [] for s in self.plain.samples[:count]]

    def _observe(self, method: MethodTrial, prompts: abc.Sequence[Prompt], shapes: abc.Sequence[Budget]) -> None:
        """Observe the method's drafts along the answers of plain decoding, and the speed of the machine in them."""
        assert method.llm is not None
        assert method.cost is not None
        found = observe_drafts(self.racer.target, method.llm.drafter, *self._answered(len(prompts)), *shapes)
        method.statistics = found
        steps = [sum(s for name, s in sample.phases.items() if name != "rest") for sample in self.plain.samples]
        prefill = sum(s.seconds for s in self.plain.samples) - sum(steps)
        self._prefill = prefill * len(found.texts) / len(steps)
        usual = steps_seconds(found, method.cost, Budget(0)) / found.tokens
        self._slowdown = sum(steps) / sum(s.output_tokens for s in self.plain.samples) / usual

    def _predictions(self, method: MethodTrial, tree_depth: int | None) -> list[Candidate]:
        """All settings of a method, the fastest first. The best trees are simulated before they are believed."""
        assert method.statistics is not None
        assert method.llm is not None
        found, target = method.statistics, self.racer.target
        some = budgets(found.limit, tree_depth)
        for _ in range(MOST):
            best = max(some, key=lambda b: self.predict(method, b).predicted or 0.0)
            if best.width == 1 or best in found.tree_steps:
                break
            if not simulate_trees(found, target, method.llm.drafter, *self._answered(len(found.texts)), best):
                break
        return sorted((self.predict(method, b) for b in some), key=lambda c: -(c.predicted or 0.0))

    def predict(self, method: MethodTrial, budget: Budget) -> Candidate:
        """A candidate with its predicted speed, the prefill of target and drafter included."""
        found, cost = method.statistics, method.cost
        assert found is not None
        assert cost is not None
        drafter_prefill = sum(text.prompt for text in found.texts) * cost.prefill
        seconds = self._prefill + self._slowdown * (drafter_prefill + steps_seconds(found, cost, budget))
        name = f"{method.name} k={budget.depth}" + (f" tree of {budget.max_nodes}" if budget.width > 1 else "")
        config = {**method.config, **budget_config(budget), "controller": "fixed"}
        return Candidate(name, config, budget, method, found.tokens / seconds)


def budget_config(budget: Budget) -> dict[str, Any]:
    """The keys of a `speculative_config` for a budget."""
    tree = {"tree_width": budget.width, "tree_nodes": budget.max_nodes} if budget.width > 1 else {}
    return {"num_speculative_tokens": budget.depth, **tree}


def neighbours(candidates: abc.Sequence[Candidate]) -> list[Candidate]:
    """The candidates of one method to measure. candidates: the fastest first.

    The best one, chains of half and of one and a half times its length, and the best of the other kind, chain or tree. If the
    cost of a node is wrong by a fifth, the best length is wrong by more than one.
    """
    best, depth = candidates[0], candidates[0].budget.depth
    near = [c for c in candidates if c.budget.width == 1 and c.budget.depth in (depth // 2, depth + (depth + 1) // 2)]
    other = next((c for c in candidates if (c.budget.width > 1) != (best.budget.width > 1)), best)
    return list(dict.fromkeys([best, *near, other]))
