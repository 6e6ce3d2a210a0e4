"""Where a controller's seconds come from: learned from the steps themselves, or from a calibrated model."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.tune.cost import CostModel, interpolate
from outrider.tune.observed import Curve
from outrider.types import Step

_NODE = 0.05  # a node's share of a plain step, and
_WARM = 2  # measurements of plain decoding before anything is compared with it
SETTLE = 4  # plain steps after drafted ones that pay for their traces in the processor's caches


class Costs:
    """Seconds learned from steps, by the number of rows. A curve over nodes for the target and all that is not the draft,
    another over depth for the draft; medians, so that a pause of the machine changes nothing."""

    learns = True  # plain steps must be measured now and then

    def __init__(self) -> None:
        self.target: dict[int, Curve] = {}  # rows -> seconds by nodes drafted in the longest row
        self.draft: dict[int, Curve] = {}  # rows asked -> seconds by depth
        self.read = Curve()  # one point: seconds per token a drafter had to catch up with
        self._unsettled = 2  # plain steps that are not measured yet
        self._drafting = False  # was the step before drafted?

    @property
    def settled(self) -> bool:
        """Has a draft been timed that was not mixed with reading?"""
        return any(curve.samples for curve in self.draft.values())

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step, or None where none was measured near."""
        own = self.target.get(rows)
        if own is not None and own.count(0) >= _WARM:
            return own.at(0)
        known = {r: c.at(0) for r, c in self.target.items() if c.count(0) >= _WARM}
        low, high = [r for r in known if r < rows], [r for r in known if r > rows]
        if not low or not high or min(high) > 2 * max(low):
            return None
        return interpolate({r: known[r] or 0.0 for r in (max(low), min(high))}, rows)

    def step(self, rows: int, depth: int, came: Sequence[float]) -> float:
        """Seconds of a step that drafts `depth` levels; came[n]: the chance that it has more than n nodes."""
        plain = self.plain(rows)
        assert plain is not None
        curve = self._like(self.target, rows)
        base = curve.at(0) if curve else None
        scale = plain / base if base else 1.0
        total, last = plain, plain
        for n, chance in enumerate(came, 1):
            here = scale * (curve.at(n) or 0.0) if curve and base else plain * (1 + _NODE * n)
            total, last = total + chance * (here - last), here
        draft = self._like(self.draft, rows)
        return total + ((draft.at(depth) or 0.0) if draft else 0.0)

    def reading(self, tokens: int) -> float:
        """Seconds in which the drafter reads so many tokens; nothing as long as none was seen to read."""
        return tokens * (self.read.at(0) or 0.0) if tokens > 1 else 0.0

    def observe(self, step: Step, nodes: int, behind: int) -> float:
        """nodes: of the longest row. behind: tokens the drafter had missed, of all rows. Returns the seconds it took to
        read them."""
        rows, taken = len(step.rows), step.seconds
        asked = [b.depth for b in step.budgets if b.depth]
        rest = sum(taken.values()) - taken["draft"]
        steady, self._drafting = self._drafting and bool(asked), bool(asked)
        curve = self.target.setdefault(rows, Curve(slope=_NODE))
        if asked:
            self._unsettled = SETTLE
            if steady:
                curve.add(nodes, rest)
            return self._drafted(len(asked), max(asked), taken["draft"], behind, steady)
        if self._unsettled:
            self._unsettled -= 1
        else:
            curve.add(0, rest + taken["draft"])
        return 0.0

    def _drafted(self, asked: int, depth: int, seconds: float, behind: int, steady: bool) -> float:
        curve = self.draft.setdefault(asked, Curve(start=0.0))
        if behind <= 1:
            if steady:
                curve.add(depth, seconds)
            return 0.0
        known = self._like(self.draft, asked)
        usual = (known.at(depth) or 0.0) if known and known.samples else 0.0
        extra = max(seconds - usual, 0.0)
        if behind >= 8:
            self.read.add(0, extra / behind)
        return extra

    @staticmethod
    def _like(curves: dict[int, Curve], rows: int) -> Curve | None:
        """The curve for so many rows if it has a slope, else the nearest that has one, else its own."""
        full = [r for r, c in curves.items() if len(c.samples) + (0 in c.medians and not c.count(0)) > 1]
        nearest = min(full, key=lambda r: abs(r - rows), default=None)
        return curves[nearest] if nearest is not None else curves.get(rows)


class Calibrated(Costs):
    """Seconds from a calibrated model, scaled by how long the steps really take: `drift` is that factor, 1 where the
    machine is as it was."""

    learns = False

    def __init__(self, model: CostModel) -> None:
        super().__init__()
        self.model, self.drift, self.context = model, 1.0, 0

    @property
    def settled(self) -> bool:
        return True

    def plain(self, rows: int) -> float:
        return self.drift * self.model.step_seconds(rows, 0, 0, self.context)

    def step(self, rows: int, depth: int, came: Sequence[float]) -> float:
        model = self.model
        total = last = model.target_seconds(rows, 1, self.context)
        for n, chance in enumerate(came, 1):
            here = model.target_seconds(rows, n + 1, self.context)
            total, last = total + chance * (here - last), here
        return self.drift * (model.fixed + total + model.draft_seconds(rows, depth, self.context))

    def reading(self, tokens: int) -> float:
        return self.drift * self.model.prefill * tokens if tokens > 1 else 0.0

    def observe(self, step: Step, nodes: int, behind: int) -> float:
        self.context = max(step.positions)
        depth = max(b.depth for b in step.budgets)
        read = self.reading(behind)
        expected = self.model.step_seconds(len(step.rows), depth, nodes, self.context) + read / self.drift
        seen = sum(step.seconds.values()) / expected
        self.drift += 0.05 * (min(max(seen, 0.2), 5.0) - self.drift)
        return read
