"""Measures what a cost model holds, once for machine, models, precision and threads, and keeps it in the user's cache."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, median_low, stdev
from time import perf_counter

import torch

from outrider._version import __version__
from outrider.control import Fixed
from outrider.control.cost_model import CostModel
from outrider.core.types import Budget
from outrider.decode import Decoder, Request, Row
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.combine.router import most_expensive
from outrider.drafters.stubs import Wrong
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel
from outrider.params import SamplingParams

REVISION = "2"  # of the way of measuring: what an older one has stored is measured again
PATIENCE = 10.0  # seconds, after which the least must do
PRECISE = 0.02  # of its step: where every setting is known so well (one standard error), no more rounds are needed


@dataclass(frozen=True)
class MeasurementPlan:
    """What is measured, and how often. nodes: the root counted; many_nodes: where rows are several; depths: of chains, the limit
    among them if None. rounds: of all settings, at one context after the other, at most; least: after `PATIENCE`; several:
    those for several rows, which are dear; none: their costs are told by those of one row."""

    nodes: tuple[int, ...]
    many_nodes: tuple[int, ...]
    depths: tuple[int | None, ...]
    contexts: tuple[int, ...]
    rounds: int
    least: int
    several: int


WHOLE = MeasurementPlan(
    (1, 2, 3, 6, 7, 9, 13, 17), (1, 2, 5, 9), (1, 4, None), (64, 512), rounds=48, least=24, several=12
)
QUICK = MeasurementPlan((1, 2, 3, 5, 8, 9, 17), (1, 2, 5, 9), (1, 8), (64,), rounds=3, least=1, several=0)
PLAIN, GREEDY = Budget(0), SamplingParams(temperature=0)


def _law(sampling: SamplingParams) -> SamplingParams:
    """What of the parameters decides how a token is chosen from its logits, and so what that costs: the kind, not the value."""
    return SamplingParams(
        temperature=float(sampling.temperature > 0),
        top_p=0.95 if sampling.top_p < 1 else 1.0,
        top_k=50 if sampling.top_k > 0 else 0,
        min_p=0.05 if sampling.min_p > 0 else 0.0,
        ignore_eos=True,
    )


def machine() -> dict[str, str]:
    """What a measurement holds for, the models not counted."""
    return {
        "outrider": __version__,
        "calibration": REVISION,
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {platform.processor() or platform.node()} x{os.cpu_count()}",
        "threads": str(torch.get_num_threads()),
        "kernels": "native" if native.available() else "torch",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def calibrated(
    target: LanguageModel,
    drafter: Callable[[int], Drafter],
    names: dict[str, str],
    limit: Budget,
    rows: Sequence[int] = (1,),
    known: CostModel | None = None,
    sampling: SamplingParams = GREEDY,
    say: Callable[[str], None] = lambda message: None,
    quick: bool = False,
) -> CostModel:
    """The stored cost model for this machine and these models, or a new measurement, which is then stored.

    drafter: makes one for so many rows, if there is need to measure. names: what tells models and drafters apart, with their
    precision: {"target": "... int8", "draft": "..."}. say: is told if it has to be measured. The rest as for `calibrate`.
    """
    key = {
        **machine(),
        **names,
        "sampling": str(_law(sampling)),
        "rows": ",".join(map(str, rows)),
        "limit": str(limit.parts),
        "pains": str(QUICK if quick else WHOLE),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"cost-{digest}.json"
    try:
        stored = CostModel.from_json(path.read_text(encoding="utf-8"))
        if stored.key == key:
            return stored
    except (OSError, ValueError):
        pass  # not there, or not whole: measured anew
    time = "as long as about a hundred tokens take" if quick else "from ten seconds to a minute"
    say(f"measuring what a step costs on this machine, {time}, once; it is kept in {path.parent}")
    model = calibrate(target, drafter, key, limit, rows, known, sampling, quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(model.to_json(), encoding="utf-8")
    part.replace(path)
    return model


def calibrate(
    target: LanguageModel,
    drafter: Callable[[int], Drafter],
    key: dict[str, str],
    limit: Budget,
    rows: Sequence[int] = (1,),
    known: CostModel | None = None,
    sampling: SamplingParams = GREEDY,
    quick: bool = False,
) -> CostModel:
    """Measure, in real steps: a target that judges wrong guesses, which anyone could have made, and a drafter that drafts
    step after step. Every setting is timed for one step a round with a plain step before and after it, for a machine with
    neighbours changes its pace from step to step: what is kept is the mean of its shares of a plain step, in seconds of the
    usual plain step. (Where in a run of equal steps a step stands makes no difference; many short visits tell more than few
    long ones in the same time. docs/log.md.)
    limit: the largest budget that will be asked for. known: of the same target, whose steps are then not timed again.
    sampling: how tokens are chosen, greedily if not given; drawing them costs something too. quick: fewer settings, fewer times,
    for who corrects them as it goes (`outrider.control.Calibrated`). Of several drafters together the dearest is measured."""
    pains, law = QUICK if quick else WHOLE, _law(sampling)
    if not pains.several and len(rows) > 1:
        return _synthetic(calibrate(target, drafter, key, limit, (1,), known, sampling, quick), rows, pains.many_nodes)
    contexts = [c for c in pains.contexts if 2 * c < target.max_length] or [1]
    draft = _Side(target, most_expensive(drafter(len(contexts) * max(rows))), max(rows), contexts, law)
    judge = _Side(target, Wrong(), max(rows), contexts, law) if known is None else draft
    shapes = [] if isinstance(draft.decoder.drafter, NoDraft) else _shapes(limit, pains.depths)
    nodes = {r: (pains.nodes if r == 1 else pains.many_nodes) if known is None else () for r in rows}
    for side, c, r in itertools.product(dict.fromkeys([judge, draft]), contexts, rows):
        side.step(c, r, Budget(limit.depth), after=2)  # a warm-up
    seen, start, least = _Seen(), perf_counter(), min(pains.least, 2 * len(contexts))
    for turn in range(pains.rounds):
        if turn and turn % len(contexts) == 0:
            late = turn >= (pains.least if known is None else least) and perf_counter() - start > PATIENCE
            if late or (turn >= 2 * len(contexts) and seen.sure):
                break
        for r in rows if turn < pains.several else [r for r in rows if r == 1]:
            seen.visit(judge, draft, r, contexts[turn % len(contexts)], nodes[r], shapes)
    for side in {judge, draft}:
        side.close()
    for r, c, b in itertools.product(rows, contexts, shapes):
        seen.drafted[r, b.width, 0, c] = seen.drafted[r, 1, 0, c]
    for r in rows:
        _smooth({n: [seen.judged[r, n, c] for c in contexts] for n in nodes[r]})
    return seen.model(key, draft.readings, known)


def _shapes(limit: Budget, depths: Sequence[int | None]) -> list[Budget]:
    """Chains up to the limit, and trees if it allows any."""
    if not limit.max_nodes:
        return []
    trees = [Budget(d, limit.width, max(d, limit.max_nodes * d // limit.depth)) for d in (1, limit.depth)]
    chains = sorted({min(d or limit.depth, limit.depth) for d in depths})
    return [Budget(d) for d in chains] + (trees if limit.width > 1 else [])


def _synthetic(one: CostModel, rows: Sequence[int], nodes: Sequence[int]) -> CostModel:
    """Costs of several rows by those of one: a forward over as many nodes in one row; a draft is as much dearer as a step over
    so many nodes."""
    context, more = int(one.target[0][2]), [r for r in rows if r > 1]
    seconds = {n: one.target_seconds(1, n, context) for n in {1, *more, *(r * n for r in more for n in nodes)}}
    target = [[r, n, context, seconds[r * n]] for r in more for n in nodes]
    draft = [[r, *where, seconds[r] / seconds[1] * took] for r in more for _, *where, took in one.draft]
    return replace(one, target=one.target + target, draft=one.draft + draft)


@dataclass(frozen=True)
class _Took:
    """Seconds of a step: its draft, its other parts, and what no part accounts for."""

    context: int
    draft: float
    rest: float
    between: float

    @property
    def whole(self) -> float:
        return self.draft + self.rest


@dataclass(eq=False)
class _Cell:
    """One setting: what was in the cache, parts of a plain step beside it, and what the whole step was."""

    contexts: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    smoothed: float | None = None

    def add(self, took: _Took, seconds: float, beside: float) -> None:
        """seconds: of the part of the step that is measured here. beside: of a plain step."""
        self.contexts.append(took.context)
        self.shares.append(seconds / beside)
        self.wholes.append(took.whole / beside)

    @property
    def context(self) -> int:
        return median_low(self.contexts)

    @property
    def share(self) -> float:
        return _middle(self.shares) if self.smoothed is None else self.smoothed

    @property
    def sure(self) -> bool:
        return stdev(self.shares) / len(self.shares) ** 0.5 < PRECISE * median(self.wholes)

    def row(self, plain: float) -> list[float]:
        """(context, seconds) where a plain step takes so long."""
        return [self.context, plain * self.share]


class _Seen:
    """All settings. judged: by rows, nodes and context. drafted: by rows, width, depth and context. plain: seconds of plain
    steps by rows and context. between: what no part of a plain step accounts for."""

    def __init__(self) -> None:
        self.judged: dict[tuple[int, int, int], _Cell] = defaultdict(_Cell)
        self.drafted: dict[tuple[int, int, int, int], _Cell] = defaultdict(_Cell)
        self.plain: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.between = list[float]()

    @property
    def sure(self) -> bool:
        return all(cell.sure for cell in (*self.judged.values(), *self.drafted.values()))

    def visit(self, judge: _Side, draft: _Side, r: int, c: int, nodes: Sequence[int], shapes: Sequence[Budget]) -> None:
        """Time every setting of `r` rows at context `c` once, plain steps before and after each."""
        before = judge.step(c, r)
        self.drafted[r, 1, 0, c].add(before, before.draft, before.whole)
        self.plain[r, c].append(before.whole)
        self.between.append(before.between)
        ways = [(judge, Budget(n - 1), self.judged[r, n, c], "rest", 0) for n in nodes]
        # a drafter first reads what plain steps have written
        ways += [(draft, b, self.drafted[r, b.width, b.depth, c], "draft", 1) for b in shapes]
        for side, b, cell, part, earlier in ways:
            took, after = side.step(c, r, b, earlier), side.step(c, r)
            beside, before = (before.whole + after.whole) / 2, after
            self.plain[r, c].append(after.whole)
            cell.add(took, getattr(took, part), beside)

    def model(self, key: dict[str, str], readings: Sequence[tuple[int, float]], known: CostModel | None) -> CostModel:
        """In seconds of the usual plain step, or at the pace of the target's own costs if they are known."""
        usual = {
            at: _middle(s) if known is None else known.target_seconds(at[0], 1, at[1]) for at, s in self.plain.items()
        }
        target = [[r, n, *cell.row(usual[r, c])] for (r, n, c), cell in self.judged.items()]
        draft = [[r, w, d, *cell.row(usual[r, c])] for (r, w, d, c), cell in self.drafted.items()]
        cheapest = min((row[-1] for row in draft if row[2]), default=0.0)
        reading = _reading(readings, cheapest)
        return CostModel(key, target if known is None else known.target, draft, reading, median(self.between))


