"""What steps cost: measured once, then corrected by every step. No clock: seconds are told."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace

from pydantic import TypeAdapter, ValidationError

from outrider.core.suggest import faults

RATE = 0.05  # of all moving averages. [half, double] cost so many hundredths in `benchmarks.replays`: [0.1, 1.2; -0.4, 1.8]
GROSS = 0.8  # bound on the logarithm of seconds taken over seconds believed: a machine pauses now and then. 0.4, 1.6 cost 0.0
MOST = 256  # nodes of a step up to which costs bend
# So many nodes more cost a plain step at most, until steps show more: what looks expensive is not tried, so no step would tell.
# [half, double] cost first requests in `benchmarks.replays` so many hundredths: right costs [0.0, 0.0], costs of several nodes
# that are five times too high [34.9, -10.3], and without a bound 64.4; four nodes that cost 2.4 plain steps [0.0, 1.0].
STEEP = 3.0


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a drafter for one sequence."""

    first: float  # of any draft
    level: float  # of each level
    read: float  # of a token that it missed

    def seconds(self, levels: float) -> float:
        """Of a draft of so many levels, at least one."""
        return self.first + self.level * levels


@dataclass(frozen=True)
class CostModel:
    """What `outrider.engine.calibrate` measured."""

    key: dict[str, str]  # what it was measured on; another key wants another measurement
    # seconds of a step without its draft, by the nodes of all its sequences, the roots counted
    target: dict[int, float]
    drafters: dict[str, DraftCost] = field(default_factory=lambda: dict[str, DraftCost]())  # by name
    attention: float = 0.0  # seconds that each node adds for each token of the text behind it that a layer reads
    # layers by the tokens that they read at most; 0: all
    windows: dict[int, int] = field(default_factory=lambda: {0: 1})

    def forward(self, nodes: int) -> float:
        """Seconds of a step without its draft."""
        return interpolate(self.target, nodes)

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
                f"this is no cost model ({faults(error)[0]}); measure again: outrider doctor MODEL"
            ) from None
        if not model.target or min(model.target.values()) <= 0:
            raise ValueError("this cost model has no seconds of the target; measure again: outrider doctor MODEL")
        return model


def tokens_read(windows: Mapping[int, int], behind: float) -> float:
    """Tokens of a text that a layer reads, the mean of all layers. windows: as in `CostModel`. behind: tokens of the text."""
    layers = sum(windows.values())
    return sum(count * min(behind, window or behind) for window, count in windows.items()) / max(layers, 1)


