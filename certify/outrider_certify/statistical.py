"""The statistical certificate: is a sampled text drawn from the target's own distribution?

Each token becomes a number in (0, 1): the target's mass above it, in an order that was fixed before, with a uniform part of its
own. If tokens are drawn from the target, these numbers are independent and uniform, for every model and every text. So two
consecutive tokens fall into a square, and three into a cube, of equal cells. The number of draft tokens that the step before
accepted is known before a step, so the first token of a step is tested given that number. The audit runs over the same tokens.

What it bounds is the total variation between the cells' distribution and the uniform one, averaged over the contexts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from outrider.core.params import SamplingParams
from outrider_certify import bounds
from outrider_certify.audit import Audit, places
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.failures import add_failures, broken
from outrider_certify.run import CertifyTrial, Record
from outrider_certify.subjects.base import Job, Row, Subject, Unsupported, Way, Writing

SQUARE, CUBE, LINE = 4, 3, 16  # cells along one token: of two tokens, of three, of one
_SURE = 3.0  # nats by which a mistake must lead before it is named
_PATIENCE = 4  # times the tokens of the alarm, spent on naming it

TEMPERATURES = {"temperature 1": {"temperature": 1.0}, "temperature 0.7": {"temperature": 0.7}}
FILTERS = {
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
}


def rank(row: Row, token: int, uniform: float, order: np.ndarray | None = None) -> float:
    """The mass above a token plus a uniform part of its own, in (0, 1).

    order: float64 [known], larger comes first; None orders by p. Equal tokens keep the order of their ids.
    """
    p = row.probs
    order = p if order is None else order
    if row.ids is not None:
        found = np.flatnonzero(row.ids == token)
        if not len(found):
            rest = max(1 - float(p.sum()), 0.0)
            return min(float(p.sum()) + uniform * rest, 1 - 1e-12)
        token = int(found[0])
    above = order > order[token]
    equal = (order == order[token]) & (np.arange(len(p)) < token)
    return min(float(p[above].sum() + p[equal].sum() + uniform * p[token]), 1 - 1e-12)


class Cells:
    """Counts of cells, by the name of the test."""

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray] = {}

    def add(self, name: str, size: int, numbers: Sequence[float]) -> None:
        """Count one group of numbers in (0, 1), in a grid of `size` cells along each."""
        counts = self.counts.setdefault(name, np.zeros(size ** len(numbers)))
        at = 0
        for u in numbers:
            at = at * size + int(u * size)
        counts[at] += 1

    def merge(self, counts: dict[str, list[float]]) -> None:
        for name, more in counts.items():
            self.counts[name] = self.counts.get(name, 0) + np.asarray(more)


def read(writing: Writing, job: Job, rows: Sequence[Row], drafts: Any, subject: Subject, cells: Cells, audit: Audit,
         label: str, prompt: int, rng: np.random.Generator) -> None:  # fmt: skip
    """Count one text. label: of its parameters. prompt: number of the prompt."""
    tokens, steps = writing.tokens[: len(rows)], writing.steps()
    by_p, by_q = list[float](), list[float]()
    known = writing.prompt or (list(job.prompt) if not isinstance(job.prompt, str) else [])
    for place, token in places(rows, drafts, job.params, known, tokens, subject.end_ids, steps):
        v = float(rng.random())
        by_p.append(rank(place.p, token, v))
        if place.q is not None and place.p.whole:
            with np.errstate(divide="ignore", invalid="ignore"):
                order = np.where(place.p.probs > 0, place.q.probs / place.p.probs, np.inf)
            by_q.append(rank(place.p, token, v, order))
        audit.see(place, token)
    for name, numbers in (("by the target's order", by_p), ("by what the drafter prefers", by_q)):
        for at in range(0, len(numbers) - 1, 2):
            cells.add(f"two tokens, {name}", SQUARE, numbers[at : at + 2])
        for at in range(0, len(numbers) - 2, 3):
            cells.add(f"three tokens, {name}", CUBE, numbers[at : at + 3])
        for u in numbers:
            cells.add(f"one token, {label}, {name}", LINE, [u])
        if len(numbers) > 1:
            cells.add(f"prompt {prompt}, {name}", SQUARE, numbers[:2])
    finest = by_q or by_p
    for u, (step, depth) in zip(finest, steps, strict=False):
        if depth == 0 and step > 0:
            cells.add(f"first token of a step after {min(writing.accepted[step - 1], 8)} accepted", LINE, [u])


class Statistical:
    """The kind `statistical`: texts that the subject writes."""

    name, share = "statistical", 4.0

    def __init__(
        self, subject: Subject, *, confidence: float = 0.99, deviation: float = 0.1, length: int = 48, seed: int = 0
    ) -> None:
        """deviation: the total variation below which the subject passes. length: tokens of a text."""
        self.subject, self.alpha, self.deviation, self.seed = subject, 1 - confidence, deviation, seed
        self.length = length
        self._counted, self._seen = self._new(), 0

    def _new(self) -> tuple[Cells, Audit]:
        return Cells(), Audit(self.alpha / 2)

    def trials(self) -> Iterator[CertifyTrial]:
        sets = {**TEMPERATURES, **(FILTERS if self.subject.exact_numbers else {})}
        if self.subject.partial_rows:
            sets = {name: params for name, params in TEMPERATURES.items() if params["temperature"] == 1}
        ways = [way for way in self.subject.ways() if way.own and not way.options.get("stream")]
        number = 0
        while True:
            for label, params in sets.items():
                way = ways[number % len(ways)]
                yield CertifyTrial(
                    f"texts {number}, {label}, {way.name}",
                    lambda n=number, text=label, p=params, w=way: self._trial(n, text, p, w),
                )
                number += 1

    def _trial(self, number: int, label: str, params: dict[str, Any], way: Way) -> Record:
        prompts = self.subject.prompts()
        jobs = [
            Job(
                prompt,
                SamplingParams(**params, max_tokens=self.length, ignore_eos=True, seed=self.seed + number * 1009 + i),
            )
            for i, prompt in enumerate(prompts)
        ]
        cells, audit, errors = Cells(), Audit(self.alpha), list[str]()
        rng = np.random.default_rng([self.seed, number])
        texts = self.subject.write(jobs, way)
        for i, (job, writing) in enumerate(zip(jobs, texts, strict=True)):
            if writing.error:
                errors.append(writing.error)
                continue
            try:
                rows, drafts = self.subject.rows(job, writing), self.subject.draft_rows(job, writing)
            except (Unsupported, ConnectionError) as error:
                errors.append(str(error))
                continue
            read(writing, job, rows, drafts, self.subject, cells, audit, label, i, rng)
        return {
            "tokens": audit.tokens,
            "texts": len(jobs) - len(errors),
            "cells": {name: counts.tolist() for name, counts in cells.counts.items()},
            "wealth": [[*bet, logs] for bet, logs in audit.wealth.items()],
            "errors": errors[:3],
            "broke": broken(texts),
            "set": label,
        }

    def _total(self, records: Sequence[Record]) -> tuple[Cells, Audit]:
        """All records together. Those that were counted before are not counted again."""
        if len(records) < self._seen:
            self._counted, self._seen = self._new(), 0
        cells, audit = self._counted
        for record in records[self._seen :]:
            cells.merge(record["cells"])
            audit.add({(name, stake): logs for name, stake, logs in record["wealth"]}, record["tokens"])
        self._seen = len(records)
        return cells, audit

    def done(self, records: Sequence[Record]) -> bool:
        """The alarm was raised, and one mistake leads."""
        _, audit = self._total(records)
        return audit.crossed is not None and (audit.lead() >= _SURE or audit.tokens >= _PATIENCE * audit.crossed)

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        cells, audit = self._total(records)
        errors = [e for r in records for e in r["errors"]]
        texts, seconds = sum(r["texts"] for r in records), sum(r["seconds"] for r in records)
        part = judge(cells, audit, self.alpha, self.deviation, texts, seconds, errors, self.name)
        add_failures(part, records)
        return part


def judge(
    cells: Cells,
    audit: Audit,
    alpha: float,
    deviation: float,
    texts: int,
    seconds: float,
    errors: Sequence[str],
    kind: str = "statistical",
) -> CertificatePart:
    """The part of a certificate, from all counts."""
    if not audit.tokens:
        why = errors[0] if errors else "no text was written"
        return CertificatePart(
            kind=kind, conclusion=Conclusion.CANNOT_TELL, sentence=f"Cannot tell: no text could be read ({why})."
        )
    by_prompt = {n: c for n, c in cells.counts.items() if n.startswith("prompt ")}
    tests = {n: c for n, c in cells.counts.items() if n not in by_prompt and c.sum() >= 5 * len(c)}
    p_values = {n: bounds.p_value(c, np.full(len(c), c.sum() / len(c))) for n, c in tests.items()}
    for name in ("by the target's order", "by what the drafter prefers"):
        some = [c for n, c in by_prompt.items() if n.endswith(name) and c.sum() >= 5 * len(c)]
        if some:
            joined = np.concatenate(some)
            expected = np.concatenate([np.full(len(c), c.sum() / len(c)) for c in some])
            statistic = float(((joined - expected) ** 2 / expected).sum())
            p_values[f"first two tokens of each prompt, {name}"] = float(
                bounds.stats.chi2.sf(statistic, sum(len(c) - 1 for c in some))
            )
    level = alpha / 2 / max(len(p_values), 1)
    square = cells.counts.get("two tokens, by the target's order", np.zeros(SQUARE**2))
    pairs = float(square.sum())
    expected = np.full(len(square), max(pairs, 1) / len(square))
    bound = bounds.total_variation_at_most(square, expected, alpha)
    least = bounds.smallest_deviation(len(square), pairs, level)
    confidence = f"{100 * (1 - alpha):g} %"
    figures = {
        "tokens": audit.tokens,
        "texts": texts,
        "pairs": pairs,
        "tv_bound": bound,
        "smallest_deviation": least,
        "p_values": dict(sorted(p_values.items(), key=lambda pair: pair[1])),
        "tests_level": level,
        "audit_log_wealth": audit.log_wealth,
        "audit_alarm": math.log(2 / alpha),
        "audit_stopped_at": audit.crossed,
        "audit_ranking": audit.ranking()[:6],
        "cells": {n: c.tolist() for n, c in {**tests}.items()},
    }
    part = CertificatePart(
        kind=kind,
        conclusion=Conclusion.SAME_DISTRIBUTION,
        sentence="",
        power=f"A total variation of {least:.3f} between pairs of tokens would have been found with probability "
        f"{bounds.POWER:g}. A bet on each known mistake ran over all {audit.tokens:,} tokens. A deviation that cancels "
        "over all contexts and is no known mistake would not be seen.",
        tested={
            "texts": f"{texts:,}",
            "tokens": f"{audit.tokens:,}",
            "tests": f"{len(p_values)} of the joint distribution, and the audit",
            "the drafter's probabilities": "known" if any("drafter" in n for n in p_values) else "not known",
        },
        figures=figures,
    )
    rejected = [n for n, p in figures["p_values"].items() if p < level]
    if rejected or audit.crossed is not None:
        part.conclusion = Conclusion.DIFFERS
        part.findings.append(_finding(audit, rejected, figures))
        cause = part.findings[0].cause
        part.sentence = (
            f"Differs: the texts are not drawn from the target's distribution{': ' + cause if cause else ''}."
        )
    elif bound <= deviation:
        part.sentence = f"Same distribution: total variation at most {bound:.3f} with {confidence} confidence, "
        part.sentence += f"over {audit.tokens:,} tokens."
    else:
        enough = bounds.needed(len(square), deviation, alpha)
        part.conclusion = Conclusion.CANNOT_TELL
        ratio = 2 * enough / max(audit.tokens, 1)
        part.sentence = (
            f"Cannot tell with this budget: nothing differs so far, and the total variation is at most {bound:.3f} with "
            f"{confidence} confidence. To show {deviation:g} it needs about {2 * enough:,} tokens"
            + (f", {max(ratio * seconds / 60, 0.1):.1f} minutes here." if seconds else ".")
        )
    if errors:
        part.skipped.append(f"{len(errors)} texts failed, the first: {errors[0]}")
    return part


def _finding(audit: Audit, rejected: Sequence[str], figures: dict[str, Any]) -> Finding:
    ranking = audit.ranking()
    named = bool(ranking) and ranking[0][1] >= figures["audit_alarm"]
    lines = [f"{name}: p = {figures['p_values'][name]:.2g}" for name in rejected[:6]]
    lines += [f"bet: {name}: wealth e^{logs:.1f}" for name, logs in ranking[:4] if logs > 0]
    if audit.crossed is not None:
        lines.append(f"the audit raised its alarm after {audit.crossed:,} tokens")
    return Finding(
        title="the texts are not drawn from the target's distribution",
        cause=ranking[0][0] if named else "",
        where=f"{figures['texts']:,} texts, {figures['tokens']:,} tokens",
        evidence="\n".join(lines),
    )


class RecordedTexts:
    """The kind `statistical` on texts that were recorded elsewhere, as in production."""

    name, share = "statistical", 4.0

    def __init__(
        self,
        subject: Subject,
        texts: Sequence[tuple[Job, Writing]],
        *,
        confidence: float = 0.99,
        deviation: float = 0.1,
    ) -> None:
        """subject: knows the target's probabilities. texts: with the parameters they were written with."""
        self._inner = Statistical(subject, confidence=confidence, deviation=deviation)
        self.subject, self.texts = subject, texts

    def trials(self) -> Iterator[CertifyTrial]:
        for number, (job, writing) in enumerate(self.texts):
            yield CertifyTrial(f"text {number}", lambda n=number, j=job, w=writing: self._trial(n, j, w))

    def _trial(self, number: int, job: Job, writing: Writing) -> Record:
        cells, audit, errors = Cells(), Audit(self._inner.alpha), list[str]()
        try:
            rows, drafts = self.subject.rows(job, writing), self.subject.draft_rows(job, writing)
            rng = np.random.default_rng(number)
            label = f"temperature {job.params.temperature:g}"
            read(writing, job, rows, drafts, self.subject, cells, audit, label, number, rng)
        except (Unsupported, ValueError) as error:
            errors.append(str(error))
        return {
            "tokens": audit.tokens,
            "texts": 1 - len(errors),
            "cells": {name: counts.tolist() for name, counts in cells.counts.items()},
            "wealth": [[*bet, logs] for bet, logs in audit.wealth.items()],
            "errors": errors,
        }

    def done(self, records: Sequence[Record]) -> bool:
        return self._inner.done(records)

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        part = self._inner.judge(records)
        part.tested["texts"] += " recorded"
        return part
