"""The seeded certificate: the texts of speculation and of plain decoding, token by token.

Prompts x seeds x variants of speculation x companions in the batch x sampling parameters, each alone and together, and the
conditions that break engines. Every difference is classified by the margin at the first differing token. It is a tie if the two
scores are no farther apart than two ways to compute one score; else an error. The first differences are reduced to the shortest
request that still shows them. Where texts of the same seed are not promised, only greedy texts are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np

from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.conditions import (
    AGAIN,
    CONDITIONS,
    LOGPROBS,
    LONG,
    MATES,
    NEAR_TIES,
    NEIGHBOURS,
    PREEMPTION,
    SEVERAL,
    longer,
    not_asked,
)
from outrider_certify.parameters import CHOSEN, FILTERS, PENALTIES, chosen, together, turned_off
from outrider_certify.reduce import COMPANIONS, reduced, same
from outrider_certify.subject import (
    GeneratedText,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    Unsupported,
)
from outrider_certify.trials import CertificateKind, CertifyTrial, Record, broken

_ENOUGH = 8  # errors after which more would not help to name the mistake
_SHOWN = 40  # differences of a trial that are kept
_REDUCED = {"error": 3, "unclear": 1, "tie": 1}  # differences of each kind that are reduced
PLAIN, TOGETHER, END = "the defaults", "together", "end token"


class Seeded(CertificateKind):
    """The kind `seeded`."""

    name, share = "seeded", 4.0

    def __init__(
        self,
        subject: Subject,
        *,
        confidence: float = 0.99,
        length: int = 48,
        seed: int = 0,
        rate: float = 0.005,
        rounds: int | None = None,
    ) -> None:
        """Test one subject.

        Args:
            length: Tokens of a text.
            rate: The share of changed texts that is to be excluded.
            rounds: None for as many as that needs. Each has prompts of its own.
        """
        self.subject, self.confidence, self.length, self.seed = subject, confidence, length, seed
        self.rate, self.rounds = rate, rounds
        self._reduced = Counter[str]()

    def _conditions(self) -> list[str]:
        """Those of `CONDITIONS` that the subject can have."""
        can = {
            LONG: self.subject.long_context,
            NEIGHBOURS: self.subject.batches,
            PREEMPTION: self.subject.batches and self.subject.slots,
        }
        return [name for name in CONDITIONS if can.get(name, True)]

    def checks_by_name(self) -> Sequence[str]:
        filters = FILTERS if self.subject.exact_tokens else ()
        parameters = [*filters, *PENALTIES, *CHOSEN, TOGETHER, END]
        turns = zip_longest(
            self._conditions(), parameters
        )  # in turns, because a short budget may end in the first round
        return (PLAIN, *(name for pair in turns for name in pair if name))

    def trials(self) -> Iterator[CertifyTrial]:
        number = 0
        while self.rounds is None or number < self.rounds:
            yield from self.round(number)
            number += 1

    def round(self, number: int) -> Iterator[CertifyTrial]:
        """The trials of each set once."""
        for temperature in (0.0, 1.0) if self.subject.exact_tokens else (0.0,):
            for name in self.checks_by_name():
                if (name in FILTERS and not temperature) or (name == NEAR_TIES and temperature):
                    continue
                yield (
                    f"round {number}, temperature {temperature:g}, {name}",
                    partial(self.trial, number, temperature, name),
                )

    def done(self, records: Sequence[Record]) -> bool:
        """After each condition was tried: errors enough to name a mistake, texts enough to exclude `rate`, or none to compare."""
        size = sum(1 for _ in self.round(0))
        errors = sum(d["kind"] == "error" for r in records for d in r["differences"])
        texts = sum(r["texts"] for r in records)
        enough = errors >= _ENOUGH or not texts or bounds.smallest_rate(texts, self.confidence) <= self.rate
        return len(records) >= size and enough

    def trial(self, number: int, temperature: float, name: str) -> Record:
        """The differences between speculation and plain decoding of one text for each prompt.

        Args:
            name: Of the parameter or the condition.
        """
        record: Record = {
            "set": name,
            "tokens": 0,
            "texts": 0,
            "differences": [],
            "skipped": "",
            "failed": [],
            "broke": [],
            "applied": False,
        }
        try:
            requests = self._requests(number, temperature, name)
            plain = self.subject.plain(requests)
        except Unsupported as why:
            return {**record, "skipped": str(why)}
        tokens: dict[tuple[int, str], list[int]] = {}  # by request and text: a stream may not tell its tokens
        first, right = dict[str, tuple[Record, TextRequest, SpeculationVariant]](), dict[int, TextRequest]()
        for variant, companions in self._variants(number, name):
            asked = [replace(request, companions=companions) for request in requests]
            try:
                texts = self.subject.generate(asked, variant)
                texts += self.subject.generate(asked, variant) if name == AGAIN else []
            except Unsupported as why:
                record["refused"] = str(why)
                continue
            if not any(text.error for text in plain):
                record["broke"] += broken(texts)
            each = [request for request in asked for _ in range(request.params.n)] * (2 if name == AGAIN else 1)
            if len(texts) != len(each) or len(each) % len(plain):
                record["failed"].append(
                    f"{len(each)} texts were asked for, {len(texts)} came, and {len(plain)} in plain decoding"
                )
                continue
            for index, (request, got) in enumerate(zip(each, texts, strict=True)):
                want = plain[index % len(plain)]
                got.tokens = got.tokens or tokens.get((index, got.text), [])
                tokens[index, got.text] = got.tokens
                if got.error or want.error:
                    record["failed"].append(got.error or want.error)
                    continue
                record["texts"] += 1
                record["tokens"] += max(len(want.tokens), 1)
                if same(got, want):
                    right[index % len(plain)] = request
                    continue
                if want.tokens:
                    got.tokens = self.subject.tokens_of(got)
                if len(record["differences"]) >= _SHOWN:
                    record["differences"].append({"kind": "more"})
                    continue
                difference = self._difference(request, variant, got, want)
                twin = texts[index - index % request.params.n]
                difference["shared"] = got is not twin and got.content == twin.content
                record["differences"].append(difference)
                first.setdefault(difference["kind"], (difference, request, variant))
        for kind, (difference, request, variant) in first.items():
            if self._reduced[kind] < _REDUCED[kind]:
                self._reduced[kind] += 1
                difference["reduced"] = self._reduction(request, variant)
        if any(d.get("dropped") == name for d in record["differences"]):
            record["applied"] = any(self._changes(name, request, plain[i]) for i, request in right.items())
        record["failed"], record["broke"] = record["failed"][:3], record["broke"][:3]
        return record

    def _variants(self, number: int, name: str) -> list[tuple[SpeculationVariant, int]]:
        """The first variant and two others, in turns, each with a number of companions."""
        first, *others = self.subject.variants()
        turn = 2 * (number + sum(name.encode()))
        some = [others[(turn + i) % len(others)] for i in range(min(2, len(others)))]
        fixed = {NEIGHBOURS: MATES[-1], PREEMPTION: self.subject.slots + 2}.get(name)
        mates = [MATES[(turn // 2 + at) % len(MATES)] if fixed is None else fixed for at in range(3)]
        return [(v, mates[at] if self.subject.batches else 0) for at, v in enumerate([first, *some])]

    def _requests(self, number: int, temperature: float, name: str) -> list[TextRequest]:
        """One request for each prompt, with its own value of the parameter."""
        seed = self.seed + 7919 * number
        params = SamplingParams(temperature=temperature, max_tokens=self.length, ignore_eos=name != END)
        prompts = [not_asked(p, number) if number else p for p in self.subject.prompts()]
        requests = [TextRequest(p, replace(params, seed=seed + i)) for i, p in enumerate(prompts)]
        if name in (PLAIN, END, NEIGHBOURS, PREEMPTION):
            return requests
        if name in (LOGPROBS, SEVERAL):
            return [request.with_(**{name: 2}) for request in requests]
        if name == AGAIN:
            return [replace(request, prompt=not_asked(request.prompt, number)) for request in requests]
        if name == LONG:
            return [replace(r, prompt=longer(r.prompt, self.subject.long_context)) for r in requests[:2]]
        if name == NEAR_TIES:
            return [self._near_tie(request) for request in requests]
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

    def _near_tie(self, request: TextRequest) -> TextRequest:
        """A bias that makes the two best scores equal, where they are closest in the greedy text. Raises Unsupported."""
        [text] = self.subject.plain([request])
        best: tuple[float, int] | None = None
        for p in self.subject.distributions(request.with_(temperature=1.0), text):
            with np.errstate(divide="ignore"):
                scores = np.log(p.probs) if p.logits is None else p.logits
            second, top = np.argsort(scores)[-2:]
            gap, token = float(scores[top] - scores[second]), int(second if p.ids is None else p.ids[second])
            best = min(best or (gap, token), (gap, token))
        if best is None:
            raise Unsupported(f"{NEAR_TIES}: no text was written")
        return request.with_(logit_bias={best[1]: best[0]})

    def _reduction(self, request: TextRequest, variant: SpeculationVariant) -> Record:
        case = reduced(self.subject, request, variant)
        size = len(case.request.prompt)
        return {
            "needs": case.needs,
            "again": case.again,
            "stable": case.stable,
            "companions": case.request.companions,
            "size": f"{size} {'characters' if isinstance(case.request.prompt, str) else 'tokens'} of the prompt, "
            f"max_tokens {case.request.params.max_tokens}",
            "show": self.subject.reproduce(case.request, case.variant) if case.stable else "",
        }

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
            "bonus": step is not None and depth == got.drafted[step] > 0,
            "rejected": any(a < d for d, a in earlier),
            "filled": any(a == d > 0 for d, a in earlier),
            "longer": other is not None and wanted is None and want.finish == "stop",
            "dropped": self._dropped(request, got),
        }

    def _dropped(self, request: TextRequest, got: GeneratedText) -> str:
        """The parameter without which plain decoding gives the text that speculation gave."""
        return next((name for name in turned_off(request.params) if not self._changes(name, request, got)), "")

    def _changes(self, name: str, request: TextRequest, text: GeneratedText) -> bool:
        """Whether plain decoding writes another text than this one without a parameter of the request, as far as it can tell."""
        try:
            [without] = self.subject.plain([request.with_(**turned_off(request.params)[name])])
        except (Unsupported, ValueError):
            return True
        return without.content != text.content

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
                **({"companions in the batch": " and ".join(map(str, MATES))} if self.subject.batches else {}),
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
            cause = diagnose(errors or unclear, records, self.subject.slots)
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
    for d in sorted(differences, key=lambda d: ("reduced" not in d, d["at"]))[:4]:
        lines += [
            f"{d['set']}, {d['variant']}, {d['companions']} companions, seed {d['seed']}, token {d['at']}:",
            f"  plain        ... {d['want']}  ({d['finish'][1]})",
            f"  speculation  ... {d['got']}  ({d['finish'][0]})",
        ]
        if d["margin"] is not None:
            noise = "not measured" if d["noise"] is None else f"{d['noise']:.2g}"
            lines.append(f"  margin {d['margin']:.3g}, noise {noise}")
        if case := d.get("reduced"):
            lines.append(_shortest(case))
    where = Counter(f"{d['set']}, {d['variant']}" for d in differences).most_common(3)
    return Finding(
        title=title,
        cause=cause,
        where="; ".join(f"{name}: {n}" for name, n in where),
        evidence="\n".join(lines),
        error=error,
    )


def _shortest(case: Record) -> str:
    """A reduced difference, as a person repeats it."""
    if not case["stable"]:
        return "  asked again alone it does not differ: it depends on what was written before"
    needs = f", needs {', '.join(case['needs'])}" if case["needs"] else ""
    twice = " the second time" if case["again"] else ""
    return f"  the shortest that still differs{twice} ({case['size']}{needs}):\n    {case['show']}"


def _by_conditions(errors: Sequence[Record], slots: int) -> str:
    """The condition that no reduced difference could do without; "" if there is none."""
    cases = [d["reduced"] for d in errors if d.get("reduced") and d["reduced"]["stable"]]
    if not cases:
        return ""
    if all(c["again"] for c in cases):
        return CONDITIONS[AGAIN]
    needed = set[str].intersection(*(set(c["needs"]) for c in cases))
    if COMPANIONS in needed:
        fewest = min(c["companions"] for c in cases)
        if slots and fewest >= slots:
            return CONDITIONS[PREEMPTION]
        return CONDITIONS[NEIGHBOURS] + (f", from {fewest + 1} sequences on" if fewest > 1 else "")
    return next((CONDITIONS[name] for name in (LOGPROBS, SEVERAL) if name in needed), "")


def diagnose(errors: Sequence[Record], records: Sequence[Record], slots: int = 0) -> str:
    """The mistake that the differences have the traces of; "" if there is none in common."""
    clean = {
        r["set"] for r in records if r["texts"] and not any(d["kind"] in ("error", "unclear") for d in r["differences"])
    }
    sets = {d["set"] for d in errors}
    if all(d["longer"] for d in errors):
        return "the text goes on past the end: an end token or a stop inside an accepted run is not seen"
    if all(d.get("shared") for d in errors):
        return "the n texts of one request share their random numbers"
    if condition := _by_conditions(errors, slots):
        return condition
    # A right text shows that its parameter is applied.
    applied = clean | {r["set"] for r in records if r.get("applied")}
    dropped = Counter(d["dropped"] for d in errors if d["dropped"] and d["dropped"] not in applied)
    if dropped and (best := dropped.most_common(1)[0]) and 3 * best[1] >= len(errors):
        return f"{best[0]} is not applied under speculation"
    if PLAIN in clean and sets & {*PENALTIES} and sets <= {*PENALTIES, "bad_words", "min_tokens", TOGETHER}:
        return "penalties count otherwise than in plain decoding: what depends on earlier tokens misses those of the same step"
    if PLAIN in clean and len(alone := sets - {TOGETHER}) == 1:
        name = alone.pop()
        return CONDITIONS.get(name, f"{name} is applied otherwise than in plain decoding")
    if len({d["companions"] > 0 for d in errors}) == 1 and errors[0]["companions"] and len(errors) > 4:
        return CONDITIONS[NEIGHBOURS]
    located = [d for d in errors if d["depth"] is not None]
    if len(located) >= 5:
        if all(d["bonus"] for d in located):
            return "the bonus token, after a step that is accepted whole, is not the target's"
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
