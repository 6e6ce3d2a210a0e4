"""Calibration: measures once what steps cost, and keeps it in the user's cache. It makes the planner of a model.

The result is a `CostModel`. It holds for one machine, this build of the kernels, these models, their precision and this number of
threads. A second at load is enough: the planner corrects the costs by every step (`outrider.control.Costs`).
`outrider doctor MODEL` measures more sizes, more often, for reports.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from outrider.control import Controller, CostModel, Costs, DraftCost, Fixed, Planner
from outrider.control.costs import assumed, tokens_read
from outrider.core.files import cache_folder, written_whole
from outrider.core.params import SamplingParams
from outrider.core.types import Budget, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, chains
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import METHODS, level_cost, lookup_names, method_of
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.kernels import cpu as native
from outrider.kernels.machine import machine
from outrider.models.base import LanguageModel
from outrider.models.checkpoint import fingerprint
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes
from outrider.models.packs import store

REVISION = "7"  # of this method of measurement; costs that an older one has stored are measured again
AT_LOAD, WHOLE = (1, 4, 16), (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Nodes of the forwards that are measured, at load and by `outrider doctor MODEL`."""
ROUNDS = 8
"""Rounds of `outrider doctor MODEL`."""
_PROMPT, _FEW, _MANY = 33, 2, 6  # tokens that are read, and the levels of two chains
_BEHIND = 2048  # tokens behind the nodes whose attention is timed
_SLOW = 0.15  # seconds of a plain step from which on everything is measured once at load
_EXPENSIVE = 3.0  # a drafter that takes so many times what its bytes say is measured again
_TURNS = 8  # in so many rounds at most


def conditions() -> dict[str, str]:
    """What a measurement holds for, apart from the models."""
    facts = machine()
    return {
        "calibration": REVISION,
        "threads": str(native.num_threads() if native.available() else "all"),
        "kernels": native.build(),
        **{name: str(facts[name]) for name in ("outrider", "cpu", "cores")},
    }


def costs_of(config: SpeculativeConfig, target: Loaded) -> dict[str, str]:
    """What a measurement holds for: the target and the drafter, with their settings and the present state of their files.

    Other weights of the same shape may have other costs: they choose experts, and the layers of layer_skip.
    """
    free = {"controller", "verifier", "prediction", "num_speculative_tokens", "tree_width", "tree_nodes"}
    draft = config.model_dump_json(exclude=free, fallback=str)
    cells = "" if target.model.kv_cache_dtype == "auto" else f" {target.model.kv_cache_dtype} keys and values"
    cells += "" if str(target.model.device) == "cpu" else f" on {target.model.device}"
    return {
        "target": f"{target.source} {target.weights} {fingerprint(target.source)}{cells}",
        "draft": f"{draft} {fingerprint(config.model)} {fingerprint(config.layers)}",
    }


def make_planner(
    config: SpeculativeConfig,
    target: Loaded,
    drafters: Mapping[str, Drafter],
    lengths: Controller | None = None,
    whole: bool = False,
) -> Planner:
    """The planner of a model and its drafters, with the costs that this machine has for them.

    Costs that are not stored are measured now and stored; those of drafters that others wrote are learned from the steps.
    lengths: a controller that says how long drafts are; None for what the configuration says. Fixed lengths need no costs. whole:
    measure with `WHOLE` sizes and `ROUNDS`, whatever is stored.
    """
    shares = {name: level_cost(name, drafter, target.model) for name, drafter in drafters.items()}
    if lengths is None and not config.adaptive:
        lengths = Fixed(config.budget.depth, config.budget.width, config.budget.nodes)
    if lengths is not None:
        return Planner(config.budget, Costs(assumed(1.0, shares)), lengths)
    heavy = {name: drafter for name, drafter in drafters.items() if name not in lookup_names(drafters)}
    models = {name: drafter for name, drafter in heavy.items() if (m := method_of(name)) and m.name in METHODS}
    grown = [name for name, drafter in heavy.items() if drafter.resources().siblings]
    siblings = grown if config.tree_width is None else []
    return Planner(config.budget, Costs(costs(config, target, models, whole)), siblings=siblings)


