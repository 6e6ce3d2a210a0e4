"""The verifiers on a batch. Rows may have trees of different sizes.

`position` is the position of the token after the root. A verifier reads this noise:

    match      TOKEN    at position + depth, in the target's own `sample_row`
    all others ACCEPT   at position + depth - 1 of the judged node, index = node
               RESIDUAL at position + accepted, for the token after the accepted nodes (residual or bonus)

Coins and ratios are compared in float64. The product of two float32 numbers is exact there, so `u * q < p` has no
rounding of its own. So the batched form and its reference make the same decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.core import sampling
from outrider.core.noise import Noise, Stream
from outrider.core.tree import child_table, depth, levels
from outrider.core.types import Array, Draft, Siblings, Verdict
from outrider.kernels.probabilities import log, total

_QUIET = np.errstate(divide="ignore", invalid="ignore")  # rows without mass are NaN, and -1 in the end


class TargetDistribution(Protocol):
    """The target's distribution at the nodes of a draft. Each one is computed when a verifier asks for it."""

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        """The target's own token after a node of one row: argmax(log probs + gumbel). Greedy decoding gives the argmax.

        key: the row of `Noise.keys` at the token's position. -1 means that the distribution has NaN or is empty. It equals no
        draft token, and becomes the verdict's token.
        """
        ...

    def probs(self, node: Array) -> Array:
        """float32 [batch, vocab]: the distribution of the token after `node`. node: int64 [batch], one per row."""
        ...


class FixedDistribution:
    """A target with given distributions, for tests and examples."""

    def __init__(self, probs: Array) -> None:
        """probs: float32 [batch, node, vocab]; probs[:, n] is the distribution of the token after node n."""
        self.table = probs

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        seed, stream, step, position = key
        return int(draw(self.table[row, node][None], Noise([seed], [step]), Stream(stream), np.array([position]))[0])

    def probs(self, node: Array) -> Array:
        return self.table[np.arange(len(node)), node]


def match(target: TargetDistribution, draft: Draft, noise: Noise, position: Array | Sequence[int]) -> Verdict:
    """Accept draft tokens that equal the target's own sample. Any tree; among equal children the lowest index counts.

    position: int64 [batch], the position of the token after the root (= the number of committed tokens). For each draft
    the tokens are those of plain decoding with the same seed. Batched twin of `reference_match`.
    """
    trees = zip(draft.host, noise.keys(Stream.TOKEN, position), strict=True)
    return Verdict([walk(target, row, nodes, key) for row, (nodes, key) in enumerate(trees)])


def walk(
    target: TargetDistribution, row: int, nodes: list[tuple[int, int]], key: tuple[int, int, int, int]
) -> tuple[list[int], int]:
    """`match` for one row: its entry of `Verdict.host`. nodes: of `Draft.host`. key: of `Noise.keys`, after the root."""
    path, (seed, stream, step, at) = [0], key
    while True:
        here, token = path[-1], target.sample_row(row, path[-1], (seed, stream, step, at + len(path) - 1))
        child = next((n for n in range(here + 1, len(nodes)) if nodes[n] == (token, here)), 0)
        if not child:
            return path, token
        path.append(child)


@_QUIET
def rejection(target: TargetDistribution, draft: Draft, noise: Noise, position: Array | Sequence[int]) -> Verdict:
    """Accept draft token x with probability min(1, p(x)/q(x)). After a rejection the residual replaces p.

    The residual judges the next sibling, or gives the token that ends the step. Chains: Leviathan 2211.17192. Trees: see
    `reference_rejection`, its reference. position: int64 [batch], the position of the token after the root. q follows
    from `draft.probs` and `draft.siblings`; a chosen token (`Siblings.POINT`) has q = 1.

    Raises ValueError for drawn tokens without probs, and for probs of another vocabulary.
    """
    here, position = np.zeros_like(draft.tokens[:, 0]), np.asarray(position)
    probs = target.probs(here).astype(np.float64)
    check_probs(draft, "rejection", probs)
    levels, width = _extent(draft)
    offered = _judging_order(draft, width)
    rows = np.arange(len(here))
    accepted = np.zeros_like(here)
    path = _only_roots(len(here), levels)
    for level in range(1, levels + 1):
        stays = accepted == level - 1
        children = offered[rows, here]
        moved = np.zeros_like(stays)
        for slot in range(width):
            child = children[:, slot]
            judged = stays & ~moved & (child >= 0)
            if not judged.any():
                break
            child = np.maximum(child, 0)
            q, x = proposal(draft, child, probs), draft.tokens[rows, child]
            # Multiply and do not divide. Strictly less: a token without mass in p is never accepted.
            keeps = judged & (coin(noise, position + (level - 1), child, draft.nodes) * mass(q, x) < mass(probs, x))
            refused = judged & ~keeps
            if refused.any():
                probs = np.where(refused[:, None], normalized(residual(1.0, probs, q)), probs)
            moved, here = moved | keeps, np.where(keeps, child, here)
        if not moved.any():
            break
        accepted = accepted + moved
        path[:, level] = np.where(moved, here, -1)
        probs = np.where(moved[:, None], target.probs(here).astype(np.float64), probs)
    return _verdict(path, draw(probs, noise, Stream.RESIDUAL, position + accepted))


