"""Where a controller's seconds come from: learned from the steps themselves, or from a calibrated model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

from outrider.control.acceptance import Curve
from outrider.control.cost_model import CostModel, interpolate
from outrider.core.types import Budget, Step

_NODE = 0.05  # a node's share of a plain step, until it was measured
_WARM = 2  # measurements of plain decoding before anything is compared with it
_ENOUGH = 3  # of drafts, before they are given up: a machine pauses now and then
_RECENT = 9  # measurements whose median is believed
_NEAR = 3  # steps of either kind that are compared where plain and drafted ones meet
_DOUBT = 2.0  # such meetings that the calibration counts for
_GROSS = 1.5  # the log of how far they may seem apart
_MEETING = 0.95  # what a meeting leaves of those before it
SETTLE = 4  # plain steps after drafted ones that pay for their traces in the processor's caches


class Costs:
    """Seconds learned from steps, by the number of rows. A curve over nodes for the target and all that is not the draft,
    another over depth for the draft; medians, so that a pause of the machine changes nothing."""

    plain_gaps = (32, 1024)  # drafted steps between measurements of plain decoding: the least and the most
    thinking = 2e-4  # seconds, about, of a decision by these costs
    shapes = False  # are chains and trees told apart?

    def __init__(self) -> None:
        self.target: dict[int, Curve] = {}  # rows -> seconds by nodes drafted in the longest row
        self.draft: dict[int, Curve] = {}  # rows asked -> seconds by depth
        self.read = Curve()  # one point: seconds per token a drafter had to catch up with
        self._unsettled = 2  # plain steps that are not measured yet
        self._drafting = False  # was the step before drafted?

    @property
    def settled(self) -> bool:
        """Have enough drafts been timed that were not mixed with reading?"""
        return any(sum(map(curve.count, curve.samples)) >= _ENOUGH for curve in self.draft.values())

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

    def forget_plain(self, rows: int) -> None:
        """Believe of plain steps only what is measured from now on."""
        if rows in self.target:
            self.target[rows].forget(0)

    def step(self, rows: int, budget: Budget, came: Sequence[float]) -> float:
        """Seconds of a step that drafts so much; came[n]: the chance that more than n guesses come."""
        plain = self.plain(rows)
        assert plain is not None
        curve = self._like(self.target, rows)
        base = curve.at(0) if curve else None
        scale = plain / base if base else 1.0
        total, last = plain, plain
        for n, chance in enumerate(came[: budget.max_nodes], 1):
            here = scale * (curve.at(n) or 0.0) if curve and base else plain * (1 + _NODE * n)
            total, last = total + chance * (here - last), here
        return total + self.drafting(rows, budget)

    def drafting(self, rows: int, budget: Budget) -> float:
        """Seconds of a draft for so many rows."""
        draft = self._like(self.draft, rows)
        return (draft.at(budget.depth) or 0.0) if draft else 0.0

    def reading(self, tokens: int) -> float:
        """Seconds in which the drafter reads so many tokens; nothing as long as none was seen to read."""
        return tokens * (self.read.at(0) or 0.0) if tokens > 1 else 0.0

    def observe(self, step: Step, nodes: int, behind: int) -> float:
        """nodes: of the longest row. behind: tokens the drafter had missed, of all rows. Returns the seconds it took to
        read them."""
        rows, taken = len(step.slots), step.seconds
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
    """Seconds from a calibrated model, corrected by how long the steps really take. `pace` is how fast the machine is just now:
    the median of the last few steps, plain or drafted. `share`: how much dearer than the model says drafted steps and drafts
    are beside plain ones. It is learned only where plain and drafted steps meet, and from several meetings, for what is
    measured at other times may be of another pace."""

    plain_gaps = (32, 2048)
    thinking = 2e-3
    shapes = True

    def __init__(self, model: CostModel) -> None:
        super().__init__()
        self.model, self.context = model, 0
        self.pace = 1.0
        self.share = {"plain": 1.0, "drafted": 1.0, "draft": 1.0}
        self._measured = 0  # plain steps
        # kinds of steps, and logs of their seconds over the model's; such logs of drafts, less those of their steps
        self._lately, self._drafts = deque[tuple[str, float]](maxlen=_RECENT), deque[float](maxlen=_RECENT)
        # rows and kind of the last steps, their logs, and those of the last steps of the other kind
        self._last, self._now, self._before = (0, ""), list[float](), list[float]()
        self._apart, self._meetings = 0.0, 0.0
        self._known: dict[tuple[int, int, int, int], float] = {}

    @property
    def settled(self) -> bool:
        return True

    @property
    def drift(self) -> dict[str, float]:
        """By kind: seconds over those of the model."""
        return {kind: self.pace * share for kind, share in self.share.items()}

    def plain(self, rows: int) -> float | None:
        if self._measured < _WARM:
            return None
        return self.pace * (self._target(rows, 0) + self._draft(rows, 0, 1))

    def forget_plain(self, rows: int) -> None:
        self._measured = 0

    def step(self, rows: int, budget: Budget, came: Sequence[float]) -> float:
        total = last = self._target(rows, 0)
        for n, chance in enumerate(came[: budget.max_nodes], 1):
            here = self._target(rows, n)
            total, last = total + chance * (here - last), here
        return self.pace * self.share["drafted"] * total + self.drafting(rows, budget)

    def drafting(self, rows: int, budget: Budget) -> float:
        return self.pace * self.share["draft"] * self._draft(rows, budget.depth, budget.width) if rows else 0.0

    def reading(self, tokens: int) -> float:
        return self.pace * self.share["draft"] * self.model.prefill * tokens if tokens > 1 else 0.0

    def observe(self, step: Step, nodes: int, behind: int) -> float:
        self.context = max(step.positions)
        rows, draft = len(step.slots), step.seconds["draft"]
        rest = sum(step.seconds.values()) - draft + self.model.fixed
        asked = sum(b.depth > 0 for b in step.budgets)
        if not asked:
            if self._unsettled:
                self._unsettled -= 1
            else:
                self._measured += 1
                self._saw(rows, "plain", (rest + draft) / (self._target(rows, 0) + self._draft(rows, 0, 1)))
            return 0.0
        self._unsettled = SETTLE
        largest = max(step.budgets, key=lambda b: (b.depth, b.width))
        read = self.reading(behind)
        own = self._saw(rows, "drafted", rest / self._target(rows, nodes))
        if behind <= largest.depth + 1:
            drafting = max(draft / self._draft(asked, largest.depth, largest.width), 0.01)
            self._drafts.append(math.log(drafting) - own)
            self.share["draft"] = self.share["drafted"] * math.exp(median_low(self._drafts))
        return read

    def _saw(self, rows: int, kind: str, factor: float) -> float:
        """A step that took so many times its seconds in the model. Returns the log of that."""
        own = math.log(max(factor, 0.01))
        if self._last != (rows, kind):
            self._before = self._now[-_NEAR:] if self._last[0] == rows else []
            self._last, self._now = (rows, kind), []
        self._now.append(own)
        if len(self._now) == len(self._before) == _NEAR:
            apart = min(self._now) - min(self._before)  # a machine pauses, it never hurries
            apart = min(max(apart if kind == "drafted" else -apart, -_GROSS), _GROSS)
            self._apart, self._meetings = _MEETING * self._apart + apart, _MEETING * self._meetings + 1
            self.share["drafted"] = math.exp(self._apart / (self._meetings + _DOUBT))
        self._lately.append((kind, own))
        shares = {name: math.log(share) for name, share in self.share.items()}
        self.pace = math.exp(median_low([own - shares[name] for name, own in self._lately]))
        return own

    def _target(self, rows: int, nodes: int) -> float:
        """A step without its draft, at about this context."""
        key = (rows, -1 - nodes, 0, self.context // 64)
        if key not in self._known:
            self._known[key] = self.model.fixed + self.model.target_seconds(rows, nodes + 1, self.context)
        return self._known[key]

    def _draft(self, rows: int, depth: int, width: int) -> float:
        key = (rows, depth, width, self.context // 64)
        if key not in self._known:
            self._known[key] = max(self.model.draft_seconds(rows, depth, self.context, width), 1e-7)
        return self._known[key]
