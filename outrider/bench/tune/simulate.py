"""How fast a setting will be, before it is measured: what a drafter's guesses were worth along some texts, at what a step
costs here.

Under `match` the text is the same whatever is guessed, so one run with a large budget tells of nearly every position whether
a guess there is right, and every shorter chain can be played through on paper, step by step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.control import CostModel, Fixed
from outrider.control.acceptance import RankAcceptance
from outrider.core.tree import depth as depths
from outrider.core.types import Budget
from outrider.decode import Decoder, Request
from outrider.llm import len_drafted

CONTEXT = 128  # tokens, where one must do for all


@dataclass(eq=False)
class Text:
    """What was guessed along one text. right: of each output token, was the guess for it right; None where none was asked for.
    there: guesses that the drafter had from here on, this one included; as many as asked for where it was not at its end."""

    prompt: int
    right: list[bool | None] = field(default_factory=list)
    there: list[int] = field(default_factory=list)

    def add(self, asked: int, drafted: int, kept: int, tokens: int) -> None:
        """One step: guesses asked for, made and kept, and tokens committed."""
        for at in range(tokens):
            known = at < drafted or drafted < asked  # a drafter that had no more says so of what follows
            self.right.append(at < kept if known else None)
            self.there.append(drafted - at if drafted < asked else asked)


class Seen:
    """What a drafter's guesses were worth: chains exactly, trees by the order of what was accepted."""

    def __init__(self, limit: Budget) -> None:
        self.limit, self.texts = limit, list[Text]()
        self.places = RankAcceptance(limit, 1 << 30)
        self.straight = [0] * (limit.depth + 1)  # steps of trees in which a chain would have kept so many, or more
        self.drafted = list[tuple[int, list[int]]]()  # tokens of those steps, and guesses by the depth they are within
        self.played: dict[Budget, list[tuple[int, int]]] = {}  # of trees by themselves: as `chain` tells of chains

    def watch(self, decoder: Decoder, request: Request, budget: Budget) -> None:
        """Answer with this budget in every step, and learn."""
        decoder.controller = Fixed(*budget.parts)
        text = Text(len(request.prompt))
        for step, _ in decoder.steps([request]):
            if step is None:
                continue
            [kept], [asked] = step.commits, step.budgets
            if budget.width == 1:
                text.add(asked.depth, len_drafted(step, 0), kept.num_accepted, len(kept.tokens))
            elif kept.finish is None:
                along = self.places.observe(step.draft, 0, kept.nodes, asked)
                levels = depths(step.draft.parents)[0][step.draft.parents[0] >= 0].tolist()
                within = [sum(n <= depth for n in levels) for depth in range(1, self.limit.depth + 1)]
                self.drafted.append((len(kept.tokens), within))
                for depth in range(along + 1):
                    self.straight[depth] += 1
        if budget.width == 1:
            self.texts.append(text)

    def play(self, decoder: Decoder, request: Request, budget: Budget) -> None:
        """Answer with a tree whose steps are to be known, not estimated from a larger one's."""
        decoder.controller = Fixed(*budget.parts)
        steps = self.played.setdefault(budget, [])
        steps += [(len_drafted(step, 0), step.positions[0]) for step, _ in decoder.steps([request]) if step is not None]

    def chain(self, depth: int) -> list[tuple[int, int]]:
        """Of every step that chains of this depth would take, (guesses made, tokens in the cache)."""
        draw, steps = random.Random(0), list[tuple[int, int]]()
        known = [r for text in self.texts for r in text.right if r is not None]
        usual = sum(known) / max(len(known), 1)
        for text in self.texts:
            right = [draw.random() < usual if r is None else r for r in text.right]
            at, end = 0, len(right)
            while at < end:
                made = max(min(depth, text.there[at], end - at - 1), 0)
                kept = next((n for n in range(made) if not right[at + n]), made)
                steps.append((made, text.prompt + at))
                at += kept + 1
        return steps

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(text.right) for text in self.texts)

    def made(self, budget: Budget) -> dict[int, float]:
        """Shares of the steps of a tree by the guesses they had: who drafts from texts often has fewer than the budget. A step
        that wrote more tokens than the budget is deep would have been several such steps."""
        shares: dict[int, float] = {}
        for tokens, within in self.drafted:
            guesses = min(within[budget.depth - 1], budget.max_nodes)
            shares[guesses] = shares.get(guesses, 0.0) + -(-tokens // (budget.depth + 1))
        whole = sum(shares.values())
        return {guesses: times / whole for guesses, times in sorted(shares.items())}

    def better(self, budget: Budget) -> float:
        """Tokens per step of a tree over those of a chain as deep, where both could be seen."""
        steps = self.straight[0]
        alone = sum(self.straight[1 : budget.depth + 1]) / steps
        return (1 + self._expected(budget)) / (1 + alone)

    def _expected(self, budget: Budget) -> float:
        return self.places.expected(self.straight[1] / self.straight[0])[budget.depth - 1][budget.max_nodes - 1]


def steps_seconds(seen: Seen, cost: CostModel, budget: Budget) -> float:
    """Seconds in which these texts will be written with this budget, their prompts aside. Raises ValueError for a tree where
    only chains were seen."""
    known = seen.played.get(budget)
    if budget.width > 1 and not known and not seen.drafted:
        raise ValueError(f"no tree was seen, so {budget} cannot be predicted; watch one first")
    steps = [(nodes, context // 64, 1.0) for nodes, context in known or seen.chain(budget.depth)]
    if budget.width > 1 and not known:
        fewer, shares = 1 / seen.better(budget), seen.made(budget)
        steps = [(nodes, context, fewer * share) for _, context, _ in steps for nodes, share in shares.items()]
    times = dict[tuple[int, int], float]()
    for nodes, context, share in steps:
        times[nodes, context] = times.get((nodes, context), 0.0) + share
    return sum(
        n * cost.step_seconds(1, budget.depth, nodes, 64 * context + 32, budget.width)
        for (nodes, context), n in times.items()
    )


def by_rows(seen: Seen, cost: CostModel, rows: Sequence[int], deepest: int) -> dict[int, int]:
    """The chain's best depth for so many texts side by side, 0 where plain decoding is best."""
    best = dict[int, int]()
    for count in rows:
        speeds = list[float]()
        for depth in range(deepest + 1):
            steps = seen.chain(depth)
            context = sum(c for _, c in steps) // max(len(steps), 1)
            nodes = round(sum(n for n, _ in steps) / max(len(steps), 1))
            speeds.append(seen.tokens / (len(steps) * cost.step_seconds(count, depth, nodes, context)))
        best[count] = max(range(len(speeds)), key=speeds.__getitem__)
    return best


def most(cost: CostModel, deepest: int) -> float:
    """Times plain decoding, if all guesses came and were right."""
    plain = cost.step_seconds(1, 0, 0, CONTEXT)
    return max((d + 1) * plain / cost.step_seconds(1, d, d, CONTEXT) for d in range(1, deepest + 1))


def budgets(limit: Budget, deepest: int | None) -> list[Budget]:
    """All that is predicted. deepest: of trees; None where a level by itself costs nothing, and a tree of so many nodes may be as
    deep as it likes."""
    chains, sizes = [Budget(d) for d in range(1, limit.depth + 1)], range(2, limit.max_nodes + 1)
    if limit.width == 1:
        return chains
    depths = range(1, min(deepest or 0, limit.depth) + 1)
    trees = itertools.product(depths, sizes) if deepest else ((n - 1, n) for n in sizes)
    return chains + [Budget(d, limit.width, n) for d, n in trees if d < n <= d * limit.width]
