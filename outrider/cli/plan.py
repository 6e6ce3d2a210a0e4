"""`outrider plan`. Imports nothing large until it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.options import Debug, option
from outrider.cli.terminal import DIM, GREEN, YELLOW, console, paint, readable, working

if TYPE_CHECKING:
    from outrider.lab.plan.answer import PlanAnswer, PlanFigure
    from outrider.lab.plan.serving_plan import ServingPlan


@dataclass(frozen=True)
class PlanModelOptions:
    """The model, and where it runs."""

    model_params: Annotated[str | None, option("Model", "Weights of the model: 70B, 1.5B or 135M.", metavar="SIZE")] = (
        None
    )
    active_params: Annotated[
        str | None, option("Model", "Weights that a token uses, of a mixture of experts.", metavar="SIZE")
    ] = None
    model_config: Annotated[
        Path | None,
        option(
            "Model", "A config.json, for the shape; without it, that of a model of about this size.", metavar="FILE"
        ),
    ] = None
    weights: Annotated[str, option("Model", "Precision of the weights: bf16, fp8, int8 or int4.")] = "bf16"
    kv_cache: Annotated[str, option("Model", "Precision of keys and values: bf16 or fp8.")] = "bf16"
    draft_params: Annotated[
        str | None, option("Model", "Weights of the draft model; without it, drafts are lookups.", metavar="SIZE")
    ] = None
    hardware: Annotated[
        str, option("Hardware", "Of one replica: h100x8, l40s, ..., or a file FILE.json with your figures.")
    ] = "h100"
    price: Annotated[
        float | None,
        option("Hardware", "Price of one device for an hour, in your currency; there is no default.", min=0),
    ] = None


@dataclass(frozen=True)
class DemandOptions:
    """What is asked of the fleet."""

    qps: Annotated[float, option("Demand", "Requests per second.")] = 1.0
    prompt: Annotated[
        str, option("Demand", "Tokens of a prompt: 300, 100-500, or ~300 for very different lengths with this mean.")
    ] = "1024"
    output: Annotated[str, option("Demand", "Tokens of an answer, in the same way.")] = "256"
    acceptance: Annotated[
        str,
        option(
            "Demand",
            "Measured acceptance: a report of outrider bench, a trace, a result of vllm bench serve; or a rate such as 0.7.",
            metavar="FILE|RATE",
        ),
    ] = "0.7"
    setting: Annotated[str | None, option("Demand", "The setting of a report that has several.", metavar="NAME")] = None


@dataclass(frozen=True)
class EngineLimitOptions:
    """The engine of a replica; the names of `outrider serve`."""

    max_num_seqs: Annotated[int, option("Engine", "Sequences in a batch, at most.", min=1, max=1024)] = 64
    kv_tokens: Annotated[
        int | None, option("Engine", "Tokens of all sequences together; without it, as many as fit.", min=64)
    ] = None
    prefill_chunk: Annotated[int, option("Engine", "Prompt tokens per step while others generate.", min=1)] = 512


@dataclass(frozen=True)
class TargetOptions:
    """What 90 % of the requests must get."""

    p90_wait: Annotated[float, option("Limits", "Seconds in the queue, for 90 % of the requests.")] = 1.0
    p90_ttft: Annotated[float | None, option("Limits", "Seconds to the first token.")] = None
    p90_tpot: Annotated[float | None, option("Limits", "Seconds per token after the first.")] = None
    p90_latency: Annotated[float | None, option("Limits", "Seconds to the last token.")] = None
    replicas: Annotated[
        int | None, option("Limits", "Forecast so many replicas, and do not search.", min=1, max=10_000)
    ] = None


def plan(
    *,
    model: PlanModelOptions,
    demand: DemandOptions,
    engine: EngineLimitOptions,
    targets: TargetOptions,
    seed: Annotated[int, option("Simulation", "Of the simulated requests.")] = 0,
    whole_fleet: Annotated[
        bool, option("Simulation", "Simulate every replica, not a part of the fleet.", "--whole-fleet")
    ] = False,
    json_file: Annotated[Path | None, option("Output", "Write all figures here.", "--json", metavar="FILE")] = None,
    out: Annotated[
        Path | None, option("Output", "Write a page with pictures here.", "--out", "-o", metavar="FILE.html")
    ] = None,
    debug: Debug = False,
) -> None:
    """Plan machines you do not have: replicas, draft lengths and costs for a demand, and whether to speculate at all.

    Costs come from data sheets by the roofline model, acceptance from a measurement, queues from a simulator of the engine.
    """
    with readable(debug):
        for file in (json_file, out):
            if file is not None and not file.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {file.absolute().parent} to write {file.name} to")
        with working(f"simulating {demand.qps:g} requests a second on {model.hardware}"):
            from outrider.lab.plan.answer import answer

            made, inputs = _plan(model, demand, engine, targets, seed, whole_fleet)
            found = answer(made, inputs, targets.replicas, sweep=out is not None)
        show(made, found)
        if json_file is not None:
            json_file.write_text(found.to_json() + "\n", encoding="utf-8")
            print(paint(f"All figures are in {json_file}.", DIM))
        if out is not None:
            from outrider.lab.plan.page import write

            write(found, out)
            print(paint(f"The page is {out}.", DIM))


def _plan(
    model: PlanModelOptions,
    demand: DemandOptions,
    engine: EngineLimitOptions,
    targets: TargetOptions,
    seed: int,
    whole_fleet: bool,
) -> tuple[ServingPlan, list[PlanFigure]]:
    from outrider.lab.plan.acceptance_curve import find_curve
    from outrider.lab.plan.answer import PlanFigure
    from outrider.lab.plan.serving_costs import measured_costs
    from outrider.lab.plan.serving_plan import LatencyTargets, ServingPlan
    from outrider.lab.plan.simulation import ReplicaLimits
    from outrider.lab.plan.workload import Demand, Lengths

    asked = Demand(demand.qps, Lengths.of(demand.prompt, "--prompt"), Lengths.of(demand.output, "--output"))
    curve = find_curve(demand.acceptance, demand.setting)
    wanted = LatencyTargets(targets.p90_wait, targets.p90_ttft, targets.p90_tpot, targets.p90_latency)
    if curve.model and model.draft_params is None and not model.hardware.endswith(".json"):
        raise ValueError(
            f"the drafts of {demand.acceptance} came from a model, and its passes take time; say how large it is on that "
            "hardware: --draft-params 1B (of a trained head, its own weights)"
        )
    measured = measured_costs(Path(model.hardware)) if model.hardware.endswith(".json") else None
    if measured is not None:
        costs, capacity, price = measured, engine.kv_tokens or 1 << 40, model.price
        curve = curve.cut(measured.deepest)
        inputs = [PlanFigure("costs", "measured", measured.source)]
    else:
        costs, capacity, price, inputs = _roofline(model, engine, asked.prompt.most + asked.output.most)
    inputs += [
        PlanFigure(
            "demand", f"{asked.qps:g} requests/s", f"Poisson arrivals; prompts {asked.prompt}, answers {asked.output}"
        ),
        PlanFigure(
            "acceptance", ", ".join(f"{s:.0%}" for s in curve.survival), f"{curve.source}; survival by draft length"
        ),
        PlanFigure(
            "engine",
            f"{engine.max_num_seqs} sequences",
            f"{capacity:,} tokens of keys and values, prompts in pieces of {engine.prefill_chunk}",
        ),
    ]
    limits = ReplicaLimits(engine.max_num_seqs, capacity, engine.prefill_chunk)
    return ServingPlan(asked, costs, curve, limits, wanted, price, seed, whole_fleet), inputs


def _roofline(model: PlanModelOptions, engine: EngineLimitOptions, longest: int):
    """Costs, tokens of keys and values, price of a replica, and the inputs that say so."""
    from outrider.core.hardware import find_hardware
    from outrider.lab.plan.answer import PlanFigure, kv_tokens
    from outrider.lab.plan.planned_model import planned
    from outrider.lab.plan.serving_costs import RooflineCosts

    if model.model_params is None:
        raise ValueError("say how large the model is: --model-params 70B")
    hardware = find_hardware(model.hardware)
    hardware = replace(hardware, price=model.price if model.price is not None else hardware.price)
    target = planned(model.model_params, model.active_params, model.weights, model.kv_cache, model.model_config)
    draft = None if model.draft_params is None else planned(model.draft_params, None, model.weights, model.kv_cache)
    capacity = kv_tokens(hardware, target, draft, longest)
    device = hardware.device
    inputs = [
        PlanFigure(
            "hardware",
            hardware.name,
            f"{device.source}: {device.memory / 1e9:g} GB, {device.bandwidth / 1e12:g} TB/s, {device.half / 1e12:g} TFLOP/s with "
            f"16 bits{f', {device.fp8 / 1e12:g} with 8' if device.fp8 else ''}, {device.link / 1e9:g} GB/s to its neighbours",
        ),
        PlanFigure(
            "assumed of it",
            f"{hardware.bandwidth_share:.0%} of the bandwidth, {hardware.arithmetic_share:.0%} of the arithmetic",
            f"and {hardware.memory_share:.0%} of the memory, {1e6 * hardware.sync_seconds:g} us for a sum over devices, "
            f"{1e3 * hardware.step_seconds:g} ms a step outside of the model; a hardware file changes them",
        ),
    ]
    for name, one in (("model", target), *([("draft model", draft)] if draft else [])):
        shape = f"{one.layers} layers, {one.heads} heads, {one.kv_heads} of keys and values, {one.head_dim} wide"
        inputs.append(
            PlanFigure(
                name,
                f"{one.name}, {one.weight_bytes / 1e9:.4g} GB",
                f"{one.params:.4g} weights of {one.bits} bits; {one.source}: {shape}; {one.kv_per_token / 1024:.4g} KiB a token",
            )
        )
    if draft is None:
        inputs.append(
            PlanFigure("drafts", "lookups", "they cost nothing beside the target; --draft-params for a draft model")
        )
    price = None if hardware.price is None else hardware.price * hardware.count
    if engine.kv_tokens is not None and engine.kv_tokens > capacity:
        raise ValueError(f"--kv-tokens {engine.kv_tokens} do not fit; {capacity:,} do")
    return RooflineCosts(target, hardware, draft), engine.kv_tokens or capacity, price, inputs


def show(plan: ServingPlan, found: PlanAnswer) -> None:
    """Print inputs, the table over batch sizes, and the answer with its formulas."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for figure in found.inputs:
        print(f"{figure.name}: {figure.value} " + paint(f"({figure.formula})", DIM))
    table = Table(title="A replica by batch size", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in (
        "batch", "plain\nms/step", "best\ndraft", "with it\nms/step", "decoding\nspeedup", "plain\ntokens/s", "best\ntokens/s",
    ):  # fmt: skip
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for row in found.table:
        table.add_row(
            str(row.batch_size), f"{1e3 * row.plain_seconds:.1f}", str(row.depth), f"{1e3 * row.seconds:.1f}",
            f"{row.speedup:.2f} x", f"{row.plain_tokens:.0f}", f"{row.tokens:.0f}", "" if row.reached else "not reached",
        )  # fmt: skip
    console().print(table)
    names = {
        "plain": "plain decoding",
        "fixed": f"{plan.adaptive[0]} draft tokens always",
        "adaptive": "length by load",
    }
    for name, forecast in found.fleets.items():
        state = "" if forecast.stable else paint(" the queue grows without end", YELLOW)
        print(
            f"{names[name]}: {forecast.replicas} replicas at {forecast.load:.0%} load, p90 wait {forecast.wait:.2g} s, "
            f"first token {forecast.ttft:.2g} s, per token {1e3 * forecast.tpot:.3g} ms, answer {forecast.latency:.3g} s{state}"
        )
    lengths = ", ".join(
        f"{low}-{high}: {depth}" if high > low else f"{low}: {depth}" for low, high, depth in found.schedule
    )
    chosen = found.chosen
    decision = "Do not speculate" if found.policy == "plain" else f"Speculate, {names[found.policy]}"
    print(
        paint(
            f"{decision}: {chosen.replicas} replicas, answers {found.speedup:.2f} x as fast as plain decoding.", GREEN
        )
    )
    print(f"Best draft length by batch size: {lengths}")
    for figure in found.figures:
        print(f"  {figure.name}: {figure.value} " + paint(f"= {figure.formula}", DIM))
    for term in found.terms:
        print(
            f"  round of {round(chosen.batch_size)}, {term.name}: {1e3 * term.seconds:.3g} ms "
            + paint(f"= {term.formula}", DIM)
        )
    for note in found.notes:
        print(paint(f"note: {note}", YELLOW))
