"""The verifiers on a batch: fixed trip counts, ragged rows, host reads before the loop and none inside it.

Which noise is read where, with `position` the place of the token after the root:

    match      TOKEN    at position + depth, by the target's own `sample`
    all others ACCEPT   at position + depth - 1 of the judged node, index = node
               RESIDUAL at position + accepted, for the token drawn after the accepted nodes (residual or bonus)
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol, cast

import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.tree import child_table, depth, levels, lists
from outrider.core.types import Draft, Siblings, Verdict
from outrider.verify.laws import (
    check_laws,
    clipped_ratio,
    coin,
    draw,
    leftover,
    mass,
    nobody,
    normal,
    proposal,
    residual,
)


class TargetDistribution(Protocol):
    """The target's law at the nodes of a draft, computed when asked: only visited nodes are paid for."""

    def sample(self, node: Tensor, noise: Noise, position: Tensor) -> Tensor:
        """int64 [batch]: the target's own token after `node`, argmax(log law + gumbel(TOKEN, position)).

        node: int64 [batch], one per row. position: int64 [batch], where that token will stand. A greedy law gives its
        argmax. -1 says that the law was NaN or empty; it matches no guess and is returned as the verdict's token.
        """
        ...

    def probs(self, node: Tensor) -> Tensor:
        """float32 [batch, vocab]: the law of the token after `node`. node: int64 [batch], one per row."""
        ...


class RowTargetDistribution(Protocol):
    """A target that can also be asked for one row at a time: the way that costs least on the CPU."""

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        """What `sample` gives for that row; key: the row of `Noise.keys` at the token's position."""
        ...


class FixedDistribution:
    """A target whose laws are given: for tests, docs and teaching."""

    def __init__(self, probs: Tensor) -> None:
        """probs: float32 [batch, node, vocab]; row n is the law of the token after node n."""
        self.table = probs

    def sample(self, node: Tensor, noise: Noise, position: Tensor) -> Tensor:
        return draw(self.probs(node), noise, Stream.TOKEN, position)

    def probs(self, node: Tensor) -> Tensor:
        return self.table[torch.arange(len(node), device=node.device), node]


