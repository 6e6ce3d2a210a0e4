"""Calibration: measures the seconds of a step and keeps them in the user's cache.

The result is a `CostModel`. It holds for one machine, these models, their precision and this number of threads. Nothing here
runs unless somebody asks: `outrider calibrate`, `outrider serve`, `LLM(calibrate=True)`, or `"controller": "calibrated"`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import abc, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, median_low, stdev
from time import perf_counter

import torch

from outrider.config import SpeculativeConfig
from outrider.control import Adaptive, Calibrated, Controller, Fixed
from outrider.control.cost_model import CostModel
from outrider.core.files import cache_folder, written_whole
from outrider.core.types import Budget
from outrider.decode import Decoder, Sequence
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.combine.router import most_expensive
from outrider.drafters.stubs import Wrong
from outrider.kernels.machine import machine
from outrider.models.base import LanguageModel
from outrider.models.checkpoint import fingerprint
from outrider.models.load import Loaded
from outrider.models.packs import store
from outrider.params import SamplingParams

REVISION = "3"  # of this method of measurement; costs that an older one has stored are measured again
PATIENCE = 10.0  # seconds after which `MeasurementPlan.least` rounds are enough
PRECISE = 0.02  # one standard error of every setting, in parts of its step, at which no more rounds are needed


@dataclass(frozen=True)
class MeasurementPlan:
    """What is measured, and how often.

    nodes: sizes of the forward, the root counted. many_nodes: the same for batches. depths: of chains; None is the limit.
    contexts: tokens in the cache. rounds: over all settings, at one context after the other, at most. least: rounds that are
    enough after `PATIENCE`. several: rounds for batches, which are expensive; 0 derives their costs from those of one
    sequence.
    """

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


def _sampling_kind(sampling: SamplingParams) -> SamplingParams:
    """The parameters that decide what choosing a token costs, each with one typical value."""
    return SamplingParams(
        temperature=float(sampling.temperature > 0),
        top_p=0.95 if sampling.top_p < 1 else 1.0,
        top_k=50 if sampling.top_k > 0 else 0,
        min_p=0.05 if sampling.min_p > 0 else 0.0,
        ignore_eos=True,
    )


def conditions() -> dict[str, str]:
    """What a measurement holds for, apart from the models."""
    facts = machine()
    return {
        "calibration": REVISION,
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **{name: str(facts[name]) for name in ("outrider", "torch", "cpu", "cores", "kernels")},
    }


def costs_of(config: SpeculativeConfig, target: Loaded) -> dict[str, str]:
    """What a measurement holds for: the target and the drafter, with their settings and the present state of their files.

    Other weights of the same shape may have other costs: they choose experts, and the layers of layer_skip.
    """
    free = {"controller", "verifier", "prediction", "num_speculative_tokens", "tree_width", "tree_nodes"}
    draft = config.model_dump_json(exclude=free, fallback=str)
    cells = "" if target.kv_cache_dtype == "auto" else f" {target.kv_cache_dtype} keys and values"
    return {
        "target": f"{target.source} {target.weights} {fingerprint(target.source)}{cells}",
        "draft": f"{draft} {fingerprint(config.model)} {fingerprint(config.layers)} "
        f"{fingerprint(config.speculative_token_map)}",
    }


def build_controller(
    config: SpeculativeConfig,
    target: Loaded,
    drafter: Callable[[int], Drafter] | None,
    max_num_seqs: int,
    calibrate: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> Controller:
    """The controller that a configuration asks for.

    drafter: makes a drafter for so many sequences; None if the drafter is the caller's own, which cannot be measured.
    calibrate: measure the costs if none are stored. The controller "calibrated" always does; "adaptive" never does. say:
    gets a message before a measurement. Raises ValueError for "calibrated" without a drafter to measure.
    """
    if not config.adaptive:
        return Fixed(config.budget.depth, config.budget.width, config.budget.nodes)
    whole = config.controller == "calibrated"
    if whole and drafter is None:
        raise ValueError(
            '"controller": "calibrated" measures a drafter of its own and cannot make yours; use "adaptive"'
        )
    if drafter is None or config.controller == "adaptive" or config.method == "none" or not config.budget.max_nodes:
        return Adaptive(config.budget)
    sizes = sorted({n for n in ((1, 2, 4, max_num_seqs) if whole else (1, max_num_seqs)) if n <= max_num_seqs})
    names, limit = costs_of(config, target), config.budget
    if whole or calibrate:
        cost = calibrated(target.model, drafter, names, limit, sizes, say=say, quick=not whole)
    else:
        cost = stored(names, limit, sizes, quick=True)
    return Adaptive(limit, None if cost is None else Calibrated(cost))


def stored(
    names: dict[str, str],
    limit: Budget,
    rows: abc.Sequence[int] = (1,),
    sampling: SamplingParams = GREEDY,
    quick: bool = False,
) -> CostModel | None:
    """The cost model that was measured for this machine and these models, or None. The arguments are those of `calibrated`."""
    plan = QUICK if quick else WHOLE
    measured = rows if plan.several else (1,)
    key = _key(names, limit, measured, sampling, plan)
    try:
        model = CostModel.from_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # there is none, or the file is damaged
    if model.key != key:
        return None
    return model if measured == rows else derive_batches(model, rows, plan.many_nodes)


def all_stored() -> list[CostModel]:
    """The cost models that `outrider calibrate` has measured on this machine as it is now, by the names in their keys."""
    here, found = {**conditions(), "plan": str(WHOLE)}, list[CostModel]()
    for path in sorted(cache_folder().glob("cost-*.json")):
        try:
            model = CostModel.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # damaged: the next measurement replaces it
        if all(model.key.get(name) == value for name, value in here.items()):
            found.append(model)
    return sorted(found, key=lambda model: (model.key["target"], model.key["draft"]))


def calibrated(
    target: LanguageModel,
    drafter: Callable[[int], Drafter],
    names: dict[str, str],
    limit: Budget,
    rows: abc.Sequence[int] = (1,),
    known: CostModel | None = None,
    sampling: SamplingParams = GREEDY,
    say: Callable[[str], None] = lambda message: None,
    quick: bool = False,
) -> CostModel:
    """The stored cost model for this machine and these models. If there is none, measures one and stores it.

    drafter: makes a drafter for so many sequences, if one must be measured. names: what tells models and drafters apart, with
    their precision, as of `costs_of`. say: gets a message before a measurement. The rest as for `calibrate`.
    """
    model = stored(names, limit, rows, sampling, quick)
    if model is not None:
        return model
    plan = QUICK if quick else WHOLE
    measured = rows if plan.several else (1,)
    key = _key(names, limit, measured, sampling, plan)
    path = _path(key)
    time = "as long as about a hundred tokens take" if quick else "from ten seconds to a minute"
    say(f"measuring what a step costs on this machine, {time}, once; it is kept in {path.parent}")
    model = calibrate(target, drafter, key, limit, measured, known, sampling, quick)
    with written_whole(path) as part:
        part.write_text(model.to_json(), encoding="utf-8")
    return model if measured == rows else derive_batches(model, rows, plan.many_nodes)


def _key(
    names: dict[str, str], limit: Budget, rows: abc.Sequence[int], sampling: SamplingParams, plan: MeasurementPlan
) -> dict[str, str]:
    return {
        **conditions(),
        **names,
        "sampling": str(_sampling_kind(sampling)),
        "rows": ",".join(map(str, rows)),
        "limit": str((limit.depth, limit.width, limit.nodes)),
        "plan": str(plan),
    }


def _path(key: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"cost-{digest}.json"


def calibrate(
    target: LanguageModel,
    drafter: Callable[[int], Drafter],
    key: dict[str, str],
    limit: Budget,
    rows: abc.Sequence[int] = (1,),
    known: CostModel | None = None,
    sampling: SamplingParams = GREEDY,
    quick: bool = False,
) -> CostModel:
    """Measure a cost model in real steps. The draft tokens of the target's steps are wrong; the drafter drafts in every step.

    Other programs change the pace of a machine from step to step. So each setting is timed for one step a round, between two
    plain steps. What is kept is the mean of its ratio to them, in seconds of the usual plain step. Many short visits tell
    more than few long ones; the place of a step in a run of equal steps makes no difference (docs/log.md).

    limit: the largest budget that will be asked for. rows: batch sizes. known: a cost model of the same target, whose steps
    are then not timed again. sampling: how tokens are chosen; drawing them takes time, too. quick: fewer settings and
    rounds, for a controller that corrects them as it goes (`outrider.control.Calibrated`). Of several drafters together, the
    most expensive one is measured.
    """
    store.wait()  # a pack that is being written slows some of the steps
    plan, kind = QUICK if quick else WHOLE, _sampling_kind(sampling)
    if not plan.several and len(rows) > 1:
        one = calibrate(target, drafter, key, limit, (1,), known, sampling, quick)
        return derive_batches(one, rows, plan.many_nodes)
    contexts = [c for c in plan.contexts if 2 * c < target.max_length] or [1]
    draft = Workbench(target, most_expensive(drafter(len(contexts) * max(rows))), max(rows), contexts, kind)
    judge = Workbench(target, Wrong(), max(rows), contexts, kind) if known is None else draft
    shapes = [] if isinstance(draft.decoder.drafter, NoDraft) else _shapes(limit, plan.depths)
    nodes = {r: (plan.nodes if r == 1 else plan.many_nodes) if known is None else () for r in rows}
    for bench, c, r in itertools.product(dict.fromkeys([judge, draft]), contexts, rows):
        bench.step(c, r, Budget(limit.depth), after=2)  # a warm-up
    times = _measure(judge, draft, plan, contexts, nodes, shapes, wait=known is None)
    for bench in {judge, draft}:
        bench.close()
    for r, c, b in itertools.product(rows, contexts, shapes):
        times.drafted[r, b.width, 0, c] = times.drafted[r, 1, 0, c]
    for r in rows:
        smooth_contexts({n: [times.judged[r, n, c] for c in contexts] for n in nodes[r]})
    return times.model(key, draft.readings, known)


def _measure(
    judge: Workbench,
    draft: Workbench,
    plan: MeasurementPlan,
    contexts: abc.Sequence[int],
    nodes: Mapping[int, abc.Sequence[int]],
    shapes: abc.Sequence[Budget],
    wait: bool,
) -> Measurements:
    """Rounds over all settings, until all are precise or the plan ends. nodes: by batch size. wait: take at least the plan's
    rounds; else two at each context are enough after `PATIENCE`."""
    times, start = Measurements(), perf_counter()
    least = plan.least if wait else min(plan.least, 2 * len(contexts))
    for turn in range(plan.rounds):
        if turn and turn % len(contexts) == 0:
            late = turn >= least and perf_counter() - start > PATIENCE
            if late or (turn >= 2 * len(contexts) and times.sure):
                break
        for r in nodes if turn < plan.several else [r for r in nodes if r == 1]:
            times.visit(judge, draft, r, contexts[turn % len(contexts)], nodes[r], shapes)
    return times


def _shapes(limit: Budget, depths: abc.Sequence[int | None]) -> list[Budget]:
    """Chains up to the limit, and trees if it allows any."""
    if not limit.max_nodes:
        return []
    trees = [Budget(d, limit.width, max(d, limit.max_nodes * d // limit.depth)) for d in (1, limit.depth)]
    chains = sorted({min(d or limit.depth, limit.depth) for d in depths})
    return [Budget(d) for d in chains] + (trees if limit.width > 1 else [])


def derive_batches(one: CostModel, rows: abc.Sequence[int], nodes: abc.Sequence[int]) -> CostModel:
    """Add the costs of batches to those of one sequence.

    A forward costs as much as one over the same number of nodes in one sequence. A draft grows like a step of so many nodes.
    """
    context, more = int(one.target[0][2]), [r for r in rows if r > 1]
    seconds = {n: one.target_seconds(1, n, context) for n in {1, *more, *(r * n for r in more for n in nodes)}}
    target = [[r, n, context, seconds[r * n]] for r in more for n in nodes]
    draft = [[r, *where, seconds[r] / seconds[1] * took] for r in more for _, *where, took in one.draft]
    return replace(one, target=one.target + target, draft=one.draft + draft)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: its draft, its other parts, and the time between the parts."""

    context: int
    draft: float
    rest: float
    between: float

    @property
    def whole(self) -> float:
        return self.draft + self.rest


