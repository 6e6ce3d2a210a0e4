"""What a drafter that others wrote must keep to: it gets copies of the committed tokens, and its drafts are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.core.tree import levels, validate
from outrider.core.types import Draft, Siblings
from outrider.drafters.base import DraftContext, Drafter


class Broken(ValueError):
    """A draft that breaks the contract."""


def accept(name: str, drafter: object) -> None:
    """Raise ValueError for an object that lacks a drafter's methods."""
    if isinstance(drafter, type):
        raise ValueError(f"{drafter.__name__} is a class, and a drafter is an object: drafter={drafter.__name__}()")
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"{name!r} is of type {type(drafter).__name__}, which is no drafter: it lacks taps, start, propose, update, "
            "release, reset, missing, read, inner or resources. "
            "Derive from outrider.drafters.BaseDrafter, which has all but propose"
        )


def lend(act: Callable[..., Any], own: DraftContext, *more: Any) -> Any:
    """Call a method of a drafter that others wrote, and protect the committed tokens from it.

    Raises Broken if the method changed them; they are restored first. Also raises what the method raises.
    """
    originals, copies = list(own.tokens), [list(tokens) for tokens in own.tokens]
    try:
        result = act(own, *more)
    finally:
        changed = own.tokens != copies
        if changed:
            own.tokens[:] = originals
            for now, then in zip(originals, copies, strict=True):
                now[:] = then
    if changed:
        raise Broken(f"{act.__name__} changed the committed tokens, which are read-only; make a list of your own")
    return result


def check(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise Broken unless the draft fits the batch, the budgets and the contract."""
    if not isinstance(draft, Draft):
        raise Broken(f"propose returned a {type(draft).__name__}, not a Draft")
    for name in ("tokens", "parents", "probs"):
        given = getattr(draft, name)
        if given is not None and not isinstance(given, np.ndarray):
            raise Broken(f"{name} is a {type(given).__name__} and must be a numpy array; np.asarray({name}) makes one")
    try:
        validate(Draft(draft.tokens, draft.parents), vocab_size)
    except Exception as error:
        raise Broken(str(error)) from error
    if len(draft.tokens) != len(context.slots):
        raise Broken(f"{len(draft.tokens)} drafts for {len(context.slots)} sequences")
    for tokens, parents, committed, budget in zip(
        draft.tokens.tolist(), draft.parents.tolist(), context.tokens, context.budgets, strict=True
    ):
        if tokens[0] != committed[-1]:
            raise Broken(f"node 0 is the last committed token, {committed[-1]}, and here it is {tokens[0]}")
        children = Counter(parent for parent in parents if parent >= 0)
        for what, got, most in (
            ("levels", max(levels(parents)), budget.depth),
            ("nodes", children.total(), budget.max_nodes),
            ("children of a node", max(children.values(), default=0), budget.width),
        ):
            if got > most:
                raise Broken(
                    f"{got} {what} where the sequence's budget allows {most}; cut the draft to context.budgets"
                )
    if context.needs_probs and draft.siblings is not Siblings.POINT:
        shape = (*draft.tokens.shape, vocab_size)
        if draft.probs is None or draft.probs.shape != shape or not np.isfinite(draft.probs).all():
            raise Broken(
                "probs, which the draft tokens were drawn from, is missing, has the wrong shape or is not finite"
            )
