"""A run as one HTML page, with what changed since another. It needs no network and no scripts. Texts are always shown as text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.core.files import write_whole
from outrider.core.origins import ACCEPTED, BONUS, CORRECTED, PLAIN
from outrider_lab.bench import stats
from outrider_lab.bench.report.analysis import PHASES, SettingResult, analyse, by_category
from outrider_lab.bench.report.compare import compare_runs, versions
from outrider_lab.bench.report.format import amount, bounds, count, duration, factor, percent
from outrider_lab.bench.report.recommend import Recommendation, no_answers, recommend
from outrider_lab.bench.run import PromptRecord, Run, Sample

# Characters of a prompt, tokens of an answer, prompts at either end, columns of a table.
LONGEST, MOST_TOKENS, EXTREMES, DEEPEST = 1200, 400, 2, 10
ORIGINS = {PLAIN: "plain", ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus"}
MEANINGS = {
    "accepted": "drafted and accepted",
    "corrected": "by the target, in place of a rejected draft token",
    "bonus": "by the target, after all draft tokens were accepted",
    "plain": "by the target, in a step without draft tokens",
}
# Characters that a browser interprets or drops: control characters, and those that change the direction of a text.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Answer:
    """An answer to show."""

    prompt: PromptRecord
    prompt_text: str
    speed: str
    sample: Sample
    tokens: list[tuple[str, str]]  # (origin, text) of consecutive tokens with one origin; "" if unknown
    counts: dict[str, int]  # tokens by origin
    cut: int  # number of tokens left out


def write(run: Run, path: Path, *, other: Run | None = None) -> Recommendation:
    """Write the page of a run, compared with an earlier run `other`. Returns the recommendation at its top.

    Raises ValueError for a run without an answer.
    """
    html, recommendation = render(run, other=other)
    write_whole(path, html, errors="replace")
    return recommendation


def render(run: Run, *, other: Run | None = None) -> tuple[str, Recommendation]:
    """The page, and the recommendation at its top."""
    if other is not None and not any(s.error is None for s in other.samples):
        raise ValueError(f"the earlier run is empty: {no_answers(other)}")
    results = analyse(run)
    recommendation = recommend(run, results)
    best = next((r for r in results if r.name == recommendation.setting), results[0])
    values: dict[str, Any] = {
        "run": run,
        "results": results,
        "base": results[0],
        "recommendation": recommendation,
        "best": best,
        "comparison": compare_runs(other, run, recommendation.setting) if other is not None else versions(run),
        "other": other,
        "deepest": min(max(len(r.by_depth) for r in results), DEEPEST),
        "categories": by_category(run),
        "phases": PHASES,
        "extremes": extremes(run, best),
        "origins": MEANINGS,
        "percentile": np.percentile,
        "percentiles": stats.PERCENTILES,
        "times": stats.TIMES,
        "times_of": stats.times,
    }
    folder = FileSystemLoader(Path(__file__).parent / "template")
    env = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"amount": amount, "factor": factor, "percent": percent, "of": count}
    env.filters |= {"duration": duration, "json": json.dumps, "bounds": bounds}
    env.filters |= {"factors": lambda interval: bounds(interval, factor)}
    html = env.get_template("report.html").render(values)
    return visible(html), recommendation


def visible(text: str) -> str:
    """Replaces characters that are interpreted instead of shown by visible symbols. Keeps line ends and tabs."""
    return _HIDDEN.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 32 else f"⟨{ord(m[0]):04X}⟩", text)


def extremes(run: Run, best: SettingResult) -> dict[str, list[Answer]]:
    """The fastest and the slowest prompts of a setting, by speedup or else by tokens per second."""
    if best.prompts:
        speeds = {p: f"{factor(x)} times as fast" for p, x in best.prompts.items()}
        order = sorted(best.prompts, key=best.prompts.__getitem__)
    else:
        rates = {s.prompt: s.output_tokens / s.seconds for s in best.answers if s.output_tokens and s.seconds > 0}
        speeds = {p: f"{amount(x)} tokens per second" for p, x in rates.items()}
        order = sorted(rates, key=rates.__getitem__)
    few = min(EXTREMES, (len(order) + 1) // 2)
    ends = {"The fastest": order[::-1][:few], "The slowest": order[:few][: len(order) - few]}
    prompts, first = {p.id: p for p in run.prompts}, dict[str, Sample]()
    for sample in best.answers:
        first.setdefault(sample.prompt, sample)
    return {
        title: [_answer(prompts[p], speeds[p], first[p]) for p in ids if p in prompts]
        for title, ids in ends.items()
        if ids
    }


def _answer(prompt: PromptRecord, speed: str, sample: Sample) -> Answer:
    text = prompt.text if len(prompt.text) <= LONGEST else "… " + prompt.text[-LONGEST:]
    pieces, origins = sample.pieces, sample.origins
    if not pieces or not origins or len(pieces) != len(origins):
        limit = MOST_TOKENS * 5
        return Answer(prompt, text, speed, sample, [("", sample.text[:limit])], {}, max(len(sample.text) - limit, 0))
    tokens = zip((ORIGINS.get(o, "") for o in origins[:MOST_TOKENS]), pieces, strict=False)
    runs = [(origin, "".join(p for _, p in some)) for origin, some in groupby(tokens, key=lambda t: t[0])]
    counts = {name: n for letter, name in ORIGINS.items() if (n := origins.count(letter))}
    return Answer(prompt, text, speed, sample, runs, counts, max(len(pieces) - MOST_TOKENS, 0))