@_QUIET
def block(target: TargetDistribution, draft: Draft, noise: Noise, position: Array | Sequence[int]) -> Verdict:
    """Judge the chain as a whole. Accepts at least as many tokens as `rejection`. Sun 2403.10444, algorithm 2.

    position: int64 [batch], the position of the token after the root. Errors as for `rejection`; a tree raises
    ValueError too. Every node's distribution is needed: a later coin may accept after an earlier one rejected. Batched
    twin of `reference_block`.

    The weight p~ is a float64 and not a logarithm. The clip at 1 prevents overflow. After an underflow (below 1e-308)
    the path would need an equally large ratio on tokens drawn from q; its probability is below 1e-308 (Markov).
    """
    last_kept, position = np.zeros_like(draft.tokens[:, 0]), np.asarray(position)
    p = target.probs(last_kept)
    check_probs(draft, "block", p)
    length, end = _chain_length(draft), draft.nodes - 1
    weight = np.ones(len(p))  # p~_n of the paper
    kept_weight, kept_p = weight, p
    q = proposal(draft, np.minimum(last_kept + 1, end), p)
    for n in range(1, draft.nodes):
        inside, x, node = length >= n, draft.tokens[:, n], np.full_like(last_kept, n)
        weight = np.where(inside, clipped_ratio(weight * mass(p, x), mass(q, x)), weight)
        p, q = target.probs(np.minimum(length, n)), proposal(draft, np.minimum(node + 1, end), p)
        owed = total(leftover(weight[:, None], p, q))[:, 0]
        last = length == n
        part, whole = np.where(last, weight, owed), np.where(last, 1.0, owed + 1 - weight)
        says_yes = coin(noise, position + (n - 1), node, draft.nodes) * whole < part
        keeps = inside & (says_yes | (weight == 1))  # weight 1 means h = 1, also for 0/0
        last_kept, kept_weight = np.where(keeps, n, last_kept), np.where(keeps, weight, kept_weight)
        kept_p = np.where(keeps[:, None], p, kept_p)
    probs = residual(kept_weight[:, None], kept_p, proposal(draft, np.minimum(last_kept + 1, end), kept_p))
    probs = np.where((last_kept < length)[:, None], probs, kept_p.astype(np.float64))
    token = draw(probs, noise, Stream.RESIDUAL, position + last_kept)
    return Verdict([([*range(n + 1)], t) for n, t in zip(last_kept.tolist(), token.tolist(), strict=True)])


