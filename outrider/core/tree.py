"""The draft as a tree: `parents` is stored, and mask, depth and children are functions of it. Imports torch and types.

`parents` is int64 [batch, node]: -1 for node 0 (the root), -2 for padding (only at the end of a row), else an index
smaller than the node's own. A chain is [-1, 0, 1, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from outrider.core.types import PADDING, ROOT, Draft, Siblings


def _parent_or_self(parents: Tensor) -> Tensor:
    """int64 [batch, node]: the parent; the root and padding point at themselves, where walks come to rest."""
    return torch.where(parents >= 0, parents, torch.arange(parents.shape[1], device=parents.device))


def ancestor_mask(parents: Tensor) -> Tensor:
    """bool [batch, node, node]: may node i (dim 1) see node j (dim 2)? It sees itself and its ancestors, no sibling.

    A padding node sees only itself, so that its softmax has something to look at.
    """
    n = parents.shape[1]
    mask = torch.eye(n, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    hop = _parent_or_self(parents)
    for _ in range(n.bit_length()):  # doubling: i rounds reach 2**i - 1 generations up
        mask |= mask.gather(1, hop[:, :, None].expand_as(mask))
        hop = hop.gather(1, hop)
    return mask


def depth(parents: Tensor) -> Tensor:
    """int64 [batch, node]: generations below the root; 0 for the root and for padding."""
    steps, hop = (parents >= 0).long(), _parent_or_self(parents)
    for _ in range(parents.shape[1].bit_length()):
        steps = steps + steps.gather(1, hop)
        hop = hop.gather(1, hop)
    return steps


def levels(parents: Sequence[int]) -> list[int]:
    """`depth` of one row, on the host."""
    found = [0] * len(parents)
    for n, parent in enumerate(parents):
        if parent >= 0:
            found[n] = found[parent] + 1
    return found


def child_table(parents: Tensor, width: int) -> Tensor:
    """int64 [batch, node, width]: the children of every node in index order, then -1.

    Children beyond `width` are left out; give `width` the number of nodes to be sure of all.
    """
    batch, n = parents.shape
    index = torch.arange(n, device=parents.device)
    # rank among siblings = how many smaller indices have the same parent
    rank = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)
    listed = (parents >= 0) & (rank < width)
    slot = torch.where(listed, parents * width + rank, n * width)  # one slot too many, for what is not listed
    table = torch.full((batch, n * width + 1), -1, dtype=torch.long, device=parents.device)
    return table.scatter_(1, slot, index.expand(batch, n))[:, :-1].reshape(batch, n, width)


def path_to(parents: Tensor | Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`, in one row's parents [node]. Raises ValueError for a padding node."""
    row = lists(parents[None])[0] if isinstance(parents, Tensor) else list(parents)
    path = [node]
    while row[path[-1]] >= 0:
        path.append(row[path[-1]])
    if path[-1] != 0:
        raise ValueError(f"node {node} does not hang on the root (node 0): it is padding, or parents is broken: {row}")
    return path[::-1]


