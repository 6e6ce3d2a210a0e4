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
from statistics import median, median_low
from time import perf_counter

import torch

from outrider import native
from outrider._version import __version__
from outrider.decode import Decoder, Request, Row
from outrider.drafters.base import Drafter, NoDraft, Wrong
from outrider.models.base import LanguageModel
from outrider.params import SamplingParams
from outrider.tune import Fixed
from outrider.tune.cost import CostModel
from outrider.types import Budget

NODES, MANY_NODES = (1, 2, 3, 6, 7, 9, 13, 17), (1, 2, 5, 9)  # the root counted; where rows are several
CONTEXTS = (64, 512)
REPEATS, LEAST, PATIENCE = 7, 4, 10.0  # rounds of all settings; fewer after so many seconds
BURST = 3  # steps of one setting in a round
GREEDY = SamplingParams(temperature=0)


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
) -> CostModel:
    """The stored cost model for this machine and these models, or a new measurement, which is then stored.

    drafter: makes one for so many rows, if there is need to measure. names: what tells models and drafters apart, with their
    precision: {"target": "... int8", "draft": "..."}. The rest as for `calibrate`.
    """
    key = {
        **machine(),
        **names,
        "sampling": str(_law(sampling)),
        "rows": ",".join(map(str, rows)),
        "limit": str(limit.parts),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"cost-{digest}.json"
    try:
        stored = CostModel.from_json(path.read_text(encoding="utf-8"))
        if stored.key == key:
            return stored
    except (OSError, ValueError):
        pass  # not there, or not whole: measured anew
    model = calibrate(target, drafter, key, limit, rows, known, sampling)
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
) -> CostModel:
    """Measure, in real steps: a target that judges wrong guesses, which anyone could have made, and a drafter that drafts
    step after step. Every setting is timed once a round with plain steps beside it, for a machine with neighbours changes its
    pace within seconds: what is kept is the median of its shares of a plain step, in seconds of the median plain step.
    limit: the largest budget that will be asked for. known: of the same target, whose steps are then not timed again.
    sampling: how tokens are chosen, greedily if not given; drawing them costs something too."""
    contexts = [c for c in CONTEXTS if 2 * c < target.max_length] or [1]
    law = _law(sampling)
    judge = _Side(target, Wrong(), max(rows), contexts, law)
    draft = _Side(target, drafter(len(contexts) * max(rows)), max(rows), contexts, law)
    shapes = [] if isinstance(draft.decoder.drafter, NoDraft) else _shapes(limit)
    nodes = {r: (NODES if r == 1 else MANY_NODES) if known is None else (1,) for r in rows}
    ways = [(r, Budget(n - 1)) for r in rows for n in nodes[r]]
    judged: dict[tuple[int, int, int], _Cell] = defaultdict(_Cell)
    drafted: dict[tuple[int, int, int, int], _Cell] = defaultdict(_Cell)
    plain: dict[tuple[int, int], list[float]] = defaultdict(list)
    between = list[float]()
    for side, c, r in itertools.product((judge, draft), contexts, rows):
        side.time(c, r, Budget(limit.depth))  # a warm-up
    start = perf_counter()
    for turn in range(REPEATS):
        if turn >= LEAST and perf_counter() - start > PATIENCE:
            break
        for c in contexts:
            for r, b in ways:
                took, beside = judge.time(c, r, b)
                plain[r, c].append(beside.whole)
                judged[r, b.depth + 1, c].add(took.context, took.rest / beside.whole)
                if not b.depth:
                    drafted[r, 1, 0, c].add(took.context, took.draft / beside.whole)
                    between.append(took.between)
            for r, b in itertools.product(rows, shapes):
                took, beside = draft.time(c, r, b)
                plain[r, c].append(beside.whole)
                drafted[r, b.width, b.depth, c].add(took.context, took.draft / beside.whole)
    judge.close()
    draft.close()
    for r, c in itertools.product(rows, contexts):
        drafted |= {(r, b.width, 0, c): drafted[r, 1, 0, c] for b in shapes}
    if known is None:
        usual = {at: median(seconds) for at, seconds in plain.items()}
    else:  # at the pace of the target's own costs
        usual = {(r, c): known.target_seconds(r, 1, c) for r, c in plain}
    target_rows = [[r, n, *cell.row(usual[r, c])] for (r, n, c), cell in judged.items()]
    draft_rows = [[r, w, d, *cell.row(usual[r, c])] for (r, w, d, c), cell in drafted.items()]
    cheapest = min((row[-1] for row in draft_rows if row[2]), default=0.0)
    reading = _reading(draft.readings, cheapest)
    return CostModel(key, target_rows if known is None else known.target, draft_rows, reading, median(between))


def _shapes(limit: Budget) -> list[Budget]:
    """Chains up to the limit, and trees if it allows any."""
    depths = sorted({1, min(4, limit.depth), limit.depth})
    if not limit.max_nodes:
        return []
    trees = [Budget(d, limit.width, max(d, limit.max_nodes * d // limit.depth)) for d in (1, limit.depth)]
    return [Budget(d) for d in depths] + (trees if limit.width > 1 else [])


@dataclass(eq=False)
class _Cell:
    """One setting: what was in the cache, and parts of a plain step beside it."""

    contexts: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def add(self, context: int, share: float) -> None:
        self.contexts.append(context)
        self.shares.append(share)

    def row(self, plain: float) -> list[float]:
        """(context, seconds) where a plain step takes so long."""
        return [median_low(self.contexts), plain * median(self.shares)]


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

    def time(self, context: int, rows: int, budget: Budget) -> tuple[_Took, _Took]:
        """A step with this budget, and a plain one right after it."""
        took = self._steps(context, rows, budget)
        return took, self._steps(context, rows, Budget(0)) if budget.depth else took

    def _steps(self, context: int, rows: int, budget: Budget) -> _Took:
        """A few steps, of which the middle one counts: the first pays for what others left in the processor's caches."""
        took = list[_Took]()
        while len(took) < BURST:
            if any(r.end or r.limit - r.ending.count < budget.depth + 2 for r in self.rows[context]) or not took:
                self._fill(context)
            self.asked.budget = budget
            began = perf_counter()
            step = self.decoder.round(self.rows[context][:rows])
            taken, draft = perf_counter() - began, step.seconds["draft"]
            parts = sum(step.seconds.values())
            took.append(_Took(max(step.positions), draft, parts - draft, taken - parts))
        return sorted(took, key=lambda t: t.whole)[(BURST - 1) // 2]

    def _fill(self, context: int) -> None:
        """Rows that hold so many tokens again; a drafter reads them anew."""
        decoder = self.decoder
        rows = self.rows[context]
        if rows and not any(r.end for r in rows) and max(len(r.tokens) for r in rows) < context + max(context, 128):
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
