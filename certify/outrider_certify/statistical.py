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
from dataclasses import replace
from typing import Any

import numpy as np

from outrider_certify import bounds
from outrider_certify.audit import Audit
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.mistakes import TokenContext
from outrider_certify.subject import (
    GeneratedText,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
)
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken

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


def rank(p: TokenDistribution, token: int, uniform: float, order: np.ndarray | None = None) -> float:
    """The mass above a token plus a uniform part of its own, in (0, 1).

    order: float64 [known], larger comes first; None orders by p. Equal tokens keep the order of their ids.
    """
    probs, at = p.probs, p.index(token)
    if at is None:
        known = float(probs.sum())
        return min(known + uniform * max(1 - known, 0.0), 1 - 1e-12)
    order = probs if order is None else order
    above = order > order[at]
    equal = (order == order[at]) & (np.arange(len(probs)) < at)
    return min(float(probs[above].sum() + probs[equal].sum() + uniform * probs[at]), 1 - 1e-12)


class TextStatistics:
    """What texts add to the tests: counts of cells by the name of the test, and the audit."""

    def __init__(self, alpha: float) -> None:
        self.cells: dict[str, np.ndarray] = {}
        self.audit, self.texts, self.errors = Audit(alpha), 0, list[str]()

    def count(self, name: str, size: int, numbers: Sequence[float]) -> None:
        """Count one group of numbers in (0, 1), in a grid of `size` cells along each."""
        counts = self.cells.setdefault(name, np.zeros(size ** len(numbers)))
        at = 0
        for u in numbers:
            at = at * size + int(u * size)
        counts[at] += 1

    def read(
        self,
        subject: Subject,
        request: TextRequest,
        text: GeneratedText,
        label: str,
        number: int,
        rng: np.random.Generator,
    ) -> None:
        """Count one text. label: of its parameters. number: of its prompt. rng: of the uniform parts."""
        if text.error:
            self.errors.append(text.error)
            return
        try:
            distributions = subject.distributions(request, text)
            drafts = subject.draft_distributions(request, text)
        except (Unsupported, ConnectionError, ValueError) as error:
            self.errors.append(str(error))
            return
        self.texts += 1
        steps, by_p, by_q = text.steps(), list[float](), list[float]()
        prompt = text.prompt or list(request.prompt_ids)
        for at, (p, token) in enumerate(zip(distributions, text.tokens, strict=False)):
            context = TokenContext(
                p,
                q=drafts[at] if drafts else None,
                before=drafts[at - 1] if drafts and at else None,
                params=request.params,
                tokens=[*prompt, *text.tokens[:at]],
                prompt=len(prompt),
                end_ids=subject.end_ids,
                step=len(prompt) + at - steps[at][1] if steps else None,
            )
            uniform = float(rng.random())
            by_p.append(rank(p, token, uniform))
            if context.q is not None and p.whole:
                with np.errstate(divide="ignore", invalid="ignore"):
                    order = np.where(p.probs > 0, context.q.probs / p.probs, np.inf)
                by_q.append(rank(p, token, uniform, order))
            self.audit.see(context, token)
        for name, numbers in (("by the target's order", by_p), ("by what the drafter prefers", by_q)):
            for at in range(0, len(numbers) - 1, 2):
                self.count(f"two tokens, {name}", SQUARE, numbers[at : at + 2])
            for at in range(0, len(numbers) - 2, 3):
                self.count(f"three tokens, {name}", CUBE, numbers[at : at + 3])
            for u in numbers:
                self.count(f"one token, {label}, {name}", LINE, [u])
            if len(numbers) > 1:
                self.count(f"prompt {number}, {name}", SQUARE, numbers[:2])
        for u, (step, depth) in zip(by_q or by_p, steps, strict=False):
            if depth == 0 and step > 0:
                self.count(f"first token of a step after {min(text.accepted[step - 1], 8)} accepted", LINE, [u])

    def record(self) -> Record:
        return {
            "tokens": self.audit.tokens,
            "texts": self.texts,
            "cells": {name: counts.tolist() for name, counts in self.cells.items()},
            "wealth": [self.audit.logs.tolist(), self.audit.made.tolist()],
            "errors": self.errors[:3],
        }

    def add(self, record: Record) -> None:
        """Count what `record` gave."""
        self.texts += record["texts"]
        self.errors += record["errors"]
        for name, more in record["cells"].items():
            self.cells[name] = self.cells.get(name, 0) + np.asarray(more)
        logs, made = record["wealth"]
        self.audit.add(np.array(logs), np.array(made), record["tokens"])


