"""The children of a node, for every way in which a draft may choose or draw them. Called once for each level of a tree.

A row here is a node to expand, of any sequence. Verifiers that read the draft's distribution (`rejection`, `traversal`) set
rules. A node's children are those drawn here, in this order, and none may be left out after it was drawn. *Which node to expand
next* may depend on anything drawn so far, so a tree may grow best first. Under `match` any choice of nodes keeps the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, TokenSubset
from outrider.core.types import Siblings, ints
from outrider.kernels.probabilities import log, log_softmax, running_total, softmax

_NO = float("-inf")
_STEPS = 2**20  # the noise of a node is that of step `node * 2**20 + step`, which no sequence reaches


@dataclass(frozen=True, eq=False)
class Children:
    """The children of some nodes, one node per row."""

    tokens: Tensor  # int64 [row, width], -1 where there are fewer
    log_q: Tensor  # float32 [row, width], the log probability of each, -inf where there is none
    keys: Tensor  # float32 [row, width], what ordered them: log q with or without noise
    # float32 [row, vocab], exactly the distribution they were drawn from; None with `Siblings.POINT`
    probs: Tensor | None


def child_scores(
    warp: LogitsWarper, logits: Tensor, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None
) -> Tensor:
    """`warp.scores`, except that greedy rows keep all their logits: the second best token is a candidate too.

    For `Siblings.POINT`, with `greedy=warp.greedy` for `children`. logits: float32 [row, vocab], or of the tokens of `subset`.
    """
    if warp.all_greedy:
        return warp.processed(logits, extra, subset)
    scores = warp.scores(logits, extra, subset)
    if not any(warp.greedy):
        return scores
    greedy = torch.tensor(warp.greedy, device=logits.device)[:, None]
    return torch.where(greedy, warp.processed(logits, extra, subset), scores)


def children(
    scores: Tensor,
    width: int,
    kind: Siblings,
    noise: Noise,
    stream: Stream,
    position: Tensor,
    *,
    node: Tensor | None = None,
    greedy: Sequence[bool] | None = None,
    subset: TokenSubset | None = None,
) -> Children:
    """Up to `width` children of each row's node.

    Args:
        scores: float32 [row, vocab], log probabilities up to a constant.
        width: Children of a node, at most.
        kind: How they are chosen or drawn.
        noise: One seed and step per row.
        stream: Of the noise.
        position: int64 [row], the position of the children.
        node: int64 [row], the node's index in its draft, below 4096 (default 0). It makes two nodes of a level draw
            independently. The TOKEN stream, which the target shares, ignores it.
        greedy: Rows that add no noise.
        subset: Tokens of the columns of `scores`; None for the whole vocabulary, of which the result always is.

    POINT: the largest of score + noise. With `Stream.TOKEN` this noise would make the target choose these tokens, if its
    distribution were the draft's. IID: `width` independent draws. WITHOUT_REPLACEMENT: draws in turn, by Gumbel-top-k (Kool et
    al. 2019, 1903.06059). TOP_THEN_SAMPLED: the width - 1 largest, then one draw from the rest (Hu et al. 2025, 2502.18779).
    There are fewer children if the distribution has fewer tokens; the last of TOP_THEN_SAMPLED is then still a draw. A row
    without a possible token has none, and its probs are 0: a draft model with a small head may not have what a grammar allows.

    Raises ValueError for a width below 1.
    """
    if width < 1:
        raise ValueError(f"a node that is expanded has at least one child, got width={width}; leave it out instead")
    if node is not None and stream is not Stream.TOKEN:
        noise = replace(noise, step=noise.step + node * _STEPS)
    if kind is Siblings.POINT:
        return _chosen(scores, width, noise, stream, position, greedy, subset)
    probs = softmax(scores).masked_fill(scores.amax(1, keepdim=True) == _NO, 0.0)
    log_probs = log(probs).float()  # draw from exactly what is returned, rounding included: the verifier divides by it
    if kind is Siblings.IID:
        tokens = _independent(probs, width, noise, stream, position)
        keys = log_probs.gather(1, tokens.clamp_min(0)).masked_fill(tokens < 0, _NO)
    elif kind is Siblings.TOP_THEN_SAMPLED:
        tokens, keys = _top_then_sampled(log_probs, width, noise, stream, position)
    else:
        tokens, keys = _largest(log_probs + noise.gumbel(stream, position, scores.shape[1]), width)
    log_q = log_probs.gather(1, tokens.clamp_min(0)).masked_fill(tokens < 0, _NO)
    if subset is not None:
        tokens, probs = subset.tokens(tokens), subset.widened(probs, 0.0)
    return Children(tokens, log_q, keys, probs)


def _chosen(
    scores: Tensor,
    width: int,
    noise: Noise,
    stream: Stream,
    position: Tensor,
    greedy: Sequence[bool] | None,
    subset: TokenSubset | None,
) -> Children:
    perturbed = scores
    if greedy is None or not all(greedy):
        # the same expression as the target's, so the same ties
        perturbed = scores + _gumbel(noise, stream, position, scores.shape[1], subset)
    if greedy is not None and any(greedy):
        perturbed = torch.where(torch.tensor(greedy, device=scores.device)[:, None], scores, perturbed)
    tokens, keys = _largest(perturbed, width)
    total = scores.amax(1, keepdim=True) - log_softmax(scores).amax(1, keepdim=True)  # logsumexp
    log_q = (scores.gather(1, tokens.clamp_min(0)) - total).masked_fill(tokens < 0, _NO)
    keys = (keys - total).masked_fill(tokens < 0, _NO)
    return Children(tokens if subset is None else subset.tokens(tokens), log_q, keys, None)


def _largest(keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(tokens, keys) [row, width]: the largest, descending; -1 and -inf if nothing is left or the row has NaN."""
    best = keys.topk(min(width, keys.shape[1]))
    missing = width - best.indices.shape[1]
    tokens = torch.nn.functional.pad(best.indices, (0, missing), value=-1)
    values = torch.nn.functional.pad(best.values, (0, missing), value=_NO)
    none = ~(values > _NO) | keys.isnan().any(1, keepdim=True)
    return tokens.masked_fill(none, -1), values.masked_fill(none, _NO)


