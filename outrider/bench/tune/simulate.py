"""The speed of a setting before it is measured: what a drafter's tokens were worth along some texts, and the cost of steps.

With the verifier `match` the text does not depend on the drafts. One run with a large budget therefore shows, for nearly
every position, if the draft token there is correct. Every shorter chain can then be simulated step by step.
"""

from __future__ import annotations

import itertools
import random
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.bench.tune.replay_target import KnownTextTarget
from outrider.control import CostModel, Fixed
from outrider.control.acceptance import RankAcceptance
from outrider.core.tree import depth as depths
from outrider.core.types import Budget
from outrider.decode import Decoder, Sequence
from outrider.drafters.base import Drafter
from outrider.drafters.combine.guard import trusted
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.drafters.model.self_speculation import QuantizedSelfDrafter
from outrider.engine.scheduler import Scheduler
from outrider.models.load import Loaded

# Tokens of context where one number must be enough.
CONTEXT = 128
# Contexts are grouped by so many tokens, to look up costs less often.
_CONTEXT_GROUP = 64


@dataclass(eq=False)
class DraftedText:
    """The drafts along one text.

    prompt: tokens of the prompt. correct: for each output token, was the draft token for it correct; None if there was no
    draft for it. available: for each output token, how many draft tokens the drafter had from there on; the number that was
    asked for, if it had at least as many.
    """

    prompt: int
    correct: list[bool | None] = field(default_factory=list)
    available: list[int] = field(default_factory=list)

    def add(self, budget: int, drafted: int, accepted: int, committed: int) -> None:
        """One step: draft tokens asked for, drafted and accepted, and tokens committed."""
        for at in range(committed):
            # A drafter that had fewer tokens than the budget has none for the following positions.
            known = at < drafted or drafted < budget
            self.correct.append(at < accepted if known else None)
            self.available.append(drafted - at if drafted < budget else budget)


