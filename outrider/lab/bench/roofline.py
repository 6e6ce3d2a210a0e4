"""What the machine allows, and what the cost model predicts for settings that draft chains. A report shows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import torch

from outrider.control import CostModel
from outrider.drafters.method import model_method
from outrider.drafters.registry import lookup_names
from outrider.engine.calibrate import costs
from outrider.engine.llm import LLM
from outrider.kernels import cpu as native
from outrider.lab.bench import stats
from outrider.lab.bench.run import Limits, Run, Sample

# Seconds of a plain step from which on a calibration would take minutes; it is then skipped.
SLOW_STEP = 0.2
# Bytes of a matrix that no cache can hold, and how often it is read.
MATRIX, PASSES = 2**29, 12


def measure_limits(run: Run, llms: Mapping[str, LLM]) -> None:
    """Fill in `run.limits` and `run.predicted`.

    Takes seconds for each setting the first time. Cost models are kept on disk.
    """
    first, *others = run.settings
    plain = stats.answered(run, first.name)
    steps = [seconds for s in plain for seconds, tokens in s.gaps if tokens == 1]
    target = llms[first.name].loaded.model
    plain_step, size = median(steps) if steps else None, target.weight_bytes or None
    speed, forwards, level = read_speed(MATRIX, PASSES) if size else None, dict[str, float](), None
    run.allow(Limits(plain_step=plain_step, weight_bytes=size, read_bytes_per_second=speed))
    if run.concurrency > 1 or not steps or median(steps) > SLOW_STEP:
        return
    for setting in others:
        llm = llms[setting.name]
        config = llm.config
        if config.tree_width > 1 or config.tree_nodes is not None or not config.budget.depth:
            continue
        lookups = lookup_names(llm.drafters)
        models = {name: drafter for name, drafter in llm.drafters.items() if name not in lookups}
        cost = costs(config, llm.loaded, models)
        forwards = forwards or {str(n): seconds for n, seconds in cost.target.items()}
        if level is None and model_method() in models:
            level = cost.drafters[model_method()].level
        run.allow(run.limits.model_copy(update={"target": forwards, "draft_token": level}))
        name = next(iter(models), "")
        if (speed := predict(stats.answered(run, setting.name), plain, cost, name)) is not None:
            run.predicted[setting.name] = speed


def read_speed(size: int, passes: int) -> float:
    """Memory bandwidth in bytes per second, of all threads together. Needs the native kernels.

    Measured with the linear layer that reads a model's weights: a vector times a matrix of `size` bytes. The fastest pass
    counts, because other programs can only slow a pass down.
    """
    width = 4096
    matrix = native.Packed([torch.ones(1, 1).expand(size // (4 * width), width)], "float32")
    row, seconds = torch.ones(1, width), list[float]()
    for _ in range(passes):
        began = perf_counter()
        matrix.linear(row)
        seconds.append(perf_counter() - began)
    return matrix.bytes / min(seconds)


def predict(samples: Sequence[Sample], plain: Sequence[Sample], cost: CostModel, drafter: str) -> float | None:
    """Tokens per second that the cost model predicts for the steps of these samples. None if their steps are unknown.

    drafter: the one that costs something, "" for none. The first step counts as it was measured. The price of the others is
    scaled by the speed of the machine during the plain answers.
    """
    tokens, first, priced = _price(samples, cost, drafter)
    _, plain_first, plain_priced = _price(plain, cost, drafter)
    if not priced or not plain_priced:
        return None
    slowdown = (sum(s.seconds for s in plain) - plain_first) / plain_priced
    return tokens / (first + slowdown * priced)


def _price(samples: Sequence[Sample], cost: CostModel, drafter: str) -> tuple[int, float, float]:
    """Tokens, measured seconds to the first tokens, and the cost model's seconds for all other steps."""
    tokens, first, priced = 0, 0.0, 0.0
    for s in samples:
        if not s.drafted or s.ttft is None:
            continue
        tokens, first = tokens + s.output_tokens, first + s.ttft
        priced += sum(cost.draft(drafter, drafted) + cost.forward(drafted + 1) for drafted in s.drafted[1:])
    return tokens, first, priced
