"""Predicted outputs: the user gives a text that most of the answer repeats. The place in it is found again after each change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.corpus import alike
from outrider.drafters.lookup.mixture import Context, drafted, grow

_TRUST = 8  # length of match, in tokens, that the prediction counts as before the answer starts
_LOOK = 64  # places on either side that are compared when the place is lost
_REACH = 32  # tokens compared at each place
_SURE = 4  # tokens that must match before a jump back, or a replacement, is believed
_GIVE_UP = 8  # upper limit of the tokens that must match, after any number of wrong predictions
_SWAP = 8  # tokens of the longest replacement that is remembered


class Alignment:
    """The place of an answer in its prediction, token by token: a function of the answer alone. A `ContextSource` of the mixture.

    Attributes:
        text: The prediction.
        answer: Its tokens so far.
        place: Index of the predicted next token; None if the place is lost.
        run: Matching tokens before the place.
        misses: Recent wrong predictions. After a loss, so many tokens must match before the place counts as found. So a
            prediction that does not fit is soon ignored, and one that fits again is found again.
        swaps: Replacements seen, by first token. A name that changed once is expected to change again, until it does not.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.text, self.answer = list(prediction), list[int]()
        self.place: int | None = 0
        self.run, self.misses = _TRUST, 0
        self.lost = self.since = 0  # the place, and the length of the answer, when the place was lost
        self.swaps: dict[int, tuple[list[int], list[int]] | None] = {}  # None: the replacement did not come again
        self._swap: tuple[list[int], list[int]] | None = None  # seen, not believed yet
        self._inside: tuple[int, ...] = ()  # the rest of the replacement that the answer is in
        self._behind: dict[int, list[int]] = {}  # token -> places after it
        for at, token in enumerate(self.text, 1):
            self._behind.setdefault(token, []).append(at)

    def extend(self, answer: Sequence[int]) -> None:
        """Read the new tokens of an answer."""
        for token in answer[len(self.answer) :]:
            self.push(token)

    def push(self, token: int) -> None:
        self.answer.append(token)
        if self.place is not None:
            expected = [option for option in self.following((self.place, self._inside))[1] if option[0] == token]
            if expected:
                raw = not self._inside and token == self.text[self.place]
                if raw and token in self.swaps and self._swapped(self.place):
                    self.swaps[token] = None
                self.place, self._inside = expected[0][2]
                self._gained()
                return
            self.misses = min(self.misses + (self.place < len(self.text)), _GIVE_UP)
            self.lost, self.since = self.place, len(self.answer) - 1
            self.place, self._inside, self._swap = None, (), None
        self._find()

    def following(self, state: tuple[int, tuple[int, ...]]) -> tuple[float, list[tuple[int, float, tuple]]]:
        """See `ContextSource`. state: a place, and the rest of a replacement before it."""
        place, inside = state
        if inside:
            return 1, [(inside[0], 1, (place, inside[1:]))]
        options: list[tuple[int, float, tuple]] = []
        if place < len(self.text):
            options.append((self.text[place], 1, (place + 1, ())))
        if swap := self._swapped(place):
            old, new = swap
            option = self.following((place + len(old), tuple(new)))[1][:1]
            options = [(token, 9, state) for token, _, state in option] + options
        return sum(count for _, count, _ in options), options

    def contexts(self) -> list[Context]:
        """Where the prediction is expected to go on. Just after a change, one token is assumed to have replaced one."""
        if self.place is not None:
            return [Context(self, (self.place, self._inside), 1.0, self.run)]
        if len(self.answer) - self.since > 1 or self.misses > 2:
            return []
        return [Context(self, (self.lost + 1, ()), 1.0, 1)]

    def _swapped(self, place: int) -> tuple[list[int], list[int]] | None:
        """The replacement that is expected at a place."""
        swap = self.swaps.get(self.text[place]) if place < len(self.text) else None
        return swap if swap and self.text[place : place + len(swap[0])] == swap[0] else None

    def _gained(self) -> None:
        self.run += 1
        if self.run >= _SURE:
            self.misses = max(0, self.misses - 1)
            if self._swap is not None:
                old, new = self._swap
                self.swaps.setdefault(old[0], (old, new))
                self._swap = None

    def _find(self) -> None:
        """Find the place with the most matching tokens: after the old place, the nearest first, else before it."""
        places = self._behind.get(self.answer[-1], [])
        middle = bisect_left(places, self.lost)
        run, place = self._longest(places[middle : middle + _LOOK])
        if run < max(1, self.misses):
            run, place = self._longest(places[max(0, middle - _LOOK) : middle][::-1])
            if run < max(_SURE, self.misses):
                return
        self.place, self.run = place, run
        fresh = min(run, len(self.answer) - self.since)  # of the match, what came after the change
        old, new = self.text[self.lost : place - fresh], self.answer[self.since : len(self.answer) - fresh]
        if place - fresh >= self.lost and 0 < len(old) <= _SWAP and len(new) <= _SWAP:
            self._swap = old, new

    def _longest(self, places: Sequence[int]) -> tuple[int, int]:
        """(matching tokens, place) of the first place with the most."""
        end = self.answer[: -_REACH - 1 : -1]
        runs = [(alike(self.text[max(place - _REACH, 0) : place][::-1], end), place) for place in places]
        return max(runs, key=itemgetter(0), default=(0, 0))


class PredictionDrafter(BaseDrafter):
    """Proposes that the answer goes on as its prediction does: `SamplingParams.prediction`, else the one given here.

    After a change the place is found again (`Alignment`), and replacements that were seen are expected again. Every draft token
    comes from the prediction or from such a replacement. So a server reports the accepted ones as accepted_prediction_tokens
    and the others as rejected_prediction_tokens.

    least: a path ends where its probability falls below this. Source: "predicted outputs" of the OpenAI API; the alignment is
    our own.
    """

    def __init__(self, prediction: Sequence[int] = (), *, least: float = 0.2) -> None:
        self.prediction, self.least = tuple(prediction), least
        self._alignments: dict[int, Alignment] = {}

    def release(self, slot: int) -> None:
        self._alignments.pop(slot, None)

    def propose(self, context: DraftContext) -> Draft:
        trees = []
        predictions = context.predictions or [()] * len(context.slots)
        for slot, tokens, n, prediction, budget in zip(
            context.slots, context.tokens, context.prompt_lengths, predictions, context.budgets, strict=True
        ):
            if not prediction and not self.prediction:  # there is nothing to look in
                trees.append(grow(tokens[-1], (), budget))
                continue
            if slot not in self._alignments:
                self._alignments[slot] = Alignment(prediction or self.prediction)
            alignment = self._alignments[slot]
            alignment.extend(tokens[n:])
            doubt = 0.5 * (1 + alignment.misses)
            trees.append(grow(tokens[-1], alignment.contexts(), budget, least=self.least, doubt=doubt))
        return drafted(trees)


def from_setup(setup: DrafterSetup) -> PredictionDrafter:
    """Raises ValueError for a text without a tokenizer, or tokens that the target does not have."""
    prediction, target = setup.config.prediction, setup.target
    if isinstance(prediction, str):
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; give the prediction as token ids")
        return PredictionDrafter(target.tokenizer(prediction, add_special_tokens=False)["input_ids"])
    wrong = [token for token in prediction or () if not 0 <= token < target.model.vocab_size]
    if wrong:
        raise ValueError(
            f"the prediction contains token {wrong[0]}, outside {target.name}'s {target.model.vocab_size} tokens"
        )
    return PredictionDrafter(prediction or ())
