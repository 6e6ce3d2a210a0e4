"""What drafters propose for one sequence, how proposals become one draft, and how its commit goes back to each drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from outrider.control.plan import Offer
from outrider.core.tree import levels
from outrider.core.types import Array, Commit, Draft
from outrider.drafters.base import DraftContext, Drafter, draft_of

NodeList = list[tuple[int, int]]  # (token, parent) of one tree, the root first


@dataclass(eq=False)
class Proposal:
    """What a drafter proposes for one sequence: an entry of its draft. What is read of it is computed once."""

    draft: Draft
    entry: int

    @cached_property
    def nodes(self) -> NodeList:
        return self.draft.host[self.entry]

    @cached_property
    def levels(self) -> list[int]:
        """The level of each node, 0 for the root."""
        return levels([parent for _, parent in self.nodes])

    @property
    def confidence(self) -> Sequence[float] | None:
        """Of each node; None if the draft states none."""
        stated = self.draft.stated
        return None if stated is None else stated[self.entry]

    @property
    def offer(self) -> Offer:
        """What a lookup says of it. Of a lookup of another package no match is known."""
        note = self.draft.notes[self.entry] if self.draft.notes else None
        if isinstance(note, Offer):
            return note
        return Offer(self.nodes, [max(mass, 1e-9) for mass in self.confidence or [1.0] * len(self.nodes)], 0)


def accepted_path(nodes: NodeList, tokens: Sequence[int]) -> list[int]:
    """The nodes on the path of the committed tokens, the root first. They are what this draft alone would have accepted."""
    path = [0]
    for token in tokens:
        here = (token, path[-1])
        following = next((n for n in range(path[-1] + 1, len(nodes)) if nodes[n] == here), None)
        if following is None:
            break
        path.append(following)
    return path


def own_commit(commit: Commit, nodes: NodeList | None) -> Commit:
    """The commit with nodes numbered as in a drafter's own proposal. nodes: that proposal; without one the commit has none."""
    if nodes is None:
        return Commit(commit.tokens, [], 0, commit.finish, commit.features)
    path = accepted_path(nodes, commit.tokens)
    # the last committed token is the next root. It is not in the cache, even if the proposal contained it
    return Commit(commit.tokens, path[: len(commit.tokens)], len(path) - 1, commit.finish, commit.features)


def cut(made: Proposal, kept: Sequence[int]) -> Proposal:
    """A proposal with these of its nodes, besides the root."""
    nodes, place = made.nodes, {0: 0} | {old: new for new, old in enumerate(kept, 1)}
    return Proposal(draft_of([[nodes[0], *[(nodes[n][0], place[nodes[n][1]]) for n in kept]]]), 0)


def legal(context: DraftContext, b: int, nodes: NodeList, kept: Sequence[int]) -> list[int]:
    """Those of the kept nodes of entry b that its grammar allows, by index. A node goes with its parent."""
    history, paths = context.warp.histories[b], {0: list[int]()}
    assert history.mask is not None
    for n in kept:
        token, parent = nodes[n]
        if parent in paths:
            path = [*paths[parent], token]
            if history.mask.legal_prefix(history.tokens, history.prompt_length, path) == len(path):
                paths[n] = path
    return [*paths][1:]


@dataclass(frozen=True)
class SharedTaps:
    """The taps of several drafters side by side: each layer is read once, and each drafter gets its own.

    taps: all layers, without repeats. columns: for each tapping drafter, the places of its layers among them.
    """

    taps: tuple[int, ...]
    columns: dict[str, list[int]]

    @classmethod
    def of(cls, drafters: Mapping[str, Drafter]) -> SharedTaps:
        taps = tuple(dict.fromkeys(tap for drafter in drafters.values() for tap in drafter.taps))
        return cls(taps, {name: [taps.index(t) for t in d.taps] for name, d in drafters.items() if d.taps})

    def of_drafter(self, name: str, features: Array) -> Array:
        """float [..., feature]: a drafter's own part of the features of all taps. All taps have the same width."""
        columns = self.columns[name]
        if columns == list(range(len(self.taps))):
            return features
        return features.reshape(*features.shape[:-1], len(self.taps), -1)[..., columns, :].reshape(
            *features.shape[:-1], -1
        )

    def commit(self, name: str, commit: Commit) -> Commit:
        """The commit with the drafter's own features, and with none for a drafter without taps."""
        features = commit.features
        part = None if features is None or name not in self.columns else self.of_drafter(name, features)
        return commit if part is features else replace(commit, features=part)


def join(context: DraftContext, proposals: Mapping[int, Proposal], notes: Sequence[object] = ()) -> Draft:
    """One draft for a batch. proposals: by entry of the batch. Others get the root alone.

    If some proposals declare distributions, a token that was chosen counts as drawn from a distribution with all its mass on it.
    Raises ValueError if proposals were drawn in different ways.
    """
    if len(context.tokens) == 1 and 0 in proposals and (context.needs_probs or proposals[0].draft.probs is None):
        return proposals[0].draft.noted(notes)
    nodes: list[NodeList] = [[(tokens[-1], -1)] for tokens in context.tokens]
    for b, one in proposals.items():
        nodes[b] = one.nodes
    stated = {b: chances for b, one in proposals.items() if (chances := one.confidence) is not None}
    out = draft_of(nodes, stated, notes)
    drawn = [one.draft for one in proposals.values() if one.draft.probs is not None]
    if not context.needs_probs or not drawn:
        return out
    siblings = {draft.siblings for draft in drawn}
    if len(siblings) > 1:
        raise ValueError(
            f"one draft holds tokens drawn in {len(siblings)} ways: {sorted(s.name for s in siblings)}. "
            "Give the drafters of a batch the same `siblings`"
        )
    assert drawn[0].probs is not None
    probs = np.zeros((*out.tokens.shape, drawn[0].probs.shape[-1]), np.float32)
    for b, one in proposals.items():
        if one.draft.probs is not None:
            probs[b, : len(nodes[b])] = one.draft.probs[one.entry, : len(nodes[b])]
        else:
            for token, parent in nodes[b][1:]:
                probs[b, parent, token] = 1.0
    return replace(out, probs=probs, siblings=siblings.pop())
