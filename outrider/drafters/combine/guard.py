"""What protects a text from a faulty drafter: checks of its drafts, and of the committed tokens that it is lent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from outrider.core.tree import levels, lists, validate
from outrider.core.types import Draft, Siblings
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.combine.merge import NodeList


class Broken(ValueError):
    """A draft that breaks the contract."""


def trusted(drafter: Drafter) -> bool:
    """True for a drafter of this package. It is trusted with the committed tokens, and its drafts are not checked."""
    return type(drafter).__module__.startswith(
        ("outrider.drafters.", "outrider.lab.bench.", "outrider.lab.tune.")
    ) and all(map(trusted, drafter.inner().values()))


def lend(drafter: Any, method: str, own: DraftContext, *more: Any) -> Any:
    """Call a drafter's method and protect the committed tokens from it.

    Raises Broken if the method changed them; they are restored first. Also raises what the method raises.
    """
    act = getattr(drafter, method)
    if trusted(drafter):
        return act(own, *more)
    originals, copies = list(own.tokens), [list(tokens) for tokens in own.tokens]
    try:
        made = act(own, *more)
    finally:
        changed = own.tokens != copies
        if changed:
            own.tokens[:] = originals
            for now, then in zip(originals, copies, strict=True):
                now[:] = then
    if changed:
        raise Broken(f"{method} changed the committed tokens, which are read-only; make a list of your own")
    return made


def check(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise Broken unless the draft fits the batch, the budgets and the contract."""
    if not isinstance(draft, Draft):
        raise Broken(f"propose returned a {type(draft).__name__}, not a Draft")
    try:
        validate(Draft(draft.tokens, draft.parents), vocab_size)
    except Exception as error:
        raise Broken(str(error)) from error
    if len(draft.tokens) != len(context.slots):
        raise Broken(f"{len(draft.tokens)} drafts for {len(context.slots)} rows")
    for tokens, parents, known, budget in zip(
        lists(draft.tokens), lists(draft.parents), context.tokens, context.budgets, strict=True
    ):
        if tokens[0] != known[-1]:
            raise Broken(f"node 0 is the last committed token, {known[-1]}, and here it is {tokens[0]}")
        children = Counter(parent for parent in parents if parent >= 0)
        for what, got, most in (
            ("levels", max(levels(parents)), budget.depth),
            ("nodes", children.total(), budget.max_nodes),
            ("children of a node", max(children.values(), default=0), budget.width),
        ):
            if got > most:
                raise Broken(f"{got} {what} where the row's budget allows {most}; cut the draft to context.budgets")
    if context.needs_probs and draft.siblings is not Siblings.POINT:
        good = draft.probs is not None and draft.probs.shape == (*draft.tokens.shape, vocab_size)
        if not good or not bool(torch.isfinite(draft.probs).all()):  # pyright: ignore[reportArgumentType]
            raise Broken(
                "probs, which the draft tokens were drawn from, is missing, has the wrong shape or is not finite"
            )


def legal(context: DraftContext, b: int, nodes: NodeList) -> NodeList:
    """The nodes of entry b that its grammar allows. A node goes with its parent."""
    history = context.warp.histories[b]
    assert history.mask is not None
    kept, where, paths = [nodes[0]], {0: 0}, {0: list[int]()}
    for n, (token, parent) in enumerate(nodes[1:], 1):
        if parent not in where:
            continue
        path = paths[where[parent]]
        if history.mask.allowed(history.tokens, history.prompt_length, path)[token]:
            where[n] = len(kept)
            paths[where[n]] = [*path, token]
            kept.append((token, where[parent]))
    return kept
