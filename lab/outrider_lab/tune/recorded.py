"""Texts with what every drafter would have proposed at every position: recorded once, replayed with any setting.

The target writes each text plainly. Beside it each drafter drafts after every token, as deep as it may, and nothing of that is
verified. So a recording tells what every draft length would have accepted, and costs one draft of each kind a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from outrider.core.tree import chain
from outrider.core.types import Array, Budget, Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass
from outrider.drafters.proposal import NodeList, Proposal, SharedTaps, accepted_path, own_commit
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.request import Sequence as Text

DEPTH = 16
"""Levels that lookups are asked for."""
STATED = 0.75
"""The scale of `LogitError` at which chances are recorded."""
LEAST = 0.004
"""A model's draft ends below this chance: no machine verifies such a token."""


class RecordedDraft(NamedTuple):
    """A chain that a drafter proposed at one position."""

    accepted: int  # how many of its tokens the text goes on with
    match: int  # tokens that a lookup matched, 0 for none and for a model
    chances: list[float]  # of each token, given those before it, as the drafter states them; empty if it states none
    length: int  # its tokens


@dataclass(eq=False)
class RecordedText:
    """A text, with the drafts for each of its tokens."""

    kind: str  # of its prompt, such as code
    temperature: float
    limit: int  # tokens that it may have
    prompt: list[int]  # token ids
    output: list[int]  # token ids
    drafts: dict[str, list[RecordedDraft]] = field(default_factory=dict)  # by drafter, one for each output token


class DraftRecorder(BaseDrafter):
    """Asks drafters at every position, and proposes nothing itself. A drafter that raises is not asked again."""

    def __init__(self, drafters: Mapping[str, Drafter], lookups: Sequence[str] = (), depth: int = 8) -> None:
        """Record what some drafters propose.

        Args:
            lookups: The names of those that cost nothing.
            depth: Levels that the others are asked for.
        """
        self.drafters, self.lookups, self.depth = dict(drafters), set(lookups), depth
        self._shared = SharedTaps.of(drafters)
        self.taps = self._shared.taps
        self.problems: dict[str, str] = {}  # how drafters failed, by name
        self._proposals: dict[str, list[NodeList]] = {}
        self.drafts: dict[int, dict[str, list[tuple[NodeList, int, list[float]]]]] = {}  # by slot and drafter

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        self._each(
            lambda name, drafter: drafter.start(slot, tokens, first, self._shared.of_drafter(name, features)),
            self._shared.columns,
        )

    def propose(self, context: DraftContext) -> Draft:
        self._each(lambda name, drafter: self._asked(name, drafter, context))
        return Draft(*chain([[tokens[-1]] for tokens in context.tokens]))

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        def updated(name: str, drafter: Drafter) -> None:
            nodes = self._proposals[name]
            drafter.update(
                context, [self._shared.commit(name, own_commit(c, nodes[b])) for b, c in enumerate(commits)], target
            )

        self._each(updated)

    def release(self, slot: int) -> None:
        self._each(lambda name, drafter: drafter.release(slot))

    def _each(self, act: Callable[[str, Drafter], None], names: Iterable[str] | None = None) -> None:
        """Do the same with all drafters that did not fail."""
        for name in self.drafters if names is None else names:
            if name not in self.problems:
                try:
                    act(name, self.drafters[name])
                except Exception as error:
                    self.problems[name] = " ".join(f"it failed: {type(error).__name__}: {error}".split())

    def _asked(self, name: str, drafter: Drafter, context: DraftContext) -> None:
        error = drafter.resources().error
        if error is not None:
            error.scale = STATED  # all chances are stated with the same error
        budget = Budget(DEPTH) if name in self.lookups else Budget(self.depth, min_probability=LEAST)
        budgets = [budget.clipped(wanted.depth) for wanted in context.budgets]
        draft = drafter.propose(replace(context, budgets=budgets))
        self._proposals[name] = draft.host
        for b, slot in enumerate(context.slots):
            one = Proposal(draft, b)
            chances = [x / max(before, 1e-9) for before, x in pairwise(one.confidence or [1.0])]
            self.drafts.setdefault(slot, {}).setdefault(name, []).append((one.nodes, one.offer.match, chances))

    def taken(self, text: Text, slot: int, kind: str, limit: int) -> RecordedText:
        """What was recorded of a text that has ended. slot: the one that it had."""
        out = RecordedText(kind, text.params.temperature, limit, text.prompt, text.output)
        for name, every in self.drafts.pop(slot, {}).items():
            if name in self.problems:
                continue
            out.drafts[name] = [
                RecordedDraft(len(accepted_path(nodes, text.output[at:])) - 1, match, chances, len(nodes) - 1)
                for at, (nodes, match, chances) in enumerate(every)
            ]
            # nothing can be drafted before a text's last token, so nothing was asked for
            out.drafts[name] += [RecordedDraft(0, 0, [], 0)] * (len(out.output) - len(out.drafts[name]))
        return out


def record(decoder: Decoder, recorder: DraftRecorder, texts: Sequence[tuple[str, Request]]) -> list[RecordedText]:
    """Write texts, as many at a time as the decoder has slots, and return them in their order.

    texts: (kind, request). decoder: drafts with the recorder, whatever the length.
    """
    results, slots = list[RecordedText](), decoder.cache.num_slots
    for first in range(0, len(texts), slots):
        group = texts[first : first + slots]
        sequences = [decoder.start(request) for _, request in group]
        for _ in decoder.run(sequences):
            pass
        for (kind, _), text in zip(group, sequences, strict=True):
            results.append(recorder.taken(text, text.slot, kind, text.checker.limit))
            decoder.release(text.slot)
    return results
