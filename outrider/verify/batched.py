"""The verifiers on a batch: fixed trip counts, ragged rows, one host read before the loop and none inside it.

Which noise is read where, with `position` the place of the token after the root:

    match      TOKEN    at position + depth, by the target's own `sample`
    rejection  ACCEPT   at position + depth - 1 of the judged node, index = node
    and block  RESIDUAL at position + accepted, for the token drawn after the accepted nodes (residual or bonus)

Coins and ratios are compared in float64, where the product of two float32 numbers is exact: `u * q < p` then has no
rounding of its own, and the twins agree decision for decision.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from outrider.noise import Noise, Stream
from outrider.tree import depth, lists
from outrider.types import Draft, Siblings, Verdict


class Target(Protocol):
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


class RowTarget(Protocol):
    """A target that can also be asked for one row at a time: the way that costs least on the CPU."""

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        """What `sample` gives for that row; key: the row of `Noise.keys` at the token's position."""
        ...


class Table:
    """A target whose laws are given: for tests, docs and teaching."""

    def __init__(self, probs: Tensor) -> None:
        """probs: float32 [batch, node, vocab]; row n is the law of the token after node n."""
        self.table = probs

    def sample(self, node: Tensor, noise: Noise, position: Tensor) -> Tensor:
        return draw(self.probs(node), noise, Stream.TOKEN, position)

    def probs(self, node: Tensor) -> Tensor:
        return self.table[torch.arange(len(node), device=node.device), node]


