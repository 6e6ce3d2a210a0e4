"""The exact certificate: a verifier function against the target's distribution, in rational arithmetic, over all branches.

Toy models give distributions that depend on the text. Every draft and every random choice is tried, over several steps. The
joint distribution of the text must be that of plain decoding, without tolerance. The configurations come smallest first, so the
first difference is a small one. It is printed branch by branch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from outrider.core.types import Siblings
from outrider.testing import oracle
from outrider.verify import VERIFIERS
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.subject import Subject
from outrider_certify.trials import CertificateKind, CertifyTrial, Record

LETTERS = "abcdefgh"
_TOYS, _TOYS_OF_TREES = 14, 7  # of each configuration: two of every kind, or one where there are many branches
_SMALLEST = 40  # toys in which a small counterexample is looked for


@dataclass(frozen=True)
class Configuration:
    """One way to try a verifier."""

    vocab: int
    gamma: int  # draft tokens of a step, for a chain
    length: int
    siblings: Siblings | None = None  # of a tree
    widths: tuple[int, ...] = ()  # of a tree, by level

    @property
    def name(self) -> str:
        shape = (
            f"chains of {self.gamma}"
            if self.siblings is None
            else f"trees {self.widths} ({self.siblings.name.lower()})"
        )
        return f"{shape}, {self.vocab} tokens in the vocabulary, texts of {self.length}"

    def drafter(self) -> oracle.Drafter:
        if self.siblings is None:
            return oracle.drawn_chain(self.gamma)
        return oracle.grown_tree(oracle.by_level(*self.widths), self.siblings)


CHAINS = (
    Configuration(2, 1, 1),
    Configuration(3, 1, 1),
    Configuration(3, 1, 2),
    Configuration(3, 2, 2),
    Configuration(3, 2, 3),
    Configuration(4, 2, 2),
    Configuration(3, 3, 3),
)
TREES = tuple(
    Configuration(3, 0, length, siblings, widths)
    for widths, length in (((2,), 2), ((2, 1), 1))
    for siblings in Siblings
    if siblings is not Siblings.POINT
)


class VerifierFunction(Subject):
    """A function with the signature of `outrider.verify.Reference`."""

    def __init__(self, function: Callable[..., Any], name: str, *, trees: bool | None = None) -> None:
        """A verifier and its name.

        Args:
            trees: Whether a node may have two children. None takes the attribute `trees` of the function, False without it.
        """
        super().__init__()
        self.function, self.name = function, name
        if trees is None:
            ours = (v.trees for v in VERIFIERS.values() if v.reference is function)
            trees = next(ours, bool(getattr(function, "trees", False)))
        self.trees = trees
        self.properties = {"function": name, "trees": "true" if trees else "false"}
        self._takes_siblings = "siblings" in inspect.signature(function).parameters

    @staticmethod
    def recognizes(target: Any) -> bool:
        """Whether it is a verifier: `f(tokens, parents, target, drafter, choose)`."""
        names = list(inspect.signature(target).parameters) if callable(target) else []
        return len(names) >= 5 and names[:2] == ["tokens", "parents"]

    def kinds(self) -> dict[str, CertificateKind]:
        return {"exact": Exact(self)}

    def rule(self, siblings: Siblings | None) -> oracle.Rule:
        """The rule for drafts whose siblings were made so."""
        if siblings is None or not self._takes_siblings:
            return self.function
        return lambda *args: self.function(*args, siblings=siblings)


class Exact(CertificateKind):
    """The kind `exact`."""

    name = "exact"

    def __init__(self, verifier: VerifierFunction) -> None:
        self.verifier = verifier

    def trials(self) -> Iterator[CertifyTrial]:
        for configuration in CHAINS + (TREES if self.verifier.trees else ()):
            yield (configuration.name, lambda c=configuration: self._trial(c))

    def done(self, records: Sequence[Record]) -> bool:
        return any(r["counterexample"] or r["error"] for r in records)

    def _trial(self, configuration: Configuration) -> Record:
        record: Record = {"toys": 0, "texts": 0, "counterexample": "", "error": "", "distance": 0.0}
        rule, drafter = self.verifier.rule(configuration.siblings), configuration.drafter()
        wrong = list[oracle.Toy]()
        for toy in oracle.toys(_TOYS if configuration.siblings is None else _TOYS_OF_TREES, configuration.vocab):
            try:
                written = oracle.composed(toy, rule, drafter, configuration.length)
            except Exception as error:  # of the author's function
                record["error"] = f"{type(error).__name__}: {error} (toy {toy.seed}, {toy.kind}, {configuration.name})"
                return record
            wanted = oracle.plain(toy, configuration.length)
            record["toys"] += 1
            record["texts"] += len(wanted)
            if written != wanted:
                wrong.append(toy)
                record["distance"] = max(record["distance"], oracle.total_variation(written, wanted))
        if wrong:
            record["counterexample"] = self._counterexample(configuration, wrong)
        return record

    def _counterexample(self, configuration: Configuration, wrong: Sequence[oracle.Toy]) -> str:
        rule, drafter = self.verifier.rule(configuration.siblings), configuration.drafter()
        candidates = list(wrong)
        for seed in range(100, 100 + _SMALLEST):
            toy = oracle.Toy(seed, "zeros" if seed % 2 else "ties", configuration.vocab)
            if oracle.composed(toy, rule, drafter, configuration.length) != oracle.plain(toy, configuration.length):
                candidates.append(toy)
        toy = min(candidates, key=lambda t: _size(t, configuration))
        return story(toy, rule, drafter, configuration)

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        toys, texts = sum(r["toys"] for r in records), sum(r["texts"] for r in records)
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.EXACT_TOKENS,
            sentence="",
            power="Every branch was computed with fractions, so any deviation on these toys would have been found.",
            tested={
                "configurations": "; ".join(r["key"] for r in records),
                "toy models": str(toys),
                "texts": f"{texts:,}",
            },
            figures={"toys": toys, "texts": texts, "distance": max((r["distance"] for r in records), default=0.0)},
        )
        bad = next((r for r in records if r["counterexample"] or r["error"]), None)
        if not self.verifier.trees:
            part.skipped.append("trees: the function has no attribute `trees = True`")
        if bad is None:
            part.conclusion = Conclusion.SAME_DISTRIBUTION
            part.sentence = (
                f"Same distribution, exactly: equal to plain decoding on {toys} toy models, over all branches."
            )
            return part
        part.conclusion = Conclusion.DIFFERS
        if bad["error"]:
            part.sentence = f"Differs: the function fails. {bad['error']}"
            part.findings.append(Finding(title="the function raises an error", where=bad["key"], evidence=bad["error"]))
        else:
            part.sentence = f"Differs. The total variation is up to {bad['distance']:.3f} with {bad['key']}."
            part.findings.append(
                Finding(
                    title="the distribution is not that of plain decoding",
                    where=bad["key"],
                    evidence=bad["counterexample"],
                )
            )
        return part


# -- a counterexample in words ----------------------------------------------------------------------------------------------


def _size(toy: oracle.Toy, configuration: Configuration) -> int:
    """How hard it is to follow by hand: the denominators, and the number of branches."""
    p, q = toy.p(()), toy.q(())
    return sum(x.denominator for x in (*p, *q) if x) + 2 * sum(1 for x in q if x)


class _Narrator(oracle.Oracle):
    """Tells what each choice was for."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(script)
        self.told = list[str]()

    def pick(self, weights: Sequence[Fraction | int]) -> int:
        before = self.weight
        choice = super().pick(weights)
        self.told.append(f"draws {LETTERS[choice]} ({self.weight / before})")
        return choice

    def token(self, probs: Sequence[Any], *, depth: int) -> int:
        choice = self.pick(probs)
        total = sum(probs)
        shown = ", ".join(str(Fraction(x) / total) for x in probs)
        self.told[-1] = f"writes {LETTERS[choice]} from ({shown})"
        return choice

    def coin(self, part: Any, whole: Any, *, depth: int, node: int) -> bool:
        if part >= whole:
            self.told.append("accepts for sure" if whole > 0 else "rejects for sure")
            return whole > 0
        before = self.weight
        accepted = oracle.Oracle.pick(self, [part, whole - part]) == 0
        self.told.append(f"{'accepts' if accepted else 'rejects'} ({self.weight / before})")
        return accepted


