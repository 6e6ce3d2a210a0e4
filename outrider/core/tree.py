"""The draft as a tree: `parents` is stored, and mask, depth and children are functions of it.

`parents` is int64 [batch, node]: -1 for node 0 (the root), -2 for padding (only at the end of a row), else an index
smaller than the node's own. A chain is [-1, 0, 1, 2].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.types import PADDING, ROOT, Array, Draft, Siblings


def _parent_or_self(parents: Array) -> Array:
    """int64 [batch, node]: the parent. The root and padding point at themselves, so a walk upwards stays there."""
    return np.where(parents >= 0, parents, np.arange(parents.shape[1], dtype=np.int64))


def ancestor_mask(parents: Array) -> Array:
    """bool [batch, node, node]: whether node i (dim 1) sees node j (dim 2). It sees itself and its ancestors, no sibling.

    A padding node sees only itself: its softmax needs at least one entry.
    """
    n = parents.shape[1]
    mask = np.repeat(np.eye(n, dtype=bool)[None], len(parents), 0)
    hop = _parent_or_self(parents)
    for _ in range(n.bit_length()):  # doubling: i rounds reach 2**i - 1 generations up
        mask |= np.take_along_axis(mask, hop[:, :, None], 1)
        hop = np.take_along_axis(hop, hop, 1)
    return mask


def depth(parents: Array) -> Array:
    """int64 [batch, node]: generations below the root; 0 for the root and for padding."""
    steps, hop = (parents >= 0).astype(np.int64), _parent_or_self(parents)
    for _ in range(parents.shape[1].bit_length()):
        steps = steps + np.take_along_axis(steps, hop, 1)
        hop = np.take_along_axis(hop, hop, 1)
    return steps


def levels(parents: Sequence[int]) -> list[int]:
    """`depth` of one tree, as lists."""
    depths = [0] * len(parents)
    for n, parent in enumerate(parents):
        if parent >= 0:
            depths[n] = depths[parent] + 1
    return depths


def child_table(parents: Array, width: int) -> Array:
    """int64 [batch, node, width]: the children of every node in index order, then -1.

    Children beyond `width` are left out. With `width` equal to the number of nodes, all are listed.
    """
    # rank among siblings = how many smaller indices have the same parent
    rank = np.tril(parents[:, :, None] == parents[:, None, :], -1).sum(-1)
    row, node = ((parents >= 0) & (rank < width)).nonzero()
    table = np.full((*parents.shape, width), -1)
    table[row, parents[row, node], rank[row, node]] = node
    return table


def chain(tokens: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """(tokens, parents), int64 [batch, node]: one chain per batch entry, given as [root, draft token, draft token, ...].

    Chains may differ in length. Raises ValueError for an empty one.
    """
    return tree([[(token, n - 1) for n, token in enumerate(row)] for row in tokens])


def tree(rows: Sequence[Sequence[tuple[int, int]]]) -> tuple[Array, Array]:
    """(tokens, parents), int64 [batch, node], padded with token 0 and parent -2: one tree per batch entry.

    A tree is a list of (token, parent). The root comes first, as (token, -1). Raises ValueError for an empty list.
    """
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"row {b} has no node. To propose nothing, return the root alone: [(last_committed_token, -1)]"
            )
    if not rows:
        return np.empty((0, 1), np.int64), np.empty((0, 1), np.int64)
    n = max(map(len, rows))
    tokens = [[token for token, _ in row] + [0] * (n - len(row)) for row in rows]
    parents = [[parent for _, parent in row] + [PADDING] * (n - len(row)) for row in rows]
    return np.array(tokens, np.int64), np.array(parents, np.int64)


def validate(draft: Draft, vocab_size: int) -> None:
    """Check a draft against the contract of `Draft`. Raises ValueError. Slow.

    Checked: shapes and dtypes, the root first and only first, parents before children, padding only at the end, and tokens
    in the vocabulary. If siblings were drawn, every node with children needs a distribution that gives mass to each drawn
    token. No sibling may occur twice unless they were drawn independently.
    """
    tokens, parents = draft.tokens, draft.parents
    if tokens.ndim != 2 or tokens.shape != parents.shape or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens and parents are [batch, node] with at least the root, got {[*tokens.shape]} and {[*parents.shape]}"
        )
    if tokens.dtype != np.int64 or parents.dtype != np.int64:
        raise ValueError(f"tokens and parents are int64, got {tokens.dtype} and {parents.dtype}")
    for b, (row, up) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        _validate_row(b, row, up, vocab_size)
    if draft.siblings is not Siblings.POINT:
        _validate_probs(draft, vocab_size)


def _validate_row(b: int, tokens: list[int], parents: list[int], vocab_size: int) -> None:
    if parents[0] != ROOT:
        raise ValueError(f"row {b}: node 0 is the root, with parent -1, got {parents[0]}: {parents}")
    nodes = next((n for n, parent in enumerate(parents) if parent == PADDING), len(parents))
    if any(parent != PADDING for parent in parents[nodes:]):
        raise ValueError(f"row {b}: padding (-2) comes only at the end, got {parents}")
    for n, parent in enumerate(parents[1:nodes], start=1):
        if not 0 <= parent < n:
            raise ValueError(
                f"row {b}: node {n} has parent {parent}; a parent comes before its children, so 0 <= parent < {n}. "
                "List the nodes from the root down"
            )
    for n, token in enumerate(tokens[:nodes]):
        if not 0 <= token < vocab_size:
            raise ValueError(f"row {b}: node {n} proposes token {token}, outside the target's {vocab_size} tokens")


def _validate_probs(draft: Draft, vocab_size: int) -> None:
    how, probs = draft.siblings.name, draft.probs
    if probs is None:
        raise ValueError(
            f"siblings={how} says the draft tokens were drawn, so probs must hold the distributions they were drawn from.\n"
            "Return it (float32 [batch, node, vocab]), or declare Siblings.POINT if they were chosen."
        )
    if probs.shape != (*draft.tokens.shape, vocab_size):
        raise ValueError(f"probs is [batch, node, vocab] = {[*draft.tokens.shape, vocab_size]}, got {[*probs.shape]}")
    if probs.dtype != np.float32:
        raise ValueError(
            f"probs is float32, got {probs.dtype}: probs must not be rounded after tokens were drawn from it"
        )
    for b, (row, up) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        seen: set[tuple[int, int]] = set()
        for n, (token, parent) in enumerate(zip(row, up, strict=True)):
            if parent < 0:
                continue
            distribution = probs[b, parent]
            total = float(distribution.sum())
            if not abs(total - 1) < 1e-3 or bool((distribution < 0).any()):  # also false for NaN
                raise ValueError(
                    f"row {b}: probs of node {parent}, which has children, is no distribution: its sum is {total:g}"
                )
            if not distribution[token] > 0:
                raise ValueError(
                    f"row {b}: node {n} drew token {token}, which has no mass in probs of its parent, node {parent}. "
                    "Return the distribution that the token was drawn from"
                )
            if (parent, token) in seen and draft.siblings is not Siblings.IID:
                raise ValueError(f"row {b}: node {n} repeats a sibling's token {token}, though siblings={how}")
            seen.add((parent, token))
