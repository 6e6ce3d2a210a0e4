"""The contract certificate: does every parameter have its effect under speculation, and do the books agree with the text?

Each check writes a few texts with speculation and looks at them. A check that the subject cannot be asked is listed as skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.params import SamplingParams
from outrider.lab.bench.report.format import count
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.failures import add_failures, broken
from outrider_certify.knobs import PENALTIES, chosen, penalties
from outrider_certify.run import CertifyTrial, Record
from outrider_certify.subjects.base import Job, Subject, Unsupported, Way, Writing


class _RefusedHere(Unsupported):
    """Speculation refuses what plain decoding takes."""


class _BrokeHere(Unsupported):
    """The engine failed."""


_HOT = 1.5  # a temperature at which two seeds give two texts
_LOGPROB = 0.02  # by which a log-probability may be off, where the noise was not measured


@dataclass(frozen=True)
class ContractCheck:
    """A check. cause: what is wrong if it fails. run: gives what is wrong, a line each; none if nothing is."""

    name: str
    cause: str
    run: Callable[[], list[str]]


class Contract:
    """The kind `contract`. length: tokens of a text."""

    name, share = "contract", 2.0

    def __init__(self, subject: Subject, *, length: int = 32, seed: int = 0) -> None:
        self.subject, self.length, self.seed = subject, length, seed

    # -- texts ------------------------------------------------------------------------------------------------------------

    def _jobs(self, count: int = 3, **params: object) -> list[Job]:
        given = {"temperature": 0.0, "max_tokens": self.length, "ignore_eos": True, "seed": self.seed + 11, **params}
        return [Job(prompt, SamplingParams(**given)) for prompt in list(self.subject.prompts())[:count]]  # type: ignore[arg-type]

    def _write(self, jobs: Sequence[Job], way: Way | None = None) -> list[Writing]:
        try:
            texts = self.subject.write(jobs, way or self.subject.ways()[0])
        except Unsupported as why:
            raise (_RefusedHere if way is None and self._plain_takes(jobs) else Unsupported)(str(why)) from None
        if lines := broken(texts):
            raise _BrokeHere("\n".join(lines))
        failed = [t.error for t in texts if t.error]
        if failed:
            raise Unsupported(failed[0])
        return texts

    def _plain_takes(self, jobs: Sequence[Job]) -> bool:
        try:
            return not any(text.error for text in self.subject.plain(jobs))
        except Unsupported:
            return False

    # -- checks -----------------------------------------------------------------------------------------------------------

    def checks(self) -> list[ContractCheck]:
        """All of them, in order."""
        one = [("top_k", {"top_k": 1}), ("top_p", {"top_p": 1e-6}), ("min_p", {"min_p": 1.0})]
        sample = Writing(tokens=list(range(8)), text="a text of some length")
        knobs = [k.name for k in penalties()] + [k.name for k in chosen(sample)]
        return [
            *(
                ContractCheck(name, f"{name} is not applied", lambda p=params: self._is_greedy(p))
                for name, params in one
            ),
            *(
                ContractCheck(name, f"{name} has no effect, or a wrong one", lambda n=name: self._has_effect(n))
                for name in knobs
            ),
            ContractCheck("seed", "the seed is ignored", self._seed),
            ContractCheck("n", "the n texts of one request share their random numbers", self._n),
            ContractCheck(
                "logprobs", "log-probabilities are those of another row, or of another distribution", self._logprobs
            ),
            ContractCheck("max_tokens", "max_tokens is not kept, or its finish reason is wrong", self._max_tokens),
            ContractCheck("end token", "the text goes on past its end token", self._end_token),
            ContractCheck("grammar", "the grammar is not applied to all tokens of a step", self._grammar),
            *(
                ContractCheck("stream", "a stream is not the answer in one piece", lambda w=way: self._stream(w))
                for way in self.subject.ways()
                if way.options.get("stream")
            ),
            ContractCheck("usage", "tokens are counted that are not in the text", self._usage),
            ContractCheck("acceptance counters", "the acceptance counters do not agree with the text", self._counters),
        ]

    def _is_greedy(self, params: dict[str, Any]) -> list[str]:
        """Only the likeliest token is left, so a sampled text must be the greedy one."""
        greedy = self._write(self._jobs())
        sampled = self._write(self._jobs(temperature=1.0, **params))
        return [
            f"with {params} at temperature 1 the text is not the greedy one: {self._shown(b)} for {self._shown(a)}"
            for a, b in zip(greedy, sampled, strict=True)
            if (a.tokens or a.text) != (b.tokens or b.text) and not self._tie(a, b)
        ]

    def _tie(self, greedy: Writing, other: Writing) -> bool:
        """Whether two texts part where the target has two best tokens within its noise."""
        noise = self.subject.noise()
        at = next((i for i, (a, b) in enumerate(zip(greedy.tokens, other.tokens, strict=False)) if a != b), None)
        if noise is None or at is None or self.subject.exact_numbers:
            return False
        job = Job(tuple(greedy.prompt), SamplingParams(temperature=0, max_tokens=self.length, ignore_eos=True))
        margin = self.subject.margin(job, greedy, at, other.tokens[at])
        return margin is not None and margin <= 2 * noise

    def _has_effect(self, name: str) -> list[str]:
        jobs = self._jobs()
        wrong, tried = list[str](), 0
        for job, before in zip(jobs, self._write(jobs), strict=True):
            knob = next((k for k in [*penalties(), *chosen(before)] if k.name == name), None)
            if knob is None or knob.effect is None:
                continue
            tried += 1
            base = before
            if name == "min_tokens":
                [base] = self._write([job])
            [after] = self._write([job.with_(**knob.params)])
            found = knob.effect(base, after)
            if found and self._is_as_plain(job.with_(**knob.params), after):
                # A penalty may be too small to change a text of which the target is sure.
                if name not in PENALTIES:
                    raise Unsupported(f"without speculation it has no effect either: {found}")
            elif found:
                wrong.append(f"{found}: {self._shown(after)}")
        if not tried:
            raise Unsupported("no text was long enough to choose a value")
        return wrong

    def _is_as_plain(self, job: Job, text: Writing) -> bool:
        """Whether plain decoding gives the same text."""
        try:
            [plain] = self.subject.plain([job])
        except Unsupported:
            return False
        return not plain.error and (plain.tokens, plain.text) == (text.tokens, text.text)

    def _seed(self) -> list[str]:
        wrong = list[str]()
        jobs = self._jobs(2, temperature=_HOT)
        first, again = self._write(jobs), self._write(jobs)
        other = self._write([job.with_(seed=self.seed + 12) for job in jobs])
        for a, b, c in zip(first, again, other, strict=True):
            if (a.tokens, a.text) != (b.tokens, b.text):
                wrong.append(f"the same seed gave two texts: {self._shown(a)} and {self._shown(b)}")
            if (a.tokens, a.text) == (c.tokens, c.text):
                wrong.append(f"two seeds gave one text: {self._shown(a)}")
        return wrong

    def _n(self) -> list[str]:
        texts = self._write(self._jobs(1, temperature=_HOT, n=3))
        if len(texts) != 3:
            return [f"n=3 gave {len(texts)} texts"]
        different = {(tuple(t.tokens), t.text) for t in texts}
        return (
            [] if len(different) == 3 else [f"only {len(different)} of 3 texts are different: {self._shown(texts[0])}"]
        )

    def _logprobs(self) -> list[str]:
        jobs = self._jobs(logprobs=0)
        texts = self._write(jobs)
        if any(t.logprobs is None for t in texts):
            raise Unsupported("it gives no log-probabilities")
        try:
            wanted = self.subject.plain(jobs)
        except Unsupported:
            wanted = texts
        noise = self.subject.noise()
        allowed = _LOGPROB if noise is None else max(8 * noise, 1e-4)
        wrong = list[str]()
        for text, plain in zip(texts, wanted, strict=True):
            if text is plain or plain.logprobs is None:
                continue
            for at, (token, other) in enumerate(zip(text.tokens, plain.tokens, strict=False)):
                if token != other:
                    break
                ours, theirs = (text.logprobs or [])[at].get(token), plain.logprobs[at].get(token)
                if ours is None or theirs is None or abs(ours - theirs) > allowed:
                    wrong.append(f"token {at} has the log-probability {ours}, and {theirs} in plain decoding")
                    break
            if len(text.logprobs or []) != len(text.tokens):
                wrong.append(f"{len(text.logprobs or [])} log-probabilities for {len(text.tokens)} tokens")
        return wrong

    def _max_tokens(self) -> list[str]:
        wrong = list[str]()
        for limit in (1, 2, 5, 11):
            for text in self._write(self._jobs(2, max_tokens=limit)):
                count = len(text.tokens) or text.usage
                if count != limit or text.finish != "length":
                    wrong.append(f"max_tokens={limit} gave {count} tokens, finish reason {text.finish!r}")
        return wrong

    def _end_token(self) -> list[str]:
        """The end tokens of the model, where the subject names them."""
        if not self.subject.end_ids:
            raise Unsupported("its end tokens are not known")
        wrong, ended = list[str](), 0
        for seed in range(4):
            jobs = self._jobs(6, temperature=_HOT, ignore_eos=False, max_tokens=4 * self.length, seed=self.seed + seed)
            for text in self._write(jobs):
                inside = [t for t in text.tokens[:-1] if t in self.subject.end_ids]
                ended += bool(inside) or (bool(text.tokens) and text.tokens[-1] in self.subject.end_ids)
                if inside:
                    wrong.append(f"the text goes on past the end token {inside[0]}: {self._shown(text)}")
        if not ended:
            raise Unsupported("no text came to its end token")
        return wrong

    def _grammar(self) -> list[str]:
        wrong, choices = list[str](), ["a long first answer", "a long second answer", "neither"]
        for job in self._jobs(temperature=1.0, ignore_eos=False, max_tokens=4 * self.length):
            text = self.subject.constrained(job, choices)
            if text.broke:
                raise _BrokeHere(text.error)
            if text.error:
                raise Unsupported(text.error)
            if text.text not in choices:
                wrong.append(f"the grammar allows {choices}, and the text is {self._shown(text)}")
        return wrong

    def _stream(self, way: Way) -> list[str]:
        """Text, tokens, finish reason and counts of a stream, and of the same answer in one piece."""
        wrong, jobs = list[str](), self._jobs()
        for whole, parts in zip(self._write(jobs), self._write(jobs, way), strict=True):
            if self._tie(whole, parts):
                continue
            if whole.tokens and not parts.tokens:
                wrong.append("the stream leaves out the token ids or the log-probabilities of some tokens")
            for name in ("text", "finish", "usage", *(("tokens",) if parts.tokens else ())):
                a, b = getattr(whole, name), getattr(parts, name)
                if a != b and not (name == "usage" and None in (a, b)):
                    wrong.append(f"{name} of the stream: {b!r}; in one piece: {a!r}")
        return wrong

    def _usage(self) -> list[str]:
        jobs = self._jobs()
        texts = self._write(jobs)
        for job, text in zip(jobs, list(texts), strict=True):
            knob = next((k for k in chosen(text) if k.name == "stop_token_ids"), None)
            if knob is not None:
                texts += self._write([job.with_(**knob.params)])
        if all(t.usage is None for t in texts) or not any(t.tokens for t in texts):
            raise Unsupported("it does not report token ids and their number")
        return [
            f"usage says {t.usage} tokens, the text has {len(t.tokens)}"
            for t in texts
            if t.tokens and t.usage != len(t.tokens)
        ]

    def _counters(self) -> list[str]:
        texts = self._write(self._jobs())
        if not any(t.drafted for t in texts):
            raise Unsupported("it does not report its draft tokens")
        wrong = list[str]()
        for t in texts:
            written = sum(t.accepted) + len(t.accepted)
            if any(a > d for a, d in zip(t.accepted, t.drafted, strict=True)):
                wrong.append(f"a step accepted more than it drafted: {t.accepted} of {t.drafted}")
            elif not 0 <= written - len(t.tokens) <= max(t.drafted, default=0) + 1:
                wrong.append(
                    f"{len(t.accepted)} steps accepted {sum(t.accepted)} draft tokens, and the text has {len(t.tokens)}"
                )
        return wrong

    def _shown(self, text: Writing) -> str:
        return repr(text.text[:80]) if text.text else self.subject.show(text.tokens[:24])

    # -- the kind ---------------------------------------------------------------------------------------------------------

    def trials(self) -> Iterator[CertifyTrial]:
        for check in self.checks():
            yield CertifyTrial(check.name, lambda c=check: self._trial(c))

    def _trial(self, check: ContractCheck) -> Record:
        try:
            return {"wrong": check.run(), "skipped": "", "cause": check.cause}
        except Unsupported as why:
            record: Record = {"wrong": [], "skipped": str(why), "cause": check.cause}
            if isinstance(why, _BrokeHere):
                record["broke"] = str(why).splitlines()
            if isinstance(why, _RefusedHere):
                record["refused"] = str(why)
            return record

    def done(self, records: Sequence[Record]) -> bool:
        return False

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        tested = [r for r in records if not r["skipped"]]
        bad = [r for r in tested if r["wrong"]]
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.HOLDS if tested else Conclusion.NOT_TESTED,
            sentence=f"The contract holds: {count(len(tested), 'check')} of parameters and bookkeeping.",
            power="Each check writes a few texts with a value that must change them. A rare mistake may stay unseen.",
            tested={"checks": ", ".join(r["key"] for r in tested)},
            skipped=[f"{r['key']}: {r['skipped']}" for r in records if r["skipped"] and not r.get("refused")],
            figures={"checks": len(tested), "wrong": len(bad)},
        )
        if not tested:
            part.sentence = "The contract was not tested: no check could be run."
        unrun = len(self.checks()) - len(records)
        if unrun > 0:
            part.skipped.append(f"{count(unrun, 'check')} not reached")
        if bad:
            part.conclusion = Conclusion.DIFFERS
            failed = ", ".join(r["key"] for r in bad)
            part.sentence = f"Differs: {len(bad)} of {count(len(tested), 'check')} of the contract: {failed}."
            part.findings = [
                Finding(title=f"{r['key']} fails", cause=r["cause"], evidence="\n".join(r["wrong"][:4])) for r in bad
            ]
        add_failures(part, records)
        return part
