"""The records that all layers share. They are frozen and small; behaviour lives in functions. Imports numpy only.

A draft is a tree that contains its root. Node 0 is the last committed token: committed, and not yet in the cache.
`parents` is the only structure stored: -1 for the root, -2 for padding, else a smaller index. So a chain is `[-1, 0, 1, 2]`.
An empty draft is a tree of one node. To verify it *is* plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
ROOT = -1
PADDING = -2
PHASES = ("draft", "target", "verify", "commit")  # of a step, in order


class Siblings(Enum):
    """How the children of a node were chosen. A verifier refuses drafts whose way it cannot judge."""

    POINT = auto()  # chosen, not drawn: n-gram, top-k, argmax, or tokens drawn from the shared TOKEN noise
    IID = auto()  # drawn with replacement from probs[parent]
    WITHOUT_REPLACEMENT = auto()  # drawn one after another from probs[parent], without those drawn before
    TOP_THEN_SAMPLED = auto()  # all but the last chosen; the last drawn from probs[parent] without those


class Guarantee(Enum):
    """What an output promises about plain decoding. Printed with every output."""

    EXACT_TOKENS = "exact-tokens"  # the same tokens as plain decoding with the same seed
    EXACT_DISTRIBUTION = "exact-distribution"  # the same distribution, other tokens


@dataclass(frozen=True)
class Budget:
    """What a drafter may spend on one sequence in one step. The root does not count. Raises ValueError for negatives."""

    depth: int  # levels below the root
    width: int = 1  # children of one node
    nodes: int | None = None  # nodes below the root; None: depth * width
    # No token follows one that is accepted with a lower probability, as far as the drafter knows.
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 0 or self.width < 0 or (self.nodes is not None and self.nodes < 0) or self.min_probability < 0:
            raise ValueError(f"a budget cannot be negative, got {self}")

    @cached_property
    def max_nodes(self) -> int:
        return self.depth * self.width if self.nodes is None else self.nodes

    @property
    def parts(self) -> tuple[int, int, int | None]:
        """depth, width, nodes."""
        return self.depth, self.width, self.nodes

    def clipped(self, depth: int) -> Budget:
        """The same budget, at most `depth` levels deep."""
        return self if depth >= self.depth else Budget(max(depth, 0), self.width, self.nodes, self.min_probability)


@dataclass(frozen=True, eq=False)
class Draft:
    """Draft tokens for each sequence of a batch, as trees."""

    tokens: Array
    """int64 [batch, node]; node 0 is the last committed token."""
    parents: Array
    """int64 [batch, node]; -1 for node 0, -2 for padding, else smaller than the node's own index."""
    probs: Array | None = None
    """float32 [batch, node, vocab]. probs[b, n] is the distribution that the *children of n* were drawn from, after all of the
    drafter's own processing. None with `Siblings.POINT`."""
    siblings: Siblings = Siblings.POINT
    """How the children of a node were chosen."""
    confidence: Array | None = None
    """float32 [batch, node]; the drafter's estimate of the probability that a node is accepted. No output depends on it."""
    notes: tuple[Any, ...] = ()
    """What the drafter tells its controller of each entry; `str` words a note for traces. () if it tells nothing."""

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree, the root counted."""
        return self.tokens.shape[1]

    @cached_property
    def host(self) -> list[list[tuple[int, int]]]:
        """(token, parent) of the nodes of each tree without padding, as lists."""
        trees = zip(self.tokens.tolist(), self.parents.tolist(), strict=True)
        return [[n for n in zip(t, up, strict=True) if n[1] > PADDING] for t, up in trees]

    @cached_property
    def stated(self) -> list[list[float]] | None:
        """`confidence` of the nodes of each tree without padding, as lists."""
        rows: list[list[float]] | None = None if self.confidence is None else self.confidence.tolist()
        return rows and [row[: len(nodes)] for row, nodes in zip(rows, self.host, strict=True)]

    def noted(self, notes: Sequence[Any]) -> Draft:
        """The same draft with these notes."""
        noted = object.__new__(type(self))  # a copy would take all fields apart
        noted.__dict__.update(self.__dict__, notes=tuple(notes))
        return noted

    @property
    def num_draft_tokens(self) -> Array:
        """int64 [batch]: draft tokens of each tree, the root not counted."""
        return (self.parents >= 0).sum(1)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a verifier decided, of each sequence: the accepted nodes from the root down, node 0 first, and the next token.

    That token is drawn at the last accepted node. If a child was rejected there, it is drawn from the residual, else from the
    target's own distribution (the bonus token if everything was accepted). -1: no token is possible.
    """

    host: list[tuple[list[int], int]]

    @property
    def path(self) -> Array:
        """int64 [batch, level]: the accepted nodes, then -1."""
        levels = max((len(path) for path, _ in self.host), default=1)
        return np.array([p + [-1] * (levels - len(p)) for p, _ in self.host], np.int64).reshape(-1, levels)

    @property
    def accepted(self) -> Array:
        """int64 [batch]: draft tokens accepted, the root not counted."""
        return np.array([len(path) - 1 for path, _ in self.host], np.int64)

    @property
    def token(self) -> Array:
        """int64 [batch]: the next token."""
        return np.array([token for _, token in self.host], np.int64)


@dataclass(frozen=True, eq=False)
class Commit:
    """What one sequence commits in one step, after stop conditions were applied."""

    tokens: list[int]
    """The new committed tokens: accepted draft tokens, then the verdict's own, cut at the first stop."""
    nodes: list[int]
    """The draft's nodes whose keys and values were committed to the cache, from the root down. A drafter is given them as
    numbered in its own proposal."""
    num_accepted: int
    """How many of `tokens` are draft tokens."""
    finish: str | None = None
    """Why the sequence ended in this step."""
    features: Array | None = None
    """float [committed position, feature], the tapped layers at the positions that the cache gained, in their order; None
    without taps."""


@dataclass(frozen=True, eq=False)
class Step:
    """One draft-verify round, as a value. Its arrays are valid until the next step."""

    draft: Draft
    verdict: Verdict
    commits: list[Commit]
    slots: list[int]  # the cache slot of each batch entry
    positions: list[int]  # committed tokens of each batch entry before the step
    budgets: list[Budget]
    seconds: dict[str, float]  # of each of PHASES
    # float32 [batch, node, vocab], the target's logits after every node
    logits: Array | None = None