class DraftStatistics:
    """What a drafter's tokens are worth: exact for chains, estimated from the ranks of accepted nodes for trees.

    limit: the largest budget that can be predicted. texts: of chains. ranks: acceptance of tree nodes by rank.
    chain_hits[d]: steps of trees in which a chain would have accepted at least d tokens.
    tree_drafts: for each step of a tree, committed tokens, and number of nodes within each depth.
    tree_steps: for trees that were simulated themselves, (draft tokens, context) of each step.
    """

    def __init__(self, limit: Budget) -> None:
        self.limit, self.texts = limit, list[DraftedText]()
        self.ranks = RankAcceptance(limit, 1 << 30)
        self.chain_hits = [0] * (limit.depth + 1)
        self.tree_drafts = list[tuple[int, list[int]]]()
        self.tree_steps: dict[Budget, list[tuple[int, int]]] = {}

    def observe(self, decoder: Decoder, request: Sequence, budget: Budget) -> None:
        """Answer with this budget in every step, and add what the steps show."""
        decoder.controller = Fixed(*budget.parts)
        text = DraftedText(len(request.prompt))
        for step, _ in Scheduler(decoder, raises=True).run([request.fresh()]):
            if step is None:
                continue
            [commit], [given] = step.commits, step.budgets
            if budget.width == 1:
                text.add(given.depth, len(step.draft.host[0]) - 1, commit.num_accepted, len(commit.tokens))
            elif commit.finish is None:
                hits = self.ranks.observe(step.draft, 0, commit.nodes, given)
                levels = depths(step.draft.parents)[0][step.draft.parents[0] >= 0].tolist()
                within = [sum(n <= depth for n in levels) for depth in range(1, self.limit.depth + 1)]
                self.tree_drafts.append((len(commit.tokens), within))
                for depth in range(hits + 1):
                    self.chain_hits[depth] += 1
        if budget.width == 1:
            self.texts.append(text)

    def observe_tree(self, decoder: Decoder, request: Sequence, budget: Budget) -> None:
        """Answer with this tree, and record its steps. They are then known, not estimated."""
        decoder.controller = Fixed(*budget.parts)
        steps = self.tree_steps.setdefault(budget, [])
        run = Scheduler(decoder, raises=True).run([request.fresh()])
        steps += [(len(step.draft.host[0]) - 1, step.positions[0]) for step, _ in run if step is not None]

    def chain_steps(self, depth: int) -> list[tuple[int, int]]:
        """Every step that chains of this depth would take, as (draft tokens, context)."""
        draw, steps = random.Random(0), list[tuple[int, int]]()
        known = [c for text in self.texts for c in text.correct if c is not None]
        usual = sum(known) / max(len(known), 1)
        for text in self.texts:
            correct = [draw.random() < usual if c is None else c for c in text.correct]
            at, end = 0, len(correct)
            while at < end:
                drafted = max(min(depth, text.available[at], end - at - 1), 0)
                accepted = next((n for n in range(drafted) if not correct[at + n]), drafted)
                steps.append((drafted, text.prompt + at))
                at += accepted + 1
        return steps

    @property
    def tokens(self) -> int:
        """Output tokens of all texts."""
        return sum(len(text.correct) for text in self.texts)

    def tree_sizes(self, budget: Budget) -> dict[int, float]:
        """The share of steps by number of draft tokens. A lookup often has fewer than the budget.

        A step that committed more tokens than the depth of the budget counts as several steps.
        """
        shares: dict[int, float] = {}
        for tokens, within in self.tree_drafts:
            drafted = min(within[budget.depth - 1], budget.max_nodes)
            shares[drafted] = shares.get(drafted, 0.0) + -(-tokens // (budget.depth + 1))
        whole = sum(shares.values())
        return {drafted: times / whole for drafted, times in sorted(shares.items())}

    def tree_gain(self, budget: Budget) -> float:
        """Tokens per step of a tree over those of a chain of the same depth."""
        steps = self.chain_hits[0]
        chain = sum(self.chain_hits[1 : budget.depth + 1]) / steps
        expected = self.ranks.expected(self.chain_hits[1] / steps)[budget.depth - 1][budget.max_nodes - 1]
        return (1 + expected) / (1 + chain)


def reads_target(drafter: Drafter) -> bool:
    """True where a draft depends on the target's features, logits or cache. It is not known what a foreign drafter reads."""
    if drafter.taps or not trusted(drafter) or isinstance(drafter, (QuantizedSelfDrafter, TokenRecyclingDrafter)):
        return True
    return any(map(reads_target, drafter.inner().values()))


class KnownTexts:
    """Texts of plain decoding, and a decoder that writes them again.

    needs_target: the decoder runs the target itself, because the drafter reads its features or its cache.
    """

    def __init__(
        self,
        target: Loaded,
        drafter: Drafter,
        requests: abc.Sequence[Sequence],
        answers: abc.Sequence[abc.Sequence[int]],
    ) -> None:
        self.needs_target = reads_target(drafter)
        self._texts, self._known = list(zip(requests, answers, strict=True)), KnownTextTarget(target.model)
        longest = max(len(r.prompt) + len(a) for r, a in self._texts)
        self.decoder = Decoder(
            target.model if self.needs_target else self._known,
            drafter,
            rows=1,
            max_length=min(longest + 1, target.model.max_length),
            end_ids=target.end_ids,
            tokenizer=target.tokenizer,
        )

    def requests(self) -> Iterator[Sequence]:
        """One by one: answer each before you take the next. The drafter first forgets other texts."""
        self.decoder.drafter.reset()
        for request, answer in self._texts:
            self._known.text = [*request.prompt, *answer]
            yield request


def observe_drafts(
    target: Loaded,
    drafter: Drafter,
    requests: abc.Sequence[Sequence],
    answers: abc.Sequence[abc.Sequence[int]],
    *budgets: Budget,
) -> DraftStatistics:
    """What a drafter's tokens are worth along the answers of plain decoding.

    budgets: one run with each: the longest chain, and the largest tree if trees are to be predicted.
    """
    found = DraftStatistics(Budget(budgets[0].depth, *budgets[-1].parts[1:]))
    known = KnownTexts(target, drafter, requests, answers)
    for budget in budgets:
        for request in known.requests():
            found.observe(known.decoder, request, budget)
    return found


def simulate_trees(
    found: DraftStatistics,
    target: Loaded,
    drafter: Drafter,
    requests: abc.Sequence[Sequence],
    answers: abc.Sequence[abc.Sequence[int]],
    *trees: Budget,
) -> bool:
    """Record the steps of these trees, instead of estimating them from the largest tree.

    Returns False and does nothing if that needs the target: a measurement would cost the same.
    """
    known = KnownTexts(target, drafter, requests, answers)
    for tree in trees if not known.needs_target else ():
        for request in known.requests():
            found.observe_tree(known.decoder, request, tree)
    return not known.needs_target


def steps_seconds(found: DraftStatistics, cost: CostModel, budget: Budget) -> float:
    """Predicted seconds to write the texts with this budget, prefill left out. Raises ValueError for a tree if only chains
    were observed."""
    known = found.tree_steps.get(budget)
    if budget.width > 1 and not known and not found.tree_drafts:
        raise ValueError(f"no tree was observed, so {budget} cannot be predicted; call `observe` with a tree first")
    group = _CONTEXT_GROUP
    steps = [(nodes, context // group, 1.0) for nodes, context in known or found.chain_steps(budget.depth)]
    if budget.width > 1 and not known:
        fewer, shares = 1 / found.tree_gain(budget), found.tree_sizes(budget)
        steps = [(nodes, context, fewer * share) for _, context, _ in steps for nodes, share in shares.items()]
    counts = dict[tuple[int, int], float]()
    for nodes, context, share in steps:
        counts[nodes, context] = counts.get((nodes, context), 0.0) + share
    return sum(
        n * cost.step_seconds(1, budget.depth, nodes, group * context + group // 2, budget.width)
        for (nodes, context), n in counts.items()
    )


def best_depths(
    found: DraftStatistics, cost: CostModel, batch_sizes: abc.Sequence[int], deepest: int
) -> dict[int, int]:
    """The fastest chain for each batch size, 0 where plain decoding is fastest."""
    best = dict[int, int]()
    for batch_size in batch_sizes:
        speeds = list[float]()
        for depth in range(deepest + 1):
            steps = found.chain_steps(depth)
            context = sum(c for _, c in steps) // max(len(steps), 1)
            nodes = round(sum(n for n, _ in steps) / max(len(steps), 1))
            speeds.append(found.tokens / (len(steps) * cost.step_seconds(batch_size, depth, nodes, context)))
        best[batch_size] = max(range(len(speeds)), key=speeds.__getitem__)
    return best


def largest_speedup(cost: CostModel, deepest: int) -> float:
    """The speedup over plain decoding if every draft token is accepted."""
    plain = cost.step_seconds(1, 0, 0, CONTEXT)
    return max((d + 1) * plain / cost.step_seconds(1, d, d, CONTEXT) for d in range(1, deepest + 1))


def budgets(limit: Budget, tree_depth: int | None) -> list[Budget]:
    """All budgets to predict. tree_depth: of the deepest tree. None is for drafters whose levels cost nothing: the number of
    nodes then decides the depth."""
    chains, sizes = [Budget(d) for d in range(1, limit.depth + 1)], range(2, limit.max_nodes + 1)
    if limit.width == 1:
        return chains
    depths = range(1, min(tree_depth or 0, limit.depth) + 1)
    trees = itertools.product(depths, sizes) if tree_depth else ((n - 1, n) for n in sizes)
    return chains + [Budget(d, limit.width, n) for d, n in trees if d < n <= d * limit.width]
