"""A drafter for every row: several methods in one batch, none of which can hurt.

Each row is drafted for by the method its request chose. A drafter that raises, or whose draft breaks the contract, loses
the row: the text goes on without guesses, and the request is told. Guesses that a grammar forbids are cut off before the
target pays for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outrider.core.tree import levels, lists, tree, validate
from outrider.core.types import Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter
from outrider.drafters.combine.merge import NodeList, draft_nodes, join, select


class PerRequestDrafter(BaseDrafter):
    """Drafters by name. `assign` says which of them a row has; a row without one has `default`, "none" has no guesses.

    tell: is told of every failure, with the drafter's name and the rule it broke or what it raised. Raises ValueError for an
    object that lacks a drafter's methods.
    """

    def __init__(
        self,
        drafters: dict[str, Drafter],
        default: str,
        vocab_size: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        for name, drafter in drafters.items():
            if not isinstance(drafter, Drafter):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"the drafter {name!r} is none: a drafter has taps, propose, update and release; "
                    "outrider.drafters.BaseDrafter has all but propose"
                )
        self.tell = tell
        self.drafters, self.default, self.vocab_size = drafters, default, vocab_size
        self.taps = tuple(drafters[default].taps) if default in drafters else ()
        self.lost: dict[int, str] = {}  # rows that their drafter failed, and how
        self.failures = 0
        self._method: dict[int, str] = {}
        self.draft_seconds: dict[str, float] = {}  # of the last proposal, by drafter
        self._asked: list[tuple[str, list[int]]] = []  # whom the last proposal came from, with entries of the batch
        if any(hasattr(d, "watch") for d in drafters.values()):
            self.watch = self._watch

    def assign(self, row: int, method: str | None) -> None:
        """Choose a row's drafter. Raises ValueError for a method that is not at hand."""
        method = self.default if method is None else method
        if method != "none" and method not in self.drafters:
            raise ValueError(f"there is no drafter {method!r} here; there are none, {', '.join(self.drafters)}")
        self._method[row] = method

    def method(self, row: int) -> str:
        return self._method.get(row, self.default)

    def propose(self, context: DraftContext) -> Draft:
        self.draft_seconds = {}
        groups: dict[str, list[int]] = {}
        for b, row in enumerate(context.slots):
            if self.method(row) != "none" and row not in self.lost:
                groups.setdefault(self.method(row), []).append(b)
        parts = [select for name, some in groups.items() for select in self._ask(name, context, some)]
        self._asked = [(name, some) for name, some, _ in parts]
        masked = [h.mask is not None for h in context.warp.histories]
        if len(parts) == 1 and len(parts[0][1]) == len(context.slots) and not any(masked):
            return parts[0][2]
        return self._joined(context, parts, masked)

    def update(self, context: DraftContext, kept: Sequence[Commit], features: Tensor | None) -> None:
        for name, some in self._asked:
            own, seen = select(context, some), None if features is None else features[some]
            mine = [kept[b] for b in some]
            self._guarded(name, own.slots, lambda d, own=own, mine=mine, seen=seen: lend(d, "update", own, mine, seen))

    def release(self, row: int) -> None:
        self._method.pop(row, None)
        self.lost.pop(row, None)
        for name in self.drafters:
            self._guarded(name, [], lambda d: d.release(row))

    def _watch(self, context: DraftContext, draft: Draft, logits: Tensor) -> None:
        for name, some in self._asked:
            if hasattr(self.drafters[name], "watch"):
                own, drafted = select(context, some), Draft(draft.tokens[some], draft.parents[some])
                found = logits[some]
                self._guarded(name, own.slots, lambda d, own=own, a=drafted, b=found: lend(d, "watch", own, a, b))

    def _ask(self, name: str, context: DraftContext, some: list[int]) -> list[tuple[str, list[int], Draft]]:
        """A drafter's proposal for some entries of the batch. If it fails them together, each is asked for alone, and only
        those that fail alone are lost."""
        own, drafter, started = select(context, some), self.drafters[name], perf_counter()
        try:
            draft = lend(drafter, "propose", own)
            self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + perf_counter() - started
            check(draft, own, self.vocab_size)
            return [(name, some, draft)]
        except Exception as error:
            for row in own.slots:
                self._guarded(name, [], lambda d, row=row: d.release(row))
            if len(some) > 1:
                return [found for b in some for found in self._ask(name, context, [b])]
            self._lose(name, own.slots, error)
            return []

    def _joined(self, context: DraftContext, parts: list[tuple[str, list[int], Draft]], masked: list[bool]) -> Draft:
        out, notes = list[tuple[int, Draft, int]](), [""] * len(context.slots)
        for _, some, draft in parts:
            for i, b in enumerate(some):
                if draft.notes:
                    notes[b] = draft.notes[i]
                if masked[b] and draft.probs is None:  # to un-draw a token that was drawn would bend the law
                    out.append((b, Draft(*tree([legal(context, b, draft_nodes(draft, i))])), 0))
                else:
                    out.append((b, draft, i))
        return join(context, out, notes if any(notes) else ())

    def _guarded(self, name: str, rows: list[int], act: Callable[..., None]) -> None:
        try:
            act(self.drafters[name])
        except Exception as error:
            self._lose(name, rows, error)

    def _lose(self, name: str, rows: list[int], error: Exception) -> None:
        self.failures += 1
        broken = isinstance(error, Broken)
        what = f"it broke the contract: {error}" if broken else f"it raised {type(error).__name__}"
        self.tell(
            f"the drafter {name!r} failed: {what if broken else f'{what}: {error}'}; the text goes on without guesses"
        )
        for row in rows:
            self.lost[row] = f"the drafter {name!r} failed ({what}); the text was written on without guesses"


class Broken(ValueError):
    """A draft that breaks the contract."""


def trusted(drafter: Drafter) -> bool:
    """Is it one of this package, and those that it asks too? Copies of long texts are not made for them."""
    asked = getattr(drafter, "drafters", {})
    return type(drafter).__module__.startswith("outrider.") and all(trusted(d) for d in asked.values())


def lend(drafter: Any, method: str, own: DraftContext, *more: Any) -> Any:
    """What a drafter's method makes of a batch, whose committed tokens stay what they are, whatever it does to them. Raises
    Broken if it changed them, and what it raises."""
    act = getattr(drafter, method)
    if trusted(drafter):
        return act(own, *more)
    lists, copies = list(own.tokens), [list(tokens) for tokens in own.tokens]
    try:
        made = act(own, *more)
    finally:
        changed = own.tokens != copies
        if changed:
            own.tokens[:] = lists
            for now, then in zip(lists, copies, strict=True):
                now[:] = then
    if changed:
        raise Broken(f"{method} changed the committed tokens, which are read-only; make a list of your own")
    return made


def check(draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise Broken unless the draft is one for these rows, within their budgets."""
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
                raise Broken(f"{got} {what} where the row's budget allows {most}")
    if context.needs_probs and draft.siblings is not Siblings.POINT:
        good = draft.probs is not None and draft.probs.shape == (*draft.tokens.shape, vocab_size)
        if not good or not bool(torch.isfinite(draft.probs).all()):  # pyright: ignore[reportArgumentType]
            raise Broken("the law that the guesses were drawn from is missing, of the wrong shape or not finite")


def legal(context: DraftContext, b: int, nodes: NodeList) -> NodeList:
    """The nodes that the row's mask allows, each after its ancestors."""
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
