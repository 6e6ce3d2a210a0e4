"""What the ratio verifiers share: the law a guess was drawn from, the residual, coins, draws, and refusals.

Coins and ratios are compared in float64, where the product of two float32 numbers is exact: `u * q < p` then has no
rounding of its own, and the twins agree decision for decision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.types import Draft, Siblings


def draw(law: Tensor, noise: Noise, stream: Stream, position: Tensor) -> Tensor:
    """int64 [batch]: argmax(log law + Gumbel noise), lowest index first; law float [batch, vocab], of any total.

    -1 where the law holds NaN or is empty.
    """
    best = (law.log() + noise.gumbel(stream, position, law.shape[-1])).max(-1)
    return torch.where(best.values > float("-inf"), best.indices, -1)  # false for NaN too


def coin(noise: Noise, position: Tensor, node: Tensor, nodes: int) -> Tensor:
    """float64 [batch] in (0, 1): the coin of `node` (int64 [batch]), read at index `node` of the node's position."""
    return noise.uniform(Stream.ACCEPT, position, nodes).gather(1, node[:, None])[:, 0].double()


def mass(law: Tensor, token: Tensor) -> Tensor:
    """float64 [batch]: the law's mass on one token per row."""
    return law.gather(1, token[:, None])[:, 0].double()


def clipped_ratio(part: Tensor, whole: Tensor) -> Tensor:
    """min(part / whole, 1); where a guess has no mass in q, which breaks the contract, 1 if p gives it some, else 0."""
    return torch.where(part < whole, part / whole, (part > 0).double())


def leftover(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """float64 [batch, vocab]: max(weight * p - q, 0), not normalised. weight: float64 [batch, 1]."""
    return (weight * p - q).clamp_min(0)


def residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """float64 [batch, vocab]: `leftover`, or p where rounding left it empty. (Drawing needs no normalising.)"""
    rest = leftover(weight, p, q)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, p.double())


def normal(law: Tensor) -> Tensor:
    """The law with sum 1; NaN where it is empty."""
    return law / law.sum(1, keepdim=True)


def proposal(draft: Draft, node: Tensor, p: Tensor) -> Tensor:
    """float [batch, vocab]: q, the law `node` (int64 [batch], not the root) was drawn from, given the siblings judged before.

    All mass on it where it was chosen. p gives the vocabulary. Twin of `offers` in the reference.
    """
    rows = torch.arange(len(p), device=p.device)
    kind, parents = draft.siblings, draft.parents
    parent = parents[rows, node].clamp_min(0)
    if kind is Siblings.POINT or draft.probs is None:
        return torch.zeros_like(p).scatter_(1, draft.tokens[rows, node][:, None], 1.0)
    q = draft.probs[rows, parent]
    if kind is Siblings.IID:
        return q
    index = torch.arange(draft.nodes, device=p.device)
    beside = (parents == parent[:, None]) & (index != node[:, None])
    before = beside & (index < node[:, None])
    spare = p.shape[1]  # one column too many, for what is no sibling
    gone = torch.zeros(len(p), spare + 1, dtype=torch.bool, device=p.device)
    gone = gone.scatter_(1, torch.where(before, draft.tokens, spare), True)[:, :-1]
    rest = q.double().masked_fill(gone, 0)
    total = rest.sum(1, keepdim=True)
    q = torch.where(before.any(1, keepdim=True) & (total > 0), rest / total, rest)
    if kind is Siblings.WITHOUT_REPLACEMENT:
        return q
    chosen = (beside & ~before).any(1, keepdim=True)  # TOP_THEN_SAMPLED: only the last sibling was drawn
    return torch.where(chosen, torch.zeros_like(q).scatter_(1, draft.tokens[rows, node][:, None], 1.0), q)


def check_laws(draft: Draft, name: str, p: Tensor) -> None:
    """Raises ValueError where guesses were drawn and their law is missing, or speaks of another vocabulary than p."""
    if draft.siblings is Siblings.POINT:
        return
    if draft.probs is None:
        raise ValueError(
            f"the draft says its guesses were drawn ({draft.siblings.name}), and verify={name!r} needs the law they "
            "were drawn from, which is missing.\n"
            "Return Draft(probs=...) from the drafter, or use verify='match', which needs none."
        )
    if draft.probs.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"the drafter's laws speak of {draft.probs.shape[-1]} tokens and the target's of {p.shape[-1]}.\n"
            "Scatter the drafter's law onto the target's vocabulary, or use verify='match', which needs no law."
        )


def nobody(walks: Tensor) -> bool:
    """May the loop end early? Asked on the CPU only: elsewhere the question costs more than the levels it saves."""
    return walks.device.type == "cpu" and not bool(walks.any())
