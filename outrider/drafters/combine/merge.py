"""What combiners of drafters share. They split a batch among drafters, join the drafts, and pass the commits back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.tree import tree
from outrider.core.types import Commit, Draft
from outrider.drafters.base import DraftContext, Drafter

NodeList = list[tuple[int, int]]  # (token, parent) of one tree, the root first


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
        left=[context.left[b] for b in some] if context.left else (),
    )


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
        return replace(commit, nodes=[], num_accepted=0)
    path = accepted_path(nodes, commit.tokens)
    # the last committed token is the next root. It is not in the cache, even if the proposal contained it
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
        """float [..., feature]: a drafter's own part of the features of all taps. All taps have the same width."""
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
    """The confidence of the first `count` nodes of entry b; None if the draft states none."""
    return None if draft.confidence is None else draft.confidence[b, :count].tolist()


def join(context: DraftContext, parts: Sequence[tuple[int, Draft, int]], notes: Sequence[object] = ()) -> Draft:
    """One draft for a batch. parts: (entry of the batch, a draft, the entry's index in that draft). Others get the root alone.

    If some parts declare distributions, a token that was chosen counts as drawn from a distribution with all its mass on it.
    Raises ValueError if parts were drawn in different ways.
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
        raise ValueError(
            f"one draft holds tokens drawn in {len(drawn)} ways: {sorted(s.name for s in drawn)}. "
            "Give the drafters of a batch the same `siblings`"
        )
    vocab = next(draft.probs.shape[-1] for _, draft, _ in parts if draft.probs is not None)
    probs = torch.zeros(*tokens.shape, vocab)
    for b, draft, row in parts:
        if draft.probs is not None:
            probs[b, : len(nodes[b])] = draft.probs[row, : len(nodes[b])].to(probs.device)
        else:
            for token, parent in nodes[b][1:]:
                probs[b, parent, token] = 1.0
    return replace(out, probs=probs, siblings=drawn.pop())