def story(toy: oracle.Toy, rule: oracle.Rule, drafter: oracle.Drafter, configuration: Configuration) -> str:
    """One toy, branch by branch, and what it adds up to."""
    length, vocab = configuration.length, range(configuration.vocab)

    def numbers(probs: Sequence[Fraction]) -> str:
        return "  ".join(f"{LETTERS[i]} {probs[i]!s:>5}" for i in vocab)

    texts: list[tuple[int, ...]] = [()]
    if length > 1 or configuration.gamma > 1:
        texts += [(i,) for i in vocab]
    lines = [f"the target's p and the drafter's q ({configuration.name}):"]
    for text in texts:
        after = "".join(LETTERS[i] for i in text) or "nothing"
        lines += [f"  after {after:8} p:  {numbers(toy.p(text))}", f"  {'':14} q:  {numbers(toy.q(text))}"]
    program, branches = oracle.speculate(toy, rule, drafter, length), list[str]()

    def told(narrator: _Narrator) -> tuple[int, ...]:
        text = program(narrator)
        branches.append(f"  {narrator.weight!s:>8}  {''.join(LETTERS[i] for i in text)}   {'; '.join(narrator.told)}")
        return text

    written = oracle.distribution(told, _Narrator)
    lines += ["all branches:", *branches[:24]]
    if len(branches) > 24:
        lines.append(f"  ... and {len(branches) - 24} more")
    lines.append("added up, and what plain decoding gives:")
    wanted = oracle.plain(toy, length)
    for text in sorted({*written, *wanted}):
        got, want = written.get(text, Fraction(0)), wanted.get(text, Fraction(0))
        mark = "" if got == want else f"   <- {'too often' if got > want else 'too rarely'} by {abs(got - want)}"
        lines.append(f"  {''.join(LETTERS[i] for i in text)}  {got!s:>10}  {want!s:>10}{mark}")
    return "\n".join(lines)
