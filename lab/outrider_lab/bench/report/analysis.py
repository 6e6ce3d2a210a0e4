"""The results of a run as numbers. `recommend` puts them into words, `summary` is for files. Statistics come from `stats`.

The first setting of a run is the baseline. Ratios are over it, for the prompts and repeats that both answered.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import numpy as np

from outrider.core.intervals import Interval
from outrider_lab.bench import stats
from outrider_lab.bench.report.compare import versions
from outrider_lab.bench.run import Run, Sample, Setting
from outrider_lab.bench.stats import AcceptanceStats

PHASES = ("target", "draft", "verify", "commit", "rest")
EXAMPLES = 4  # of texts that differ


@dataclass(frozen=True)
class TextDifference:
    """Two answers to one prompt that differ."""

    prompt: str
    repeat: int
    at: int  # index of the first different token, or character if tokens are unknown
    unit: str  # token or character
    before: str  # the text before it
    base: str  # what follows in the baseline's answer
    ours: str  # what follows in this setting's answer


@dataclass(frozen=True)
class TextComparison:
    """Texts of a setting and of the baseline."""

    compared: int
    differing: int
    promised: bool  # they must be equal
    examples: list[TextDifference]


@dataclass(frozen=True)
class SettingResult:
    """All answers of one setting. What compares it with the baseline is None or empty for the baseline itself."""

    setting: Setting
    answers: list[Sample]
    failed: list[Sample]
    rate: Interval | None
    ratio: Interval | None = None  # to the baseline
    prompts: dict[str, float] = field(default_factory=dict)  # ratio to the baseline by prompt
    acceptance: AcceptanceStats | None = None
    by_depth: list[tuple[int, int]] = field(default_factory=list)  # see `stats.by_depth`
    texts: TextComparison | None = None  # with the baseline's
    phases: dict[str, float] = field(default_factory=dict)  # seconds per token

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def per_token(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phases.values())


def analyse(run: Run) -> list[SettingResult]:
    """One result for each setting, in the run's order."""
    base, results = stats.answered(run, run.settings[0].name), []
    for i, setting in enumerate(run.settings):
        answers = stats.answered(run, setting.name)
        promised = stats.identity_promised(run, setting.name)
        results.append(
            SettingResult(
                setting,
                answers,
                [s for s in run.samples if s.setting == setting.name and s.error is not None],
                stats.rate(answers),
                stats.ratio(answers, base) if i else None,
                ratio_by_prompt(answers, base) if i else {},
                stats.acceptance(answers),
                stats.by_depth(stats.steps(answers)) if is_chain(setting) else [],
                compare_texts(answers, base, promised) if i else None,
                seconds_by_phase(answers),
            )
        )
    return results


def by_category(run: Run) -> dict[str, tuple[int, list[SettingResult]]]:
    """For each category, in the run's order: its number of prompts, and the results on them. Empty for a single category."""
    names, results = dict.fromkeys(p.category for p in run.prompts), dict[str, tuple[int, list[SettingResult]]]()
    for name in names if len(names) > 1 else ():
        prompts = [p for p in run.prompts if p.category == name]
        wanted = {p.id for p in prompts}
        samples = [s for s in run.samples if s.prompt in wanted]
        results[name] = len(prompts), analyse(run.model_copy(update={"prompts": prompts, "samples": samples}))
    return results


def is_chain(setting: Setting) -> bool:
    """True if draft tokens follow one another, so that the number of them is the depth."""
    config = setting.speculative_config or {}
    return config.get("tree_width") in (1, None) and not config.get("tree_nodes")


def ratio_by_prompt(ours: Iterable[Sample], base: Iterable[Sample]) -> dict[str, float]:
    """Ratio of tokens per second for each prompt, over the repeats of both. Each answer has its own clock."""
    mine, theirs = _rates(ours), _rates(base)
    return {p: mine[p] / theirs[p] for p in mine if p in theirs}