def match(target: Target, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Keep guesses that equal the target's own sample. Any draft, any tree; the lowest of equal children is followed.

    position: int64 [batch], the position of the token after the root (= committed tokens). The emitted tokens are those
    of plain decoding with the same seed, whatever the draft. Batched twin of `reference_match`.
    """
    tokens, parents = draft.tokens, draft.parents
    batch, nodes = tokens.shape
    if tokens.device.type == "cpu" and hasattr(target, "sample_row"):
        return _match_on_host(cast(RowTarget, target), draft, noise, position)
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
        if _nobody(walks):
            break
        here, accepted = torch.where(walks, child, here), accepted + walks
        path[:, level] = torch.where(walks, child, -1)
        token = target.sample(here, noise, position + accepted)
    return Verdict(path, accepted, token)


def _match_on_host(target: RowTarget, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
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


def rejection(target: Target, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Keep guess x with probability min(1, p(x)/q(x)), else draw from the residual. Leviathan 2211.17192, algorithm 1.

    position: int64 [batch], the position of the token after the root. Chains only; q is `draft.probs`, or all mass on
    the guess where it was chosen (`Siblings.POINT`). Raises ValueError for a tree, and for drawn guesses without their
    law. Batched twin of `reference_rejection`.
    """
    length = _chain_length(draft, "rejection")
    accepted = torch.zeros_like(length)
    walks = torch.ones_like(length, dtype=torch.bool)
    p = target.probs(accepted)
    _same_vocabulary(draft, p)
    for n in range(1, draft.nodes):
        p_x, q_x = _mass(p, draft.tokens[:, n]), _drafted_mass(draft, n)
        # multiply, never divide; strictly less, so that a guess the target gives no mass is never kept
        walks = walks & (length >= n) & (_coin(noise, position, n) * q_x < p_x)
        if _nobody(walks):
            break
        accepted = accepted + walks
        p = target.probs(accepted)
    law = _residual(torch.ones_like(p[:, :1]), p, _proposal(draft, accepted, p))
    law = torch.where((accepted < length)[:, None], law, p.double())
    return Verdict(_chain_path(accepted, draft.nodes), accepted, draw(law, noise, Stream.RESIDUAL, position + accepted))


def block(target: Target, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
    """Judge the chain as a whole: at least as many guesses kept as `rejection`, same law. Sun 2403.10444, algorithm 2.

    position: int64 [batch], the position of the token after the root. Drafts and errors as for `rejection`. The law of
    every node is asked for: a later coin may say yes after an earlier one said no. Batched twin of `reference_block`.

    The weight p~ is kept in float64, not as a logarithm. Clipping at 1 keeps it from overflowing, and where it
    underflows (below 1e-308) the path would have to win back as large a ratio on tokens that q drew, which has
    probability below 1e-308 (Markov).
    """
    length = _chain_length(draft, "block")
    kept = torch.zeros_like(length)
    p = target.probs(kept)
    _same_vocabulary(draft, p)
    weight = torch.ones_like(p[:, 0], dtype=torch.float64)  # p~_n of the paper
    kept_weight, kept_p = weight, p
    for n in range(1, draft.nodes):
        inside = length >= n
        part, whole = weight * _mass(p, draft.tokens[:, n]), _drafted_mass(draft, n)
        # as clipped_ratio: 1 unless part < whole, and 0 where both are 0
        ratio = torch.where(part < whole, part / whole, (part > 0).double())
        weight = torch.where(inside, ratio, weight)
        p = target.probs(length.clamp_max(n))
        mass = _leftover(weight[:, None], p, _proposal(draft, n, p)).sum(1)
        last = length == n
        part, whole = torch.where(last, weight, mass), torch.where(last, 1.0, mass + 1 - weight)
        keeps = inside & ((_coin(noise, position, n) * whole < part) | (weight == 1))  # weight 1: h = 1, even if 0/0
        kept, kept_weight = torch.where(keeps, n, kept), torch.where(keeps, weight, kept_weight)
        kept_p = torch.where(keeps[:, None], p, kept_p)
    law = _residual(kept_weight[:, None], kept_p, _proposal(draft, kept, kept_p))
    law = torch.where((kept < length)[:, None], law, kept_p.double())
    return Verdict(_chain_path(kept, draft.nodes), kept, draw(law, noise, Stream.RESIDUAL, position + kept))


def draw(law: Tensor, noise: Noise, stream: Stream, position: Tensor) -> Tensor:
    """int64 [batch]: argmax(log law + Gumbel noise), lowest index first; law float [batch, vocab], of any total.

    -1 where the law holds NaN or is empty.
    """
    best = (law.log() + noise.gumbel(stream, position, law.shape[-1])).max(-1)
    return torch.where(best.values > float("-inf"), best.indices, -1)  # false for NaN too


def _coin(noise: Noise, position: Tensor, node: int) -> Tensor:
    """float64 [batch] in (0, 1): the coin of chain node `node`, which stands at position + node - 1."""
    return noise.uniform(Stream.ACCEPT, position + (node - 1), node + 1)[:, node].double()


def _mass(law: Tensor, token: Tensor) -> Tensor:
    """float64 [batch]: the law's mass on one token per row."""
    return law.gather(1, token[:, None])[:, 0].double()


def _drafted_mass(draft: Draft, node: int) -> Tensor:
    """float64 [batch]: q's mass on the guess at chain node `node`; 1 where it was chosen."""
    if draft.siblings is not Siblings.POINT and draft.probs is not None:
        return _mass(draft.probs[:, node - 1], draft.tokens[:, node])
    return torch.ones(len(draft.tokens), dtype=torch.float64, device=draft.tokens.device)


def _leftover(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """float64 [batch, vocab]: max(weight * p - q, 0), not normalised. weight: float [batch, 1]."""
    return (weight.double() * p - q).clamp_min(0)


def _residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """float64 [batch, vocab]: `_leftover`, or p where rounding left it empty. (Drawing needs no normalising.)"""
    rest = _leftover(weight, p, q)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p.double())


def _proposal(draft: Draft, node: Tensor | int, p: Tensor) -> Tensor:
    """float32 [batch, vocab]: q, the law the child of `node` was drawn from; all mass on it where it was chosen.

    What it says at a node without a child is never used. p gives the vocabulary.
    """
    rows = torch.arange(len(p), device=p.device)
    if draft.siblings is not Siblings.POINT and draft.probs is not None:
        return draft.probs[rows, node]
    child = (node + torch.ones_like(rows)).clamp_max(draft.nodes - 1)
    return torch.zeros_like(p).scatter_(1, draft.tokens[rows, child][:, None], 1.0)


def _chain_length(draft: Draft, name: str) -> Tensor:
    """int64 [batch]: guesses in each row. Raises ValueError for what this verifier cannot judge. One host read."""
    if draft.siblings is not Siblings.POINT and draft.probs is None:
        raise ValueError(
            f"the draft says its guesses were drawn ({draft.siblings.name}), and verify={name!r} needs the law they "
            "were drawn from, which is missing.\n"
            "Return Draft(probs=...) from the drafter, or use verify='match', which needs none."
        )
    parents = draft.parents
    index = torch.arange(draft.nodes, device=parents.device)
    if bool(((parents >= 0) & (parents != index - 1)).any()):
        raise ValueError(
            f"the draft is a tree (some node has two children), and verify={name!r} judges chains only.\n"
            "Use verify='match', which judges any tree, or give the drafter Budget(width=1)."
        )
    return draft.drafted


def _same_vocabulary(draft: Draft, p: Tensor) -> None:
    if draft.siblings is not Siblings.POINT and draft.probs is not None and draft.probs.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"the drafter's laws speak of {draft.probs.shape[-1]} tokens and the target's of {p.shape[-1]}.\n"
            "Scatter the drafter's law onto the target's vocabulary, or use verify='match', which needs no law."
        )


def _chain_path(accepted: Tensor, nodes: int) -> Tensor:
    index = torch.arange(nodes, device=accepted.device)
    return torch.where(index <= accepted[:, None], index, -1)


def _nobody(walks: Tensor) -> bool:
    """May the loop end early? Asked on the CPU only: elsewhere the question costs more than the levels it saves."""
    return walks.device.type == "cpu" and not bool(walks.any())
