"""The seconds that a controller counts with: learned from the steps themselves, or calibrated and then corrected.

`Costs` has two halves. The target's half times plain steps and verification; it is the same for every drafter. The draft's
half times one drafter. Learned: `LearnedTarget` and `LearnedDraft`. From a cost model: `CalibratedTarget`, `CalibratedDraft`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import Protocol

from outrider.control.cost_model import CostModel, interpolate
from outrider.core.types import Budget, Step

SETTLE = 4  # plain steps after drafted ones that are not measured: the draft has emptied the processor's caches
_NODE = 0.05  # cost of one more node in plain steps, until it was measured
_WARM = 2  # plain steps to measure before anything is compared with them
_ENOUGH = 3  # drafted steps to measure before drafting is judged: a machine pauses now and then
_RECENT = 9  # measurements whose median counts
_NEAR = 3  # steps of each kind that are compared where plain and drafted steps meet
_DOUBT = 2.0  # pseudo-observations of "the calibration is right", in such meetings
_GROSS = 1.5  # bound on |log ratio| between plain and drafted steps
_MEETING = 0.95  # what a meeting leaves of those before it
_FLOOR = 0.01  # least ratio of measured to calibrated seconds, so that its logarithm exists


class Curve:
    """Seconds by size: the median of the last measurements of each size, and straight lines between the sizes.

    Of two measurements the lower one counts: a machine pauses, it never hurries. Medians are recomputed only every few
    measurements, because a look at the curve must be cheap beside a step.
    """

    def __init__(self, start: float | None = None, slope: float = 0.0) -> None:
        """start: the value at size 0, if it is known. slope: growth by size, in parts of the value at size 0, until two
        sizes were measured."""
        self.samples: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {} if start is None else {0: start}
        self.slope = slope
        self._new: dict[int, int] = {}  # measurements since the last median, by size
        self._known: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        samples = self.samples.setdefault(size, deque(maxlen=_RECENT))
        samples.append(seconds)
        self._new[size] = self._new.get(size, 0) + 1
        if len(samples) < 4 or self._new[size] >= 4:
            self._new[size] = 0
            self.medians[size] = median_low(samples)
            self._known.clear()

    def forget(self, size: int) -> None:
        """Drop the measurements of a size. Their last median stays until there is a new one."""
        self.samples.pop(size, None)
        self._new.pop(size, None)

    def count(self, size: int) -> int:
        return len(self.samples.get(size, ()))

    def at(self, size: int) -> float | None:
        """Seconds, or None where nothing is known."""
        value = self._known.get(size)
        if value is None and self.medians:
            if len(self.medians) == 1 and 0 in self.medians:
                value = self.medians[0] * (1 + self.slope * size)
            else:
                value = interpolate(self.medians, size)
            self._known[size] = value
        return value


class TargetCosts(Protocol):
    """Seconds of a step without its draft. The same for every drafter."""

    @property
    def plain_gaps(self) -> tuple[int, int]:
        """Drafted steps between two measurements of plain decoding: the fewest and the most."""
        ...

    def plain(self, batch_size: int) -> float | None:
        """Seconds of a plain step, or None where too few were measured."""
        ...

    def forget_plain(self, batch_size: int) -> None:
        """From now on, believe only new measurements of plain steps."""
        ...

    def verified(self, batch_size: int, came: Sequence[float]) -> float:
        """Expected seconds of a drafted step without its draft. came[n]: the chance that the draft has more than n nodes."""
        ...

    def observe(self, step: Step, nodes: int) -> None:
        """Learn from a step. nodes: draft tokens of its largest draft, 0 for a plain step."""
        ...


class DraftCosts(Protocol):
    """Seconds of one drafter."""

    @property
    def thinking(self) -> float:
        """About how many seconds a decision with these costs takes."""
        ...

    @property
    def shapes(self) -> bool:
        """Whether they tell chains from trees."""
        ...

    @property
    def settled(self) -> bool:
        """Whether enough drafts were timed to judge them."""
        ...

    def seconds(self, batch_size: int, budget: Budget) -> float:
        """Seconds of a draft for so many sequences."""
        ...

    def reading(self, tokens: int) -> float:
        """Seconds in which the drafter reads so many tokens that it has missed."""
        ...

    def observe(self, step: Step, behind: int) -> float:
        """Learn from a step, after the target's half has. behind: tokens that the drafter had missed, over all sequences.

        Returns the seconds of this step in which the drafter read them.
        """
        ...


class LearnedTarget:
    """Medians of the steps themselves: for each batch size a curve over the nodes of the largest draft."""

    plain_gaps = (32, 1024)

    def __init__(self) -> None:
        self.curves: dict[int, Curve] = {}
        self._unsettled = 2  # plain steps that are not measured yet
        self._drafted = False  # was the last step drafted?

    def plain(self, batch_size: int) -> float | None:
        own = self.curves.get(batch_size)
        if own is not None and own.count(0) >= _WARM:
            return own.at(0)
        known = {r: c.at(0) for r, c in self.curves.items() if c.count(0) >= _WARM}
        low, high = [r for r in known if r < batch_size], [r for r in known if r > batch_size]
        if not low or not high or min(high) > 2 * max(low):
            return None
        return interpolate({r: known[r] or 0.0 for r in (max(low), min(high))}, batch_size)

    def forget_plain(self, batch_size: int) -> None:
        if batch_size in self.curves:
            self.curves[batch_size].forget(0)

    def verified(self, batch_size: int, came: Sequence[float]) -> float:
        plain = self.plain(batch_size)
        assert plain is not None
        curve = _nearest(self.curves, batch_size)
        base = curve.at(0) if curve else None
        scale = plain / base if base else 1.0
        total, last = plain, plain
        for n, chance in enumerate(came, 1):
            here = scale * (curve.at(n) or 0.0) if curve and base else plain * (1 + _NODE * n)
            total, last = total + chance * (here - last), here
        return total

    def observe(self, step: Step, nodes: int) -> None:
        draft = step.seconds["draft"]
        rest = sum(step.seconds.values()) - draft
        drafted = any(b.depth for b in step.budgets)
        steady, self._drafted = self._drafted and drafted, drafted
        curve = self.curves.setdefault(len(step.slots), Curve(slope=_NODE))
        if drafted:
            self._unsettled = SETTLE
            if steady:
                curve.add(nodes, rest)
        elif self._unsettled:
            self._unsettled -= 1
        else:
            curve.add(0, rest + draft)


class LearnedDraft:
    """Medians of the drafts themselves: for each number of sequences a curve over depth, and seconds per token read."""

    thinking = 2e-4
    shapes = False

    def __init__(self) -> None:
        self.curves: dict[int, Curve] = {}
        self.read = Curve()  # one size only: seconds per token
        self._drafted = False  # was the last step drafted?

    @property
    def settled(self) -> bool:
        return any(sum(map(curve.count, curve.samples)) >= _ENOUGH for curve in self.curves.values())

    def seconds(self, batch_size: int, budget: Budget) -> float:
        curve = _nearest(self.curves, batch_size)
        return (curve.at(budget.depth) or 0.0) if curve else 0.0

    def reading(self, tokens: int) -> float:
        return tokens * (self.read.at(0) or 0.0) if tokens > 1 else 0.0

    def observe(self, step: Step, behind: int) -> float:
        asked = sum(b.depth > 0 for b in step.budgets)
        steady, self._drafted = self._drafted and asked > 0, asked > 0
        if not asked:
            return 0.0
        seconds, depth = step.seconds["draft"], _levels(step)
        curve = self.curves.setdefault(asked, Curve(start=0.0))
        if behind <= 1:
            if steady:
                curve.add(depth, seconds)
            return 0.0
        known = _nearest(self.curves, asked)
        usual = (known.at(depth) or 0.0) if known and known.samples else 0.0
        extra = max(seconds - usual, 0.0)
        if behind >= 8:
            self.read.add(0, extra / behind)
        return extra


def _levels(step: Step) -> int:
    """Levels of a step's draft: those that were drafted of chains, those that were asked for of trees and empty drafts."""
    asked = max(b.depth for b in step.budgets)
    chains = all(b.width == 1 for b in step.budgets if b.depth)
    return min(step.draft.nodes - 1, asked) or asked if chains else asked


