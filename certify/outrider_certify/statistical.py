"""The statistical certificate: is a sampled text drawn from the target's own distribution?

Each token becomes a number in (0, 1): the target's mass above it, in an order that was fixed before, with a uniform part of its
own. If tokens are drawn from the target, these numbers are independent and uniform, for every model and every text. So two
consecutive tokens fall into a square, and three into a cube, of equal cells. The number of draft tokens that the step before
accepted is known before a step, so the first token of a step is tested given that number. The audit runs over the same tokens.

What it bounds is the total variation between the cells' distribution and the uniform one, averaged over the contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outrider_certify import bounds
from outrider_certify.audit import Audit, StratifiedAudit
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.conditions import (
    AGAIN,
    CHANGED_PROMPTS,
    CONDITIONS,
    LOGPROBS,
    LONG,
    MATES,
    NEIGHBOURS,
    NEW,
    PREEMPTION,
    SEVERAL,
    longer,
    not_asked,
)
from outrider_certify.mistakes import TokenContext
from outrider_certify.subject import (
    GeneratedText,
    Prompt,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
)
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken, confirmed

SQUARE, CUBE, LINE = 4, 3, 16  # cells along one token: of two tokens, of three, of one
_SURE = 3.0  # nats by which a mistake must lead before it is named
_FIRST_LOOK = 8  # records before the first look
_NUMBERS = 100_000  # from here on prompts have numbers that no other kind uses
PAIRS = "two tokens, by the target's order"
_PATIENCE = 4  # times the tokens of the alarm, spent on naming it

TEMPERATURES = {"temperature 1": {"temperature": 1.0}, "temperature 0.7": {"temperature": 0.7}}
FILTERS = {
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
}


def rank(p: TokenDistribution, token: int, uniform: float, order: np.ndarray | None = None) -> float:
    """The mass above a token plus a uniform part of its own, in (0, 1). Equal tokens keep the order of their ids.

    Args:
        order: float64 [known], larger comes first. None orders by p.
    """
    probs, at = p.probs, p.index(token)
    if at is None:
        mass = float(probs.sum())
        return min(mass + uniform * max(1 - mass, 0.0), 1 - 1e-12)
    order = probs if order is None else order
    above = order > order[at]
    equal = (order == order[at]) & (np.arange(len(probs)) < at)
    return min(float(probs[above].sum() + probs[equal].sum() + uniform * probs[at]), 1 - 1e-12)


class TextStatistics:
    """What texts add to the tests: counts of cells by the name of the test, and the audit of one stratum."""

    def __init__(self, label: str) -> None:
        self.label, self.cells = label, dict[str, np.ndarray]()
        self.audit, self.texts, self.errors = Audit(), 0, list[str]()

    def count(self, name: str, size: int, numbers: Sequence[float]) -> None:
        """Count one group of numbers in (0, 1), in a grid of `size` cells along each."""
        counts = self.cells.setdefault(name, np.zeros(size ** len(numbers)))
        at = 0
        for u in numbers:
            at = at * size + int(u * size)
        counts[at] += 1

    def read(
        self, subject: Subject, request: TextRequest, text: GeneratedText, number: int, rng: np.random.Generator
    ) -> None:
        """Count one text.

        Args:
            number: Of its prompt.
            rng: Of the uniform parts.
        """
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
            step, depth = steps[at] if steps else (0, 0)
            context = TokenContext(
                p,
                q=drafts[at] if drafts else None,
                before=drafts[at - 1] if drafts and at else None,
                params=request.params,
                tokens=[*prompt, *text.tokens[:at]],
                prompt=len(prompt),
                end_ids=subject.end_ids,
                step=len(prompt) + at - depth if steps else None,
                bonus=bool(steps) and depth == text.drafted[step] > 0,
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
                self.count(f"one token, {self.label}, {name}", LINE, [u])
            if len(numbers) > 1 and self.label not in CHANGED_PROMPTS:
                self.count(f"prompt {number}, {name}", SQUARE, numbers[:2])
        for u, (step, depth) in zip(by_q or by_p, steps, strict=False):
            if depth == 0 and step > 0:
                self.count(f"first token of a step after {min(text.accepted[step - 1], 8)} accepted", LINE, [u])

    def record(self) -> Record:
        return {
            "tokens": self.audit.tokens,
            "texts": self.texts,
            "set": self.label,
            "cells": {name: counts.tolist() for name, counts in self.cells.items()},
            "wealth": [self.audit.logs.tolist(), self.audit.placed.tolist()],
            "errors": self.errors[:3],
        }


class _Gathered:
    """All records so far, and what the tests said at each look.

    A look is after 8, 16, 32, ... records. Each look spends its share of the error probability, so one may stop at any of them.
    """

    def __init__(self, alpha: float, labels: Sequence[str]) -> None:
        self.alpha, self.looks, self.records = alpha, 0, 0
        self.audit = StratifiedAudit(alpha / 2, labels)
        self.cells, self.texts, self.errors, self.skipped = dict[str, np.ndarray](), 0, list[str](), list[str]()
        # of the first look that rejected, or of the last one
        self.tests, self.p_values, self.level = dict[str, np.ndarray](), dict[str, float](), 0.0
        self.bound, self.rejected, self.rejected_at = 1.0, list[str](), 0  # bound: the smallest upper bound of any look

    def add(self, record: Record) -> None:
        """Count what `record` gave."""
        self.records += 1
        self.texts += record["texts"]
        self.errors += record["errors"]
        self.skipped += [record["skipped"]] if record.get("skipped") else []
        for name, more in record["cells"].items():
            self.cells[name] = self.cells.get(name, 0) + np.asarray(more)
        logs, placed = record["wealth"]
        self.audit.add(record["set"], np.array(logs), np.array(placed), record["tokens"])
        if self.records >= _FIRST_LOOK and self.records & (self.records - 1) == 0:
            self.look()

    def look(self) -> None:
        """Test everything. After a look that rejected, later ones change nothing."""
        if self.rejected:
            return
        self.looks += 1
        share = bounds.spent(self.looks)
        self.tests, self.p_values = _tests(self.cells)
        self.level = self.alpha / 2 * share / max(len(self.p_values), 1)
        self.bound = min(self.bound, _bound(self.cells.get(PAIRS), self.alpha * share))
        self.rejected = [name for name, p in sorted(self.p_values.items(), key=lambda n: n[1]) if p < self.level]
        self.rejected_at = self.audit.tokens

    def strata(self) -> dict[str, float]:
        """The bound of one token in each stratum, each at the whole level."""
        names = {label: f"one token, {label}, by the target's order" for label in self.audit.parts}
        share = bounds.spent(max(self.looks, 1))
        return {label: _bound(self.cells.get(name), self.alpha * share) for label, name in names.items()}


def _bound(counts: np.ndarray | None, delta: float) -> float:
    if counts is None:
        return 1.0
    return bounds.total_variation_at_most(counts, np.full(len(counts), 1 / len(counts)), delta)


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
        """Test one subject.

        Args:
            deviation: The total variation below which the subject passes.
            length: Tokens of a text.
            recorded: Texts that were written elsewhere, as in production, with their parameters. Then none are written.
        """
        self.subject, self.alpha, self.deviation, self.seed = subject, 1 - confidence, deviation, seed
        self.length, self.recorded = length, recorded
        self._gathered = _Gathered(self.alpha, self.labels())

    def strata(self) -> dict[str, dict[str, Any]]:
        """The sampling parameters of each stratum: temperatures, filters, and the conditions that break engines."""
        subject = self.subject
        parameters = {**TEMPERATURES, **(FILTERS if subject.exact_numbers else {})}
        if subject.partial_distributions:
            parameters = {name: params for name, params in TEMPERATURES.items() if params["temperature"] == 1}
        conditions = {LOGPROBS: {"logprobs": 1}, SEVERAL: {"n": 2}, AGAIN: {}}
        conditions |= {LONG: {}} if subject.long_context else {}
        conditions |= {NEIGHBOURS: {}} if subject.batches else {}
        conditions |= {PREEMPTION: {}} if subject.batches and subject.slots else {}
        return {**parameters, **{name: {"temperature": 1.0, **params} for name, params in conditions.items()}}

    def labels(self) -> list[str]:
        if self.recorded:
            return list(dict.fromkeys(_temperature(request) for request, _ in self.recorded))
        return [*self.strata(), NEW]

    def trials(self) -> Iterator[CertifyTrial]:
        for number, (request, text) in enumerate(self.recorded):
            yield (f"text {number}", lambda n=number, r=request, t=text: self._recorded(n, r, t))
        strata = self.strata()
        variants = [v for v in self.subject.variants() if not (v.adversarial or v.options.get("stream"))]
        number = 0
        while not self.recorded:
            for label in strata:
                variant = variants[(number + number // len(strata)) % len(variants)]
                if label == AGAIN:
                    yield (f"texts {number}, {NEW}, {variant.name}", partial(self._written, number, NEW, variant))
                yield (f"texts {number}, {label}, {variant.name}", partial(self._written, number, label, variant))
                number += 1

    def _written(self, number: int, label: str, variant: SpeculationVariant) -> Record:
        changes = self.strata().get(label, {"temperature": 1.0})
        params = SamplingParams(**changes, max_tokens=self.length, ignore_eos=True)
        seed = self.seed + number * 1009 + _NUMBERS * (label == NEW)  # a new prompt and the same one again: two texts
        mates = {NEIGHBOURS: MATES[-1], PREEMPTION: self.subject.slots + 2}.get(label, 0)
        requests = [
            TextRequest(
                self._prompt(prompt, label, number),
                replace(params, seed=seed + i),
                companions=mates,
            )
            for i, prompt in enumerate(self.subject.prompts())
        ]
        statistics = TextStatistics(label)
        try:
            texts = self.subject.generate(requests, variant)
        except Unsupported as why:
            return {**statistics.record(), "skipped": f"{label}: {why}"}
        rng = np.random.default_rng([self.seed, number, label == NEW])
        each = [(i, request) for i, request in enumerate(requests) for _ in range(request.params.n)]
        if len(texts) != len(each):
            return {**statistics.record(), "skipped": f"{label}: {len(each)} texts were asked for, {len(texts)} came"}
        for (i, request), text in zip(each, texts, strict=True):
            statistics.read(self.subject, request, text, i, rng)
        return {**statistics.record(), "broke": confirmed(self.subject, requests, broken(texts))}

    def _prompt(self, prompt: Prompt, label: str, number: int) -> Prompt:
        if label == LONG:
            return longer(prompt, self.subject.long_context)
        return not_asked(prompt, _NUMBERS + number) if label in (NEW, AGAIN) else prompt

    def _recorded(self, number: int, request: TextRequest, text: GeneratedText) -> Record:
        statistics = TextStatistics(_temperature(request))
        statistics.read(self.subject, request, text, number, np.random.default_rng(number))
        return statistics.record()

    def _all(self, records: Sequence[Record]) -> _Gathered:
        """All records together. Those that were added before are not added again."""
        if len(records) < self._gathered.records:
            self._gathered = _Gathered(self.alpha, self.labels())
        for record in records[self._gathered.records :]:
            self._gathered.add(record)
        return self._gathered

    def done(self, records: Sequence[Record]) -> bool:
        """An alarm was raised, and one mistake leads. Or the bound is half of what was asked for, and that in each stratum."""
        gathered = self._all(records)
        audit, first = gathered.audit, gathered.audit.crossed
        if first is not None or gathered.rejected:
            leads = audit.ranked(audit.guilty()).lead() >= _SURE and first is not None
            return leads or audit.tokens >= _PATIENCE * (first or gathered.rejected_at)
        return gathered.bound <= self.deviation / 2 and max(gathered.strata().values()) <= self.deviation

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        gathered, seconds = self._all(records), sum(r["seconds"] for r in records)
        audit = gathered.audit
        if not audit.tokens:
            why = (gathered.errors + gathered.skipped + ["no text was written"])[0]
            return CertificatePart(
                kind=self.name,
                conclusion=Conclusion.CANNOT_TELL,
                sentence=f"Cannot tell: no text could be read ({why}).",
            )
        gathered = deepcopy(gathered)  # the last look is not one of those at which it may go on
        gathered.look()
        pairs = float(gathered.cells.get(PAIRS, np.zeros(1)).sum())
        least = bounds.smallest_deviation(SQUARE**2, pairs, gathered.level)
        confidence = f"{100 * (1 - self.alpha):g} %"
        strata = gathered.strata()
        figures = {
            "tokens": audit.tokens,
            "texts": gathered.texts,
            "pairs": pairs,
            "tv_bound": gathered.bound,
            "tv_bound_by_stratum": strata,
            "smallest_deviation": least,
            "looks": gathered.looks,
            "p_values": dict(sorted(gathered.p_values.items(), key=lambda pair: pair[1])),
            "tests_level": gathered.level,
            "audit_log_wealth": audit.log_wealth,
            "audit_alarm": audit.whole.alarm,
            "audit_stopped_at": audit.crossed,
            "audit_strata": {label: part.log_wealth for label, part in audit.parts.items()},
            "audit_ranking": audit.ranked(audit.guilty()).ranking()[:6],
            "cells": {n: c.tolist() for n, c in gathered.tests.items()},
        }
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.SAME_DISTRIBUTION,
            sentence="",
            power=f"A total variation of {least:.3f} between pairs of tokens would have been gathered with probability "
            f"{bounds.POWER:g}. A bet on each known mistake ran over all {audit.tokens:,} tokens. A deviation that cancels "
            "over all contexts and is no known mistake would not be seen.",
            tested={
                "texts": f"{gathered.texts:,}" + (" recorded" if self.recorded else ""),
                "tokens": f"{audit.tokens:,}",
                "tests": f"{len(gathered.p_values)} of the joint distribution, and the audit",
                "total variation of one token at most": "; ".join(f"{n}: {b:.2f}" for n, b in strata.items() if b < 1),
                "the drafter's probabilities": "known"
                if any("drafter" in n for n in gathered.p_values)
                else "not known",
            },
            figures=figures,
        )
        if gathered.rejected or audit.crossed is not None:
            part.conclusion = Conclusion.DIFFERS
            part.findings.append(_finding(gathered))
            cause = part.findings[0].cause
            part.sentence = (
                f"Differs: the texts are not drawn from the target's distribution{': ' + cause if cause else ''}."
            )
        elif gathered.bound <= self.deviation:
            part.sentence = (
                f"Same distribution: total variation at most {gathered.bound:.3f} with {confidence} confidence, "
            )
            part.sentence += f"over {audit.tokens:,} tokens."
        else:
            enough = bounds.needed(SQUARE**2, self.deviation, self.alpha * bounds.spent(gathered.looks + 1))
            part.conclusion = Conclusion.CANNOT_TELL
            ratio = 2 * enough / max(audit.tokens, 1)
            part.sentence = (
                f"Cannot tell with this budget: nothing differs so far, and the total variation is at most {gathered.bound:.3f} "
                f"with {confidence} confidence. To show {self.deviation:g} it needs about {2 * enough:,} tokens"
                + (f", {max(ratio * seconds / 60, 0.1):.1f} minutes here." if seconds else ".")
            )
        part.skipped = list(dict.fromkeys(gathered.skipped))
        if gathered.errors:
            part.skipped.append(f"{len(gathered.errors)} texts failed, the first: {gathered.errors[0]}")
        return part


def _temperature(request: TextRequest) -> str:
    return f"temperature {request.params.temperature:g}"


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


def _where(gathered: _Gathered) -> str:
    """The condition under which alone the texts differ, as the mistake that it is; "" if there is none."""
    parts, guilty = gathered.audit.parts, set(gathered.audit.guilty())
    guilty |= {label for label in parts if any(f"one token, {label}," in name for name in gathered.rejected)}
    if guilty and guilty <= {NEIGHBOURS, PREEMPTION}:
        return CONDITIONS[NEIGHBOURS if NEIGHBOURS in guilty else PREEMPTION]
    if len(guilty) == 1:
        return CONDITIONS.get(next(iter(guilty)), "")
    others = [label for label, part in parts.items() if part.tokens and label != NEW]
    quiet = NEW in parts and parts[NEW].tokens and NEW not in guilty
    return CONDITIONS[AGAIN] if quiet and len(guilty) >= 0.8 * len(others) > 1 else ""


def _finding(gathered: _Gathered) -> Finding:
    guilty = gathered.audit.guilty()
    audit, where = gathered.audit.ranked(guilty), _where(gathered)
    ranking = audit.ranking()
    named = [ranking[0][0]] if ranking and ranking[0][1] >= audit.alarm else []
    lines = [f"{name}: p = {gathered.p_values[name]:.2g}" for name in gathered.rejected[:6]]
    lines += [f"bet: {name}: wealth e^{logs:.1f}" for name, logs in ranking[:4] if logs > 0]
    lines += [f"strata whose own bets won: {', '.join(guilty)}"] if guilty else []
    if gathered.audit.crossed is not None:
        lines.append(f"the audit raised its alarm after {gathered.audit.crossed:,} tokens")
    return Finding(
        title="the texts are not drawn from the target's distribution",
        cause=": ".join([where] * bool(where) + named),
        where=f"{gathered.texts:,} texts, {gathered.audit.tokens:,} tokens",
        evidence="\n".join(lines),
    )
