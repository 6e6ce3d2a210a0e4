"""The children of a node, for every way in which a draft may choose or draw them. Called once for each level of a tree.

A row here is a node to expand, of any sequence. Verifiers that read the draft's distribution (`rejection`, `traversal`) set
rules. A node's children are those drawn here, in this order, and none may be left out after it was drawn. *Which node to expand
next* may depend on anything drawn so far, so a tree may grow best first. Under `match` any choice of nodes keeps the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, TokenSubset, largest
from outrider.core.types import Array, Siblings
from outrider.kernels.probabilities import log, log_softmax, running_total, softmax

_NO = float("-inf")
_STEPS = 2**20  # the noise of a node is that of step `node * 2**20 + step`, which no sequence reaches


@dataclass(frozen=True, eq=False)
class Children:
    """The children of some nodes, one node per row."""

    tokens: Array  # int64 [row, width], -1 where there are fewer
    log_q: Array  # float32 [row, width], the log probability of each, -inf where there is none
    keys: Array  # float32 [row, width], what ordered them: log q with or without noise
    # float32 [row, vocab], exactly the distribution they were drawn from; None with `Siblings.POINT`
    probs: Array | None


def child_scores(
    warp: LogitsWarper, logits: Array, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None
) -> Array:
    """`warp.scores`, except that greedy rows keep all their logits: the second best token is a candidate too.

    For `Siblings.POINT`, with `greedy=warp.greedy` for `children`. logits: float32 [row, vocab], or of the tokens of `subset`.
    """
    if warp.all_greedy:
        return warp.processed(logits, extra, subset)
    scores, greedy = warp.scores(logits, extra, subset), np.array(warp.greedy)[:, None]
    return np.where(greedy, warp.processed(logits, extra, subset), scores) if greedy.any() else scores


def children(
    scores: Array,
    width: int,
    kind: Siblings,
    noise: Noise,
    stream: Stream,
    position: Array,
    *,
    node: Array | None = None,
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
        noise = replace(noise, step=np.asarray(noise.step) + node * _STEPS)
    if kind is Siblings.POINT:
        return _chosen(scores, width, noise, stream, position, greedy, subset)
    probs = np.where(scores.max(1, keepdims=True) == _NO, 0.0, softmax(scores))
    # draw from exactly what is returned, rounding included: the verifier divides by it
    log_probs = log(probs).astype(np.float32)
    if kind is Siblings.IID:
        tokens = _independent(probs, width, noise, stream, position)
        keys = _at(log_probs, tokens)
    elif kind is Siblings.TOP_THEN_SAMPLED:
        tokens, keys = _top_then_sampled(log_probs, width, noise, stream, position)
    else:
        tokens, keys = _largest(log_probs + noise.gumbel(stream, position, scores.shape[1]), width)
    log_q = _at(log_probs, tokens)
    if subset is not None:
        tokens, probs = subset.tokens(tokens), subset.widened(probs, 0.0)
    return Children(tokens, log_q, keys, probs)


def _chosen(
    scores: Array,
    width: int,
    noise: Noise,
    stream: Stream,
    position: Array,
    greedy: Sequence[bool] | None,
    subset: TokenSubset | None,
) -> Children:
    keys, quiet = scores, np.array(greedy or [False] * len(scores))
    if not quiet.all():
        # the same expression as the target's, so the same ties
        noisy = scores + _gumbel(noise, stream, position, scores.shape[1], subset)
        keys = np.where(quiet[:, None], scores, noisy) if quiet.any() else noisy
    tokens, keys = _largest(keys, width)
    total = scores.max(1, keepdims=True) - log_softmax(scores).max(1, keepdims=True)  # logsumexp
    log_q, keys = (np.where(tokens < 0, _NO, values - total) for values in (_at(scores, tokens), keys))
    return Children(tokens if subset is None else subset.tokens(tokens), log_q, keys, None)


def _at(values: Array, tokens: Array) -> Array:
    """[row, width]: the values [row, vocab] of some tokens; -inf for -1."""
    return np.where(tokens < 0, _NO, np.take_along_axis(values, np.maximum(tokens, 0), 1))


def _largest(keys: Array, width: int) -> tuple[Array, Array]:
    """(tokens, keys) [row, width]: the largest, descending; -1 and -inf if nothing is left or the row has NaN."""
    places, values = largest(keys, min(width, keys.shape[1]))
    missing = ((0, 0), (0, width - places.shape[1]))
    tokens, values = np.pad(places, missing), np.pad(values, missing, constant_values=_NO)
    none = ~(values > _NO) | np.isnan(keys).any(1, keepdims=True)
    return np.where(none, -1, tokens), np.where(none, _NO, values)


def _independent(probs: Array, width: int, noise: Noise, stream: Stream, position: Array) -> Array:
    """int64 [row, width]: draws by the inverse distribution function, with 53 bits of noise each."""
    words = noise.words(stream, position, 2 * width)
    u = ((words[:, ::2] >> 5) * 2**26 + (words[:, 1::2] >> 6)) * 2.0**-53
    mass = running_total(probs)
    tokens = (~(mass[:, None] > (np.minimum(u, 1 - 2.0**-50) * mass[:, -1:])[:, :, None])).sum(-1)
    return np.where(tokens < probs.shape[1], tokens, -1)  # a row of NaN has no token


def _top_then_sampled(
    log_probs: Array, width: int, noise: Noise, stream: Stream, position: Array
) -> tuple[Array, Array]:
    top, keys = _largest(log_probs, width)
    there = (top >= 0).sum(1, keepdims=True)
    last = np.arange(width) == there - 1
    rest = log_probs.copy()
    row, column = ((top >= 0) & ~last).nonzero()
    rest[row, top[row, column]] = _NO
    drawn, drawn_key = _largest(rest + noise.gumbel(stream, position, rest.shape[1]), 1)
    return np.where(last, drawn, top), np.where(last, drawn_key, keys)


def _gumbel(noise: Noise, stream: Stream, position: Array, n: int, subset: TokenSubset | None) -> Array:
    """`noise.gumbel`, of the tokens of a subset if there is one. Nodes that share TOKEN noise compute it once."""

    def drawn(noise: Noise, position: Array) -> Array:
        if subset is None:
            return noise.gumbel(stream, position, n)
        return noise.gumbel(stream, position, subset.vocab_size, subset.ids)

    if stream is not Stream.TOKEN:
        return drawn(noise, position)
    keys = noise.keys(stream, position)
    row_of = {key: row for row, key in enumerate(keys)}
    rows, place = [*row_of.values()], {key: at for at, key in enumerate(row_of)}
    return drawn(noise.select(rows), position[rows])[[place[key] for key in keys]]