def _independent(probs: Tensor, width: int, noise: Noise, stream: Stream, position: Tensor) -> Tensor:
    """int64 [row, width]: draws by the inverse distribution function, with 53 bits of noise each."""
    words = noise.words(stream, position, 2 * width)
    u = ((words[:, ::2] >> 5) * 2**26 + (words[:, 1::2] >> 6)).double() * 2.0**-53
    mass = running_total(probs)
    tokens = torch.searchsorted(mass, u.clamp_max(1 - 2.0**-50) * mass[:, -1:], right=True)
    return torch.where(tokens < probs.shape[1], tokens, -1)  # a row of NaN has no token


def _top_then_sampled(
    log_probs: Tensor, width: int, noise: Noise, stream: Stream, position: Tensor
) -> tuple[Tensor, Tensor]:
    top, keys = _largest(log_probs, width)
    there = (top >= 0).sum(1, keepdim=True)
    last = torch.arange(width, device=log_probs.device) == there - 1
    chosen = (top >= 0) & ~last
    spare = log_probs.shape[1]  # an extra column, for what is not chosen
    taken = torch.zeros(len(log_probs), spare + 1, dtype=torch.bool, device=log_probs.device)
    taken = taken.scatter_(1, torch.where(chosen, top, spare), True)[:, :-1]
    rest = log_probs.masked_fill(taken, _NO)
    drawn, drawn_key = _largest(rest + noise.gumbel(stream, position, spare), 1)
    return torch.where(last, drawn, top), torch.where(last, drawn_key, keys)


def _gumbel(noise: Noise, stream: Stream, position: Tensor, n: int, subset: TokenSubset | None) -> Tensor:
    """`noise.gumbel`, of the tokens of a subset if there is one. Nodes that share TOKEN noise compute it once on the CPU."""

    def drawn(noise: Noise, position: Tensor) -> Tensor:
        if subset is None:
            return noise.gumbel(stream, position, n)
        return noise.gumbel(stream, position, subset.vocab_size, subset.ids)

    if stream is not Stream.TOKEN or position.device.type != "cpu":
        return drawn(noise, position)
    first: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(ints(noise.seed), ints(position), strict=True)):
        first.setdefault(key, row)
    if len(first) == len(position):
        return drawn(noise, position)
    rows = list(first.values())
    place = {row: at for at, row in enumerate(rows)}
    some = drawn(noise.select(rows), position[rows])
    return some[[place[first[key]] for key in zip(ints(noise.seed), ints(position), strict=True)]]
