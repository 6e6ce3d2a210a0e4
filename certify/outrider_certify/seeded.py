"""The seeded certificate: the texts of speculation and of plain decoding, token by token.

Prompts x seeds x variants of speculation x companions in the batch x sampling parameters, each alone and together. Every
difference is classified by the margin at the first differing token. It is a tie if the two scores are no farther apart than two
ways to compute one score; else an error. Where texts of the same seed are not promised, only greedy texts are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.parameters import CHOSEN, FILTERS, PENALTIES, chosen, together, turned_off
from outrider_certify.subject import (
    GeneratedText,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    Unsupported,
)
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken

_SHOWN = 20  # differences of a trial that are kept
COMPANIONS = (0, 3)
PLAIN, TOGETHER, END = "the defaults", "together", "end token"


class Seeded(CertificateKind):
    """The kind `seeded`. length: tokens of a text. rounds: None for as many as the time allows."""

    name, share = "seeded", 4.0

    def __init__(
        self, subject: Subject, *, confidence: float = 0.99, length: int = 48, seed: int = 0, rounds: int | None = None
    ) -> None:
        self.subject, self.confidence, self.length, self.seed, self.rounds = subject, confidence, length, seed, rounds

    def checks_by_name(self) -> Sequence[str]:
        return (PLAIN, *(FILTERS if self.subject.exact_tokens else ()), *PENALTIES, *CHOSEN, TOGETHER, END)

    def trials(self) -> Iterator[CertifyTrial]:
        number = 0
        while self.rounds is None or number < self.rounds:
            for temperature in (0.0, 1.0) if self.subject.exact_tokens else (0.0,):
                for name in (PLAIN, *(FILTERS if temperature else ()), *PENALTIES, *CHOSEN, TOGETHER, END):
                    yield (
                        f"round {number}, temperature {temperature:g}, {name}",
                        lambda n=number, t=temperature, k=name: self.trial(n, t, k),
                    )
            number += 1

    def done(self, records: Sequence[Record]) -> bool:
        """There are many errors, or a second round begins and no text of the first could be compared."""
        repeated = len({r["set"] for r in records}) < len(records)
        errors = sum(d["kind"] == "error" for r in records for d in r["differences"])
        return errors > 200 or (repeated and not any(r["texts"] for r in records))

    def trial(self, number: int, temperature: float, name: str) -> Record:
        """The differences between speculation and plain decoding of one text for each prompt. name: of the parameter."""
        record: Record = {
            "set": name,
            "tokens": 0,
            "texts": 0,
            "differences": [],
            "skipped": "",
            "failed": [],
            "broke": [],
        }
        try:
            requests = self._requests(number, temperature, name)
            plain = self.subject.plain(requests)
        except Unsupported as why:
            return {**record, "skipped": str(why)}
        tokens: dict[tuple[int, str], list[int]] = {}  # by request and text: a stream may not tell its tokens
        for variant, companions in self._variants(number, name):
            asked = [replace(request, companions=companions) for request in requests]
            try:
                texts = self.subject.generate(asked, variant)
            except Unsupported as why:
                record["refused"] = str(why)
                continue
            if not any(text.error for text in plain):
                record["broke"] += broken(texts)
            for index, (request, got, want) in enumerate(zip(asked, texts, plain, strict=True)):
                got.tokens = got.tokens or tokens.get((index, got.text), [])
                tokens[index, got.text] = got.tokens
                if got.error or want.error:
                    record["failed"].append(got.error or want.error)
                    continue
                record["texts"] += 1
                record["tokens"] += max(len(want.tokens), 1)
                if not same(got, want):
                    more = len(record["differences"]) >= _SHOWN
                    record["differences"].append(
                        {"kind": "more"} if more else self._difference(request, variant, got, want)
                    )
        record["failed"], record["broke"] = record["failed"][:3], record["broke"][:3]
        return record

    def _variants(self, number: int, name: str) -> list[tuple[SpeculationVariant, int]]:
        """The first variant and two others, in turns, each with a number of companions."""
        first, *others = self.subject.variants()
        turn = 2 * (number + sum(name.encode()))
        some = [others[(turn + i) % len(others)] for i in range(min(2, len(others)))]
        return [
            (variant, COMPANIONS[(turn // 2 + at) % len(COMPANIONS)] if self.subject.batches else 0)
            for at, variant in enumerate([first, *some])
        ]

    def _requests(self, number: int, temperature: float, name: str) -> list[TextRequest]:
        """One request for each prompt, with its own value of the parameter."""
        seed = self.seed + 7919 * number
        params = SamplingParams(temperature=temperature, max_tokens=self.length, ignore_eos=name != END)
        requests = [TextRequest(p, replace(params, seed=seed + i)) for i, p in enumerate(self.subject.prompts())]
        if name in (PLAIN, END):
            return requests
        if fixed := {**FILTERS, **PENALTIES}.get(name):
            return [request.with_(**fixed.params) for request in requests]
        out = list[TextRequest]()
        for request, text in zip(requests, self.subject.plain(requests), strict=True):
            changes = chosen(text)
            if name == TOGETHER:
                out.append(request.with_(**together(changes)))
            elif name in changes:
                out.append(request.with_(**changes[name].params))
        if not out:
            raise Unsupported(f"{name}: the texts are too short to choose a value")
        return out

    def _difference(
        self, request: TextRequest, variant: SpeculationVariant, got: GeneratedText, want: GeneratedText
    ) -> Record:
        """What is known about the first token that differs."""
        at = next(
            (i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b),
            min(len(got.tokens), len(want.tokens)),
        )
        other = got.tokens[at] if at < len(got.tokens) else None
        wanted = want.tokens[at] if at < len(want.tokens) else None
        margin = noise = None
        one_is_longer = other is None or wanted is None
        if not one_is_longer:
            margin, noise = self.subject.margin(request, want, at, other), self.subject.noise()
        tie = margin is not None and noise is not None and margin <= 2 * noise
        unclear = noise is None or (margin is None and not one_is_longer) or not (got.tokens and want.tokens)
        steps = got.steps()
        step, depth = steps[at] if at < len(steps) else (None, None)
        earlier = list(zip(got.drafted, got.accepted, strict=True))[:step] if step is not None else []

        def shown(text: GeneratedText) -> str:
            return self.subject.show(text.tokens[max(at - 6, 0) : at + 6]) if text.tokens else text.text[:200]

        return {
            "kind": "tie" if tie else "unclear" if unclear and not self.subject.exact_numbers else "error",
            "variant": variant.name,
            "adversarial": variant.adversarial,
            "companions": request.companions,
            "seed": request.params.seed,
            "at": at,
            "got": shown(got),
            "want": shown(want),
            "finish": [got.finish, want.finish],
            "margin": margin,
            "noise": noise,
            "depth": depth,
            "rejected": any(a < d for d, a in earlier),
            "filled": any(a == d > 0 for d, a in earlier),
            "longer": other is not None and wanted is None and want.finish == "stop",
            "dropped": self._dropped(request, got),
        }

    def _dropped(self, request: TextRequest, got: GeneratedText) -> str:
        """The parameter without which plain decoding gives the text that speculation gave."""
        for name, off in turned_off(request.params).items():
            try:
                [text] = self.subject.plain([request.with_(**off)])
            except (Unsupported, ValueError):
                continue
            if text.content == got.content:
                return name
        return ""

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        texts, tokens = sum(r["texts"] for r in records), sum(r["tokens"] for r in records)
        differences = [{**d, "set": r["set"], "trial": r["key"]} for r in records for d in r["differences"]]
        errors, ties, unclear, more = (
            [d for d in differences if d["kind"] == kind] for kind in ("error", "tie", "unclear", "more")
        )
        failed = [f for r in records for f in r["failed"]]
        rate = bounds.smallest_rate(texts, self.confidence)
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.EXACT_TOKENS,
            sentence=f"Exact tokens over {tokens:,} tokens: {texts:,} texts, none differs.",
            power=f"A mistake that changes one text in {max(round(1 / rate), 1) if rate else 0:,} would have been seen with "
            f"{100 * self.confidence:g} % probability.",
            tested={
                "texts": f"{texts:,}",
                "tokens": f"{tokens:,}",
                "ways to speculate": "; ".join(v.name for v in self.subject.variants()),
                "parameters": ", ".join(dict.fromkeys(r["set"] for r in records if not r["skipped"])),
                **({"companions in the batch": " and ".join(map(str, COMPANIONS))} if self.subject.batches else {}),
            },
            figures={
                "tokens": tokens,
                "texts": texts,
                "errors": len(errors) + len(more),
                "ties": len(ties),
                "unclear": len(unclear),
            },
        )
        part.skipped = list(dict.fromkeys(f"{r['set']}: {r['skipped']}" for r in records if r["skipped"]))
        if failed:
            part.skipped.append(f"{len(failed)} texts failed, the first: {failed[0]}")
        if not texts:
            part.conclusion = Conclusion.CANNOT_TELL
            part.sentence = (
                f"Cannot tell: no text could be compared ({(failed + part.skipped + ['none was written'])[0]})."
            )
        if ties:
            part.findings.append(_finding("texts part at a tie", "", ties, error=False))
            part.sentence = (
                f"Exact tokens over {tokens:,} tokens, but for {len(ties)} ties among {texts:,} texts: there the two best scores "
                "differ by no more than the measured noise of the numbers."
            )
        if errors or unclear:
            part.conclusion = Conclusion.DIFFERS
            cause = diagnose(errors or unclear, records)
            part.findings.insert(0, _finding("texts are not those of plain decoding", cause, errors or unclear))
            count = len(errors) + len(unclear) + len(more)
            said = f"Differs: {count} of {texts:,} texts are not those of plain decoding"
            said += f", and {len(ties)} more part at a tie" if ties else ""
            part.sentence = said + (f". {cause[0].upper()}{cause[1:]}." if cause else ".")
            if unclear and not errors:
                part.sentence += (
                    " Whether these are ties is not known, because the noise of the scores could not be measured."
                )
        return part


def _finding(title: str, cause: str, differences: Sequence[Record], *, error: bool = True) -> Finding:
    lines = list[str]()
    for d in sorted(differences, key=lambda d: d["at"])[:4]:
        lines += [
            f"{d['set']}, {d['variant']}, {d['companions']} companions, seed {d['seed']}, token {d['at']}:",
            f"  plain        ... {d['want']}  ({d['finish'][1]})",
            f"  speculation  ... {d['got']}  ({d['finish'][0]})",
        ]
        if d["margin"] is not None:
            noise = "not measured" if d["noise"] is None else f"{d['noise']:.2g}"
            lines.append(f"  margin {d['margin']:.3g}, noise {noise}")
    where = Counter(f"{d['set']}, {d['variant']}" for d in differences).most_common(3)
    return Finding(
        title=title,
        cause=cause,
        where="; ".join(f"{name}: {n}" for name, n in where),
        evidence="\n".join(lines),
        error=error,
    )


def same(got: GeneratedText, want: GeneratedText) -> bool:
    """Whether two texts are the same, token by token where both tell their tokens."""
    tokens = got.tokens == want.tokens or not (got.tokens and want.tokens)
    return tokens and (got.text, got.finish) == (want.text, want.finish)


def diagnose(errors: Sequence[Record], records: Sequence[Record]) -> str:
    """The mistake that the differences have the traces of; "" if there is none in common."""
    clean = {
        r["set"] for r in records if r["texts"] and not any(d["kind"] in ("error", "unclear") for d in r["differences"])
    }
    sets = {d["set"] for d in errors}
    if all(d["longer"] for d in errors):
        return "the text goes on past the end: an end token or a stop inside an accepted run is not seen"
    dropped = Counter(d["dropped"] for d in errors if d["dropped"])
    if dropped and (best := dropped.most_common(1)[0]) and 3 * best[1] >= len(errors):
        return f"{best[0]} is not applied under speculation"
    if PLAIN in clean and sets & {*PENALTIES} and sets <= {*PENALTIES, "bad_words", "min_tokens", TOGETHER}:
        return "penalties count otherwise than in plain decoding: what depends on earlier tokens misses those of the same step"
    if PLAIN in clean and len(alone := sets - {TOGETHER}) == 1:
        return f"{alone.pop()} is applied otherwise than in plain decoding"
    if len({d["companions"] > 0 for d in errors}) == 1 and errors[0]["companions"] and len(errors) > 4:
        return "texts depend on the other texts in the batch"
    located = [d for d in errors if d["depth"] is not None]
    if len(located) >= 5:
        if all(d["depth"] > 0 for d in located):
            return "draft tokens are verified at wrong positions or with a wrong mask (for example constant RoPE positions)"
        if all(d["rejected"] for d in located):
            return "the cache is off after a rejection: it keeps a rejected token, or loses an accepted one"
        if all(d["filled"] for d in located):
            return "the cache is off after all draft tokens were accepted"
    if all(d["adversarial"] for d in errors):
        variants = Counter(str(d["variant"]) for d in errors)
        return f"only drafts that are made to provoke mistakes do it: {variants.most_common(1)[0][0]}"
    return ""