def match(target: TargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Keep guesses that equal the target's own sample. Any draft, any tree; the lowest of equal children is followed.

    position: int64 [batch], the position of the token after the root (= committed tokens). The emitted tokens are those
    of plain decoding with the same seed, whatever the draft. Batched twin of `reference_match`.
    """
    tokens, parents = draft.tokens, draft.parents
    batch, nodes = tokens.shape
    if tokens.device.type == "cpu" and hasattr(target, "sample_row"):
        return _match_on_host(cast(RowTargetDistribution, target), draft, noise, position)
    levels = int(depth(parents).max()) if batch else 0
    index = torch.arange(nodes, device=tokens.device)
    here = torch.zeros(batch, dtype=torch.long, device=tokens.device)
    accepted = here.clone()
    path = torch.full((batch, levels + 1), -1, dtype=torch.long, device=tokens.device)
    path[:, 0] = 0
    token = target.sample(here, noise, position)
    # A row that has stopped stays where it is: here, accepted and so its token no longer change.
    for level in range(1, levels + 1):
        hit = (parents == here[:, None]) & (tokens == token[:, None])
        child = torch.where(hit, index, nodes).amin(1)
        walks = child < nodes
        if nobody(walks):
            break
        here, accepted = torch.where(walks, child, here), accepted + walks
        path[:, level] = torch.where(walks, child, -1)
        token = target.sample(here, noise, position + accepted)
    return Verdict(path, accepted, token)


def _match_on_host(target: RowTargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """The same, row by row on plain lists: on the CPU a tensor operation on five numbers costs more than the walk."""
    trees = zip(lists(draft.tokens), lists(draft.parents), noise.keys(Stream.TOKEN, position), strict=True)
    paths: list[list[int]] = []
    last: list[int] = []
    for row, (tokens, parents, (seed, stream, step, at)) in enumerate(trees):
        path = [0]
        while True:
            token = target.sample_row(row, path[-1], (seed, stream, step, at + len(path) - 1))
            here = path[-1]
            child = next((n for n in range(here + 1, len(tokens)) if parents[n] == here and tokens[n] == token), 0)
            if not child:
                break
            path.append(child)
        paths.append(path)
        last.append(token)
    levels = max(map(len, paths), default=1)
    padded = torch.tensor([p + [-1] * (levels - len(p)) for p in paths], dtype=torch.long).reshape(-1, levels)
    accepted = torch.tensor([len(p) - 1 for p in paths], dtype=torch.long)
    return Verdict(padded, accepted, torch.tensor(last, dtype=torch.long))


def rejection(target: TargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Keep guess x with probability min(1, p(x)/q(x)); after a refusal the residual stands in for p, for the next sibling
    or for the draw that ends the step. Leviathan 2211.17192 on chains; on trees see `reference_rejection`, whose twin this
    is.

    position: int64 [batch], the position of the token after the root. q follows from `draft.probs` and `draft.siblings`;
    it is all mass on the guess where that was chosen (`Siblings.POINT`). Raises ValueError for drawn guesses without their
    law.
    """
    here = torch.zeros_like(draft.tokens[:, 0])
    law = target.probs(here).double()
    check_laws(draft, "rejection", law)
    levels, width = _extent(draft)
    offered = _judging_order(draft, width)
    rows = torch.arange(len(here), device=here.device)
    accepted = torch.zeros_like(here)
    path = torch.full((len(here), levels + 1), -1, dtype=torch.long, device=here.device)
    path[:, 0] = 0
    for level in range(1, levels + 1):
        stays = accepted == level - 1
        children = offered[rows, here]
        moved = torch.zeros_like(stays)
        for slot in range(width):
            child = children[:, slot]
            judged = stays & ~moved & (child >= 0)
            if nobody(judged):
                break
            child = child.clamp_min(0)
            q, x = proposal(draft, child, law), draft.tokens[rows, child]
            # multiply, never divide; strictly less, so that a guess the target gives no mass is never kept
            keeps = judged & (coin(noise, position + (level - 1), child, draft.nodes) * mass(q, x) < mass(law, x))
            refused = judged & ~keeps
            if not nobody(refused):
                law = torch.where(refused[:, None], normal(residual(torch.ones_like(law[:, :1]), law, q)), law)
            moved, here = moved | keeps, torch.where(keeps, child, here)
        if nobody(moved):
            break
        accepted = accepted + moved
        path[:, level] = torch.where(moved, here, -1)
        law = torch.where(moved[:, None], target.probs(here).double(), law)
    return Verdict(path, accepted, draw(law, noise, Stream.RESIDUAL, position + accepted))


def block(target: TargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Judge the chain as a whole: at least as many guesses kept as `rejection`, same law. Sun 2403.10444, algorithm 2.

    position: int64 [batch], the position of the token after the root. Laws as for `rejection`; raises ValueError for a tree
    too. The law of every node is asked for: a later coin may say yes after an earlier one said no. Batched twin of
    `reference_block`.

    The weight p~ is kept in float64, not as a logarithm. Clipping at 1 keeps it from overflowing, and where it
    underflows (below 1e-308) the path would have to win back as large a ratio on tokens that q drew, which has
    probability below 1e-308 (Markov).
    """
    kept = torch.zeros_like(draft.tokens[:, 0])
    p = target.probs(kept)
    check_laws(draft, "block", p)
    length, end = _chain_length(draft), draft.nodes - 1
    weight = torch.ones_like(p[:, 0], dtype=torch.float64)  # p~_n of the paper
    kept_weight, kept_p = weight, p
    q = proposal(draft, (kept + 1).clamp_max(end), p)
    for n in range(1, draft.nodes):
        inside, x, node = length >= n, draft.tokens[:, n], torch.full_like(kept, n)
        weight = torch.where(inside, clipped_ratio(weight * mass(p, x), mass(q, x)), weight)
        p, q = target.probs(length.clamp_max(n)), proposal(draft, (node + 1).clamp_max(end), p)
        owed = leftover(weight[:, None], p, q).sum(1)
        last = length == n
        part, whole = torch.where(last, weight, owed), torch.where(last, 1.0, owed + 1 - weight)
        says_yes = coin(noise, position + (n - 1), node, draft.nodes) * whole < part
        keeps = inside & (says_yes | (weight == 1))  # weight 1: h = 1, even if 0/0
        kept, kept_weight = torch.where(keeps, n, kept), torch.where(keeps, weight, kept_weight)
        kept_p = torch.where(keeps[:, None], p, kept_p)
    law = residual(kept_weight[:, None], kept_p, proposal(draft, (kept + 1).clamp_max(end), kept_p))
    law = torch.where((kept < length)[:, None], law, kept_p.double())
    index = torch.arange(draft.nodes, device=kept.device)
    path = torch.where(index <= kept[:, None], index, -1)
    return Verdict(path, kept, draw(law, noise, Stream.RESIDUAL, position + kept))


def traversal(target: TargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """From the leaves up: a node is judged after all below it were refused, by the ratio of its whole path. Keeps at least
    as much of a tree as `rejection`; on a chain it is `block`. Weng 2505.12398, algorithm 2.

    position: int64 [batch], the position of the token after the root. Laws and errors as for `rejection`. The law of every
    node that is entered is asked for. Batched twin of `reference_traversal`.
    """
    here = torch.zeros_like(draft.tokens[:, 0])
    p = target.probs(here).double()
    check_laws(draft, "traversal", p)
    levels, _ = _extent(draft)
    rows, level = torch.arange(len(here), device=here.device), depth(draft.parents)
    weight = torch.ones(
        len(here), levels + 1, dtype=torch.float64, device=here.device
    )  # of the open node of each level
    law = p[:, None].repeat(1, levels + 1, 1)  # what is left of p there
    walks = torch.ones_like(here, dtype=torch.bool)
    for event in _tour(draft).unbind(1):
        node = event.abs()
        enters, leaves = walks & (event > 0), walks & (event < 0)
        below = level[rows, node]
        above = (below - 1).clamp_min(0)
        p, w, x = law[rows, above], weight[rows, above], draft.tokens[rows, node]
        q = proposal(draft, node, p)
        refused = leaves
        if not nobody(leaves):
            keeps = leaves & (coin(noise, position + above, node, draft.nodes) < weight[rows, below])
            refused = leaves & ~keeps
            here, walks = torch.where(keeps, node, here), walks & ~keeps
        if not nobody(enters):
            ratio = clipped_ratio(w * mass(p, x), mass(q, x))
            weight[rows, below] = torch.where(enters, ratio, weight[rows, below])
            entered = target.probs(torch.where(enters, node, 0)).double()
            law[rows, below] = torch.where(enters[:, None], entered, law[rows, below])
        if not nobody(refused):
            rest = leftover(w[:, None], p, q)
            owed = rest.sum(1)
            left = torch.where(w == 1, 1.0, owed / (owed + 1 - w))
            weight[rows, above] = torch.where(refused, left, weight[rows, above])
            law[rows, above] = torch.where((refused & (owed > 0))[:, None], normal(rest), law[rows, above])
        if nobody(walks):
            break
    accepted = level[rows, here]
    token = draw(law[rows, accepted], noise, Stream.RESIDUAL, position + accepted)
    path = torch.full((len(here), levels + 1), -1, dtype=torch.long, device=here.device)
    for _ in range(levels + 1):  # up to the root, where the walk stays
        path[rows, level[rows, here]] = here
        here = draft.parents[rows, here].clamp_min(0)
    return Verdict(path, accepted, token)


def _extent(draft: Draft) -> tuple[int, int]:
    """(levels below the root, most children of a node). One host read."""
    rows = lists(draft.parents)
    children = [count for row in rows for count in Counter(parent for parent in row if parent >= 0).values()]
    return max((max(levels(row)) for row in rows), default=0), max(children, default=0)


def _judging_order(draft: Draft, width: int) -> Tensor:
    """int64 [batch, node, width]: children in the order they are judged, then -1. The one drawn comes before those chosen."""
    table = child_table(draft.parents, width)
    if draft.siblings is not Siblings.TOP_THEN_SAMPLED or width < 2:
        return table
    slot = torch.arange(width, device=table.device)
    count = (table >= 0).sum(-1, keepdim=True)
    turned = table.gather(-1, torch.where(slot == 0, (count - 1).clamp_min(0), (slot - 1).clamp_min(0)))
    return torch.where(slot < count, turned, -1)


def _tour(draft: Draft) -> Tensor:
    """int64 [batch, event]: +n on entering node n, -n on leaving it with all below it refused; 0 when the tour is over."""
    tours: list[list[int]] = []
    for parents in lists(draft.parents):
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
        tours.append(tour)
    events = max(map(len, tours), default=0)
    padded = [tour + [0] * (events - len(tour)) for tour in tours]
    return torch.tensor(padded, dtype=torch.long, device=draft.tokens.device).reshape(len(tours), events)


def _chain_length(draft: Draft) -> Tensor:
    """int64 [batch]: guesses in each row. Raises ValueError for a tree. One host read."""
    parents = draft.parents
    index = torch.arange(draft.nodes, device=parents.device)
    if bool(((parents >= 0) & (parents != index - 1)).any()):
        raise ValueError(
            "the draft is a tree (some node has two children), and verify='block' judges chains only.\n"
            "Use verify='traversal', the same rule on trees, or verify='match', or give the drafter Budget(width=1)."
        )
    return draft.num_draft_tokens
