"""A run as one page of HTML: no network, no scripts, nothing but the file. What prompts and models wrote is only ever text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.bench import stats
from outrider.bench.report import pictures
from outrider.bench.report.analysis import Figures, drift, figures, ratio
from outrider.bench.report.compare import amount, moved, rows
from outrider.bench.report.recommend import Verdict, count, nothing, percent, times, verdict
from outrider.bench.run import Prompt, Run, Sample
from outrider.core.origins import ACCEPTED, BONUS, CORRECTED, PLAIN

LONGEST, MOST_TOKENS, EXTREMES = 1200, 400, 2  # characters of a prompt, tokens of an answer, prompts at either end
DEEPEST = 10  # columns of a table
KINDS = {PLAIN: "plain", ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus"}
MEANINGS = {
    "accepted": "guessed by the drafter and accepted",
    "corrected": "written by the model where it refused a guess",
    "bonus": "written by the model after all guesses were accepted",
    "plain": "written by the model without a guess",
}
# Characters that a browser would obey or drop: control characters, and those that turn the direction of a text around.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Answer:
    """An answer to show. tokens: [kind, text] of runs of tokens of one origin; kind "" where it is unknown."""

    prompt: Prompt
    asked: str
    speed: str
    sample: Sample
    tokens: list[tuple[str, str]]
    counts: dict[str, int]
    cut: int  # tokens left out


def write(run: Run, path: Path, *, other: Run | None = None) -> Verdict:
    """Write the page of a run, compared with an earlier `other` if there is one. Returns the verdict at its top. A reader never
    sees half a page. Raises ValueError for a run without an answer."""
    html, found = render(run, other=other)
    part = path.with_name(path.name + ".part")
    part.write_text(html, encoding="utf-8", errors="replace")
    part.replace(path)
    return found


def render(run: Run, *, other: Run | None = None) -> tuple[str, Verdict]:
    """The page, and the verdict at its top."""
    if other is not None and not any(s.error is None for s in other.samples):
        raise ValueError(f"the run to compare with is empty: {nothing(other)}")
    found = figures(run)
    said = verdict(run, found)
    best = next((f for f in found if f.name == said.setting), found[0])
    values: dict[str, Any] = {
        "run": run,
        "found": found,
        "base": found[0],
        "said": said,
        "best": best,
        "moved": moved(other, run, said.setting) if other is not None else None,
        "other": other,
        "moved_rows": rows,
        "speeds": pictures.speeds(found, run.predicted),
        "speedups": pictures.speedups(found),
        "waits": pictures.waits(found),
        "acceptance": pictures.acceptance(found),
        "deepest": min(max(len(f.judged) for f in found), DEEPEST),
        "by_category": pictures.by_category(run, found),
        "categories": list(_categories(run, found)),
        "spent": pictures.time_spent(found),
        "extremes": extremes(run, found[0], best),
        "origins": MEANINGS,
        "drift": drift(run),
        "percentile": stats.percentile,
        "times_of": stats.times,
    }
    folder = FileSystemLoader(Path(__file__).parent / "template")
    env = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"amount": amount, "times": times, "percent": percent, "of": count, "seconds": pictures.seconds}
    env.filters |= {"span": pictures.span, "ratios": lambda found: pictures.span(found, times)}
    env.filters |= {"bytes": _bytes, "json": json.dumps}
    html = env.get_template("report.html").render(values)
    return visible(html), said


def visible(text: str) -> str:
    """Characters that are obeyed rather than shown, as what stands for them; line ends and tabs stay."""
    return _HIDDEN.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 32 else f"⟨{ord(m[0]):04X}⟩", text)


def extremes(run: Run, base: Figures, best: Figures) -> dict[str, list[Answer]]:
    """The fastest and the slowest prompts: by how many times as fast as the baseline, or else by tokens per second."""
    if best.prompts:
        speeds = {p: f"{times(x)} times as fast" for p, x in best.prompts.items()}
        order = sorted(best.prompts, key=best.prompts.__getitem__)
    else:
        known = {s.prompt: s.output_tokens / s.seconds for s in best.answers if s.output_tokens and s.seconds > 0}
        speeds = {p: f"{amount(x)} tokens per second" for p, x in known.items()}
        order = sorted(known, key=known.__getitem__)
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


def _answer(prompt: Prompt, speed: str, sample: Sample) -> Answer:
    asked = prompt.text if len(prompt.text) <= LONGEST else "… " + prompt.text[-LONGEST:]
    pieces, origins = sample.pieces, sample.origins
    if not pieces or not origins or len(pieces) != len(origins):
        limit = MOST_TOKENS * 5
        return Answer(prompt, asked, speed, sample, [("", sample.text[:limit])], {}, max(len(sample.text) - limit, 0))
    tokens = zip((KINDS.get(o, "") for o in origins[:MOST_TOKENS]), pieces, strict=False)
    runs = [(kind, "".join(p for _, p in some)) for kind, some in groupby(tokens, key=lambda t: t[0])]
    counts = {name: n for letter, name in KINDS.items() if (n := origins.count(letter))}
    return Answer(prompt, asked, speed, sample, runs, counts, max(len(pieces) - MOST_TOKENS, 0))


def _categories(run: Run, found: list[Figures]) -> Iterator[tuple[str, int, list[Any]]]:
    """Per category: its name, its prompts, and per setting the ratio and the acceptance."""
    for name in stats.categories(run):
        wanted = {p.id for p in run.prompts if p.category == name}
        base = [s for s in found[0].answers if s.prompt in wanted]
        parts = []
        for f in found:
            ours = [s for s in f.answers if s.prompt in wanted]
            parts.append((f.name, None if f is found[0] else ratio(ours, base), stats.acceptance(ours)))
        yield name, len(wanted), parts


def _bytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
