"""Measures what a cost model holds, once for machine, models, precision and threads, and keeps it in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from time import perf_counter

import torch

from outrider._version import __version__
from outrider.models.base import LanguageModel
from outrider.models.cache import SlotCache
from outrider.tune.cost import CostModel

NODES, CONTEXTS, REPEATS = (1, 2, 4, 8, 16), (64, 512), 7
_FIXED = 0.1  # of the smallest forward: what a step does beside the two models, until steps say better


def machine() -> dict[str, str]:
    """What a measurement holds for, the models not counted."""
    return {
        "outrider": __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()} {platform.processor() or platform.node()} x{os.cpu_count()}",
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def calibrated(
    target: LanguageModel, draft: LanguageModel | None, names: dict[str, str], rows: Sequence[int] = (1,)
) -> CostModel:
    """The stored cost model for this machine and these models, or a new measurement, which is then stored.

    names: what tells the models apart, with their precision: {"target": "... int8", "draft": "..."}.
    """
    key = {**machine(), **names, "rows": ",".join(map(str, rows))}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"cost-{digest}.json"
    try:
        known = CostModel.from_json(path.read_text(encoding="utf-8"))
        if known.key == key:
            return known
    except (OSError, ValueError):
        pass  # not there, or not whole: measured anew
    model = calibrate(target, draft, key, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(model.to_json(), encoding="utf-8")
    part.replace(path)
    return model


def calibrate(
    target: LanguageModel, draft: LanguageModel | None, key: dict[str, str], rows: Sequence[int] = (1,)
) -> CostModel:
    """Measure. Every setting is timed once a round, so that a slow moment of the machine falls on all alike; of the rounds
    the median counts. draft: None for a drafter without a model, whose time is taken as nothing."""
    contexts = [c for c in CONTEXTS if c + max(NODES) < target.max_length] or [1]
    ways = [(r, n, c) for c in contexts for r in rows for n in NODES]
    caches = {c: _filled(target, max(rows), c) for c in contexts}
    taken: dict[tuple[int, int, int], list[float]] = {way: [] for way in ways}
    drafted: dict[tuple[int, int], list[float]] = {}
    reading: list[float] = []
    own = {} if draft is None else {c: _filled(draft, max(rows), c) for c in contexts if c < draft.max_length}
    for _ in range(REPEATS + 1):  # the first round warms up
        for way in ways:
            taken[way].append(_time(target, caches[way[2]], way[0], way[1]))
        if draft is not None:
            for c, cache in own.items():
                for r in rows:
                    drafted.setdefault((r, c), []).append(_time(draft, cache, r, 1))
                reading.append(_time(draft, cache, 1, 32) / 32)
    table = [[*way, median_low(times[1:])] for way, times in taken.items()]
    return CostModel(
        key,
        table,
        [[*at, median_low(times[1:])] for at, times in drafted.items()],
        median_low(reading) if reading else 0.0,
        _FIXED * min(row[-1] for row in table),
    )


def _filled(model: LanguageModel, rows: int, context: int) -> SlotCache:
    """A cache whose rows hold `context` tokens."""
    cache = model.new_cache(rows, context + max(*NODES, 32) + 64)
    for row in range(rows):
        tokens = torch.arange(context)[None] % model.vocab_size
        model.forward(tokens, cache, [row], want="none")
        cache.commit([row], [range(context)])
    return cache


def _time(model: LanguageModel, cache: SlotCache, rows: int, nodes: int) -> float:
    """Seconds of one forward, of which nothing is kept."""
    tokens = torch.zeros(rows, nodes, dtype=torch.long)
    start = perf_counter()
    model.forward(tokens, cache, list(range(rows)))
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start
