"""Checks that any drafter can be put through: everything the loop may ask of it, and what it must answer.

from outrider.testing import check_drafter

def test_mine():
    check_drafter(lambda: MyDrafter(...), vocab_size=100)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.tree import validate
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters.base import DraftContext, Drafter, TargetPass
from outrider.drafters.combine.planned import check, lend

GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=1.3)


def context(
    slots: list[int],
    tokens: list[list[int]],
    budgets: list[Budget],
    params: SamplingParams,
    *,
    step: int = 0,
    needs_probs: bool = False,
) -> DraftContext:
    """A context as the loop makes it. The first token of each sequence is its prompt.

    slots: cache slots. needs_probs: as under a verifier that divides by the draft's distribution.
    """
    count = len(slots)
    return DraftContext(
        slots=slots,
        tokens=tokens,
        budgets=budgets,
        warp=LogitsWarper([SequenceState(params, (), (), t, 1) for t in tokens]),
        noise=Noise(torch.tensor(slots) + 100, torch.full((count,), step)),
        stream=Stream.DRAFT if needs_probs else Stream.TOKEN,
        needs_probs=needs_probs,
        prompt_lengths=[1] * count,
    )


def check_drafter(
    make: Callable[[], Drafter],
    vocab_size: int,
    seed: int = 0,
    *,
    draws: bool = True,
    shares: bool = False,
    feature_size: int = 8,
) -> None:
    """Raise AssertionError or ValueError if a drafter breaks the contract.

    Checked: the draft is a tree with the right root; it keeps depth, width and nodes of each budget; committed tokens
    are not changed; a draft depends on the text alone, not on earlier steps or on other sequences; tokens that the drafter
    declares as drawn are drawn from the distribution that it declares.

    make: a new drafter, without state. draws: False if it never returns probs. shares: True if it learns from other
    requests, so that a draft may depend on them. feature_size: for a drafter with taps, numbers per position, all taps
    together; they are random, so a draft may depend on more than the text.
    """
    random_, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    drafter = make()
    assert isinstance(drafter, Drafter), "derive from outrider.drafters.BaseDrafter, which has all but propose"

    def begin(slot: int) -> list[int]:
        """A new text. The target reads it in two chunks."""
        tokens = _text(random_, vocab_size)
        middle, stop = random_.randrange(len(tokens)), len(tokens) - 1
        for first, last in ((0, middle), (middle, stop)):
            if drafter.taps and first < last:
                drafter.start(slot, tokens, first, torch.randn(last - first, feature_size, generator=noise))
        return tokens

    texts = {slot: begin(slot) for slot in range(4)}
    for step in range(25):
        slots = random_.sample(sorted(texts), random_.randrange(1, 5))
        budgets = [Budget(random_.randrange(6), random_.randrange(1, 4), random_.choice((None, 3))) for _ in slots]
        budgets = [replace(b, min_probability=random_.choice((0.0, 0.0, 0.3))) for b in budgets]
        params, needs_probs = random_.choice([GREEDY, HOT]), draws and step % 2 > 0
        ask = context(slots, [texts[s] for s in slots], budgets, params, step=step, needs_probs=needs_probs)
        draft = _proposed(drafter, ask, vocab_size)
        commits = [_accepted(random_, draft.host[b], vocab_size) for b in range(len(slots))]
        if drafter.taps:
            commits = [replace(c, features=torch.randn(len(c.nodes), feature_size, generator=noise)) for c in commits]
        _commit(drafter, ask, draft, commits, vocab_size, noise)
        if step % 7 == 6:
            drafter.release(slots[0])
            texts[slots[0]] = begin(slots[0])
    if draws:
        _check_distribution(make, vocab_size, random_)
    if not shares and not drafter.taps:
        _check_state(make, drafter, texts)
        _check_sequences(make, texts)


def _text(random_: random.Random, vocab_size: int) -> list[int]:
    return [random_.randrange(vocab_size) for _ in range(random_.randrange(1, 12))]


def _proposed(drafter: Drafter, ask: DraftContext, vocab_size: int) -> Draft:
    """Its draft, after the checks that the loop has for a drafter of others, and of the declared probabilities."""
    draft = lend(drafter.propose, ask)
    check(draft, ask, vocab_size)
    validate(draft, vocab_size)
    return draft


def _accepted(random_: random.Random, nodes: Sequence[tuple[int, int]], vocab_size: int) -> Commit:
    """A random path is accepted; then comes a token of the target's own."""
    path = [0]
    while random_.random() < 0.7 and (children := [i for i, (_, up) in enumerate(nodes) if up == path[-1]]):
        path.append(random_.choice(children))
    new = [nodes[i][0] for i in path[1:]] + [random_.randrange(vocab_size)]
    return Commit(new, path, len(path) - 1)


