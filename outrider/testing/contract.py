"""The drafter contract, as checks that any drafter can be put through, ours or yours.

from outrider.testing.contract import check_drafter
def test_mine(): check_drafter(lambda: MyDrafter(...), vocab_size=100)
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.tree import depth, validate
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters.base import DraftContext, Drafter
from outrider.params import SamplingParams


def context(
    rows: list[int],
    tokens: list[list[int]],
    budgets: list[Budget],
    params: SamplingParams,
    *,
    step: int = 0,
    needs_probs: bool = False,
) -> DraftContext:
    """A batch as the loop would hand it over; prompts are the first token."""
    count = len(rows)
    return DraftContext(
        slots=rows,
        tokens=tokens,
        budgets=budgets,
        warp=LogitsWarper([SequenceState(params, (), (), t, 1) for t in tokens]),
        noise=Noise(torch.tensor(rows) + 100, torch.full((count,), step)),
        stream=Stream.DRAFT if needs_probs else Stream.TOKEN,
        needs_probs=needs_probs,
        prompt_lengths=[1] * count,
    )


def guesses(draft: Draft, b: int) -> list[tuple[int, int]]:
    """(token, parent) of the real nodes of one row."""
    pairs = zip(draft.tokens[b].tolist(), draft.parents[b].tolist(), strict=True)
    return [p for p in pairs if p[1] != -2]


def check_drafter(
    make: Callable[[], Drafter], vocab_size: int, seed: int = 0, *, draws: bool = True, shares: bool = False
) -> None:
    """Runs a drafter through everything the loop may ask of it. draws=False: it never declares a law. shares=True: it
    says that it learns from other requests, so its guesses may depend on them."""
    random_ = random.Random(seed)
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=1.3)

    def text(n: int) -> list[int]:
        return [random_.randrange(vocab_size) for _ in range(n)]

    drafter = make()
    assert isinstance(drafter, Drafter), "a drafter has taps, propose, update and release"
    texts = {row: text(random_.randrange(1, 12)) for row in range(4)}
    for step in range(25):
        rows = random_.sample(sorted(texts), random_.randrange(1, 5))
        budgets = [Budget(random_.randrange(6), random_.randrange(1, 3)) for _ in rows]
        seen = context(
            rows,
            [texts[r] for r in rows],
            budgets,
            random_.choice([greedy, hot]),
            step=step,
            needs_probs=draws and step % 2 > 0,
        )
        before = [list(t) for t in seen.tokens]
        draft = drafter.propose(seen)
        assert [list(t) for t in seen.tokens] == before, "the committed tokens are read-only"
        validate(draft, vocab_size)
        levels = depth(draft.parents)
        kept = []
        for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            nodes = guesses(draft, b)
            assert nodes[0] == (texts[row][-1], -1), "node 0 is the last committed token"
            assert len(nodes) - 1 <= budget.max_nodes, "more nodes than the budget"
            assert int(levels[b].max()) <= budget.depth, "deeper than the budget"
            path = [0]  # a random path is accepted, then a token of the target's own
            while random_.random() < 0.7 and (children := [i for i, (_, p) in enumerate(nodes) if p == path[-1]]):
                path.append(random_.choice(children))
            new = [nodes[i][0] for i in path[1:]] + text(1)
            kept.append(Commit(new, path, len(path) - 1))
            texts[row] = texts[row] + new
        drafter.update(seen, kept, None)
        if step % 7 == 6:
            gone = rows[0]
            drafter.release(gone)
            texts[gone] = text(random_.randrange(1, 12))
    if not shares:
        _check_amnesia(make, vocab_size, drafter, texts, hot)
        _check_company(make, texts, hot)


def _check_amnesia(
    make: Callable[[], Drafter], vocab_size: int, old: Drafter, texts: dict[int, list[int]], params: SamplingParams
) -> None:
    """A state reached step by step proposes what a fresh one proposes from the whole text."""
    for row, tokens in texts.items():
        ask = context([row], [tokens], [Budget(4)], params)
        assert guesses(old.propose(ask), 0) == guesses(make().propose(ask), 0), "state depends on more than the text"


def _check_company(make: Callable[[], Drafter], texts: dict[int, list[int]], params: SamplingParams) -> None:
    """A row's guesses do not depend on its neighbours."""
    together = make().propose(context(list(texts), list(texts.values()), [Budget(3)] * len(texts), params))
    for b, (row, tokens) in enumerate(texts.items()):
        assert guesses(together, b) == guesses(make().propose(context([row], [tokens], [Budget(3)], params)), 0)