def costs(config: SpeculativeConfig, target: Loaded, models: Mapping[str, Drafter], whole: bool = False) -> CostModel:
    """The stored costs of a target and its drafters. If there are none, they are measured and stored.

    Of two measurements of one thing the faster one is stored. The steps of the model correct it, see `Costs`. No step corrects a
    drafter that looks too expensive to be asked, so one that costs far more than its bytes say is measured again.
    models: the drafters that cost something, by name. whole: as for `make_planner`.
    """
    key = {**conditions(), **costs_of(config, target), "drafters": ",".join(sorted(models))}
    before = _stored(_place(key))
    before = before if before is not None and before.key == key else None
    if before is None or whole:
        model = measure(target.model, models, key, WHOLE if whole else AT_LOAD, ROUNDS if whole else 2)
        model = model if before is None else model.faster(before)
    else:
        plain, old, expensive = before.forward(1), before.drafters, dict[str, Drafter]()
        for name, cost in old.items():
            if cost.seconds(_FEW) > _most(name, models[name], target.model, plain):
                expensive[name] = models[name]
        if not expensive:
            return before
        new = _drafters(target.model, expensive, plain, 1).items()
        model = replace(before, drafters=old | {n: c for n, c in new if c.seconds(_FEW) < old[n].seconds(_FEW)})
    _store(model)
    return model


def _place(key: Mapping[str, str]) -> Path:
    return cache_folder() / f"cost-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _store(model: CostModel) -> None:
    with suppress(OSError), written_whole(_place(model.key)) as part:  # else they are measured again at the next start
        part.write_text(model.to_json(), encoding="utf-8")


def all_stored() -> list[CostModel]:
    """The cost models of this machine as it is now, by the names in their keys."""
    here, models = conditions(), list[CostModel]()
    for path in sorted(cache_folder().glob("cost-*.json")):
        model = _stored(path)
        if model is not None and all(model.key.get(name) == value for name, value in here.items()):
            models.append(model)
    return sorted(models, key=lambda model: (model.key["target"], model.key["draft"]))


def measure(
    target: LanguageModel,
    models: Mapping[str, Drafter],
    key: Mapping[str, str],
    sizes: tuple[int, ...] = AT_LOAD,
    rounds: int = 2,
) -> CostModel:
    """Measure a cost model in real steps over a text of `_PROMPT` tokens.

    Every setting is timed once a round, and its fastest time counts: other programs can only slow a step down, and seldom all
    rounds of one setting. The first round of a drafter does not count. models: drafters that cost something; they forget the
    text. sizes: nodes of a forward, the root counted.
    """
    store.wait()  # a pack that is being written slows some of the steps
    with Workbench(target, Different(target.vocab_size)) as bench:
        sizes = tuple(n for n in sizes if n == 1 or bench.room > 2 * n) if bench.room > 2 else (1,)
        first = bench.seconds(1)[1]
        if first > _SLOW and sizes == AT_LOAD:
            rounds = 1
        times = [[bench.seconds(n)[1] for n in sizes] for _ in range(rounds + 1)]
        seconds = dict(zip(sizes, map(min, zip(*times, strict=True)), strict=True))
        for few, many in zip(sizes[-2::-1], sizes[:0:-1], strict=True):  # more nodes never take less
            seconds[few] = min(seconds[few], seconds[many])
    drafters = _drafters(target, models, seconds[1], rounds - (rounds == 2))
    return CostModel(dict(key), seconds, drafters, _attention(target), dict(Counter(target.windows)))