def _middle(values: Sequence[float]) -> float:
    """The mean of all but the tenth at either end, where the machine's pauses are; but one at least of three."""
    cut = max(len(values) // 10, int(len(values) > 2))
    return mean(sorted(values)[cut : len(values) - cut])


def _smooth(cells: dict[int, list[_Cell]]) -> None:
    """Shares of a plain step by nodes, at several contexts: what a node costs more for every token in the cache is the same for
    all nodes, so that every context tells of the others. Least squares."""
    means = {n: (mean(c.context for c in some), mean(c.share for c in some)) for n, some in cells.items()}
    moves = [(n - 1, c.context - means[n][0], c.share - means[n][1]) for n, some in cells.items() for c in some]
    slope = sum(n * x * y for n, x, y in moves) / max(sum((n * x) ** 2 for n, x, _ in moves), 1e-9)
    for n, some in cells.items():
        context, share = means[n]
        for cell in some:
            cell.smoothed = share + max(slope, 0.0) * (n - 1) * (cell.context - context)


class _Side:
    """A decoder with `count` rows for each context, which hold about as many tokens."""

    def __init__(
        self, target: LanguageModel, drafter: Drafter, count: int, contexts: Sequence[int], law: SamplingParams
    ) -> None:
        self.asked, self.count, self.law = Fixed(0), count, law
        length, rows = min(2 * max(contexts) + 256, target.max_length), count * len(contexts)
        self.decoder = Decoder(target, drafter, controller=self.asked, rows=rows, max_length=length)
        self.rows: dict[int, list[Row]] = {c: [] for c in contexts}
        self.readings: list[tuple[int, float]] = []  # tokens read before the first guess, and seconds of that draft

    def step(self, context: int, rows: int, budget: Budget = PLAIN, after: int = 0) -> _Took:
        """One step, after so many of the same kind that do not count."""
        self._fill(context, room=(after + 1) * (budget.depth + 1) + 1)
        self.asked.budget = budget
        for _ in range(after):
            self.decoder.round(self.rows[context][:rows])
        began = perf_counter()
        step = self.decoder.round(self.rows[context][:rows])
        taken, draft = perf_counter() - began, step.seconds["draft"]
        parts = sum(step.seconds.values())
        return _Took(max(step.positions), draft, parts - draft, taken - parts)

    def _fill(self, context: int, room: int) -> None:
        """New rows where the old ones have grown too long, or cannot write so many more tokens; a drafter reads them anew."""
        decoder = self.decoder
        rows = [r for r in self.rows[context] if not r.end and r.limit - r.ending.count >= room]
        if len(rows) == self.count and max(len(r.tokens) for r in rows) < context + max(context, 256):
            return
        self._release(context)
        prompt = [n % decoder.target.vocab_size for n in range(context)]
        params = replace(self.law, max_tokens=decoder.max_length - context)
        self.rows[context] = [decoder.admit(Request(n, prompt, params)) for n in range(self.count)]
        while decoder.waiting:
            decoder.prefill(decoder.waiting[0])
        self.asked.budget = Budget(1)
        step = decoder.round(self.rows[context])
        self.readings.append((context * self.count, step.seconds["draft"]))

    def _release(self, context: int) -> None:
        for row in self.rows[context]:
            self.decoder.release(row.slot)

    def close(self) -> None:
        for context in self.rows:
            self._release(context)


def _reading(readings: Sequence[tuple[int, float]], usual: float) -> float:
    """Seconds in which a drafter reads a token: the first draft of a row, which reads all of it, less a usual one."""
    rates = [max(seconds - usual, 0.0) / tokens for tokens, seconds in readings]
    return median_low(rates) if rates else 0.0