class Statistical(CertificateKind):
    """The kind `statistical`: texts that the subject writes, or recorded ones."""

    name, share = "statistical", 4.0

    def __init__(
        self,
        subject: Subject,
        *,
        confidence: float = 0.99,
        deviation: float = 0.1,
        length: int = 48,
        seed: int = 0,
        recorded: Sequence[tuple[TextRequest, GeneratedText]] = (),
    ) -> None:
        """deviation: the total variation below which the subject passes. length: tokens of a text.

        recorded: texts that were written elsewhere, as in production, with their parameters; then none are written.
        """
        self.subject, self.alpha, self.deviation, self.seed = subject, 1 - confidence, deviation, seed
        self.length, self.recorded = length, recorded
        self._total, self._added = TextStatistics(self.alpha / 2), 0

    def trials(self) -> Iterator[CertifyTrial]:
        for number, (request, text) in enumerate(self.recorded):
            yield (f"text {number}", lambda n=number, r=request, t=text: self._recorded(n, r, t))
        sets = {**TEMPERATURES, **(FILTERS if self.subject.exact_numbers else {})}
        if self.subject.partial_distributions:
            sets = {name: params for name, params in TEMPERATURES.items() if params["temperature"] == 1}
        variants = [v for v in self.subject.variants() if not (v.adversarial or v.options.get("stream"))]
        number = 0
        while not self.recorded:
            for label, params in sets.items():
                variant = variants[number % len(variants)]
                yield (
                    f"texts {number}, {label}, {variant.name}",
                    lambda n=number, text=label, p=params, v=variant: self._written(n, text, p, v),
                )
                number += 1

    def _written(self, number: int, label: str, changes: dict[str, Any], variant: SpeculationVariant) -> Record:
        params = SamplingParams(**changes, max_tokens=self.length, ignore_eos=True)
        requests = [
            TextRequest(prompt, replace(params, seed=self.seed + number * 1009 + i))
            for i, prompt in enumerate(self.subject.prompts())
        ]
        texts, statistics = self.subject.generate(requests, variant), TextStatistics(self.alpha)
        rng = np.random.default_rng([self.seed, number])
        for i, (request, text) in enumerate(zip(requests, texts, strict=True)):
            statistics.read(self.subject, request, text, label, i, rng)
        return {**statistics.record(), "broke": broken(texts), "set": label}

    def _recorded(self, number: int, request: TextRequest, text: GeneratedText) -> Record:
        statistics = TextStatistics(self.alpha)
        label = f"temperature {request.params.temperature:g}"
        statistics.read(self.subject, request, text, label, number, np.random.default_rng(number))
        return statistics.record()

    def _all(self, records: Sequence[Record]) -> TextStatistics:
        """All records together. Those that were added before are not added again."""
        if len(records) < self._added:
            self._total, self._added = TextStatistics(self.alpha / 2), 0
        for record in records[self._added :]:
            self._total.add(record)
        self._added = len(records)
        return self._total

    def done(self, records: Sequence[Record]) -> bool:
        """The alarm was raised, and one mistake leads."""
        audit = self._all(records).audit
        return audit.crossed is not None and (audit.lead() >= _SURE or audit.tokens >= _PATIENCE * audit.crossed)

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        statistics, seconds = self._all(records), sum(r["seconds"] for r in records)
        audit = statistics.audit
        if not audit.tokens:
            why = statistics.errors[0] if statistics.errors else "no text was written"
            return CertificatePart(
                kind=self.name,
                conclusion=Conclusion.CANNOT_TELL,
                sentence=f"Cannot tell: no text could be read ({why}).",
            )
        tests, p_values = _tests(statistics.cells)
        level = self.alpha / 2 / max(len(p_values), 1)
        square = statistics.cells.get("two tokens, by the target's order", np.zeros(SQUARE**2))
        pairs = float(square.sum())
        expected = np.full(len(square), max(pairs, 1) / len(square))
        bound = bounds.total_variation_at_most(square, expected, self.alpha)
        least = bounds.smallest_deviation(len(square), pairs, level)
        confidence = f"{100 * (1 - self.alpha):g} %"
        figures = {
            "tokens": audit.tokens,
            "texts": statistics.texts,
            "pairs": pairs,
            "tv_bound": bound,
            "smallest_deviation": least,
            "p_values": dict(sorted(p_values.items(), key=lambda pair: pair[1])),
            "tests_level": level,
            "audit_log_wealth": audit.log_wealth,
            "audit_alarm": math.log(2 / self.alpha),
            "audit_stopped_at": audit.crossed,
            "audit_ranking": audit.ranking()[:6],
            "cells": {n: c.tolist() for n, c in tests.items()},
        }
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.SAME_DISTRIBUTION,
            sentence="",
            power=f"A total variation of {least:.3f} between pairs of tokens would have been found with probability "
            f"{bounds.POWER:g}. A bet on each known mistake ran over all {audit.tokens:,} tokens. A deviation that cancels "
            "over all contexts and is no known mistake would not be seen.",
            tested={
                "texts": f"{statistics.texts:,}" + (" recorded" if self.recorded else ""),
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
        elif bound <= self.deviation:
            part.sentence = f"Same distribution: total variation at most {bound:.3f} with {confidence} confidence, "
            part.sentence += f"over {audit.tokens:,} tokens."
        else:
            enough = bounds.needed(len(square), self.deviation, self.alpha)
            part.conclusion = Conclusion.CANNOT_TELL
            ratio = 2 * enough / max(audit.tokens, 1)
            part.sentence = (
                f"Cannot tell with this budget: nothing differs so far, and the total variation is at most {bound:.3f} with "
                f"{confidence} confidence. To show {self.deviation:g} it needs about {2 * enough:,} tokens"
                + (f", {max(ratio * seconds / 60, 0.1):.1f} minutes here." if seconds else ".")
            )
        if statistics.errors:
            part.skipped.append(f"{len(statistics.errors)} texts failed, the first: {statistics.errors[0]}")
        return part


def _tests(cells: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The counts of each test that has enough of them, and the p-values. Prompts with few texts are tested together."""
    by_prompt = {n: c for n, c in cells.items() if n.startswith("prompt ")}
    tests = {n: c for n, c in cells.items() if n not in by_prompt and c.sum() >= 5 * len(c)}
    p_values = {n: bounds.p_value(c, np.full(len(c), c.sum() / len(c))) for n, c in tests.items()}
    for name in ("by the target's order", "by what the drafter prefers"):
        some = [c for n, c in by_prompt.items() if n.endswith(name) and c.sum() >= 5 * len(c)]
        if some:
            joined = np.concatenate(some)
            expected = np.concatenate([np.full(len(c), c.sum() / len(c)) for c in some])
            statistic = float(((joined - expected) ** 2 / expected).sum())
            p_values[f"first two tokens of each prompt, {name}"] = bounds.chi2_tail(
                statistic, sum(len(c) - 1 for c in some)
            )
    return tests, p_values


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