@_QUIET
def traversal(target: TargetDistribution, draft: Draft, noise: Noise, position: Array | Sequence[int]) -> Verdict:
    """Judge a tree from its leaves up, each node by the ratio of its whole path. Weng 2505.12398, algorithm 2.

    A node is judged after all nodes below it were rejected. Accepts at least as many tokens as `rejection`; on a chain it
    equals `block`. position: int64 [batch], the position of the token after the root. Errors as for `rejection`. Batched
    twin of `reference_traversal`.
    """
    here, position = np.zeros_like(draft.tokens[:, 0]), np.asarray(position)
    p = target.probs(here).astype(np.float64)
    check_probs(draft, "traversal", p)
    levels, _ = _extent(draft)
    rows, level = np.arange(len(here)), depth(draft.parents)
    # float64 [batch, level]: the weight of the open node of each level
    weight = np.ones((len(here), levels + 1))
    probs = np.repeat(p[:, None], levels + 1, 1)  # what remains of p at that node
    walks = np.ones(len(here), bool)
    for event in _tour(draft).T:
        node = abs(event)
        enters, leaves = walks & (event > 0), walks & (event < 0)
        below = level[rows, node]
        above = np.maximum(below - 1, 0)
        p, w, x = probs[rows, above], weight[rows, above], draft.tokens[rows, node]
        q = proposal(draft, node, p)
        refused = leaves
        if leaves.any():
            keeps = leaves & (coin(noise, position + above, node, draft.nodes) < weight[rows, below])
            refused = leaves & ~keeps
            here, walks = np.where(keeps, node, here), walks & ~keeps
        if enters.any():
            ratio = clipped_ratio(w * mass(p, x), mass(q, x))
            weight[rows, below] = np.where(enters, ratio, weight[rows, below])
            entered = target.probs(np.where(enters, node, 0)).astype(np.float64)
            probs[rows, below] = np.where(enters[:, None], entered, probs[rows, below])
        if refused.any():
            rest = leftover(w[:, None], p, q)
            owed = total(rest)[:, 0]
            left = np.where(w == 1, 1.0, owed / (owed + 1 - w))
            weight[rows, above] = np.where(refused, left, weight[rows, above])
            probs[rows, above] = np.where((refused & (owed > 0))[:, None], normalized(rest), probs[rows, above])
        if not walks.any():
            break
    accepted = level[rows, here]
    token = draw(probs[rows, accepted], noise, Stream.RESIDUAL, position + accepted)
    path = np.full((len(here), levels + 1), -1)
    for _ in range(levels + 1):  # ends at the root
        path[rows, level[rows, here]] = here
        here = np.maximum(draft.parents[rows, here], 0)
    return _verdict(path, token)


def _verdict(path: Array, token: Array) -> Verdict:
    """path: int64 [batch, level], with -1 after the accepted nodes. token: int64 [batch]."""
    return Verdict([([n for n in row if n >= 0], t) for row, t in zip(path.tolist(), token.tolist(), strict=True)])


def _only_roots(batch: int, levels: int) -> Array:
    """int64 [batch, level]: paths on which nothing was accepted yet."""
    path = np.full((batch, levels + 1), -1)
    path[:, 0] = 0
    return path


def _extent(draft: Draft) -> tuple[int, int]:
    """(levels below the root, maximum children of a node)."""
    rows: set[tuple[int, ...]] = set(map(tuple, draft.parents.tolist()))  # equal rows are read once
    children = [count for row in rows for count in Counter(parent for parent in row if parent >= 0).values()]
    return max((max(levels(row)) for row in rows), default=0), max(children, default=0)


def _judging_order(draft: Draft, width: int) -> Array:
    """int64 [batch, node, width]: children in judging order, then -1. A drawn child comes before chosen children."""
    table = child_table(draft.parents, width)
    if draft.siblings is not Siblings.TOP_THEN_SAMPLED or width < 2:
        return table
    slot = np.arange(width)
    count = (table >= 0).sum(-1, keepdims=True)
    turned = np.take_along_axis(table, np.where(slot == 0, np.maximum(count - 1, 0), np.maximum(slot - 1, 0)), -1)
    return np.where(slot < count, turned, -1)


def _tour(draft: Draft) -> Array:
    """int64 [batch, event]: +n enters node n; -n leaves it after all nodes below it were rejected; 0 is the end."""
    rows: list[tuple[int, ...]] = [tuple(row) for row in draft.parents.tolist()]
    tour_of: dict[tuple[int, ...], list[int]] = {}
    for parents in set(rows):  # equal rows have equal tours
        children: list[list[int]] = [[] for _ in parents]
        for n, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(n)
        if draft.siblings is Siblings.TOP_THEN_SAMPLED:
            children = [c[-1:] + c[:-1] for c in children]
        tour: list[int] = []
        stack = children[0][::-1]
        while stack:
            tour.append(stack.pop())
            if tour[-1] > 0:
                stack += [-tour[-1], *children[tour[-1]][::-1]]
        tour_of[parents] = tour
    events = max(map(len, tour_of.values()), default=0)
    padded = {parents: tour + [0] * (events - len(tour)) for parents, tour in tour_of.items()}
    tours = [padded[parents] for parents in rows]
    return np.array(tours, np.int64).reshape(len(rows), events)