def chain(tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(tokens, parents), int64 [batch, node]: one chain a row, given as [root, guess, guess, ...]; rows may differ."""
    return tree([[(token, n - 1) for n, token in enumerate(row)] for row in tokens])


def tree(rows: Sequence[Sequence[tuple[int, int]]]) -> tuple[Tensor, Tensor]:
    """(tokens, parents), int64 [batch, node], padded with token 0 and parent -2: one tree a row, as (token, parent)s.

    The root comes first, as (token, -1). Raises ValueError for a row without one.
    """
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {b} has no node. No guess is a tree of its root alone: [(last_committed_token, -1)]")
    n = max((len(row) for row in rows), default=1)
    pad = (0, PADDING)
    both = torch.tensor([[*row, *[pad] * (n - len(row))] for row in rows], dtype=torch.long).reshape(len(rows), n, 2)
    return both[..., 0].contiguous(), both[..., 1].contiguous()


def validate(draft: Draft, vocab_size: int) -> None:
    """Raise a ValueError that teaches, if the draft breaks `Draft`'s contract. Reads tensors: not for the hot path.

    Checked: shapes and dtypes; the root first and only first; parents before children; padding only at the end; tokens
    in the vocabulary; and where siblings were drawn, a law at every node with children, in which each drawn token has
    mass, and no sibling twice if they were drawn without replacement.
    """
    tokens, parents = draft.tokens, draft.parents
    if tokens.ndim != 2 or tokens.shape != parents.shape or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens and parents are [batch, node] with at least the root, got {[*tokens.shape]} and {[*parents.shape]}"
        )
    if tokens.dtype != torch.long or parents.dtype != torch.long:
        raise ValueError(f"tokens and parents are int64, got {tokens.dtype} and {parents.dtype}")
    for b, (row, up) in enumerate(zip(lists(tokens), lists(parents), strict=True)):
        _validate_row(b, row, up, vocab_size)
    if draft.siblings is not Siblings.POINT:
        _validate_laws(draft, vocab_size)


def lists(rows: Tensor) -> list[list[int]]:
    """A tensor [batch, node] of whole numbers, read to the host."""
    return cast("list[list[int]]", rows.tolist())  # pyright: ignore[reportUnknownMemberType]


def _validate_row(b: int, tokens: list[int], parents: list[int], vocab_size: int) -> None:
    if parents[0] != ROOT:
        raise ValueError(f"row {b}: node 0 is the root, with parent -1, got {parents[0]}: {parents}")
    nodes = next((n for n, parent in enumerate(parents) if parent == PADDING), len(parents))
    if any(parent != PADDING for parent in parents[nodes:]):
        raise ValueError(f"row {b}: padding (-2) stands only at the end, got {parents}")
    for n, parent in enumerate(parents[1:nodes], start=1):
        if not 0 <= parent < n:
            raise ValueError(
                f"row {b}: node {n} has parent {parent}; a parent comes before its children, so 0 <= parent < {n}. "
                "List the nodes from the root down"
            )
    for n, token in enumerate(tokens[:nodes]):
        if not 0 <= token < vocab_size:
            raise ValueError(f"row {b}: node {n} guesses token {token}, outside the target's {vocab_size} tokens")


def _validate_laws(draft: Draft, vocab_size: int) -> None:
    how, probs = draft.siblings.name, draft.probs
    if probs is None:
        raise ValueError(
            f"siblings={how} says the guesses were drawn, so probs must hold the law they were drawn from.\n"
            "Return it (float32 [batch, node, vocab]), or declare Siblings.POINT if they were chosen."
        )
    if probs.shape != (*draft.tokens.shape, vocab_size):
        raise ValueError(f"probs is [batch, node, vocab] = {[*draft.tokens.shape, vocab_size]}, got {[*probs.shape]}")
    if probs.dtype != torch.float32:
        raise ValueError(f"probs is float32, got {probs.dtype}: a law must not be rounded after it was drawn from")
    for b, (row, up) in enumerate(zip(lists(draft.tokens), lists(draft.parents), strict=True)):
        seen: set[tuple[int, int]] = set()
        for n, (token, parent) in enumerate(zip(row, up, strict=True)):
            if parent < 0:
                continue
            law = probs[b, parent]
            total = float(law.sum())
            if not abs(total - 1) < 1e-3 or bool((law < 0).any()):  # also false for NaN
                raise ValueError(
                    f"row {b}: probs of node {parent}, which has children, is no law: its sum is {total:g}"
                )
            if not law[token] > 0:
                raise ValueError(
                    f"row {b}: node {n} drew token {token}, which has no mass in probs of its parent, node {parent}. "
                    "The law returned is not the law drawn from"
                )
            if (parent, token) in seen and draft.siblings is not Siblings.IID:
                raise ValueError(f"row {b}: node {n} repeats a sibling's token {token}, though siblings={how}")
            seen.add((parent, token))
