"""What steps cost: measured once, then corrected by every step. No clock: seconds are told."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from pydantic import TypeAdapter, ValidationError

from outrider.core.interpolate import interpolate
from outrider.core.suggest import faults

# Nodes between which a forward's seconds are straight lines.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_BASE = 4  # the curve is corrected at its powers: few places have little noise
_WEIGHT = 12.0  # steps that a correction of the pace is the mean of
_SHAPE = 24.0  # and a correction of the curve
_PART = 0.25  # weight of a step over several nodes in the pace: the curve may explain it
_DOUBT = 2.0  # steps that the measurement counts for
_GROSS = 0.8  # bound on the logarithm of seconds taken over seconds believed: a machine pauses now and then
_FASTER, _ENOUGH = 0.8, 48  # the pace from which a measurement is wrong, and the steps that prove it
_UNKNOWN = (0.02, 0.1, 0.05)  # first, level and read of a drafter that was not measured, in plain steps


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter for one sequence. first: of any draft. level: of each level. read: of a token that it missed."""

    first: float
    level: float
    read: float

    def seconds(self, levels: float) -> float:
        """Of a draft of so many levels, at least one."""
        return self.first + self.level * levels


@dataclass(frozen=True)
class CostModel:
    """What `outrider.engine.calibrate` measured. key: what it was measured on; another key wants another measurement.

    target: seconds of a step without its draft, by the nodes of all its sequences, the roots counted. drafters: by name.
    attention: what each node adds for each token of the text behind it that a layer reads. windows: layers by the tokens that
    they read at most; 0: the whole text.
    """

    key: dict[str, str]
    target: dict[int, float]
    drafters: dict[str, DraftCost] = field(default_factory=lambda: dict[str, DraftCost]())
    attention: float = 0.0
    windows: dict[int, int] = field(default_factory=lambda: {0: 1})

    def forward(self, nodes: int) -> float:
        """Seconds of a step without its draft."""
        return interpolate(self.target, nodes)

    def attending(self, behind: float) -> float:
        """Seconds that so many tokens of text behind it add to a node."""
        return self.attention * tokens_read(self.windows, behind)

    def draft(self, name: str, levels: int) -> float:
        """Seconds of a draft for one sequence; 0 without levels, and for a drafter that costs nothing."""
        cost = self.drafters.get(name)
        return 0.0 if cost is None or not levels else cost.seconds(levels)

    def faster(self, other: CostModel) -> CostModel:
        """The faster of two measurements, size by size: other programs can only slow a step down."""
        target = {n: min(seconds, other.target.get(n, seconds)) for n, seconds in self.target.items()}
        sizes = sorted(target)
        for few, many in zip(sizes[-2::-1], sizes[:0:-1], strict=True):  # more nodes never take less
            target[few] = min(target[few], target[many])
        drafters = {
            name: DraftCost(*map(min, astuple(cost), astuple(other.drafters.get(name, cost))))
            for name, cost in self.drafters.items()
        }
        return replace(self, target=target, drafters=drafters, attention=min(self.attention, other.attention))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Raises ValueError for a text that holds no cost model."""
        try:
            model = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(
                f"this is no cost model ({faults(error)[0]}); measure again: outrider calibrate MODEL"
            ) from None
        if not model.target or min(model.target.values()) <= 0:
            raise ValueError("this cost model has no seconds of the target; measure again: outrider calibrate MODEL")
        return model


def tokens_read(windows: Mapping[int, int], behind: float) -> float:
    """Tokens of a text that a layer reads, the mean of all layers. windows: as in `CostModel`. behind: tokens of the text."""
    layers = sum(windows.values())
    return sum(count * min(behind, window or behind) for window, count in windows.items()) / max(layers, 1)


class Correction:
    """A running mean of logarithms: seconds taken over seconds believed."""

    def __init__(self) -> None:
        self.log, self.factor, self.weight = 0.0, 1.0, _DOUBT

    def learn(self, ratio: float, sure: bool = True) -> None:
        """ratio: seconds taken over seconds believed, this correction included. sure: nothing else can explain it."""
        if sure:
            self.weight = min(self.weight + 1, _WEIGHT)
        rate = 1 / self.weight if sure else _PART / _WEIGHT
        self.log += rate * min(max(math.log(max(ratio, 1e-9)), -_GROSS), _GROSS)
        self.factor = math.exp(self.log)


class Costs:
    """The costs of a cost model, corrected by what steps take.

    The target has a pace, which all its steps share, and a curve over nodes. Each drafter has a pace of its own.

    keep: is called once with the corrected costs if steps or drafts are much faster than the measurement: another program ran
    then. A machine that is slow now is no reason to forget what it can do.
    """

    def __init__(self, model: CostModel, keep: Callable[[CostModel], None] | None = None) -> None:
        self.model, self._keep, self._steps = model, keep, 0
        self._behind = self._attention = 0.0  # seconds that the text behind it adds to a node
        self._base = [model.forward(n) for n in SIZES]
        self._curve = list(self._base)
        self._logs, self._seen = [0.0] * 5, [0.0] * 5  # corrections at 1, 4, 16, 64 and 256 nodes
        self.pace = Correction()
        self.paces: dict[str, Correction] = {}

    @property
    def behind(self) -> float:
        """Tokens of the text behind a node of the step that is weighed now. Attention over them takes time in proportion."""
        return self._behind

    @behind.setter
    def behind(self, tokens: float) -> None:
        self._behind, self._attention = tokens, self.model.attending(tokens)

    def forward(self, nodes: float) -> float:
        """Seconds of a step without its draft, over so many nodes of all its sequences."""
        at, share = _between(nodes)
        low = self._curve[at]
        return self.pace.factor * (low + share * (self._curve[at + 1] - low) + self._attention * nodes)

    def more(self, nodes: float, count: int) -> list[float]:
        """Seconds that 1, 2, ... `count` further nodes add to a step over `nodes`."""
        at, share = _between(nodes)
        last = len(SIZES) - 2
        slopes = list[float]()
        while len(slopes) < count:
            width = SIZES[at + 1] - SIZES[at]
            slope = (self._curve[at + 1] - self._curve[at]) / width + self._attention
            room = count if at == last else max(round((1 - share) * width), 1)
            slopes += [slope] * min(room, count - len(slopes))
            at, share = min(at + 1, last), 0.0
        factor = self.pace.factor
        return [factor * seconds for seconds in accumulate(slopes)]

    def draft(self, name: str, rows: int, levels: float) -> float:
        """Seconds of a draft of so many levels for so many sequences together."""
        if not rows or not levels:
            return 0.0
        return self._pace(name) * self._together(rows) * self._cost(name).seconds(levels)

    def reading(self, name: str, tokens: int) -> float:
        """Seconds in which a drafter reads tokens that it has missed."""
        return self._pace(name) * self._cost(name).read * tokens if tokens > 0 else 0.0

    def observe_forward(self, nodes: int, seconds: float) -> None:
        """A step over so many nodes took so long without its draft."""
        if seconds <= 0:
            return
        self._steps += 1
        if self._keep is not None and self._steps % _ENOUGH == 0 and min(self.drift.values()) < _FASTER:
            self._keep(self._corrected().faster(self.model))
            self._keep = None
        ratio = seconds / self.forward(nodes)
        self.pace.learn(ratio, nodes == 1)
        if nodes == 1:
            return  # the curve at one node is the pace
        log, (at, share) = min(max(math.log(ratio), -_GROSS), _GROSS), _power(nodes)
        for place, part in ((at, 1 - share), (at + 1, share)):
            if place and part > 0:
                self._seen[place] = min(self._seen[place] + part, _SHAPE)
                self._logs[place] += part * log / (self._seen[place] + _DOUBT)
        logs = self._logs
        self._curve = [
            seconds * math.exp(logs[at] + share * (logs[at + 1] - logs[at]))
            for seconds, (at, share) in zip(self._base, _PLACES, strict=True)
        ]

    def observe_draft(self, name: str, rows: int, levels: int, read: int, seconds: float) -> None:
        """A draft of so many levels took so long, with the reading of so many missed tokens before it."""
        believed = self.draft(name, rows, levels) + self.reading(name, read)
        if believed > 0 and seconds > 0:
            self.paces.setdefault(name, Correction()).learn(seconds / believed)

    @property
    def drift(self) -> dict[str, float]:
        """Seconds taken over seconds measured: of a plain step, and of each drafter."""
        return {"target": self.pace.factor, **{name: pace.factor for name, pace in self.paces.items()}}

    def _corrected(self) -> CostModel:
        """A drafter that did not draft was measured beside the same program as the target."""
        paces = {name: self.paces.get(name, self.pace).factor for name in self.model.drafters}
        drafters = {n: DraftCost(*(paces[n] * part for part in astuple(c))) for n, c in self.model.drafters.items()}
        pace = self.pace.factor
        target = {n: self.forward(n) - pace * self._attention * n for n in self.model.target}
        return replace(self.model, target=target, drafters=drafters, attention=pace * self.model.attention)

    def _pace(self, name: str) -> float:
        pace = self.paces.get(name)
        return 1.0 if pace is None else pace.factor

    def _cost(self, name: str) -> DraftCost:
        cost = self.model.drafters.get(name)
        if cost is None:
            cost = DraftCost(*(part * self._base[0] for part in _UNKNOWN))
        return cost

    def _together(self, rows: int) -> float:
        """A drafter that drafts for many sequences slows down as the target does."""
        return self.forward(rows) / self.forward(1) if rows > 1 else 1.0


@lru_cache(512)
def _between(nodes: float) -> tuple[int, float]:
    """The size at or below `nodes`, as an index, and how far they are on the way to the next; over 1 beyond the last."""
    at = min(max(bisect_right(SIZES, nodes) - 1, 0), len(SIZES) - 2)
    return at, (nodes - SIZES[at]) / (SIZES[at + 1] - SIZES[at])


def _power(nodes: int) -> tuple[int, float]:
    """The power of `_BASE` at or below `nodes`, and how far they are on the way to the next."""
    at = min(int(math.log(nodes, _BASE) + 1e-9), 3)
    return at, min(math.log(nodes, _BASE) - at, 1.0)


_PLACES = [_power(size) for size in SIZES]


def assumed(plain: float, weights: Mapping[str, float]) -> CostModel:
    """A cost model that was not measured. plain: seconds of a plain step. weights: of each drafter that has a cost, its bytes
    over the target's."""
    drafters = {
        name: DraftCost(0.1 * share * plain, share * plain, share * plain / 8) for name, share in weights.items()
    }
    return CostModel({}, {1: plain, 4: 1.35 * plain, 16: 3.0 * plain}, drafters)