@dataclass(eq=False)
class SettingTimes:
    """One setting: tokens in the cache, and seconds of the measured part and of the whole step, in plain steps."""

    contexts: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    smoothed: float | None = None

    def add(self, took: StepTime, seconds: float, beside: float) -> None:
        """seconds: of the measured part. beside: of a plain step at that time."""
        self.contexts.append(took.context)
        self.shares.append(seconds / beside)
        self.wholes.append(took.whole / beside)

    @property
    def context(self) -> int:
        return median_low(self.contexts)

    @property
    def share(self) -> float:
        return trimmed_mean(self.shares) if self.smoothed is None else self.smoothed

    @property
    def sure(self) -> bool:
        return stdev(self.shares) / len(self.shares) ** 0.5 < PRECISE * median(self.wholes)

    def row(self, plain: float) -> list[float]:
        """(context, seconds). plain: seconds of the usual plain step."""
        return [self.context, plain * self.share]


class Measurements:
    """The times of all settings.

    judged: by batch size, nodes and context. drafted: by batch size, width, depth and context. plain: seconds of plain steps,
    by batch size and context. between: seconds of plain steps that no part accounts for.
    """

    def __init__(self) -> None:
        self.judged: dict[tuple[int, int, int], SettingTimes] = defaultdict(SettingTimes)
        self.drafted: dict[tuple[int, int, int, int], SettingTimes] = defaultdict(SettingTimes)
        self.plain: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.between = list[float]()

    @property
    def sure(self) -> bool:
        return all(cell.sure for cell in (*self.judged.values(), *self.drafted.values()))

    def visit(
        self, judge: Workbench, draft: Workbench, r: int, c: int, nodes: abc.Sequence[int], shapes: abc.Sequence[Budget]
    ) -> None:
        """Time every setting of batch size `r` at context `c` once, each between two plain steps."""
        before = judge.step(c, r)
        self.drafted[r, 1, 0, c].add(before, before.draft, before.whole)
        self.plain[r, c].append(before.whole)
        self.between.append(before.between)
        settings = [(judge, Budget(n - 1), self.judged[r, n, c], "rest", 0) for n in nodes]
        # A drafter first reads what the plain steps have written.
        settings += [(draft, b, self.drafted[r, b.width, b.depth, c], "draft", 1) for b in shapes]
        for bench, b, times, part, earlier in settings:
            took, after = bench.step(c, r, b, earlier), bench.step(c, r)
            beside, before = (before.whole + after.whole) / 2, after
            self.plain[r, c].append(after.whole)
            times.add(took, getattr(took, part), beside)

    def model(
        self, key: dict[str, str], readings: abc.Sequence[tuple[int, float]], known: CostModel | None
    ) -> CostModel:
        """Ratios times the usual plain step. known: a cost model of the target, which then gives that step."""
        usual = {
            at: trimmed_mean(s) if known is None else known.target_seconds(at[0], 1, at[1])
            for at, s in self.plain.items()
        }
        target = [[r, n, *cell.row(usual[r, c])] for (r, n, c), cell in self.judged.items()]
        draft = [[r, w, d, *cell.row(usual[r, c])] for (r, w, d, c), cell in self.drafted.items()]
        cheapest = min((row[-1] for row in draft if row[2]), default=0.0)
        reading = _reading(readings, cheapest)
        return CostModel(key, target if known is None else known.target, draft, reading, median(self.between))


