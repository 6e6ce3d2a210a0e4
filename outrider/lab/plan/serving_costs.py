"""Seconds of what a replica does: reading prompts, and draft-verify rounds of a batch. From data sheets, or measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from outrider.core.files import read_settings
from outrider.core.interpolate import through
from outrider.lab.hardware import Hardware
from outrider.lab.plan.acceptance_curve import AcceptanceCurve
from outrider.lab.plan.planned_model import PlannedModel


@dataclass(frozen=True)
class CostTerm:
    """One part of a figure: its name, the formula with its inputs, and its seconds."""

    name: str
    formula: str
    seconds: float


@dataclass(frozen=True)
class RooflineCosts:
    """Costs by the roofline model (Williams et al. 2009): a pass takes the longer of its memory traffic and its arithmetic.

    Traffic: the weights that it reads, and the keys and values of every sequence. Arithmetic: 2 operations for each weight and
    token, and 4 * layers * heads * head_dim for each token and token of its context. Several devices split both, and sum up
    their results twice a layer (Megatron-LM, arXiv 1909.08053). A draft model runs on one of the devices.
    """

    model: PlannedModel
    hardware: Hardware
    draft: PlannedModel | None = None
    request: float = 0.0

    @property
    def drafter_reads(self) -> bool:
        return self.draft is not None

    @property
    def _one_device(self) -> Hardware:
        return replace(self.hardware, count=1)

    def round(self, batch_size: int, depth: int, context: float) -> float:
        return sum(term.seconds for term in self.terms(batch_size, depth, context))

    def prefill(self, tokens: int, context: float) -> float:
        return sum(term.seconds for term in _pass(self.model, self.hardware, tokens, 1, context + tokens / 2))

    def reading(self, tokens: int) -> float:
        if self.draft is None or not tokens:
            return 0.0
        return sum(term.seconds for term in _pass(self.draft, self._one_device, tokens, 1, tokens / 2))

    def terms(self, batch_size: int, depth: int, context: float) -> list[CostTerm]:
        """The parts of a round, with their formulas. Their sum is the round."""
        parts = [CostTerm("outside of the model", "step_seconds", self.hardware.step_seconds)]
        if depth and self.draft is not None:
            for term in _pass(self.draft, self._one_device, batch_size, batch_size, context):
                parts.append(CostTerm(f"draft: {term.name}", f"{depth} x ({term.formula})", depth * term.seconds))
        return parts + _pass(self.model, self.hardware, batch_size * (depth + 1), batch_size, context)


def _pass(model: PlannedModel, hardware: Hardware, tokens: int, sequences: int, context: float) -> list[CostTerm]:
    """The parts of one forward pass over so many tokens of so many sequences."""
    weights, cells = model.read_bytes(tokens), sequences * context * model.kv_per_token
    traffic = (weights + cells) / hardware.bandwidth
    operations = 2 * model.active * tokens + 4 * model.layers * model.heads * model.head_dim * context * tokens
    arithmetic = operations / hardware.arithmetic(model.bits)
    if traffic >= arithmetic:
        formula = (
            f"({_si(weights)}B weights + {sequences} x {context:.0f} x {_si(model.kv_per_token)}B keys and values) / "
            f"({hardware.count} x {_si(hardware.device.bandwidth)}B/s x {hardware.bandwidth_share:g})"
        )
        parts = [CostTerm("memory traffic", formula, traffic)]
    else:
        peak = hardware.arithmetic(model.bits) / hardware.count / hardware.arithmetic_share
        formula = (
            f"(2 x {_si(model.active)} weights x {tokens} tokens + attention) / "
            f"({hardware.count} x {_si(peak)}op/s x {hardware.arithmetic_share:g})"
        )
        parts = [CostTerm("arithmetic", formula, arithmetic)]
    if hardware.count > 1:
        moved = 2 * (hardware.count - 1) / hardware.count * tokens * model.hidden * 2
        each = hardware.sync_seconds + moved / hardware.device.link
        formula = f"{2 * model.layers} sums x ({_si(hardware.sync_seconds)}s + {_si(moved)}B / {_si(hardware.device.link)}B/s)"
        parts.append(CostTerm("sums over devices", formula, 2 * model.layers * each))
    return parts


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs that were measured on a server, with all that it does in a step.

    rounds: [batch size, depth, context, seconds]. prefills: [tokens, context, seconds] of a piece. read: seconds per token of
    the drafter's reading. request: seconds that a request takes from all others when it comes. Between the points are straight
    lines, in context, then depth or tokens, then batch size.
    """

    rounds: list[list[float]]
    prefills: list[list[float]]
    read: float = 0.0
    source: str = ""
    request: float = 0.0

    @property
    def drafter_reads(self) -> bool:
        return self.read > 0

    def round(self, batch_size: int, depth: int, context: float) -> float:
        return through(self.rounds, (batch_size, depth, context))

    def prefill(self, tokens: int, context: float) -> float:
        return through(self.prefills, (tokens, context))

    def reading(self, tokens: int) -> float:
        return self.read * tokens

    def terms(self, batch_size: int, depth: int, context: float) -> Sequence[CostTerm]:
        return ()

    @property
    def deepest(self) -> int:
        """The longest draft that was measured."""
        return max(int(row[1]) for row in self.rounds)

    def to_json(self) -> str:
        return json.dumps({"kind": "outrider-serving-costs", **asdict(self)}, indent=1)


ServingCosts = RooflineCosts | MeasuredCosts
"""What the simulator asks for, in seconds.

drafter_reads: whether the drafter is a model, which must read a text before it can draft for it. request: what a request takes
from all others when it comes. round: of `depth` draft tokens for each sequence, whose mean length is `context`. prefill: reading
tokens of one prompt, after `context` others. reading: the drafter's. terms: the parts of a round, none if rounds were measured.
"""


def measured_costs(path: Path) -> MeasuredCosts | None:
    """The costs of a file that `benchmarks.simulated calibrate` wrote, which also says how they were measured; None for another
    JSON file. Raises ValueError."""
    found = read_settings(path, "write it again: python -m benchmarks.simulated calibrate")
    if found.pop("kind", None) != "outrider-serving-costs":
        return None
    names = [field.name for field in fields(MeasuredCosts)]
    if missing := [name for name in ("rounds", "prefills") if not found.get(name)]:
        raise ValueError(f"{path} has no {missing[0]}; write it again: python -m benchmarks.simulated calibrate")
    return MeasuredCosts(**{name: found[name] for name in names if name in found})


def by_length(costs: ServingCosts, curve: AcceptanceCurve) -> Callable[[int, int, float], float]:
    """Expected seconds of a round, (batch size, depth, context) -> seconds, where drafts may be shorter than the depth.

    A batch is as long as its longest draft. If a share a of the drafts has a token at a position, a batch of n has one with
    probability 1 - (1 - a) ** n. Contexts are grouped by 16 tokens.
    """

    @lru_cache(maxsize=1 << 16)
    def seconds(batch_size: int, depth: int, group: int) -> float:
        context = 16.0 * group
        came = [1 - (1 - a) ** batch_size for a in curve.available[:depth]]
        total = last = costs.round(batch_size, 0, context)
        for k, chance in enumerate(came, 1):
            here = costs.round(batch_size, k, context)
            total, last = total + chance * (here - last), here
        return total

    return lambda batch_size, depth, context: seconds(batch_size, depth, round(context / 16))


def _si(x: float) -> str:
    """A number with a prefix, as in 140 G."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(x) >= size:
            return f"{x / size:.3g} {prefix}"
    return f"{x:.3g} "
