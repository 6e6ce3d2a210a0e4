"""Parts of a batch to drafters, and their drafts back together as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.core.tree import lists, tree
from outrider.core.types import Draft, Siblings
from outrider.drafters.base import DraftContext

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


def draft_nodes(draft: Draft, b: int) -> NodeList:
    """The real nodes of a row."""
    pairs = zip(lists(draft.tokens[b : b + 1])[0], lists(draft.parents[b : b + 1])[0], strict=True)
    return [(token, parent) for token, parent in pairs if parent >= -1]


def walked(nodes: NodeList, tokens: Sequence[int]) -> list[int]:
    """The nodes that the committed tokens walk through, the root first: what would have been accepted of this draft alone."""
    path = [0]
    for token in tokens:
        here = (token, path[-1])
        following = next((n for n in range(path[-1] + 1, len(nodes)) if nodes[n] == here), None)
        if following is None:
            break
        path.append(following)
    return path


def draft_confidence(draft: Draft, b: int, count: int) -> list[float] | None:
    return None if draft.confidence is None else draft.confidence[b, :count].tolist()


def join(context: DraftContext, parts: Sequence[tuple[int, Draft, int]], notes: Sequence[str] = ()) -> Draft:
    """One draft of a batch. parts: (entry of the batch, a draft, the draft's row for it); entries without one draft nothing.

    A guess that was chosen counts as drawn from a law with all its mass there, where other rows declare a law. Raises
    ValueError if two rows' guesses were drawn in different ways.
    """
    nodes: list[NodeList] = [[(tokens[-1], -1)] for tokens in context.tokens]
    confidence: dict[int, list[float]] = {}
    for b, draft, row in parts:
        nodes[b] = draft_nodes(draft, row)
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


__all__ = ["NodeList", "Siblings", "draft_confidence", "draft_nodes", "join", "select", "united"]