def _chain_length(draft: Draft) -> Array:
    """int64 [batch]: draft tokens in each row. Raises ValueError for a tree."""
    parents = draft.parents
    index = np.arange(draft.nodes)
    if ((parents >= 0) & (parents != index - 1)).any():
        raise ValueError(
            "the draft is a tree (a node has two children), and verifier='block' accepts chains only.\n"
            "Use verifier='traversal', the same rule for trees, or verifier='match', or give the drafter Budget(width=1)."
        )
    return draft.num_draft_tokens


def draw(probs: Array, noise: Noise, stream: Stream, position: Array) -> Array:
    """int64 [batch]: argmax(log probs + Gumbel noise), the lowest index among equals.

    probs: float [batch, vocab], of any total. -1 where probs has NaN or is all zero.
    """
    return sampling.draw(log(probs), noise, stream, position)


def coin(noise: Noise, position: Array, node: Array, nodes: int) -> Array:
    """float64 [batch] in (0, 1): the coin of `node` (int64 [batch]), at index `node` of its position's noise."""
    return mass(noise.uniform(Stream.ACCEPT, position, nodes), node)


def mass(probs: Array, token: Array) -> Array:
    """float64 [batch]: the probability of one token per row."""
    return probs[np.arange(len(probs)), token].astype(np.float64)


def clipped_ratio(part: Array, whole: Array) -> Array:
    """min(part / whole, 1). A draft token without mass in q breaks the contract: 1 if p gives it some, else 0."""
    return np.where(part < whole, part / whole, part > 0)


def leftover(weight: Array | float, p: Array, q: Array) -> Array:
    """float64 [batch, vocab]: max(weight * p - q, 0), not normalized. weight: float64 [batch, 1], or 1 with p in float64."""
    return np.maximum(weight * p - q, 0)


def residual(weight: Array | float, p: Array, q: Array) -> Array:
    """float64 [batch, vocab]: `leftover`, or p where rounding made it empty. A draw needs no normalization."""
    rest = leftover(weight, p, q)
    return np.where(total(rest) > 0, rest, p.astype(np.float64))


def normalized(probs: Array) -> Array:
    """probs with sum 1; NaN where they are all zero."""
    return probs / total(probs)


def proposal(draft: Draft, node: Array, p: Array) -> Array:
    """float [batch, vocab]: q, the distribution of `node` given the siblings that were judged before it.

    node: int64 [batch], not the root. A chosen token has q = 1. p gives the vocabulary size. Twin of `offers` in the
    reference.
    """
    rows, kind, parents = np.arange(len(p)), draft.siblings, draft.parents
    parent = np.maximum(parents[rows, node], 0)
    hot = np.zeros_like(p)
    hot[rows, draft.tokens[rows, node]] = 1.0
    if kind is Siblings.POINT or draft.probs is None:
        return hot
    q = draft.probs[rows, parent]
    if kind is Siblings.IID:
        return q
    index = np.arange(draft.nodes)
    beside = (parents == parent[:, None]) & (index != node[:, None])
    before = beside & (index < node[:, None])
    row, earlier = before.nonzero()
    rest = q.astype(np.float64)
    rest[row, draft.tokens[row, earlier]] = 0
    mass_left = total(rest)
    q = np.where(before.any(1, keepdims=True) & (mass_left > 0), rest / mass_left, rest)
    if kind is Siblings.WITHOUT_REPLACEMENT:
        return q
    chosen = (beside & ~before).any(1, keepdims=True)  # TOP_THEN_SAMPLED: only the last sibling was drawn
    return np.where(chosen, hot, q)


def check_probs(draft: Draft, name: str, p: Array) -> None:
    """Raise ValueError where drawn tokens have no probs, or probs have another vocabulary than p."""
    if draft.siblings is Siblings.POINT:
        return
    if draft.probs is None:
        raise ValueError(
            f"the draft says that its tokens were drawn (Siblings.{draft.siblings.name}), but gives no probs, and "
            f"verifier={name!r} needs the distribution they were drawn from.\n"
            "Return Draft(probs=...) from the drafter, or use verifier='match', which needs none."
        )
    if draft.probs.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"the drafter's probs have {draft.probs.shape[-1]} tokens, the target's vocabulary has {p.shape[-1]}.\n"
            "Scatter the drafter's probs onto the target's vocabulary, or use verifier='match', which needs none."
        )
