"""The results of a run by setting, in the field names of `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from outrider.core.intervals import Interval
from outrider.lab.bench import stats
from outrider.lab.bench.run import Run, Sample


def summary(run: Run) -> dict[str, Any]:
    """By setting. Times are in milliseconds, `spec_decode_acceptance_rate` is in percent, as in vLLM.

    `speedup` is over the first setting, with its 95 % interval. The bounds are null if there are too few prompts.
    """
    out: dict[str, Any] = {}
    for setting in run.settings:
        num_requests = sum(s.setting == setting.name for s in run.samples)
        fields = throughput_fields(stats.answered(run, setting.name), num_requests)
        if setting is not run.settings[0]:
            fields |= _against_baseline(run, setting.name)
        names = stats.categories(run)
        if len(names) > 1:
            fields["by_category"] = {name: _category(run, setting.name, name) for name in names}
        out[setting.name] = fields
    return out


def throughput_fields(samples: list[Sample], num_requests: int, seconds: float | None = None) -> dict[str, Any]:
    """Throughput, latency and acceptance of answered samples. num_requests: failed ones included.
    seconds: duration; None takes the sum over the turns."""
    seconds = stats.wall(samples) if seconds is None else seconds
    read, written = sum(s.prompt_tokens for s in samples), sum(s.output_tokens for s in samples)
    out: dict[str, Any] = {
        "duration": seconds,
        "completed": len(samples),
        "failed": num_requests - len(samples),
        "total_input_tokens": read,
        "total_output_tokens": written,
    }
    if seconds:
        out |= {
            "request_throughput": len(samples) / seconds,
            "output_throughput": written / seconds,
            "total_token_throughput": (read + written) / seconds,
        }
    for name, values in stats.times(samples).items():
        if values:
            ms = [1000 * v for v in values]
            out |= {f"mean_{name}_ms": statistics.mean(ms), f"median_{name}_ms": statistics.median(ms)}
            out[f"std_{name}_ms"] = statistics.pstdev(ms)
            out |= {f"p{p}_{name}_ms": stats.percentile(ms, p) for p in stats.PERCENTILES}
    if (found := stats.acceptance(samples)) is not None:
        out |= {
            "spec_decode_acceptance_rate": 100 * (found.rate or 0.0),
            "spec_decode_acceptance_length": found.length,
            "spec_decode_num_drafts": found.steps,
            "spec_decode_draft_tokens": found.drafted,
            "spec_decode_accepted_tokens": found.accepted,
            "spec_decode_per_position_acceptance_rates": found.by_depth,
        }
    return out


def _against_baseline(run: Run, setting: str) -> dict[str, Any]:
    ours, base = stats.answered(run, setting), stats.answered(run, run.settings[0].name)
    different, compared = stats.differing(ours, base)
    return {
        "speedup": bounds(stats.ratio(ours, base)),
        "texts_compared": compared,
        "texts_differing": len(different),
        "identity_promised": stats.identity_promised(run, setting),
    }


def _category(run: Run, setting: str, category: str) -> dict[str, Any]:
    ours, base = (stats.answered(run, name, category) for name in (setting, run.settings[0].name))
    out: dict[str, Any] = {"output_throughput": None if (rate := stats.rate(ours)) is None else rate.value}
    if setting != run.settings[0].name:
        out["speedup"] = bounds(stats.ratio(ours, base))
    if (found := stats.acceptance(ours)) is not None:
        out["spec_decode_acceptance_length"] = found.length
    return out


def bounds(found: Interval | None) -> dict[str, float | None] | None:
    """An interval for JSON, which has no infinity."""
    if found is None:
        return None
    known = math.isfinite(found.high)
    return {"value": found.value, "low": found.low if known else None, "high": found.high if known else None}
