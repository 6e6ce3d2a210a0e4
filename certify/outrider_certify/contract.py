"""The contract certificate: does every parameter have its effect under speculation, and do the books agree with the text?

Each check writes a few texts with speculation and looks at them. A check that the subject cannot be asked is listed as skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.parameters import CHOSEN, PENALTIES, chosen
from outrider_certify.subject import (
    GeneratedText,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    Unsupported,
)
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken, confirmed, counted

_HOT = 1.5  # a temperature at which two seeds give two texts
_LOGPROB = 0.02  # by which a log-probability may be off, where the noise was not measured


class _CannotCheck(Unsupported):
    """A check that ends early. field: of its record, for what it says; "" for nothing more than that."""

    def __init__(self, why: str, field: str = "") -> None:
        super().__init__(why)
        self.field = field


class Contract(CertificateKind):
    """The kind `contract`. length: tokens of a text."""

    name, share = "contract", 2.0

    def __init__(self, subject: Subject, *, length: int = 32, seed: int = 0) -> None:
        self.subject, self.length, self.seed = subject, length, seed

    # -- texts ------------------------------------------------------------------------------------------------------------

    def _requests(self, count: int = 3, **changes: Any) -> list[TextRequest]:
        usual = {"temperature": 0.0, "max_tokens": self.length, "ignore_eos": True, "seed": self.seed + 11}
        params = SamplingParams(**{**usual, **changes})
        return [TextRequest(prompt, params) for prompt in list(self.subject.prompts())[:count]]

    def _generate(
        self, requests: Sequence[TextRequest], variant: SpeculationVariant | None = None
    ) -> list[GeneratedText]:
        try:
            texts = self.subject.generate(requests, variant or self.subject.variants()[0])
        except Unsupported as why:
            refused = variant is None and self._plain_takes(requests)
            raise _CannotCheck(str(why), "refused" if refused else "") from None
        if lines := confirmed(self.subject, requests, broken(texts)):
            raise _CannotCheck("\n".join(lines), "broke")
        for text in texts:
            if text.error:
                raise Unsupported(text.error)
        return texts

    def _plain_takes(self, requests: Sequence[TextRequest]) -> bool:
        try:
            return not any(text.error for text in self.subject.plain(requests))
        except Unsupported:
            return False

    # -- checks -----------------------------------------------------------------------------------------------------------

    def checks_by_name(self) -> Sequence[str]:
        return tuple(self.checks())

    def checks(self) -> dict[str, tuple[str, Callable[[], list[str]]]]:
        """For each check: what is wrong if it fails, and the function that gives what is wrong, a line each."""
        greedy = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
        stream = next((v for v in self.subject.variants() if v.options.get("stream")), None)
        return {
            **{name: (f"{name} is not applied", partial(self._is_greedy, {name: v})) for name, v in greedy.items()},
            **{
                name: (f"{name} has no effect, or a wrong one", partial(self._has_effect, name))
                for name in (*PENALTIES, *CHOSEN)
            },
            "seed": ("the seed is ignored", self._seed),
            "n": ("the n texts of one request share their random numbers", self._n),
            "logprobs": ("log-probabilities are those of another row, or of another distribution", self._logprobs),
            "number of logprobs": (
                "fewer log-probabilities come than were asked for",
                self._number_of_logprobs,
            ),
            "token ids": ("the token ids are not those of the text", self._token_ids),
            "max_tokens": ("max_tokens is not kept, or its finish reason is wrong", self._max_tokens),
            "end token": ("the text goes on past its end token", self._end_token),
            "grammar": ("the grammar is not applied to all tokens of a step", self._grammar),
            **(
                {"stream": ("a stream is not the answer in one piece", partial(self._stream, stream))} if stream else {}
            ),
            "usage": ("tokens are counted that are not in the text", self._usage),
            "acceptance counters": ("the acceptance counters do not agree with the text", self._counters),
        }

    def _is_greedy(self, params: dict[str, Any]) -> list[str]:
        """Only the likeliest token is left, so a sampled text must be the greedy one."""
        greedy = self._generate(self._requests())
        sampled = self._generate(self._requests(temperature=1.0, **params))
        return [
            f"with {params} at temperature 1 the text is not the greedy one: {self._shown(b)} for {self._shown(a)}"
            for a, b in zip(greedy, sampled, strict=True)
            if (a.tokens or a.text) != (b.tokens or b.text) and not self._tie(a, b)
        ]

    def _tie(self, greedy: GeneratedText, other: GeneratedText) -> bool:
        """Whether two texts part where the target has two best tokens within its noise, or two equal ones."""
        noise, tokens = self.subject.noise(), self.subject.tokens_of(other)
        at = next((i for i, (a, b) in enumerate(zip(greedy.tokens, tokens, strict=False)) if a != b), None)
        if noise is None or at is None:
            return False
        params = SamplingParams(temperature=0, max_tokens=self.length, ignore_eos=True)
        measured = self.subject.gap if self.subject.exact_numbers else self.subject.margin
        margin = measured(TextRequest(tuple(greedy.prompt), params), greedy, at, tokens[at])
        return margin is not None and margin <= 2 * noise

    def _has_effect(self, name: str) -> list[str]:
        requests = self._requests()
        wrong, tried = list[str](), 0
        for request, before in zip(requests, self._generate(requests), strict=True):
            change = {**PENALTIES, **chosen(before)}.get(name)
            if change is None:
                continue
            tried += 1
            changed = request.with_(**change.params)
            [after] = self._generate([changed])
            error = change.effect(before, after)
            if error and not self._is_as_plain(changed, after):
                wrong.append(f"{error}: {self._shown(after)}")
            elif (
                error and name not in PENALTIES
            ):  # a penalty may be too small to change a text of which the target is sure
                raise Unsupported(f"without speculation it has no effect either: {error}")
        if not tried:
            raise Unsupported("no text was long enough to choose a value")
        return wrong

    def _is_as_plain(self, request: TextRequest, text: GeneratedText) -> bool:
        """Whether plain decoding gives the same text."""
        try:
            [plain] = self.subject.plain([request])
        except Unsupported:
            return False
        return not plain.error and plain.content == text.content

    def _seed(self) -> list[str]:
        wrong = list[str]()
        requests = self._requests(2, temperature=_HOT)
        first, again = self._generate(requests), self._generate(requests)
        other = self._generate([request.with_(seed=self.seed + 12) for request in requests])
        for a, b, c in zip(first, again, other, strict=True):
            if a.content != b.content:
                wrong.append(f"the same seed gave two texts: {self._shown(a)} and {self._shown(b)}")
            if a.content == c.content:
                wrong.append(f"two seeds gave one text: {self._shown(a)}")
        return wrong

    def _n(self) -> list[str]:
        texts = self._generate(self._requests(1, temperature=_HOT, n=3))
        if len(texts) != 3:
            return [f"n=3 gave {len(texts)} texts"]
        different = {(tuple(t.tokens), t.text) for t in texts}
        return (
            [] if len(different) == 3 else [f"only {len(different)} of 3 texts are different: {self._shown(texts[0])}"]
        )

    def _logprobs(self) -> list[str]:
        requests = self._requests(logprobs=0)
        texts = self._generate(requests)
        if any(t.logprobs is None for t in texts):
            raise Unsupported("it gives no log-probabilities")
        try:
            plain = self.subject.plain(requests)
        except Unsupported:
            plain = [GeneratedText() for _ in texts]
        noise = self.subject.noise()
        allowed = _LOGPROB if noise is None else max(8 * noise, 1e-4)
        wrong = list[str]()
        for text, wanted in zip(texts, plain, strict=True):
            if wanted.logprobs is None:
                continue
            ours = text.logprobs or []
            for at, (token, other) in enumerate(zip(text.tokens, wanted.tokens, strict=False)):
                if token != other or at >= min(len(ours), len(wanted.logprobs)):
                    break
                got, want = ours[at].get(token), wanted.logprobs[at].get(token)
                if got is None or want is None or abs(got - want) > allowed:
                    wrong.append(f"token {at} has the log-probability {got}, and {want} in plain decoding")
                    break
            if len(ours) != len(text.tokens):
                wrong.append(f"{len(ours)} log-probabilities for {len(text.tokens)} tokens")
        return wrong

    def _number_of_logprobs(self) -> list[str]:
        asked, requests = 3, self._requests(logprobs=3)
        texts = self._generate(requests)
        if not any(t.alternatives for t in texts):
            raise Unsupported("it does not tell how many log-probabilities come with a token")
        wrong = list[str]()
        for request, text in zip(requests, texts, strict=True):
            few = next((at for at, n in enumerate(text.alternatives) if n < asked), None)
            if few is not None:
                said = f"{text.alternatives[few]} log-probabilities at token {few}, and {asked} were asked for"
                if self._plain_tells(request, few) == text.alternatives[few]:
                    raise Unsupported(f"{said}, without speculation too")
                wrong.append(said)
            elif text.tokens and len(text.alternatives) != len(text.tokens):
                wrong.append(
                    f"log-probabilities of {len(text.alternatives)} tokens, and the text has {len(text.tokens)}"
                )
        return wrong

    def _plain_tells(self, request: TextRequest, at: int) -> int | None:
        """How many log-probabilities plain decoding gives with a token."""
        try:
            [plain] = self.subject.plain([request])
        except Unsupported:
            return None
        return plain.alternatives[at] if at < len(plain.alternatives) else None

    def _token_ids(self) -> list[str]:
        """The text of the ids begins with the text, or the ids of the text are the ids. Half of a character may be at the end."""
        texts = [text for text in self._generate(self._requests(ignore_eos=False)) if text.tokens and text.text.strip()]
        if not texts:
            raise Unsupported("it gives no token ids, or no text")
        wrong = list[str]()
        for text in texts:
            told, shown = self.subject.decode(text.tokens), text.text.strip().rstrip("\ufffd")
            if not told.strip().startswith(shown) and self.subject.encode(text.text, prompt=False) != text.tokens:
                wrong.append(f"the token ids say {told[:80]!r}, and the text is {text.text[:80]!r}")
        return wrong

    def _max_tokens(self) -> list[str]:
        wrong = list[str]()
        for limit in (1, 2, 5, 11):
            for text in self._generate(self._requests(2, max_tokens=limit)):
                count = len(text.tokens) or text.usage
                if count != limit or text.finish != "length":
                    wrong.append(f"max_tokens={limit} gave {count} tokens, finish reason {text.finish!r}")
        return wrong

    def _end_token(self) -> list[str]:
        """The end tokens of the model, where the subject names them."""
        if not self.subject.end_ids:
            raise Unsupported("its end tokens are not known")
        wrong, ended, length = list[str](), 0, 4 * self.length
        for seed in range(4):
            requests = self._requests(6, temperature=_HOT, ignore_eos=False, max_tokens=length, seed=self.seed + seed)
            for text in self._generate(requests):
                inside = [t for t in text.tokens[:-1] if t in self.subject.end_ids]
                ended += any(t in self.subject.end_ids for t in text.tokens)
                if inside:
                    wrong.append(f"the text goes on past the end token {inside[0]}: {self._shown(text)}")
        if not ended:
            raise Unsupported("no text came to its end token")
        return wrong

    def _grammar(self) -> list[str]:
        wrong, choices = list[str](), ["a long first answer", "a long second answer", "neither"]
        for request in self._requests(temperature=1.0, ignore_eos=False, max_tokens=4 * self.length):
            text = self.subject.constrained(request, choices)
            if text.error:
                raise _CannotCheck(text.error, "broke" if text.broke else "")
            if text.text not in choices:
                wrong.append(f"the grammar allows {choices}, and the text is {self._shown(text)}")
        return wrong

    def _stream(self, variant: SpeculationVariant) -> list[str]:
        """Text, tokens, finish reason and counts of a stream, and of the same answer in one piece."""
        wrong, requests = list[str](), self._requests()
        for whole, parts in zip(self._generate(requests), self._generate(requests, variant), strict=True):
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
        requests = self._requests()
        texts = self._generate(requests)
        for request, text in zip(requests, list(texts), strict=True):
            if stop := chosen(text).get("stop_token_ids"):
                texts += self._generate([request.with_(**stop.params)])
        if all(t.usage is None for t in texts) or not any(t.tokens for t in texts):
            raise Unsupported("it does not report token ids and their number")
        return [
            f"usage says {t.usage} tokens, the text has {len(t.tokens)}"
            for t in texts
            if t.tokens and t.usage != len(t.tokens)
        ]

    def _counters(self) -> list[str]:
        texts = self._generate(self._requests())
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

    def _shown(self, text: GeneratedText) -> str:
        return repr(text.text[:80]) if text.text else self.subject.show(text.tokens[:24])

    # -- the kind ---------------------------------------------------------------------------------------------------------

    def trials(self) -> Iterator[CertifyTrial]:
        for name, (cause, check) in self.checks().items():
            yield (name, partial(self._trial, cause, check))

    def _trial(self, cause: str, check: Callable[[], list[str]]) -> Record:
        try:
            return {"wrong": check(), "skipped": "", "cause": cause}
        except Unsupported as why:
            record: Record = {"wrong": [], "skipped": str(why), "cause": cause}
            if isinstance(why, _CannotCheck) and why.field:
                record[why.field] = str(why).splitlines() if why.field == "broke" else str(why)
            return record

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        tested = [r for r in records if not r["skipped"]]
        bad = [r for r in tested if r["wrong"]]
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.HOLDS if tested else Conclusion.NOT_TESTED,
            sentence=f"The contract holds: {counted(len(tested), 'check')} of parameters and bookkeeping.",
            power="Each check writes a few texts with a value that must change them. A rare mistake may stay unseen.",
            tested={"checks": ", ".join(r["key"] for r in tested)},
            skipped=[f"{r['key']}: {r['skipped']}" for r in records if r["skipped"] and not r.get("refused")],
            figures={"checks": len(tested), "wrong": len(bad)},
        )
        if not tested:
            part.sentence = "The contract was not tested: no check could be run."
        unrun = len(self.checks()) - len(records)
        if unrun > 0:
            part.skipped.append(f"{counted(unrun, 'check')} not reached")
        if bad:
            part.conclusion = Conclusion.DIFFERS
            failed = ", ".join(r["key"] for r in bad)
            part.sentence = f"Differs: {len(bad)} of {counted(len(tested), 'check')} of the contract: {failed}."
            part.findings = [
                Finding(title=f"{r['key']} fails", cause=r["cause"], evidence="\n".join(r["wrong"][:4])) for r in bad
            ]
        return part