def _nearest(curves: dict[int, Curve], batch_size: int) -> Curve | None:
    """Of the curves that have a slope, the one of the nearest batch size; else that batch size's own."""
    sloped = [r for r, c in curves.items() if len(c.samples) + (0 in c.medians and not c.count(0)) > 1]
    nearest = min(sloped, key=lambda r: abs(r - batch_size), default=None)
    return curves[nearest] if nearest is not None else curves.get(batch_size)


class CalibratedTarget:
    """Seconds of a cost model, corrected by how long steps really take.

    pace: how slow the machine is now, 1 as calibrated: from the median of the last steps, plain or drafted. share: how much
    slower than the model says plain and drafted steps are, against each other. A share is learned only where plain and
    drafted steps meet, and from several meetings: steps of other times may have another pace.
    """

    plain_gaps = (32, 2048)

    def __init__(self, model: CostModel) -> None:
        self.model, self.context = model, 0
        self.pace = self.pace_before = 1.0  # now, and before the last step
        self.share = {"plain": 1.0, "drafted": 1.0}
        self.ratio = 0.0  # log of the last drafted step's seconds over the model's
        self._unsettled = 2  # plain steps that are not measured yet
        self._measured = 0  # plain steps measured
        self._lately = deque[tuple[str, float]](maxlen=_RECENT)  # kind of step, log ratio
        # Batch size and kind of the last steps, their log ratios, and those of the last steps of the other kind.
        self._last, self._now, self._before = (0, ""), list[float](), list[float]()
        self._apart, self._meetings = 0.0, 0.0
        self._known: dict[tuple[int, int, int], float] = {}
        self._drafts: dict[tuple[int, int, int, int], float] = {}

    def plain(self, batch_size: int) -> float | None:
        if self._measured < _WARM:
            return None
        return self.pace * self._plain(batch_size)

    def forget_plain(self, batch_size: int) -> None:
        self._measured = 0

    def verified(self, batch_size: int, came: Sequence[float]) -> float:
        total = last = self.seconds(batch_size, 0)
        for n, chance in enumerate(came, 1):
            here = self.seconds(batch_size, n)
            total, last = total + chance * (here - last), here
        return self.pace * self.share["drafted"] * total

    def observe(self, step: Step, nodes: int) -> None:
        self.context = max(step.positions)
        self.pace_before = self.pace
        batch_size, draft = len(step.slots), step.seconds["draft"]
        rest = sum(step.seconds.values()) - draft + self.model.fixed
        if any(b.depth for b in step.budgets):
            self._unsettled = SETTLE
            self.ratio = self._compared(batch_size, "drafted", rest / self.seconds(batch_size, nodes))
        elif self._unsettled:
            self._unsettled -= 1
        else:
            self._measured += 1
            self._compared(batch_size, "plain", (rest + draft) / self._plain(batch_size))

    def seconds(self, batch_size: int, nodes: int) -> float:
        """The model's, of a step without its draft, at about this context."""
        key = (batch_size, nodes, self.context // 64)
        if key not in self._known:
            fixed = self.model.fixed
            self._known[key] = fixed + self.model.target_seconds(batch_size, nodes + 1, self.context)
        return self._known[key]

    def draft_seconds(self, batch_size: int, depth: int, width: int) -> float:
        """The model's, of a draft, at about this context."""
        key = (batch_size, depth, width, self.context // 64)
        if key not in self._drafts:
            self._drafts[key] = max(self.model.draft_seconds(batch_size, depth, self.context, width), 1e-7)
        return self._drafts[key]

    def _plain(self, batch_size: int) -> float:
        return self.seconds(batch_size, 0) + self.draft_seconds(batch_size, 0, 1)

    def _compared(self, batch_size: int, kind: str, ratio: float) -> float:
        """A step took `ratio` times the model's seconds. Returns the logarithm of the ratio."""
        own = math.log(max(ratio, _FLOOR))
        if self._last != (batch_size, kind):
            self._before = self._now[-_NEAR:] if self._last[0] == batch_size else []
            self._last, self._now = (batch_size, kind), []
        self._now.append(own)
        if len(self._now) == len(self._before) == _NEAR:
            apart = min(self._now) - min(self._before)  # the fastest of each: a machine pauses, it never hurries
            apart = min(max(apart if kind == "drafted" else -apart, -_GROSS), _GROSS)
            self._apart, self._meetings = _MEETING * self._apart + apart, _MEETING * self._meetings + 1
            self.share["drafted"] = math.exp(self._apart / (self._meetings + _DOUBT))
        self._lately.append((kind, own))
        shares = {name: math.log(share) for name, share in self.share.items()}
        self.pace = math.exp(median_low([own - shares[name] for name, own in self._lately]))
        return own


class CalibratedDraft:
    """Draft seconds of a cost model, at the target's pace. share: how much slower than the model says drafts are."""

    thinking = 2e-3
    shapes = True
    settled = True

    def __init__(self, target: CalibratedTarget) -> None:
        self.target, self.share = target, 1.0
        self._lately = deque[float](maxlen=_RECENT)  # log ratios of drafts, less those of their steps

    def seconds(self, batch_size: int, budget: Budget) -> float:
        if not batch_size:
            return 0.0
        return self.target.pace * self.share * self.target.draft_seconds(batch_size, budget.depth, budget.width)

    def reading(self, tokens: int) -> float:
        return self.target.pace * self.share * self.target.model.prefill * tokens if tokens > 1 else 0.0

    def observe(self, step: Step, behind: int) -> float:
        asked = sum(b.depth > 0 for b in step.budgets)
        if not asked:
            return 0.0
        largest = max(step.budgets, key=lambda b: (b.depth, b.width))
        read = self.target.pace_before * self.share * self.target.model.prefill * behind if behind > 1 else 0.0
        if behind <= largest.depth + 1:
            usual = self.target.draft_seconds(asked, _levels(step), largest.width)
            ratio = max(step.seconds["draft"] / usual, _FLOOR)
            self._lately.append(math.log(ratio) - self.target.ratio)
            self.share = self.target.share["drafted"] * math.exp(median_low(self._lately))
        return read


class Costs:
    """Seconds of a target and of one drafter."""

    def __init__(self, target: TargetCosts | None = None, draft: DraftCosts | None = None) -> None:
        """Either half is learned from the steps if it is not given."""
        self.target: TargetCosts = target or LearnedTarget()
        self.draft: DraftCosts = draft or LearnedDraft()

    def plain(self, batch_size: int) -> float | None:
        """Seconds of a plain step, or None where too few were measured."""
        return self.target.plain(batch_size)

    def step(self, batch_size: int, budget: Budget, came: Sequence[float]) -> float:
        """Expected seconds of a step in which every sequence has this budget.

        came[n]: the chance that the draft has more than n nodes. A chain that ends early saves its other levels.
        """
        draft = self.draft.seconds(batch_size, budget)
        if budget.width == 1:
            levels = [self.draft.seconds(batch_size, Budget(depth)) for depth in range(1, budget.depth + 1)]
            draft = levels[0] + sum(
                chance * (deep - high) for chance, (high, deep) in zip(came[1:], pairwise(levels), strict=False)
            )
        return self.target.verified(batch_size, came[: budget.max_nodes]) + draft

    def level(self, batch_size: int, budget: Budget) -> float:
        """Seconds of one more token of a chain, drafted and verified."""
        first, whole = Budget(1), Budget(max(budget.depth, 2))
        drafts = self.draft.seconds(batch_size, whole) - self.draft.seconds(batch_size, first)
        nodes = self.target.verified(batch_size, [1.0] * whole.depth) - self.target.verified(batch_size, [1.0])
        return max(drafts + nodes, 0.0) / (whole.depth - 1)

    def observe(self, step: Step, nodes: int, behind: int) -> float:
        """Learn from a step. nodes: of its largest draft. behind: tokens that the drafter had missed, over all sequences.

        Returns the seconds of this step in which the drafter read them.
        """
        self.target.observe(step, nodes)
        return self.draft.observe(step, behind)


class Calibrated(Costs):
    """The costs of a calibrated model, corrected step by step."""

    def __init__(self, model: CostModel) -> None:
        self.model, self._calibrated = model, CalibratedTarget(model)
        self._draft = CalibratedDraft(self._calibrated)
        super().__init__(self._calibrated, self._draft)

    @property
    def drift(self) -> dict[str, float]:
        """Measured seconds over the model's, for plain steps, drafted steps and drafts."""
        shares = {**self._calibrated.share, "draft": self._draft.share}
        return {kind: self._calibrated.pace * share for kind, share in shares.items()}