class Costs:
    """The costs of a cost model, corrected by what steps take.

    All steps of the target share a pace, and steps of 4, 16, 64 and 256 nodes have a correction of their own; between them it is
    interpolated, and sizes that were not seen yet follow smaller ones. A drafter has a pace for each power of two of the
    sequences that it drafts for.
    """

    def __init__(self, model: CostModel) -> None:
        self.model, self.behind, self._attention = model, 0.0, 0.0
        plain = model.forward(1)
        self._base = [min(model.forward(max(n, 1)), plain + plain * max(n - 1, 0) / STEEP) for n in range(MOST + 1)]
        self._logs, self._seen = [0.0] * 5, [0.0] * 5  # corrections at 1, 4, 16, 64 and 256 nodes, and what showed them
        self._paces = {("", 1): (0.0, 0.0)}  # corrections of the target and of drafters, and steps
        # that of the target; corrected seconds by nodes, where asked for
        self._pace, self._bent = 1.0, dict[int, float]()

    def stand(self, behind: float) -> None:
        """Steps are weighed behind so many tokens of a text from now on. Attention over them takes time in proportion."""
        if behind != self.behind:
            self.behind = behind
            self._attention = self.model.attention * tokens_read(self.model.windows, behind)

    def forward(self, nodes: float) -> float:
        """Seconds of a step without its draft, over so many nodes of all its sequences."""
        return self.forwards(nodes, 1)[0]

    def forwards(self, nodes: float, count: int) -> list[float]:
        """`forward` of so many nodes, of one more, and so on: `count` of them."""
        out, first, logs, bent = list[float](), round(nodes), self._logs, self._bent
        for n in range(first, first + count):
            if (seconds := bent.get(n)) is None:
                at, share = _PLACES[min(n, MOST)]
                base = self._base[min(n, MOST)] * max(n / MOST, 1.0)
                bent[n] = seconds = base * math.exp(logs[at] + share * (logs[at + 1] - logs[at]))
            out.append(self._pace * (seconds + self._attention * n))
        return out

    def call(self, name: str, rows: int) -> tuple[float, float]:
        """Seconds of a draft of one level for so many sequences together, and of each level more. Before it was seen for so many,
        it is thought to slow down as the target does."""
        together = self.forward(rows) / self.forward(1) if rows > 1 else 1.0
        factor, cost = self._factor(name, rows) * together, self._cost(name)
        return factor * (cost.first + cost.level), factor * cost.level

    def draft(self, name: str, rows: int, levels: float) -> float:
        """Seconds of a draft of so many levels for so many sequences together."""
        first, level = self.call(name, rows)
        return first + level * (levels - 1) if levels else 0.0

    def reading(self, name: str, tokens: int) -> float:
        """Seconds in which a drafter reads tokens that it has missed."""
        return self._factor(name, 1) * self._cost(name).read * tokens if tokens > 0 else 0.0

    def observe_forward(self, nodes: int, seconds: float) -> None:
        """A step over so many nodes took so long without its draft."""
        if seconds <= 0:
            return
        ratio = seconds / self.forward(nodes)
        at, share = _PLACES[min(nodes, MOST)]
        self._learn(("", 1), ratio, 1.0 if nodes == 1 else 0.25)  # the curve may explain a step over several nodes
        self._pace = self._factor("", 1)
        if nodes == 1:
            return  # the curve at one node is the pace
        parts = [(place, part) for place, part in ((at, 1 - share), (at + 1, share)) if place and part]
        whole, move = sum([part * part for _, part in parts]), 0.0
        for place, part in parts:  # the measurement counts as a step
            move = part * max(RATE, 1 / (self._seen[place] + 2 * whole)) * _bounded(ratio)
            self._logs[place] += move
            self._seen[place] += part * part
        for place in range(parts[-1][0] + 1, len(self._logs)):
            self._logs[place] += 0.0 if self._seen[place] else move
        self._bent.clear()

    def observe_draft(self, name: str, rows: int, levels: int, read: int, seconds: float) -> None:
        """A draft of so many levels took so long, with the reading of so many missed tokens before it."""
        believed = self.draft(name, rows, levels) + self.reading(name, read)
        if believed > 0 and seconds > 0:
            self._learn((name, max(rows.bit_length(), 1)), seconds / believed)

    def _learn(self, key: tuple[str, int], ratio: float, weight: float = 1.0) -> None:
        log, steps = self._paces.get(key, (0.0, 0.0))
        steps += weight
        self._paces[key] = log + weight * max(RATE, 1 / steps) * _bounded(ratio), steps

    def _factor(self, name: str, rows: int) -> float:
        """The correction of a drafter for so many sequences; that for one where it was not seen for so many."""
        return math.exp((self._paces.get((name, rows.bit_length())) or self._paces.get((name, 1), (0.0, 0.0)))[0])

    def _cost(self, name: str) -> DraftCost:
        return self.model.drafters.get(name) or _share(0.1, self._base[1])


def _bounded(ratio: float) -> float:
    """The logarithm of seconds taken over seconds believed."""
    return min(max(math.log(max(ratio, 1e-9)), -GROSS), GROSS)


def _power(nodes: int) -> tuple[int, float]:
    """The power of 4 at or below `nodes`, and how far they are on the way to the next."""
    at = min(int(math.log(nodes, 4) + 1e-9), 3)
    return at, min(math.log(nodes, 4) - at, 1.0)


_PLACES = [_power(max(size, 1)) for size in range(MOST + 1)]


def _share(share: float, plain: float) -> DraftCost:
    """The costs of a drafter that was not measured: of so large a part of the target, whose plain step takes `plain` seconds."""
    return DraftCost(0.1 * share * plain, share * plain, share * plain / 8)


def assumed(plain: float, weights: Mapping[str, float]) -> CostModel:
    """A cost model that was not measured. plain: seconds of a plain step. weights: of each drafter that has a cost, its bytes
    over the target's."""
    drafters = {name: _share(share, plain) for name, share in weights.items()}
    return CostModel({}, {1: plain, 4: 1.35 * plain, 16: 3.0 * plain}, drafters)


def interpolate(points: Mapping[int, float], x: float) -> float:
    """Straight lines through the points; beyond them the last line goes on, never downwards. One point is level."""
    xs = sorted(points)
    if x in points:
        return points[int(x)]
    if len(xs) == 1:
        return points[xs[0]]
    at = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low, high = xs[at - 1], xs[at]
    slope = (points[high] - points[low]) / (high - low)
    if x > xs[-1]:
        return points[high] + max(slope, 0.0) * (x - high)
    if x < xs[0]:
        return max(points[low] + slope * (x - low), 0.0)
    return points[low] + slope * (x - low)
