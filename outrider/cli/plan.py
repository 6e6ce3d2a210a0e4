"""`outrider plan`. Imports nothing large until it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.options import Debug, Options, option, setting
from outrider.cli.terminal import DIM, GREEN, YELLOW, check_folders, console, paint, readable, say, table, working
from outrider.core.files import write_whole

if TYPE_CHECKING:
    from outrider.lab.plan.answer import PlanAnswer, PlanFigure
    from outrider.lab.plan.serving_plan import ServingPlan

GROWS = "the queue grows without end"


class PlanModelOptions(Options):
    """The model, and where it runs."""

    model_params: str | None = setting(None, "Model", "Weights of the model: 70B, 1.5B or 135M.", metavar="SIZE")
    active_params: str | None = setting(
        None, "Model", "Weights that a token uses, of a mixture of experts.", metavar="SIZE"
    )
    config_file: Path | None = setting(
        None,
        "Model",
        "A config.json, for the shape; without it, that of a model of about this size.",
        "--model-config",
        metavar="FILE",
    )
    weights: str = setting("bf16", "Model", "Precision of the weights: bf16, fp8, int8 or int4.")
    kv_cache: str = setting("bf16", "Model", "Precision of keys and values: bf16 or fp8.")
    draft_params: str | None = setting(
        None, "Model", "Weights of the draft model; without it, drafts are lookups.", metavar="SIZE"
    )
    hardware: str = setting(
        "h100", "Hardware", "Of one replica: h100x8, l40s, ..., or a file FILE.json with your figures."
    )
    price: float | None = setting(
        None, "Hardware", "Price of one device for an hour, in your currency; there is no default.", ge=0
    )


class DemandOptions(Options):
    """What is asked of the fleet."""

    qps: float = setting(1.0, "Demand", "Requests per second.")
    prompt: str = setting(
        "1024", "Demand", "Tokens of a prompt: 300, 100-500, or ~300 for very different lengths with this mean."
    )
    output: str = setting("256", "Demand", "Tokens of an answer, in the same way.")
    acceptance: str = setting(
        "0.7",
        "Demand",
        "Measured acceptance: a report of outrider bench, a trace, a result of vllm bench serve; or a rate such as 0.7.",
        metavar="FILE|RATE",
    )
    setting: str | None = setting(None, "Demand", "The setting of a report that has several.", metavar="NAME")


class EngineLimitOptions(Options):
    """The engine of a replica; the names of `outrider serve`."""

    max_num_seqs: int = setting(64, "Engine", "Sequences in a batch, at most.", ge=1, le=1024)
    kv_tokens: int | None = setting(
        None, "Engine", "Tokens of all sequences together; without it, as many as fit.", ge=64
    )
    prefill_chunk: int = setting(512, "Engine", "Prompt tokens per step while others generate.", ge=1)


class TargetOptions(Options):
    """What 90 % of the requests must get."""

    p90_wait: float = setting(1.0, "Limits", "Seconds in the queue, for 90 % of the requests.")
    p90_ttft: float | None = setting(None, "Limits", "Seconds to the first token.")
    p90_tpot: float | None = setting(None, "Limits", "Seconds per token after the first.")
    p90_latency: float | None = setting(None, "Limits", "Seconds to the last token.")
    replicas: int | None = setting(None, "Limits", "Forecast so many replicas, and do not search.", ge=1, le=10000)


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
        check_folders(json_file, out)
        with working(f"planning for {demand.qps:g} requests/s on {model.hardware}"):
            from outrider.lab.plan.answer import answer

            made, inputs = _plan(model, demand, engine, targets, seed, whole_fleet)
            found = answer(made, inputs, targets.replicas, sweep=out is not None)
        show(made, found)
        if json_file is not None:
            write_whole(json_file, found.to_json() + "\n")
            say(f"All figures are in {json_file}.")
        if out is not None:
            write_whole(out, found.page())
            say(f"The page is {out}.")


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
    from outrider.lab.plan.serving_plan import ServingPlan
    from outrider.lab.plan.simulation import ReplicaLimits
    from outrider.lab.plan.workload import Demand, Lengths

    asked = Demand(demand.qps, Lengths.of(demand.prompt, "--prompt"), Lengths.of(demand.output, "--output"))
    curve = find_curve(demand.acceptance, demand.setting)
    wanted = {n: s for n in ("wait", "ttft", "tpot", "latency") if (s := getattr(targets, f"p90_{n}")) is not None}
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
    from outrider.lab.hardware import find_hardware
    from outrider.lab.plan.answer import PlanFigure, kv_tokens
    from outrider.lab.plan.planned_model import planned
    from outrider.lab.plan.serving_costs import RooflineCosts

    if model.model_params is None:
        raise ValueError("say how large the model is: --model-params 70B")
    hardware = find_hardware(model.hardware)
    hardware = replace(hardware, price=model.price if model.price is not None else hardware.price)
    target = planned(model.model_params, model.active_params, model.weights, model.kv_cache, model.config_file)
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
    for figure in found.inputs:
        print(f"{figure.name}: {figure.value} " + paint(f"({figure.formula})", DIM))
    heads = "batch", "plain\nms/step", "best\ndraft", "with it\nms/step", "decoding\nspeedup"
    shown = table("A replica by batch size", *heads, "plain\ntokens/s", "best\ntokens/s", "<")
    for row in found.table:
        shown.add_row(
            str(row.batch_size), f"{1e3 * row.plain_seconds:.1f}", str(row.depth), f"{1e3 * row.seconds:.1f}",
            f"{row.speedup:.2f} x", f"{row.plain_tokens:.0f}", f"{row.tokens:.0f}", "" if row.reached else "not reached",
        )  # fmt: skip
    console().print(shown)
    names = {
        "plain": "plain decoding",
        "fixed": f"{plan.adaptive[0]} draft tokens always",
        "adaptive": "length by load",
    }
    for name, forecast in found.fleets.items():
        times = f"wait {forecast.wait:.2g} s, first token {forecast.ttft:.2g} s, time per token {1e3 * forecast.tpot:.3g} ms"
        found_out = f"p90 of {times}, answer {forecast.latency:.3g} s" if forecast.stable else GROWS
        print(f"{names[name]}: {forecast.replicas} replicas at {forecast.load:.0%} load, {found_out}")
    lengths = ", ".join(
        f"{low}-{high}: {depth}" if high > low else f"{low}: {depth}" for low, high, depth in found.schedule
    )
    chosen = found.chosen
    decision = "Do not speculate" if found.policy == "plain" else f"Speculate, {names[found.policy]}"
    fast = f"the median answer is {found.speedup or 0:.2f} x as fast as with plain decoding on as many"
    gain = fast if found.speedup is not None else f"of plain decoding on as many, {GROWS}"
    say(f"{decision}: {chosen.replicas} replicas; {gain}.", GREEN)
    print(f"Best draft length by batch size: {lengths}")
    for figure in found.figures:
        print(f"  {figure.name}: {figure.value} " + paint(f"= {figure.formula}", DIM))
    for term in found.terms:
        print(
            f"  round of {round(chosen.batch_size)}, {term.name}: {1e3 * term.seconds:.3g} ms "
            + paint(f"= {term.formula}", DIM)
        )
    for note in found.notes:
        say(f"note: {note}", YELLOW)
