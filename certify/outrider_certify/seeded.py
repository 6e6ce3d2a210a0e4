"""The seeded certificate: the texts of speculation and of plain decoding, token by token.

Prompts x seeds x ways to speculate x companions in the batch x sampling parameters, each alone and together. Every difference is
classified by the margin at the first differing token: a tie, if the two scores are no farther apart than two ways to compute one
score; else an error. Where texts of the same seed are not promised, greedy texts are compared only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee
from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.failures import add_failures, broken
from outrider_certify.knobs import NEUTRAL, PENALTIES, Knob, chosen, filters, penalties, together
from outrider_certify.run import CertifyTrial, Record
from outrider_certify.subjects.base import Job, Subject, Unsupported, Way, Writing

_SHOWN = 20  # differences of a trial that are kept
COMPANIONS = (0, 3)
PLAIN, ALONE = "the defaults", "alone"


class Seeded:
    """The kind `seeded`. length: tokens of a text. rounds: None for as many as the time allows."""

    name, share = "seeded", 4.0

    def __init__(
        self, subject: Subject, *, confidence: float = 0.99, length: int = 48, seed: int = 0, rounds: int | None = None
    ) -> None:
        self.subject, self.confidence, self.length, self.seed, self.rounds = subject, confidence, length, seed, rounds

    def trials(self) -> Iterator[CertifyTrial]:
        sampled = self.subject.promise is Guarantee.EXACT_TOKENS
        temperatures = (0.0, 1.0) if sampled else (0.0,)
        number = 0
        while self.rounds is None or number < self.rounds:
            for temperature in temperatures:
                for name in self._names(temperature):
                    yield CertifyTrial(
                        f"round {number}, temperature {temperature:g}, {name}",
                        lambda n=number, t=temperature, k=name: self._trial(n, t, k),
                    )
            number += 1

    def _names(self, temperature: float) -> list[str]:
        """Parameters to try. Their values depend on texts."""
        fixed = [k.name for k in (filters() if temperature else []) + penalties()]
        text = Writing(tokens=list(range(8)), text="a text of some length")
        return [PLAIN, *fixed, *(k.name for k in chosen(text)), "together", "end token"]

    def done(self, records: Sequence[Record]) -> bool:
        return sum(1 for r in records for d in r["differences"] if d["kind"] == "error") > 200

    def _trial(self, number: int, temperature: float, name: str) -> Record:
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
            jobs = self._jobs(number, temperature, name)
            wanted = self.subject.plain(jobs)
        except Unsupported as why:
            return {**record, "skipped": str(why)}
        tokens: dict[tuple[int, str], list[int]] = {}  # by job and text: a stream may not tell its tokens
        for way, mates in self._ways(number, name):
            asked = [Job(job.prompt, job.params, mates) for job in jobs]
            try:
                found = self.subject.write(asked, way)
            except Unsupported as why:
                record["refused"] = str(why)
                continue
            if not any(text.error for text in wanted):
                record["broke"] += broken(found)
            for index, (job, got, want) in enumerate(zip(asked, found, wanted, strict=True)):
                got.tokens = got.tokens or tokens.get((index, got.text), [])
                tokens[index, got.text] = got.tokens
                if got.error or want.error:
                    record["failed"].append(got.error or want.error)
                    continue
                record["texts"] += 1
                record["tokens"] += max(len(want.tokens), 1)
                if not same(got, want):
                    known = len(record["differences"]) < _SHOWN
                    record["differences"].append(self._difference(job, way, got, want) if known else {"kind": "more"})
        record["failed"], record["broke"] = record["failed"][:3], record["broke"][:3]
        return record

    def _ways(self, number: int, name: str) -> list[tuple[Way, int]]:
        """The first way and two others, in turns, each with a number of companions."""
        first, *others = self.subject.ways()
        turn = 2 * (number + sum(name.encode()))
        some = [others[(turn + i) % len(others)] for i in range(min(2, len(others)))]
        return [
            (way, COMPANIONS[(turn // 2 + at) % len(COMPANIONS)] if self.subject.batches else 0)
            for at, way in enumerate([first, *some])
        ]

    def _jobs(self, number: int, temperature: float, name: str) -> list[Job]:
        """One job for each prompt, with its own value of the parameter."""
        jobs = [
            Job(
                prompt,
                SamplingParams(
                    temperature=temperature,
                    max_tokens=self.length,
                    ignore_eos=name != "end token",
                    seed=self.seed + 7919 * number + i,
                ),
            )
            for i, prompt in enumerate(self.subject.prompts())
        ]
        if name in (PLAIN, "end token"):
            return jobs
        fixed = {k.name: k for k in (filters() if temperature else []) + penalties()}
        if name in fixed:
            return [job.with_(**fixed[name].params) for job in jobs]
        out = list[Job]()
        for job, text in zip(jobs, self.subject.plain(jobs), strict=True):
            knobs: dict[str, Knob] = {k.name: k for k in chosen(text)}
            if name == "together":
                out.append(job.with_(**together([*fixed.values(), *knobs.values()]).params))
            elif name in knobs:
                out.append(job.with_(**knobs[name].params))
        if not out:
            raise Unsupported(f"{name}: the texts are too short to choose a value")
        return out

    def _difference(self, job: Job, way: Way, got: Writing, want: Writing) -> Record:
        """What is known about the first token that differs."""
        at = next(
            (i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b),
            min(len(got.tokens), len(want.tokens)),
        )
        other = got.tokens[at] if at < len(got.tokens) else None
        wanted = want.tokens[at] if at < len(want.tokens) else None
        margin = noise = None
        if other is not None and wanted is not None:
            margin, noise = self.subject.margin(job, want, at, other), self.subject.noise()
        tie = margin is not None and noise is not None and margin <= 2 * noise
        ended = other is None or wanted is None  # one text is longer
        unclear = noise is None or (margin is None and not ended)
        if not (got.tokens and want.tokens):
            unclear = True
        steps = got.steps()
        step, depth = steps[at] if at < len(steps) else (None, None)
        earlier = list(zip(got.drafted, got.accepted, strict=True))[:step] if step is not None else []
        return {
            "kind": "tie" if tie else "unclear" if unclear and not self.subject.exact_numbers else "error",
            "way": way.name,
            "own": way.own,
            "companions": job.companions,
            "prompt": self.subject.show(job.prompt)[-60:] if not isinstance(job.prompt, str) else job.prompt[-60:],
            "seed": job.params.seed,
            "at": at,
            "got": self.subject.show(got.tokens[max(at - 6, 0) : at + 6]) if got.tokens else got.text[:200],
            "want": self.subject.show(want.tokens[max(at - 6, 0) : at + 6]) if want.tokens else want.text[:200],
            "finish": [got.finish, want.finish],
            "margin": margin,
            "noise": noise,
            "depth": depth,
            "rejected": any(a < d for d, a in earlier) if step is not None else None,
            "filled": any(a == d > 0 for d, a in earlier) if step is not None else None,
            "longer": other is not None and wanted is None and want.finish == "stop",
            "shorter": other is None and wanted is not None,
            "dropped": self._dropped(job, got),
        }

    def _dropped(self, job: Job, got: Writing) -> str:
        """The parameter without which plain decoding gives the text that speculation gave."""
        for name, neutral in {**NEUTRAL, "temperature": 0.0}.items():
            if getattr(job.params, name) == neutral:
                continue
            try:
                [text] = self.subject.plain([job.with_(**{name: neutral})])
            except (Unsupported, ValueError):
                continue
            if (text.tokens, text.text) == (got.tokens, got.text):
                return name
        return ""

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        texts, tokens = sum(r["texts"] for r in records), sum(r["tokens"] for r in records)
        found = [{**d, "set": r["set"], "trial": r["key"]} for r in records for d in r["differences"]]
        more = sum(d["kind"] == "more" for d in found)
        errors = [d for d in found if d["kind"] == "error"]
        ties = [d for d in found if d["kind"] == "tie"]
        unclear = [d for d in found if d["kind"] == "unclear"]
        failed = [f for r in records for f in r["failed"]]
        ways = [w.name for w in self.subject.ways()]
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
                "ways to speculate": "; ".join(ways),
                "parameters": ", ".join(dict.fromkeys(r["set"] for r in records if not r["skipped"])),
                **({"companions in the batch": " and ".join(map(str, COMPANIONS))} if self.subject.batches else {}),
            },
            figures={
                "tokens": tokens,
                "texts": texts,
                "errors": len(errors) + more,
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
            part.findings.append(self._shown("texts part at a tie", "", ties, error=False))
            part.sentence = (
                f"Exact tokens over {tokens:,} tokens, but for {len(ties)} ties among {texts:,} texts: there the two best scores "
                "differ by no more than the measured noise of the numbers."
            )
        if errors or unclear:
            part.conclusion = Conclusion.DIFFERS
            cause = diagnose(errors or unclear, records)
            part.findings.insert(0, self._shown("texts are not those of plain decoding", cause, errors or unclear))
            count = len(errors) + len(unclear) + more
            said = f"Differs: {count} of {texts:,} texts are not those of plain decoding"
            said += f", and {len(ties)} more part at a tie" if ties else ""
            part.sentence = said + (f". {cause[0].upper()}{cause[1:]}." if cause else ".")
            if unclear and not errors:
                part.sentence += (
                    " Whether these are ties is not known, because the noise of the scores could not be measured."
                )
        add_failures(part, records)
        return part

    def _shown(self, title: str, cause: str, some: Sequence[Record], *, error: bool = True) -> Finding:
        lines = list[str]()
        for d in sorted(some, key=lambda d: d["at"])[:4]:
            lines.append(f"{d['set']}, {d['way']}, {d['companions']} companions, seed {d['seed']}, token {d['at']}:")
            lines += [
                f"  plain        ... {d['want']}  ({d['finish'][1]})",
                f"  speculation  ... {d['got']}  ({d['finish'][0]})",
            ]
            if d["margin"] is not None:
                noise = "not measured" if d["noise"] is None else f"{d['noise']:.2g}"
                lines.append(f"  margin {d['margin']:.3g}, noise {noise}")
        where = Counter(f"{d['set']}, {d['way']}" for d in some).most_common(3)
        return Finding(
            title=title,
            cause=cause,
            where="; ".join(f"{name}: {n}" for name, n in where),
            evidence="\n".join(lines),
            error=error,
        )


def same(got: Writing, want: Writing) -> bool:
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
    if PLAIN in clean and sets & {*PENALTIES} and sets <= {*PENALTIES, "bad_words", "min_tokens", "together"}:
        return "penalties count otherwise than in plain decoding: what depends on earlier tokens misses those of the same step"
    if PLAIN in clean and len(sets - {"together"}) == 1:
        return f"{next(iter(sets - {'together'}))} is applied otherwise than in plain decoding"
    if len({d["companions"] > 0 for d in errors}) == 1 and errors[0]["companions"] and len(errors) > 4:
        return "texts depend on the other texts in the batch"
    known = [d for d in errors if d["depth"] is not None]
    if len(known) >= 5:
        if all(d["depth"] > 0 for d in known):
            return "draft tokens are verified at wrong positions or with a wrong mask (for example constant RoPE positions)"
        if all(d["rejected"] for d in known):
            return "the cache is off after a rejection: it keeps a rejected token, or loses an accepted one"
        if all(d["filled"] for d in known):
            return "the cache is off after all draft tokens were accepted"
    if not any(d["own"] for d in errors):
        ways: Counter[Any] = Counter(d["way"] for d in errors)
        return f"only drafts that are made to provoke mistakes do it: {ways.most_common(1)[0][0]}"
    return ""