def _commit(
    drafter: Drafter,
    ask: DraftContext,
    draft: Draft,
    commits: Sequence[Commit],
    vocab_size: int,
    noise: torch.Generator,
) -> None:
    """Commit as the loop does: the texts grow, then `update` gets the commits and the target's logits."""
    for tokens, commit in zip(ask.tokens, commits, strict=True):
        assert isinstance(tokens, list)
        tokens.extend(commit.tokens)
    logits = torch.randn(*draft.tokens.shape, vocab_size, generator=noise)
    drafter.update(ask, commits, TargetPass(draft, logits))


def _check_distribution(make: Callable[[], Drafter], vocab_size: int, random_: random.Random) -> None:
    """Tokens that were drawn have the distribution that is declared for them.

    A token x that was drawn from q has an interval between two values of q's distribution function. A uniform number in that
    interval is uniform in (0, 1) for every q, so all draws of all nodes make one sample. The Dvoretzky-Kiefer-Wolfowitz
    inequality (Massart 1990) bounds its distance from uniform: a correct drafter exceeds the bound with probability
    1e-6. The order of the tokens is free; two orders detect a shifted and a sharpened distribution.
    """
    drafter = make()
    texts = {slot: _text(random_, vocab_size) for slot in range(3)}
    by_id, by_rank = list[float](), list[float]()
    for step in range(60):
        slots = sorted(texts)
        budgets = [Budget(3, 1 + step % 3)] * len(slots)
        ask = context(slots, [texts[s] for s in slots], budgets, HOT, step=step, needs_probs=True)
        draft = _proposed(drafter, ask, vocab_size)
        for token, q in _draws(draft):
            below = q[:token].sum(), (q * (q > q[token])).sum()
            share = random_.random()
            by_id.append(float(below[0] + share * q[token]))
            equal = float(q[q == q[token]].sum())  # equal tokens have no order: take them as one
            by_rank.append(float(below[1]) + share * equal)
        commits = [Commit([random_.randrange(vocab_size)], [0], 0) for _ in slots]
        _commit(drafter, ask, draft, commits, vocab_size, torch.Generator().manual_seed(step))
        for slot, tokens in texts.items():
            if len(tokens) > 20:
                drafter.release(slot)
                texts[slot] = _text(random_, vocab_size)
    for name, sample in (("shifted", by_id), ("sharper or flatter", by_rank)):
        bound = math.sqrt(math.log(2 / 1e-6) / (2 * max(len(sample), 1)))
        distance = _distance_from_uniform(sample)
        assert distance <= bound, (
            f"{len(sample)} tokens were not drawn from the distribution that the draft declares: it is {name}, the "
            f"distance is {distance:.3f}, and at most {bound:.3f} can be random. Return in Draft.probs what was drawn from"
        )


def _draws(draft: Draft) -> Iterator[tuple[int, torch.Tensor]]:
    """Each drawn token, with q float64 [vocab]: the distribution declared for it, given the siblings before it."""
    if draft.siblings is Siblings.POINT:
        return
    assert draft.probs is not None, (
        f"Siblings.{draft.siblings.name} says that tokens were drawn; return Draft(probs=...)"
    )
    for b in range(len(draft.tokens)):
        nodes = draft.host[b]
        for n, (token, parent) in enumerate(nodes[1:], 1):
            siblings = [i for i, (_, up) in enumerate(nodes) if up == parent]
            if draft.siblings is Siblings.TOP_THEN_SAMPLED and n != siblings[-1]:
                continue  # chosen, not drawn
            q = draft.probs[b, parent].double()
            if draft.siblings is not Siblings.IID:
                q = q.clone()
                q[[nodes[i][0] for i in siblings if i < n]] = 0
            yield token, q / q.sum()


def _distance_from_uniform(sample: Sequence[float]) -> float:
    """The largest difference between the sample's distribution function and that of the uniform one on (0, 1)."""
    count = len(sample)
    return max((max((i + 1) / count - u, u - i / count) for i, u in enumerate(sorted(sample))), default=0.0)


def _check_state(make: Callable[[], Drafter], old: Drafter, texts: dict[int, list[int]]) -> None:
    """A drafter that saw each step proposes what a new one proposes from the whole text."""
    for slot, tokens in texts.items():
        ask = context([slot], [tokens], [Budget(4)], HOT)
        assert old.propose(ask).host == make().propose(ask).host, "state depends on more than the text"


def _check_sequences(make: Callable[[], Drafter], texts: dict[int, list[int]]) -> None:
    """The draft of a sequence does not depend on the other sequences."""
    together = make().propose(context(list(texts), list(texts.values()), [Budget(3)] * len(texts), HOT))
    for b, (slot, tokens) in enumerate(texts.items()):
        alone = make().propose(context([slot], [tokens], [Budget(3)], HOT))
        assert together.host[b] == alone.host[0], "a sequence's draft depends on the other sequences"