def _rates(samples: Iterable[Sample]) -> dict[str, float]:
    sums: dict[str, tuple[int, float]] = {}
    for s in samples:
        tokens, seconds = sums.get(s.prompt, (0, 0.0))
        sums[s.prompt] = tokens + s.output_tokens, seconds + s.seconds
    return {p: tokens / seconds for p, (tokens, seconds) in sums.items() if tokens and seconds > 0}


def compare_texts(ours: Sequence[Sample], base: Sequence[Sample], promised: bool) -> TextComparison:
    different, compared = stats.differing(ours, base)
    mine, theirs = ({(s.prompt, s.repeat): s for s in samples} for samples in (ours, base))
    examples = [_difference(mine[key], theirs[key]) for key in different[:EXAMPLES]]
    return TextComparison(compared, len(different), promised, examples)


def _difference(mine: Sample, other: Sample) -> TextDifference:
    place = len(commonprefix([mine.text, other.text]))
    at, unit = place, "character"
    if mine.token_ids and other.token_ids:
        at, unit = len(commonprefix([mine.token_ids, other.token_ids])), "token"
    before = mine.text[max(place - 40, 0) : place]
    return TextDifference(mine.prompt, mine.repeat, at, unit, before, other.text[place:][:60], mine.text[place:][:60])


def seconds_by_phase(samples: Iterable[Sample]) -> dict[str, float]:
    """Seconds per token in each of PHASES that took time. Empty if phases are unknown."""
    some = [s for s in samples if s.phases]
    tokens = sum(s.output_tokens for s in some)
    return {n: t for n in PHASES if (t := sum(s.phases.get(n, 0.0) for s in some) / tokens) > 0} if tokens else {}


# -- for files ------------------------------------------------------------------------------------------------------------


def summary(run: Run) -> dict[str, Any]:
    """By setting. Times are in milliseconds, `spec_decode_acceptance_rate` is in percent, as in vLLM.

    `speedup` is over the first setting, with its 95 % interval. The bounds are null if there are too few prompts.
    `over_before`, of the setting `after`: the ratio of each measure, prompt by prompt.
    """
    categories, out = by_category(run), dict[str, dict[str, Any]]()
    for r in analyse(run):
        fields = throughput_fields(r.answers, len(r.answers) + len(r.failed))
        if r.texts is not None:
            fields |= {
                "speedup": bounds(r.ratio),
                "texts_compared": r.texts.compared,
                "texts_differing": r.texts.differing,
                "identity_promised": r.texts.promised,
            }
        if categories:
            of_setting = {name: next(x for x in some if x.name == r.name) for name, (_, some) in categories.items()}
            fields["by_category"] = {name: _of_category(result) for name, result in of_setting.items()}
        out[r.name] = fields
    if (comparison := versions(run)) is not None:
        different, compared = comparison.differing["after"]
        out["after"]["over_before"] = {
            **{c.measure: bounds(c.ratio) for c in comparison.changes},
            "texts_compared": compared,
            "texts_differing": different,
        }
    return out


def _of_category(r: SettingResult) -> dict[str, Any]:
    fields: dict[str, Any] = {"output_throughput": r.rate and r.rate.value}
    if r.texts is not None:
        fields["speedup"] = bounds(r.ratio)
    if r.acceptance is not None:
        fields["spec_decode_acceptance_length"] = r.acceptance.length
    return fields


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
            out |= {f"p{p}_{name}_ms": float(np.percentile(ms, p)) for p in stats.PERCENTILES}
    if (acceptance := stats.acceptance(samples)) is not None:
        out |= {
            "spec_decode_acceptance_rate": 100 * (acceptance.rate or 0.0),
            "spec_decode_acceptance_length": acceptance.length,
            "spec_decode_num_drafts": acceptance.steps,
            "spec_decode_draft_tokens": acceptance.drafted,
            "spec_decode_accepted_tokens": acceptance.accepted,
            "spec_decode_per_position_acceptance_rates": acceptance.by_depth,
        }
    return out


def bounds(ratio: Interval | None) -> dict[str, float | None] | None:
    """An interval for JSON, which has no infinity."""
    if ratio is None:
        return None
    low, high = (ratio.low, ratio.high) if math.isfinite(ratio.high) else (None, None)
    return {"value": ratio.value, "low": low, "high": high}
