"""What the machine allows, and what the cost model expects of settings that draft chains: the yardsticks of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import torch

from outrider.bench import stats
from outrider.bench.run import Limits, Run, Sample
from outrider.calibrate import WHOLE, calibrated
from outrider.control import CostModel
from outrider.kernels import cpu as native
from outrider.llm import LLM, costs_of
from outrider.params import SamplingParams

SLOW = 0.2  # seconds of a plain step from which on calibration would take minutes
MATRIX, PASSES = 2**29, 12  # bytes that no cache holds, and how often they are read


def measure_limits(run: Run, llms: Mapping[str, LLM]) -> None:
    """Fill `run.limits` and `run.predicted`. Takes seconds per setting the first time; cost models are kept."""
    first, *others = run.settings
    plain = stats.good(run, first.name)
    steps = [seconds for s in plain for seconds, tokens in s.gaps if tokens == 1]
    target = llms[first.name].loaded.model
    run.limits = Limits(plain_step=median(steps) if steps else None, weight_bytes=target.weight_bytes or None)
    if run.limits.weight_bytes:
        run.limits.read_bytes_per_second = read_speed()
    if run.concurrency > 1 or not steps or median(steps) > SLOW:
        return
    middle = round(median(s.prompt_tokens + s.output_tokens / 2 for s in plain))
    known = None
    for setting in others:
        config = llms[setting.name].config
        if config.tree_width > 1 or config.tree_nodes is not None or not config.budget.depth:
            continue
        cost = known = _cost(llms[setting.name], known, SamplingParams(**run.sampling))
        if not run.limits.target:
            run.limits.target = {str(n): cost.target_seconds(1, n, middle) for n in WHOLE.nodes}
        depth = config.budget.depth
        if run.limits.draft_token is None and "draft_model" in config.methods:
            whole, none = (cost.draft_seconds(1, d, middle) for d in (depth, 0))
            run.limits.draft_token = (whole - none) / depth
        if (expected := expect(stats.good(run, setting.name), plain, cost)) is not None:
            run.predicted[setting.name] = expected


def read_speed() -> float:
    """Bytes per second that all threads read of memory, by the linear that reads a model's weights: one row times a matrix
    of `MATRIX` bytes. The best of some passes, as what else the machine does can only slow them. Needs the native kernels."""
    width = 4096
    matrix = native.Packed([torch.ones(1, 1).expand(MATRIX // (4 * width), width)], "float32")
    row, taken = torch.ones(1, width), list[float]()
    for _ in range(PASSES):
        began = perf_counter()
        matrix.linear(row)
        taken.append(perf_counter() - began)
    return matrix.bytes / min(taken)


def expect(samples: Sequence[Sample], plain: Sequence[Sample], cost: CostModel) -> float | None:
    """Tokens per second of these steps: the first one as it was measured, the others as the cost model prices their guesses,
    on a machine as busy as it was for the plain answers. None where nothing is known of steps."""
    tokens, reading, priced = _priced(samples, cost)
    _, before, usual = _priced(plain, cost)
    if not priced or not usual:
        return None
    busy = (sum(s.seconds for s in plain) - before) / usual
    return tokens / (reading + busy * priced)


def _priced(samples: Sequence[Sample], cost: CostModel) -> tuple[int, float, float]:
    """Tokens, seconds to the first ones, and seconds that all other steps should take."""
    tokens, reading, priced = 0, 0.0, 0.0
    for s in samples:
        if not s.drafted or s.ttft is None:
            continue
        context, each = float(s.prompt_tokens), s.output_tokens / len(s.drafted)
        tokens, reading = tokens + s.output_tokens, reading + s.ttft
        for guesses in s.drafted[1:]:
            context += each
            priced += cost.step_seconds(1, guesses, guesses, round(context))
    return tokens, reading, priced


def _cost(llm: LLM, known: CostModel | None, sampling: SamplingParams) -> CostModel:
    """The cost model of a setting, measured unless it is kept. known: of another setting, whose target is this one's."""
    names = costs_of(llm.config, llm.loaded)
    return calibrated(llm.loaded.model, llm.drafter_for, names, llm.config.budget, known=known, sampling=sampling)
