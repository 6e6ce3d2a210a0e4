"""The results of a run by setting, in the field names of `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from outrider.core.intervals import Interval
from outrider.lab.bench import stats
from outrider.lab.bench.report.analysis import CategoryResult, analyse, by_category
from outrider.lab.bench.run import Run, Sample


def summary(run: Run) -> dict[str, Any]:
    """By setting. Times are in milliseconds, `spec_decode_acceptance_rate` is in percent, as in vLLM.

    `speedup` is over the first setting, with its 95 % interval. The bounds are null if there are too few prompts.
    """
    results = analyse(run)
    categories, out = by_category(run, results), dict[str, dict[str, Any]]()
    for r in results:
        fields = throughput_fields(r.answers, len(r.answers) + len(r.failed))
        if r.texts is not None:
            fields |= {
                "speedup": bounds(r.ratio),
                "texts_compared": r.texts.compared,
                "texts_differing": r.texts.differing,
                "identity_promised": r.texts.promised,
            }
        if own := {c.category: _category(c, r.texts is not None) for c in categories if c.setting == r.name}:
            fields["by_category"] = own
        out[r.name] = fields
    return out


def _category(result: CategoryResult, compared: bool) -> dict[str, Any]:
    """compared: with the baseline."""
    rate, found = stats.rate(result.answers), stats.acceptance(result.answers)
    out: dict[str, Any] = {"output_throughput": None if rate is None else rate.value}
    if compared:
        out["speedup"] = bounds(result.ratio)
    if found is not None:
        out["spec_decode_acceptance_length"] = found.length
    return out


def throughput_fields(samples: list[Sample], num_requests: int) -> dict[str, Any]:
    """Throughput, latency and acceptance of answered samples. num_requests: failed ones included."""
    seconds = stats.wall(samples)
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


def bounds(found: Interval | None) -> dict[str, float | None] | None:
    """An interval for JSON, which has no infinity."""
    if found is None:
        return None
    known = math.isfinite(found.high)
    return {"value": found.value, "low": found.low if known else None, "high": found.high if known else None}
