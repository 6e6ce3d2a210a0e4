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

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.tree import validate
from outrider.core.types import Array, Budget, Commit, Draft, Siblings
from outrider.drafters.base import DraftContext, Drafter, TargetPass
from outrider.drafters.contract import check, lend

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
        noise=Noise(np.array(slots) + 100, np.full(count, step)),
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
    proposes: bool = True,
    feature_size: int = 8,
) -> None:
    """Raise AssertionError or ValueError if a drafter breaks the contract.

    Checked: the draft is a tree with the right root; it keeps depth, width and nodes of each budget; committed tokens
    are not changed; a draft depends on the text alone, not on earlier steps, on an earlier text of the slot, or on other
    sequences; `reset` forgets all texts; tokens that the drafter declares as drawn are drawn from the distribution that it
    declares. The texts have few different tokens and repeat themselves, so that a lookup finds something.

    Args:
        make: a new drafter, without state.
        vocab_size: token ids of the texts are below it.
        seed: of the texts, the budgets and what is accepted.
        draws: False if it never returns probs.
        shares: True if it learns from other requests, so that a draft may depend on them.
        proposes: False if it may propose nothing at all. A drafter that proposes nothing otherwise fails, because nothing
            was checked.
        feature_size: for a drafter with taps, numbers per position, all taps together. They are a function of the tokens.
    """
    random_, logits = random.Random(seed), np.random.default_rng(seed)
    few = random_.sample(range(vocab_size), min(vocab_size, 7))
    drafter, texts, asked, drafted = make(), dict[int, list[int]](), 0, 0
    assert isinstance(drafter, Drafter), "derive from outrider.drafters.BaseDrafter, which has all but propose"

    def begin(slot: int, length: int) -> None:
        texts[slot] = tokens = _text(random_, few, length)
        middle = random_.randrange(len(tokens))
        for first, stop in ((0, middle), (middle, len(tokens) - 1)):
            _start(drafter, slot, tokens, first, stop, feature_size)

    def fresh(ask: DraftContext) -> Draft:
        drafter = make()
        for slot, tokens in zip(ask.slots, ask.tokens, strict=True):
            _start(drafter, slot, tokens, 0, len(tokens) - 1, feature_size)
        return drafter.propose(ask)

    for slot in range(4):
        begin(slot, random_.randrange(1, 12))
    for step in range(27):
        if compared := step % 3 == 2:  # other texts take two slots: a shorter and a longer one
            for slot, shorter in zip(random_.sample(sorted(texts), 2), (True, False), strict=True):
                drafter.release(slot)
                old = len(texts[slot])
                begin(slot, random_.randrange(1, old // 2 + 2) if shorter else old + random_.randrange(1, 12))
        slots = random_.sample(sorted(texts), 4 if compared else random_.randrange(1, 5))
        budgets = [Budget(random_.randrange(6), random_.randrange(1, 4), random_.choice((None, 3))) for _ in slots]
        budgets = [replace(b, min_probability=random_.choice((0.0, 0.0, 0.3))) for b in budgets]
        if compared:  # how sure a drafter is may be learned, and decides about trees and where a chain stops
            budgets = [Budget(6)] * len(slots)
        params, needs_probs = random_.choice([GREEDY, HOT]), draws and step % 4 > 1
        ask = context(slots, [texts[s] for s in slots], budgets, params, step=step, needs_probs=needs_probs)
        for slot, tokens in texts.items():
            if missing := drafter.missing(slot, tokens):
                drafter.read(slot, tokens, random_.randrange(1, missing + 1))
        draft = _proposed(drafter, ask, vocab_size)
        asked, drafted = asked + sum(b.max_nodes > 0 for b in budgets), drafted + int(draft.num_draft_tokens.sum())
        if compared and not shares:
            assert draft.host == fresh(ask).host, (
                "state depends on more than the text: a new drafter has another draft for the same tokens. Drop what is "
                "kept under a slot in `release`, and let no draft token that was rejected stay"
            )
        commits = [_accepted(random_, draft.host[b], few, vocab_size) for b in range(len(slots))]
        _commit(drafter, ask, draft, commits, vocab_size, logits, feature_size)
    assert drafted or not proposes, (
        f"nothing was proposed in {asked} steps, so nothing was checked. Give proposes=False if the drafter has nothing to "
        "propose in texts that repeat a few tokens"
    )
    if draws:
        _check_distribution(make, vocab_size, random_, feature_size)
    every = context([*texts], [*texts.values()], [Budget(3)] * len(texts), HOT)
    together = fresh(every)
    for b in range(len(texts) if not shares else 0):
        alone = fresh(every.select([b]))
        assert together.host[b] == alone.host[0], "a sequence's draft depends on the other sequences"
    for slot in texts:
        drafter.release(slot)
    drafter.reset()
    first = context([*texts], [[random_.choice(few)] for _ in texts], [Budget(3)] * len(texts), HOT)
    assert drafter.propose(first).host == fresh(first).host, (
        "after `reset` it still knows earlier texts; forget them there"
    )


def _text(random_: random.Random, few: Sequence[int], length: int) -> list[int]:
    """A text of few different tokens, with copied pieces."""
    tokens = [random_.choice(few)]
    while len(tokens) < length:
        at = random_.randrange(len(tokens))
        tokens += random_.choice((tokens[at : at + 4], random_.choices(few, k=3)))
    return tokens[:length]


def _features(tokens: Sequence[int], first: int, stop: int, size: int) -> Array:
    """Those of some positions: like the target's, a function of the tokens up to each."""
    draws = (np.random.default_rng(hash(tuple(tokens[: n + 1])) & 2**63 - 1) for n in range(first, stop))
    return np.stack([draw.standard_normal(size, np.float32) for draw in draws])


def _start(drafter: Drafter, slot: int, tokens: Sequence[int], first: int, stop: int, size: int) -> None:
    """The target has read these positions."""
    if drafter.taps and first < stop:
        drafter.start(slot, tokens, first, _features(tokens, first, stop, size))


def _proposed(drafter: Drafter, ask: DraftContext, vocab_size: int) -> Draft:
    """Its draft, after the checks that the loop has for a drafter of others, and of the declared probabilities."""
    draft = lend(drafter.propose, ask)
    check(draft, ask, vocab_size)
    validate(draft, vocab_size)
    return draft


def _accepted(random_: random.Random, nodes: Sequence[tuple[int, int]], few: Sequence[int], vocab_size: int) -> Commit:
    """A random path is accepted; then comes a token of the target's own, which is now and then none of the few."""
    path = [0]
    while random_.random() < 0.7 and (children := [i for i, (_, up) in enumerate(nodes) if up == path[-1]]):
        path.append(random_.choice(children))
    new = [nodes[i][0] for i in path[1:]] + [random_.choice((*few, random_.randrange(vocab_size)))]
    return Commit(new, path, len(path) - 1)


def _commit(
    drafter: Drafter,
    ask: DraftContext,
    draft: Draft,
    commits: Sequence[Commit],
    vocab_size: int,
    noise: np.random.Generator,
    feature_size: int,
) -> None:
    """Commit as the loop does: the texts grow, then `update` gets the commits and the target's logits."""
    read = list[Commit]()
    for tokens, commit in zip(ask.tokens, commits, strict=True):
        tokens.extend(commit.tokens)
        stop = len(tokens) - 1
        features = _features(tokens, stop - len(commit.nodes), stop, feature_size) if drafter.taps else None
        read.append(replace(commit, features=features))
    logits = noise.standard_normal((*draft.tokens.shape, vocab_size), np.float32)
    drafter.update(ask, read, TargetPass(draft, logits))


def _check_distribution(
    make: Callable[[], Drafter], vocab_size: int, random_: random.Random, feature_size: int
) -> None:
    """Tokens that were drawn have the distribution that is declared for them.

    A token x that was drawn from q has an interval between two values of q's distribution function. A uniform number in that
    interval is uniform in (0, 1) for every q, so all draws of all nodes make one sample. The Dvoretzky-Kiefer-Wolfowitz
    inequality (Massart 1990) bounds its distance from uniform: a correct drafter exceeds the bound with probability
    1e-6. The order of the tokens is free; two orders detect a shifted and a sharpened distribution.
    """
    drafter, texts = make(), dict[int, list[int]]()

    def begin(slot: int) -> None:
        texts[slot] = tokens = _text(random_, range(vocab_size), 6)
        _start(drafter, slot, tokens, 0, len(tokens) - 1, feature_size)

    for slot in range(3):
        begin(slot)
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
        _commit(drafter, ask, draft, commits, vocab_size, np.random.default_rng(step), feature_size)
        for slot in slots:
            if len(texts[slot]) > 20:
                drafter.release(slot)
                begin(slot)
    for name, sample in (("shifted", by_id), ("sharper or flatter", by_rank)):
        bound = math.sqrt(math.log(2 / 1e-6) / (2 * max(len(sample), 1)))
        distance = _distance_from_uniform(sample)
        assert distance <= bound, (
            f"{len(sample)} tokens were not drawn from the distribution that the draft declares: it is {name}, the "
            f"distance is {distance:.3f}, and at most {bound:.3f} can be random. Return in Draft.probs what was drawn from"
        )


def _draws(draft: Draft) -> Iterator[tuple[int, Array]]:
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
            q = draft.probs[b, parent].astype(np.float64)
            if draft.siblings is not Siblings.IID:
                q[[nodes[i][0] for i in siblings if i < n]] = 0
            yield token, q / q.sum()


def _distance_from_uniform(sample: Sequence[float]) -> float:
    """The largest difference between the sample's distribution function and that of the uniform one on (0, 1)."""
    count = len(sample)
    return max((max((i + 1) / count - u, u - i / count) for i, u in enumerate(sorted(sample))), default=0.0)