def _attention(target: LanguageModel) -> float:
    """Seconds that each node of a step adds for each token behind it that a layer reads. What these are does not matter."""
    nodes, taken = np.array([[_token(n, target.vocab_size) for n in range(4)]]), list[float]()
    length = min(_BEHIND, target.max_length // 2)
    cache = target.new_cache(1, length + nodes.size)
    for behind in (0, length):
        cache.reserve([0], behind + nodes.size)
        for part in (part for layer in cache.layers for part in layer):
            part[...] = 1
        cache.restore(0, behind, cache.snapshot(0))
        times = list[float]()
        for _ in range(3):
            began = perf_counter()
            target.forward(Nodes(nodes, cache, [0]))
            times.append(perf_counter() - began)
        taken.append(min(times))
    read = tokens_read(Counter(target.windows), length) * nodes.size
    return max(taken[1] - taken[0], 0.0) / read if read else 0.0


def _drafters(target: LanguageModel, models: Mapping[str, Drafter], plain: float, rounds: int) -> dict[str, DraftCost]:
    """What drafters cost, without those that cannot draft here. plain: seconds of a plain step."""
    costs = {n: draft_cost(target, drafter, rounds, _most(n, drafter, target, plain)) for n, drafter in models.items()}
    return {name: cost for name, cost in costs.items() if cost is not None}


def _most(name: str, drafter: Drafter, target: LanguageModel, plain: float) -> float:
    """Seconds that a draft of `_FEW` tokens takes at most, by the drafter's bytes. More mean another program, or slow Python."""
    return _EXPENSIVE * _FEW * level_cost(name, drafter, target) * plain


def draft_cost(target: LanguageModel, drafter: Drafter, rounds: int, most: float) -> DraftCost | None:
    """What a drafter costs; None if it cannot draft here, as on a target with a very short context.

    rounds: at least so many; more while a draft of `_FEW` tokens takes longer than `most` seconds.
    """
    few = many = whole = float("inf")
    read = 1
    for turn in range(_TURNS + 1):
        if turn > rounds and few <= most:
            break
        with Workbench(target, drafter) as bench:
            if bench.room <= _FEW + 2 * _MANY:
                return None
            read = max(drafter.missing(bench.slot, bench.tokens), 0)
            reading = bench.seconds(1 + _FEW)[0]
            times = bench.seconds(1 + _FEW)[0], bench.seconds(1 + _MANY)[0]
        if turn:  # the first round reads the weights for the first time
            whole, few, many = min(whole, reading), min(few, times[0]), min(many, times[1])
    if (error := drafter.resources().error) is not None:
        error.reset()  # that text was none
    level = max((many - few) / (_MANY - _FEW), 1e-7)
    return DraftCost(max(few - _FEW * level, 1e-7), level, max(whole - few, 0.0) / read if read > 1 else 0.0)


def _stored(path: Path) -> CostModel | None:
    try:
        return CostModel.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # there is none, or it is damaged, or of an older version


class Different(BaseDrafter):
    """Proposes tokens that all differ. Each wakes its own experts of a mixture; equal ones would share them, and look cheap."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, context: DraftContext) -> Draft:
        return chains(context, [[_token(n, self.vocab_size) for n in range(b.depth)] for b in context.budgets])


def _token(place: int, vocab_size: int) -> int:
    """Neighbours are far apart; none is repeated in a small vocabulary before it is through."""
    return (7919 * place + 1) % vocab_size


class Workbench(Fixed):
    """A decoder with one sequence, and its controller.

    Attributes:
        room: Draft tokens that the text has room for.
    """

    def __init__(self, target: LanguageModel, drafter: Drafter) -> None:
        super().__init__(0)
        length = min(4 * _PROMPT + 64, target.max_length)
        self.decoder = Decoder(target, drafter, controller=self, num_slots=1, max_length=length)
        count = min(_PROMPT, length // 3)
        prompt = [_token(n, target.vocab_size) for n in range(max(count, 1))]
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        sequence = self.decoder.start(Request(0, prompt, params))
        self.sequence, self.slot, self.tokens = sequence, sequence.slot, sequence.tokens
        self.room = length - len(prompt) - 2

    def __enter__(self) -> Workbench:
        for _ in self.decoder.run([self.sequence], 0):  # reads the prompt
            pass
        return self

    def __exit__(self, *problem: object) -> None:
        self.decoder.release(self.slot)

    def seconds(self, nodes: int) -> tuple[float, float]:
        """Time a step over so many nodes: its draft, and the rest."""
        self.budget = Budget(nodes - 1)
        began = perf_counter()
        step = self.decoder.round([self.sequence])
        taken, draft = perf_counter() - began, step.seconds["draft"]
        return draft, taken - draft
