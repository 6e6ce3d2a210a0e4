"""What is believed of drafters and of texts, from what was committed. Counts only: no clock, no text, no torch."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.control.price import DraftForecast, forecast
from outrider.core.types import Budget

PRIORS = Path(__file__).resolve().parent.parent / "data" / "priors.json"
"""Chains of stated chances by kind of drafter, and the table of lookups: python -m benchmarks.traces priors."""

_ROW = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4)  # of the table of lookups, by match length
_MATCHES, _MASSES = 6, 5  # rows and columns of the table
_DEEP = 4  # places of a lookup's chain that the table learns from
_TABLE = 200.0  # tries after which those of a cell fade
_FADE = 0.97  # weight of the past in what a text tells about its lookups
_TEXT = 4.0  # tries of a text that the table counts for
_MEMORY = 1 - 1 / 24  # weight of the past in how true a model's chances are in a text
_SHORT, _LONG = 24.0, 0.25  # steps that a text remembers of a model, and more of them for each that it has had
_POOL, _POOLED, _PRIOR, _OWN = (
    200.0,
    1 - 1 / 1000,
    8.0,
    4.0,
)  # weights: most of the pool, its fading, of prior and of pool
_TRY = 4  # levels of a drafter's first draft
_STATED, _TRUTHS = 4.0, 1 - 1 / 256  # promised tokens that other texts count for, and weight of the past over all texts
_USUAL, _WEIGHT = 128.0, 2  # tokens of an answer before any was seen, and the number of answers that this counts for
_ANSWERS = 32  # answers that are remembered
_LEAST = 16.0  # tokens that are left of an answer that outgrows them


@lru_cache(1)
def priors() -> dict[str, Any]:
    """The priors that ship."""
    return json.loads(PRIORS.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Offer:
    """What a lookup proposes: a note of `Draft.notes`. nodes: (token, parent), the root first. masses: of each node, the share of
    what it found that goes this way, 1 for the root. match: tokens of the longest end of the text that it found, 0 for none."""

    nodes: Sequence[tuple[int, int]]
    masses: Sequence[float]
    match: int

    def __str__(self) -> str:
        return f"a match of {self.match} tokens"


class LookupBelief:
    """How likely a lookup's tokens are accepted: a table by match length and mass, shifted by how much this text copies.

    The shift is in logits. The text shows with every token what a lookup would have been worth, whether it was used or not. So
    lookups need no exploration, and a text that copies is recognised after a few tokens.
    """

    def __init__(self, table: Sequence[Sequence[float]] | None = None) -> None:
        """table: [match, mass, hits, tries] of each cell; the shipped one if not given."""
        self.cells = [[1.0, 4.0] for _ in range(_MATCHES * _MASSES)]  # hits and tries
        for match, mass, hits, tries in priors()["lookups"] if table is None else table:
            self.cells[int(match) * _MASSES + int(mass)] = [hits, tries]
        self._odds = [_odds(*cell) for cell in self.cells]
        self._texts: dict[int, list[float]] = {}  # slot -> hits, what the table expected of them, tries

    def survival(self, slot: int, offer: Offer) -> list[float]:
        """The probability that each node is accepted, 1 for the root."""
        shift, out, levels = self.shift(slot), [1.0], [offer.match]
        nodes, masses, known = offer.nodes, offer.masses, self._odds
        for n in range(1, len(nodes)):
            parent = nodes[n][1]
            match = levels[parent]
            levels.append(match + 1)
            odds = known[_place(match, masses[n] / masses[parent])] * shift
            out.append(out[parent] * odds / (1 + odds))
        return out

    def learn(self, slot: int, offer: Offer, tokens: Sequence[int], ended: bool) -> None:
        """What the text went on with. ended: it was cut there, so that nothing is known of what was not accepted."""
        text = self._texts.setdefault(slot, [0.0, 0.0, 0.0])
        text[:] = [_FADE * x for x in text]
        at, level = 0, 0
        for token in tokens:
            hit = -1
            best = 0.0
            for n in range(at + 1, len(offer.nodes)):
                if offer.nodes[n][1] == at:
                    best = max(best, offer.masses[n])
                    if offer.nodes[n][0] == token:
                        hit = n
            if not best or (hit < 0 and ended):
                return
            place = _place(offer.match + level, (offer.masses[hit] if hit >= 0 else best) / offer.masses[at])
            cell = self.cells[place]
            expected = cell[0] / cell[1]
            if level < _DEEP:
                if cell[1] >= _TABLE:
                    cell[:] = [x * (1 - 1 / _TABLE) for x in cell]
                cell[0] += hit >= 0
                cell[1] += 1
                self._odds[place] = _odds(*cell)
            text[0] += hit >= 0
            text[1] += expected
            text[2] += 1
            if hit < 0:
                return
            at, level = hit, level + 1

    def release(self, slot: int) -> None:
        """The text in this slot has ended."""
        self._texts.pop(slot, None)

    def shift(self, slot: int) -> float:
        """The factor on the odds of this text."""
        hits, expected, tries = self._texts.get(slot, (0.0, 0.0, 0.0))
        if not tries:
            return 1.0
        usual = min(max(expected / tries, 0.02), 0.98)
        here = min(max((hits + _TEXT * usual) / (tries + _TEXT), 0.02), 0.995)
        return here / (1 - here) * (1 - usual) / usual


def _odds(hits: float, tries: float) -> float:
    chance = min(max(hits / tries, 0.001), 0.999)
    return chance / (1 - chance)


def _place(match: int, mass: float) -> int:
    """The cell of a token that goes on a match of so many tokens with this share of what was found."""
    return match_cell(match) * _MASSES + min(int(mass * _MASSES), _MASSES - 1)


def match_cell(match: int) -> int:
    """The row of the table for a match of so many tokens: 0-1, 2, 3, 4-5, 6-9, more."""
    return _ROW[match] if match < len(_ROW) else _MATCHES - 1


@dataclass
class Means:
    """Running means over the steps that asked a drafter. tokens: accepted. levels: drafted. nodes: verified."""

    tokens: float = 0.0
    levels: float = 0.0
    nodes: float = 0.0
    weight: float = 0.0

    def add(self, tokens: float, levels: float, nodes: float) -> None:
        self.weight += 1
        rate = 1 / self.weight
        self.tokens += rate * (tokens - self.tokens)
        self.levels += rate * (levels - self.levels)
        self.nodes += rate * (nodes - self.nodes)


@dataclass
class Truth:
    """Accepted tokens over those that the stated chances promised. Sums, fading."""

    accepted: float = 0.0
    promised: float = 0.0

    def add(self, accepted: float, promised: float, memory: float) -> None:
        self.accepted = memory * self.accepted + accepted
        self.promised = memory * self.promised + promised

    def ratio(self, usual: float, weight: float) -> float:
        """The ratio. usual: that of other texts, which counts for `weight` promised tokens."""
        return (self.accepted + weight * usual) / (self.promised + weight)


@dataclass
class TextRecord:
    """A text's own means, how true the drafter's chances are in it, the share of its steps that no lookup wins, and its steps."""

    means: Means = field(default_factory=Means)
    truth: Truth = field(default_factory=Truth)
    free: float = 0.95
    steps: int = 0


class ModelBelief:
    """What asking a model brings: from the shipped chains at first, then from all texts, then from this text.

    Means of tokens, levels and nodes are kept, and the price is put on them when it is asked for. So another price or batch size
    needs no new observation. (A small change of the price changes the best policy, but its value only by the price itself.)
    """

    def __init__(self, kind: str) -> None:
        """kind: of the drafter, a name in the shipped chains."""
        every = priors()["chains"]
        self.chains = [[c / 100 for c in chain] for chain in every.get(kind, every["sibling"])]
        self.hits, self.tries = 16.0, 20.0  # of a token after an accepted one
        self.states: bool | None = None  # does the drafter state chances? None: it was not asked yet
        self.pool, self.truths, self.free, self._free_weight = Means(), Truth(), 0.95, 6.0
        self.texts: dict[int, TextRecord] = {}

    @property
    def chance(self) -> float:
        """The usual chance of a token whose parent was accepted."""
        return min(self.hits / self.tries, 0.99)

    def forecast(self, forward: Callable[[int], float], draft: Callable[[int], float]) -> DraftForecast:
        """What the shipped chains promise at these costs, for one sequence."""
        return forecast(self.chains, forward, draft, 0.8)

    def text(self, slot: int) -> TextRecord:
        record = self.texts.get(slot)
        if record is None:
            record = self.texts[slot] = TextRecord(free=self.free)
        return record

    def means(self, slot: int, prior: DraftForecast) -> tuple[float, float, float, float]:
        """Expected tokens, levels and nodes of a step that asks it, and the weight of this text's own steps."""
        own, pool = self.text(slot).means, self.pool
        known = _PRIOR + pool.weight
        a, b, c = _OWN * _PRIOR / known, _OWN * pool.weight / known, own.weight
        total = _OWN + own.weight
        return (
            (a * prior.tokens + b * pool.tokens + c * own.tokens) / total,
            (a * prior.levels + b * pool.levels + c * own.levels) / total,
            (a * prior.nodes + b * pool.nodes + c * own.nodes) / total,
            own.weight,
        )

    def truth(self, slot: int) -> float:
        """The factor by which this text's tokens are accepted more often than their stated chances say."""
        return self.text(slot).truth.ratio(self.truths.ratio(1.0, _STATED), _STATED)

    def passed(self, slot: int, lookup_wins: bool) -> None:
        """A step has passed, with this drafter or without it."""
        record = self.text(slot)
        record.means.weight *= 1 - 1 / (_SHORT + _LONG * record.steps)  # of a long text more is known
        self.pool.weight *= _POOLED
        record.free += ((not lookup_wins) - record.free) / (min(record.steps, 12) + 5)
        record.steps += 1

    def ending(self, budget: Budget, least: float) -> Budget:
        """The budget of a chain that ends where its survival falls below `least`, as its drafter says or as its record says."""
        if self.states is False:
            return budget.clipped(max(int(math.log(least) / math.log(self.chance)), 1))
        depth, width, nodes = (budget if self.states else budget.clipped(_TRY)).parts
        return Budget(depth, width, nodes, least)

    def learn(
        self,
        slot: int,
        chances: Sequence[float],
        promised: float,
        levels: int,
        nodes: int,
        accepted: int,
        stated: bool = True,
        asked: bool = True,
    ) -> None:
        """A step that asked it.

        chances: survival of the verified levels, of the likeliest node of each. promised: the sum over all verified nodes.
        levels: drafted. nodes: verified. accepted: tokens. stated: the drafter said these chances; else they were predicted from
        its record. asked: it was asked for them.
        """
        if stated or asked:
            self.states = stated
        for level in range(
            1 if stated else 0, min(accepted + 1, len(chances))
        ):  # the chance of a token that follows accepted ones
            before = chances[level - 1] if level else 1.0
            self._continued(chances[level] / max(before, 1e-9) if stated else float(level < accepted))
        record = self.text(slot)
        tokens = (self.truth(slot) * promised + accepted) / 2  # the stated chances have less noise than the outcome
        record.truth.add(accepted, promised, _MEMORY)
        self.truths.add(accepted, promised, _TRUTHS)
        for means in (record.means, self.pool):
            means.add(tokens, levels, nodes)
        self.pool.weight = min(self.pool.weight, _POOL)

    def _continued(self, chance: float) -> None:
        if self.tries >= 60:
            self.hits, self.tries = self.hits * (1 - 1 / 60), self.tries * (1 - 1 / 60)
        self.hits, self.tries = self.hits + chance, self.tries + 1

    def release(self, slot: int) -> None:
        record = self.texts.pop(slot, None)
        if record is not None:
            self._free_weight = min(self._free_weight + 1, 24)
            self.free += (record.free - self.free) / self._free_weight


class AnswerLengths:
    """Expected tokens until the end of an answer, from the lengths of those that ended lately."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=_ANSWERS)

    def observe(self, length: int) -> None:
        """An answer has ended after so many tokens."""
        self._ended.append(length)

    def remaining(self, written: int) -> float:
        """The mean of what was left of earlier answers when they had this length. An answer that outgrows all of them is
        expected to grow by half.

        written: tokens of this answer so far.
        """
        usual = max(_USUAL - written, written / 2, _LEAST)
        left = [length - written for length in self._ended if length > written]
        return (sum(left) + _WEIGHT * usual) / (len(left) + _WEIGHT)
