"""The statistical certificate where the target's probabilities are not known: texts with speculation against texts without.

A kernel two-sample test (Gao et al. 2410.20247): the maximum mean discrepancy with a Hamming kernel, prompt by prompt, judged by
shuffling the texts of each prompt. It can show a difference. It cannot bound one, so it never says "same distribution".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.subject import SamplingParams, Subject, TextRequest, Unsupported
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken, confirmed

_LEAST = 5  # texts of a prompt on each side, before anything is said
_MOST = 300  # texts of a prompt on each side, after which more would change little
_KEPT = 32  # tokens, or pieces of text, of each text that are compared
_PIECE = 4  # characters


class TwoSample(CertificateKind):
    """The kind `statistical` for a subject without known probabilities."""

    name, share = "statistical", 4.0

    def __init__(self, subject: Subject, *, confidence: float = 0.99, length: int = 32, seed: int = 0) -> None:
        self.subject, self.alpha, self.length, self.seed = subject, 1 - confidence, min(length, _KEPT), seed

    def trials(self) -> Iterator[CertifyTrial]:
        for number in count():
            yield (f"texts {number}", lambda n=number: self._trial(n))

    def _trial(self, number: int) -> Record:
        variant = self.subject.variants()[0]
        record: Record = {"pairs": [], "errors": []}
        sides = list[list[list[object]]]()
        params = SamplingParams(temperature=1.0, max_tokens=self.length, ignore_eos=True)
        for side in range(2):  # seeds differ, so that equal noise does not make equal texts
            requests = [
                TextRequest(prompt, replace(params, seed=self.seed + 2 * (1009 * number + i) + side))
                for i, prompt in enumerate(self.subject.prompts())
            ]
            try:
                texts = self.subject.plain(requests) if side else self.subject.generate(requests, variant)
            except Unsupported as why:
                return {**record, "errors": [str(why)]}
            if side == 0:
                record["broke"] = confirmed(self.subject, requests, broken(texts))
            record["errors"] += [t.error for t in texts if t.error][:2]
            sides.append([[] if t.error else pieces(t.tokens, t.text) for t in texts])
        record["pairs"] = [[i, a, b] for i, (a, b) in enumerate(zip(*sides, strict=True)) if a and b]
        return record

    def done(self, records: Sequence[Record]) -> bool:
        """No text could be compared, three times; or there are enough."""
        return len(records) >= _MOST or (len(records) >= 3 and not any(r["pairs"] for r in records))

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        pairs = [pair for r in records for pair in r["pairs"]]
        errors = [e for r in records for e in r["errors"]]
        seconds = sum(r["seconds"] for r in records)
        prompts = len({i for i, _, _ in pairs})
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.CANNOT_TELL,
            sentence="",
            power="A kernel two-sample test sees large differences only: by its authors, three in four changed models with ten "
            "texts of each prompt. It bounds nothing. Name a model with the same weights (--reference) for a bound.",
            tested={"texts": f"{2 * len(pairs):,}, half of them without speculation", "prompts": str(prompts)},
        )
        if errors:
            part.skipped.append(f"{len(errors)} texts failed, the first: {errors[0]}")
        if not prompts or len(pairs) < _LEAST * prompts:
            wanted = _LEAST * max(prompts, 1)
            more = seconds / len(pairs) * wanted / 60 if pairs else 0.0
            why = f" ({errors[0]})" if errors and not pairs else ""
            part.sentence = (
                f"Cannot tell with this budget: {len(pairs)} pairs of texts{why}; it needs at least {wanted}"
            )
            part.sentence += f", about {max(more, 0.1):.1f} minutes." if pairs else "."
            return part
        groups, first, second = zip(*pairs, strict=True)
        distance, p = bounds.two_sample_p_value(first, second, groups=groups)
        part.figures = {"pairs": len(pairs), "mmd": distance, "p_value": p}
        if p < self.alpha:
            part.conclusion = Conclusion.DIFFERS
            part.sentence = f"Differs: texts with speculation are other texts than those without (p = {p:.2g})."
            part.findings.append(
                Finding(
                    title="texts with and without speculation come from two distributions",
                    where=f"{len(pairs)} pairs of texts, {prompts} prompts",
                    evidence=f"squared MMD {distance:.4f}, p = {p:.2g}",
                )
            )
        else:
            part.sentence = (
                f"Cannot tell: no difference was seen between {len(pairs)} texts with speculation and as many without "
                f"(p = {p:.2g}), and this test cannot show that there is none."
            )
        return part


def pieces(tokens: Sequence[int], text: str) -> list[object]:
    """What is compared: tokens, or pieces of the text where the tokens are not known."""
    if tokens:
        return list(tokens[:_KEPT])
    return [text[i : i + _PIECE] for i in range(0, min(len(text), _KEPT * _PIECE), _PIECE)]
