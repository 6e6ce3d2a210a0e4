"""What combiners of drafters share: parts of a batch go to drafters, their drafts are joined, and commits go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.tree import tree
from outrider.core.types import Commit, Draft
from outrider.drafters.base import DraftContext, Drafter

NodeList = list[tuple[int, int]]  # (token, parent) of one row, the root first


def select(context: DraftContext, some: Sequence[int]) -> DraftContext:
    """Some entries of a batch."""
    if len(some) == len(context.slots):
        return context
    return replace(
        context,
        slots=[context.slots[b] for b in some],
        tokens=[context.tokens[b] for b in some],
        budgets=[context.budgets[b] for b in some],
        warp=context.warp.select(some),
        noise=context.noise.select(some),
        prompt_lengths=[context.prompt_lengths[b] for b in some],
        predictions=[context.predictions[b] for b in some] if context.predictions else (),
    )


def accepted_path(nodes: NodeList, tokens: Sequence[int]) -> list[int]:
    """The nodes that the committed tokens walk through, the root first: what would have been accepted of this draft alone."""
    path = [0]
    for token in tokens:
        here = (token, path[-1])
        following = next((n for n in range(path[-1] + 1, len(nodes)) if nodes[n] == here), None)
        if following is None:
            break
        path.append(following)
    return path


def own_commit(commit: Commit, nodes: NodeList | None) -> Commit:
    """A commit as the drafter of one proposal must see it: numbered as in that proposal, or with no nodes without one."""
    if nodes is None:
        return replace(commit, nodes=[], num_accepted=0)
    path = accepted_path(nodes, commit.tokens)
    # the last committed token is the next root: not in the cache, also where the proposal had it
    return replace(commit, nodes=path[: len(commit.tokens)], num_accepted=len(path) - 1)


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

    def of_drafter(self, name: str, features: Tensor) -> Tensor:
        """float [..., feature]: a drafter's own features of those of all taps. Every tap is equally wide."""
        own = self.columns[name]
        if own == list(range(len(self.taps))):
            return features
        return features.unflatten(-1, (len(self.taps), -1))[..., own, :].flatten(-2)

    def commit(self, name: str, commit: Commit) -> Commit:
        """The commit with the drafter's own features, and with none for a drafter without taps."""
        if commit.features is None:
            return commit
        return replace(commit, features=self.of_drafter(name, commit.features) if name in self.columns else None)


def draft_confidence(draft: Draft, b: int, count: int) -> list[float] | None:
    return None if draft.confidence is None else draft.confidence[b, :count].tolist()


def join(context: DraftContext, parts: Sequence[tuple[int, Draft, int]], notes: Sequence[object] = ()) -> Draft:
    """One draft of a batch. parts: (entry of the batch, a draft, the draft's row for it); entries without one draft nothing.

    A guess that was chosen counts as drawn from a law with all its mass there, where other rows declare a law. Raises
    ValueError if two rows' guesses were drawn in different ways.
    """
    nodes: list[NodeList] = [[(tokens[-1], -1)] for tokens in context.tokens]
    confidence: dict[int, list[float]] = {}
    for b, draft, row in parts:
        nodes[b] = draft.host[row]
        if (known := draft_confidence(draft, row, len(nodes[b]))) is not None:
            confidence[b] = known
    tokens, parents = tree(nodes)
    together = None
    if confidence:
        together = torch.zeros(tokens.shape)
        for b, known in confidence.items():
            together[b, : len(known)] = torch.tensor(known)
    out = Draft(tokens, parents, confidence=together, notes=tuple(notes))
    drawn = {draft.siblings for _, draft, _ in parts if draft.probs is not None}
    if not context.needs_probs or not drawn:
        return out
    if len(drawn) > 1:
        raise ValueError(f"one draft holds guesses drawn in {len(drawn)} ways: {sorted(s.name for s in drawn)}")
    vocab = next(draft.probs.shape[-1] for _, draft, _ in parts if draft.probs is not None)
    probs = torch.zeros(*tokens.shape, vocab)
    for b, draft, row in parts:
        if draft.probs is not None:
            probs[b, : len(nodes[b])] = draft.probs[row, : len(nodes[b])].to(probs.device)
        else:
            for token, parent in nodes[b][1:]:
                probs[b, parent, token] = 1.0
    return replace(out, probs=probs, siblings=drawn.pop())


def united(trees: Sequence[tuple[NodeList, Sequence[float]]], most: int) -> tuple[NodeList, list[float]]:
    """One tree of several with the same root: equal paths become one, with the larger chance, and the `most` likeliest nodes
    stay. (nodes, chances). A node is never likelier than its parent."""
    found: dict[tuple[int, ...], float] = {}
    for nodes, confidence in trees:
        paths: list[tuple[int, ...]] = [()] * len(nodes)
        for n, (token, parent) in enumerate(nodes[1:], 1):
            paths[n] = (*paths[parent], token)
            found[paths[n]] = max(found.get(paths[n], 0.0), confidence[n])
    for path in sorted(found, key=len):
        if len(path) > 1:
            found[path] = min(found[path], found[path[:-1]])
    best = sorted(found, key=lambda path: (-found[path], len(path)))[
        :most
    ]  # parents before children, also among equals
    place: dict[tuple[int, ...], int] = {(): 0}
    out = [trees[0][0][0]]
    for path in best:
        place[path] = len(out)
        out.append((path[-1], place[path[:-1]]))
    return out, [1.0, *(found[path] for path in best)]
