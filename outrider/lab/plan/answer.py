"""The answer of a plan: replicas, draft lengths, costs, and for every figure its formula and its inputs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.lab.hardware import Hardware
from outrider.lab.plan.planned_model import PlannedModel
from outrider.lab.plan.serving_costs import CostTerm
from outrider.lab.plan.serving_plan import BatchFigures, Forecast, ServingPlan
from outrider.pages.page import assemble

ASSETS = Path(__file__).parent / "assets"
FEWEST = "the fewest whose simulated p90 keep the limits"
SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15)  # of the demand, for the picture of load


@dataclass(frozen=True)
class PlanFigure:
    """One figure: its name, its value in words, and its formula with the inputs, or where it comes from."""

    name: str
    value: str
    formula: str


@dataclass(frozen=True)
class PlanAnswer:
    """What a plan says.

    qps: requests per second. policy: plain, fixed or adaptive, whichever needs the fewest replicas. fleets: the forecast of
    each policy. schedule: draft length of the adaptive policy, by batch size: [from, to, length]. loses_from: batch size from
    which on the fixed length is slower than plain decoding. terms: the parts of a round at the mean batch size. cost: of a
    million output tokens. speedup: None where so many replicas of plain decoding do not suffice. sweep: forecasts of the
    chosen number of replicas under other loads, for the page.
    """

    qps: float
    policy: str
    fleets: dict[str, Forecast]
    table: list[BatchFigures]
    schedule: list[tuple[int, int, int]]
    loses_from: int | None
    terms: list[CostTerm]
    speedup: float | None
    cost: float | None
    replica_hours: float
    inputs: list[PlanFigure]
    figures: list[PlanFigure]
    notes: list[str]
    sweep: list[tuple[float, Forecast]] = field(default_factory=list)

    @property
    def chosen(self) -> Forecast:
        """The forecast of the chosen policy."""
        return self.fleets[self.policy]

    def to_json(self) -> str:
        found: dict[str, Any] = {"kind": "outrider-plan", "format": 1, **asdict(self)}
        return json.dumps(found, indent=1)

    def page(self) -> str:
        """The page of the plan in HTML. Texts of the plan are data, never markup."""
        return assemble(ASSETS / "plan.html", ASSETS / "plan.css", ASSETS / "plan.js", self.to_json())


def answer(plan: ServingPlan, inputs: list[PlanFigure], replicas: int | None = None, sweep: bool = False) -> PlanAnswer:
    """Find the fleet, or forecast one of `replicas`. sweep: also simulate other loads.

    Raises ValueError where no fleet can serve the demand, with the reason.
    """
    names = ["plain", "adaptive", "fixed"] if any(plan.adaptive) else ["plain"]
    if replicas is None:
        fleets = {name: plan.fleet(name) for name in names}
    else:
        fleets = {name: plan.forecast(replicas, name) for name in names}
        _refuse_unstable(plan, fleets)
    policy = min(names, key=lambda name: (not fleets[name].stable, fleets[name].replicas, fleets[name].median_latency))
    chosen = fleets[policy]
    plain = plan.forecast(chosen.replicas, "plain")
    speedup = plain.median_latency / chosen.median_latency if plain.stable else None
    size = max(1, round(chosen.batch_size))
    depth = plan.policies[policy][size]
    terms = list(plan.costs.terms(size, depth, plan.context))
    return PlanAnswer(
        qps=plan.demand.qps,
        policy=policy,
        fleets=fleets,
        table=plan.table(),
        schedule=_schedule(plan.adaptive),
        loses_from=plan.loses_from(),
        terms=terms,
        speedup=speedup,
        cost=plan.cost_per_million(chosen),
        replica_hours=plan.replica_hours_per_million(chosen),
        inputs=inputs,
        figures=_figures(plan, chosen, plain, speedup, "the number of --replicas" if replicas else FEWEST),
        notes=_notes(plan, fleets, policy, plain),
        sweep=[
            (share, plan.forecast(chosen.replicas, name, share)) for name in names for share in SHARES
        ] if sweep else [],
    )  # fmt: skip


def _refuse_unstable(plan: ServingPlan, fleets: dict[str, Forecast]) -> None:
    best = min(fleets.values(), key=lambda found: found.load)
    if best.stable:
        return
    each = plan.capacity[best.policy]
    raise ValueError(
        f"the queue of {best.replicas} replicas grows without end: {plan.demand.qps:g} requests come per second, and "
        f"{best.policy} decoding answers {best.replicas} x {each:.3g} = {best.replicas * each:.3g}; leave out --replicas to "
        "find enough, or lower --qps"
    )


def _schedule(depths: list[int]) -> list[tuple[int, int, int]]:
    """Runs of equal draft length over the batch sizes from 1 on."""
    runs = list[tuple[int, int, int]]()
    for depth, some in groupby(enumerate(depths[1:], 1), key=lambda pair: pair[1]):
        sizes = [n for n, _ in some]
        runs.append((sizes[0], sizes[-1], depth))
    return runs


def _figures(plan: ServingPlan, chosen: Forecast, plain: Forecast, speedup: float | None, why: str) -> list[PlanFigure]:
    demand, each = plan.demand, plan.capacity[chosen.policy]
    found = [
        PlanFigure(
            "capacity of a replica", f"{each:.3g} requests/s",
            f"simulated with requests always waiting: {chosen.policy} decoding, prompts {demand.prompt}, answers {demand.output}",
        ),
        PlanFigure(
            "replicas", f"{chosen.replicas}",
            f"{why}; at least {demand.qps:g} / {each:.3g} = {demand.qps / each:.2f}",
        ),
        PlanFigure("load", f"{chosen.load:.0%}", f"{demand.qps:g} / ({chosen.replicas} x {each:.3g})"),
        PlanFigure(
            "throughput", f"{chosen.throughput:.0f} output tokens/s", f"{demand.qps:g} requests/s x {demand.output.mean:g} tokens"
        ),
        PlanFigure(
            "replica hours for a million output tokens", f"{plan.replica_hours_per_million(chosen):.3g}",
            f"{chosen.replicas} / ({chosen.throughput:.0f} tokens/s x 3600 s) x 1e6",
        ),
    ]  # fmt: skip
    if speedup is not None:
        formula = f"plain {plain.median_latency:.3g} s / {chosen.policy} {chosen.median_latency:.3g} s"
        formula = f"median latency of {plain.replicas} replicas, {formula}"
        found.append(PlanFigure("speedup of an answer", f"{speedup:.2f} x", formula))
    if (cost := plan.cost_per_million(chosen)) is not None:
        formula = f"replica hours x {plan.price:g} for a replica and hour"
        found.append(PlanFigure("cost of a million output tokens", f"{cost:.3g} in the currency of --price", formula))
    return found


def _notes(plan: ServingPlan, fleets: dict[str, Forecast], policy: str, plain: Forecast) -> list[str]:
    notes = [
        f"A limit is not kept: the p90 {name} of {fleets[policy].replicas} replicas is more than {plan.targets[name]:g} s."
        for name in plan.missed(fleets[policy])
    ]
    if policy == "plain" and len(fleets) > 1:
        notes.append(
            f"At this load speculation does not pay: {fleets['adaptive'].replicas} replicas with it, {plain.replicas} without."
        )
    if plan.loses_from() is not None and plan.adaptive[0]:
        notes.append(
            f"A fixed draft of {plan.adaptive[0]} is slower than plain decoding from batch size {plan.loses_from()} on; let the "
            "length follow the load."
        )
    if plan.demand.output.mean / plan.pieces < plan.limits.max_num_seqs and plan.pieces > 1:
        notes.append(
            f"A step reads one piece of one prompt, and a prompt has {plan.pieces} pieces of {plan.limits.prefill_chunk} tokens. "
            f"So a batch does not grow beyond {plan.demand.output.mean / plan.pieces:.0f}; a larger --prefill-chunk lets it."
        )
    if fleets[policy].preemptions:
        notes.append(
            "Keys and values run short: some answers give way and are read again. A smaller --max-num-seqs avoids it."
        )
    return notes


def kv_tokens(hardware: Hardware, model: PlannedModel, draft: PlannedModel | None, longest: int) -> int:
    """Tokens whose keys and values fit beside the weights. Raises ValueError where one text of `longest` tokens does not."""
    models = [model] if draft is None else [model, draft]
    free = hardware.memory - sum(m.weight_bytes for m in models)
    each = sum(m.kv_per_token for m in models)
    if free < longest * each:
        need = sum(m.weight_bytes for m in models) + longest * each
        one = hardware.device.memory * hardware.memory_share
        raise ValueError(
            f"{model.name} does not fit on {hardware.name}: {model.weight_bytes / 1e9:.4g} GB of weights"
            + (f", {draft.weight_bytes / 1e9:.3g} GB of the draft model" if draft else "")
            + f" and {longest * each / 1e9:.3g} GB for one text of {longest} tokens are more than {hardware.memory / 1e9:.4g} GB "
            f"({hardware.count} x {hardware.device.memory / 1e9:g} x {hardware.memory_share:g}); use {int(-(-need // one))} "
            "devices, or --weights fp8"
        )
    return int(free // each)
