"""A drafter for each sequence. Several methods share a batch, and a faulty drafter does no harm.

Each sequence has the drafter that its request chose. A drafter that raises, or whose draft breaks the contract, loses the
sequence: the text goes on without drafts, and the request's output says so. Draft tokens that a grammar forbids are cut off
before the target reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outrider.core.tree import levels, lists, tree, validate
from outrider.core.types import Commit, Draft, Siblings
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass
from outrider.drafters.combine.merge import NodeList, SharedTaps, join, own_commit, select


class PerRequestDrafter(BaseDrafter):
    """Drafters by name. `assign` gives a sequence its drafter. Without one it has `default`; "none" makes no drafts.

    tell: called for every failure, with the drafter's name and the rule that it broke or the error that it raised. Raises
    ValueError for an object that lacks a drafter's methods.
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
                    f"{name!r} is of type {type(drafter).__name__}, which is no drafter: it lacks taps, start, propose, update, "
                    "release, reset or inner. Derive from outrider.drafters.BaseDrafter, which has all but propose"
                )
        self.tell = tell
        self.drafters, self.default, self.vocab_size = drafters, default, vocab_size
        self._shared = SharedTaps.of(drafters)
        self.taps = self._shared.taps
        self.lost: dict[int, str] = {}  # slots whose drafter failed -> how it failed
        self.failures = 0
        self.assigned: dict[int, str] = {}  # methods by slot
        self._asked: list[tuple[str, list[int]]] = []  # the drafters of the last step, with their entries of the batch
        self.draft_seconds: dict[str, float] = {}  # of the last proposal, by drafter
        self._cut: dict[int, NodeList] = {}  # batch entry -> its proposal before the grammar cut it

    def assign(self, slot: int, method: str | None) -> None:
        """Choose a sequence's drafter; None is the default. Raises ValueError for an unknown method."""
        method = self.default if method is None else method
        self.check_method(method)
        self.assigned[slot] = method

    def check_method(self, method: str) -> None:
        """Raise ValueError for a method that is not there."""
        if method != "none" and method not in self.drafters:
            raise ValueError(f"there is no drafter {method!r} here; use one of: none, {', '.join(self.drafters)}")

    def method(self, slot: int) -> str:
        """The name of a sequence's drafter."""
        return self.assigned.get(slot, self.default)

    def drafter(self, slot: int) -> Drafter | None:
        """A sequence's drafter; None if it has none or lost it."""
        return None if slot in self.lost else self.drafters.get(self.method(slot))

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        name = self.method(slot)
        if slot not in self.lost and name in self._shared.columns:
            own = self._shared.of_drafter(name, features)
            shown = tokens if trusted(self.drafters[name]) else list(tokens)
            self._guarded(name, [slot], lambda d: d.start(slot, shown, first, own))

    def propose(self, context: DraftContext) -> Draft:
        self.draft_seconds = {}
        groups: dict[str, list[int]] = {}
        for b, slot in enumerate(context.slots):
            if self.method(slot) != "none" and slot not in self.lost:
                groups.setdefault(self.method(slot), []).append(b)
        parts = [part for name, some in groups.items() for part in self._ask(name, context, some)]
        masked = [h.mask is not None for h in context.warp.histories]
        self._asked, self._cut = [(name, some) for name, some, _ in parts], {}
        whole = len(parts) == 1 and len(parts[0][1]) == len(context.slots) and not any(masked)
        return parts[0][2] if whole else self._joined(context, parts, masked)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        asked, groups = {b for _, some in self._asked for b in some}, {name: list(some) for name, some in self._asked}
        for b, slot in enumerate(context.slots):  # a drafter with taps sees every step
            if b not in asked and slot not in self.lost and self.method(slot) in self._shared.columns:
                groups.setdefault(self.method(slot), []).append(b)
        for name, some in groups.items():
            own, seen, mine = select(context, some), target.select(some), list[Commit]()
            for b in some:
                commit = commits[b]
                if b not in asked or b in self._cut:
                    commit = own_commit(commit, self._cut.get(b))
                mine.append(self._shared.commit(name, commit))
            self._guarded(name, own.slots, lambda d, own=own, mine=mine, seen=seen: lend(d, "update", own, mine, seen))
        self._asked = []

    def release(self, slot: int) -> None:
        self.assigned.pop(slot, None)
        self.lost.pop(slot, None)
        for name in self.drafters:
            self._guarded(name, [], lambda d: d.release(slot))

    def reset(self) -> None:
        for name in self.drafters:
            self._guarded(name, [], lambda d: d.reset())

    def inner(self) -> Mapping[str, Drafter]:
        return self.drafters

    def lose(self, name: str, slots: list[int], error: Exception) -> None:
        """Take these sequences from a drafter that failed. They go on without drafts."""
        self.failures += 1
        broken = isinstance(error, Broken)
        what = f"it broke the contract: {error}" if broken else f"it raised {type(error).__name__}"
        self.tell(
            f"the drafter {name!r} failed: {what if broken else f'{what}: {error}'}; the text goes on without drafts"
        )
        for slot in slots:
            self.lost[slot] = f"the drafter {name!r} failed ({what}); the rest of the text was written without drafts"

    def _ask(self, name: str, context: DraftContext, some: list[int]) -> list[tuple[str, list[int], Draft]]:
        """A drafter's proposal for some entries of the batch. If it fails, each entry is asked for alone.

        Only the entries that fail alone are lost.
        """
        own, drafter, started = select(context, some), self.drafters[name], perf_counter()
        try:
            draft = lend(drafter, "propose", own)
            self.draft_seconds[name] = self.draft_seconds.get(name, 0.0) + perf_counter() - started
            check(draft, own, self.vocab_size)
            return [(name, some, draft)]
        except Exception as error:
            for slot in own.slots if not drafter.taps else ():  # a head would miss the features that it was given
                self._guarded(name, [], lambda d, slot=slot: d.release(slot))
            if len(some) > 1:
                return [found for b in some for found in self._ask(name, context, [b])]
            self.lose(name, own.slots, error)
            return []

    def _joined(self, context: DraftContext, parts: list[tuple[str, list[int], Draft]], masked: list[bool]) -> Draft:
        out, notes = list[tuple[int, Draft, int]](), list[object]([None] * len(context.slots))
        for _, some, draft in parts:
            for i, b in enumerate(some):
                if draft.notes:
                    notes[b] = draft.notes[i]
                if masked[b] and draft.probs is None:  # taking back a drawn token would change the distribution
                    self._cut[b] = draft.host[i]
                    out.append((b, Draft(*tree([legal(context, b, draft.host[i])])), 0))
                else:
                    out.append((b, draft, i))
        return join(context, out, notes if any(note is not None for note in notes) else ())

    def _guarded(self, name: str, slots: list[int], act: Callable[..., None]) -> None:
        try:
            act(self.drafters[name])
        except Exception as error:
            self.lose(name, slots, error)


class Broken(ValueError):
    """A draft that breaks the contract."""


def trusted(drafter: Drafter) -> bool:
    """True for a drafter of this package that asks no others. It is trusted with the committed tokens: no copies are made."""
    return type(drafter).__module__.startswith("outrider.") and all(map(trusted, drafter.inner().values()))


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