def trimmed_mean(values: abc.Sequence[float]) -> float:
    """The mean without the highest and lowest tenth, where pauses are; of three values or more, at least one each."""
    cut = max(len(values) // 10, int(len(values) > 2))
    return mean(sorted(values)[cut : len(values) - cut])


def smooth_contexts(cells: dict[int, list[SettingTimes]]) -> None:
    """Smooth the ratios over contexts, in place. cells: by nodes, one for each context.

    A node costs the same more for each token in the cache, whatever the number of nodes. So every context tells of the
    others: least squares with one common slope.
    """
    means = {n: (mean(c.context for c in some), mean(c.share for c in some)) for n, some in cells.items()}
    moves = [(n - 1, c.context - means[n][0], c.share - means[n][1]) for n, some in cells.items() for c in some]
    slope = sum(n * x * y for n, x, y in moves) / max(sum((n * x) ** 2 for n, x, _ in moves), 1e-9)
    for n, some in cells.items():
        context, share = means[n]
        for cell in some:
            cell.smoothed = share + max(slope, 0.0) * (n - 1) * (cell.context - context)


class Workbench:
    """A decoder with `count` sequences for each context, which hold about so many tokens."""

    def __init__(
        self, target: LanguageModel, drafter: Drafter, count: int, contexts: abc.Sequence[int], sampling: SamplingParams
    ) -> None:
        self.asked, self.count, self.sampling = Fixed(0), count, sampling
        length, rows = min(2 * max(contexts) + 256, target.max_length), count * len(contexts)
        self.decoder = Decoder(target, drafter, controller=self.asked, rows=rows, max_length=length)
        self.rows: dict[int, list[Sequence]] = {c: [] for c in contexts}
        self.readings: list[tuple[int, float]] = []  # tokens read before the first draft, and seconds of that draft

    def step(self, context: int, rows: int, budget: Budget = PLAIN, after: int = 0) -> StepTime:
        """Time one step. after: equal steps before it that are not timed."""
        self._fill(context, room=(after + 1) * (budget.depth + 1) + 1)
        self.asked.budget = budget
        for _ in range(after):
            self.decoder.round(self.rows[context][:rows])
        began = perf_counter()
        step = self.decoder.round(self.rows[context][:rows])
        taken, draft = perf_counter() - began, step.seconds["draft"]
        parts = sum(step.seconds.values())
        return StepTime(max(step.positions), draft, parts - draft, taken - parts)

    def _fill(self, context: int, room: int) -> None:
        """Replace sequences that have grown too long, or that have no room for so many tokens. The drafter reads the new ones."""
        decoder = self.decoder
        rows = [r for r in self.rows[context] if not r.finish and r.limit - len(r.output) >= room]
        if len(rows) == self.count and max(len(r.tokens) for r in rows) < context + max(context, 256):
            return
        self._release(context)
        prompt = [n % decoder.target.vocab_size for n in range(context)]
        params = replace(self.sampling, max_tokens=decoder.max_length - context)
        self.rows[context] = [decoder.admit(Sequence(n, prompt, params)) for n in range(self.count)]
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


def _reading(readings: abc.Sequence[tuple[int, float]], usual: float) -> float:
    """Seconds per token that a drafter reads: its first draft, which reads the whole prompt, less a usual one."""
    rates = [max(seconds - usual, 0.0) / tokens for tokens, seconds in readings]
    return median_low(rates) if rates else 0.0
