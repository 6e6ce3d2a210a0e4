"""The exact certificate: a verifier function against the target's distribution, in rational arithmetic, over all branches.

Toy models give distributions that depend on the text. Every draft and every random choice is tried, over several steps. The
joint distribution of the text must be that of plain decoding, without tolerance. The configurations come smallest first, so the
first difference is a small one. It is printed branch by branch, and compared with what known mistakes would give. A real engine
shipped each of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from outrider.core.types import Siblings
from outrider.testing import oracle
from outrider.testing.oracle import Rule
from outrider.verify import VERIFIERS
from outrider.verify.reference import clipped_ratio, leftover, reference_block, residual
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.subject import Subject
from outrider_certify.trials import CertificateKind, CertifyTrial, Record

NodeProbs = Callable[[int], Any]


def _before(probs: NodeProbs) -> NodeProbs:
    """The distributions of the position before."""
    return lambda n: probs(max(n - 1, 0))


def _uniform(probs: NodeProbs) -> NodeProbs:
    return lambda n: [sum(probs(n)) / len(probs(n))] * len(probs(n))


def _rejection(
    *,
    coin: Callable[[Any, Any, int], tuple[Any, Any]] = lambda p, q, x: (p[x], q[x]),
    after: Callable[[Any, Any], Any] = lambda p, q: residual(1, p, q),
    bonus_from_residual: bool = False,
    of_p: Callable[[NodeProbs], NodeProbs] = lambda probs: probs,
    of_q: Callable[[NodeProbs], NodeProbs] = lambda probs: probs,
) -> Rule:
    """Rejection on a chain with one thing wrong.

    Args:
        coin: (part, whole) of the probability to accept token x.
        after: The distribution after a rejection.
        of_p: What the rule takes for the target's distributions.
        of_q: What the rule takes for the drafter's distributions.
    """

    def rule(
        tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
    ) -> tuple[list[int], int]:
        target, drafter, last = of_p(target), of_q(drafter), len(tokens) - 1
        for n in range(1, last + 1):
            p, q = target(n - 1), drafter(n - 1)
            if not choose.coin(*coin(p, q, tokens[n]), depth=n, node=n):
                return list(range(n)), choose.token(after(p, q), depth=n)
        bonus = target(last)
        if bonus_from_residual and last:
            bonus = residual(1, bonus, drafter(last - 1))
        return list(range(last + 1)), choose.token(bonus, depth=last + 1)

    return rule


def _absolute_residual(p: Any, q: Any) -> Any:
    gap = [abs(a - b) for a, b in zip(p, q, strict=True)]
    return gap if sum(gap) else p


def _block(*, first_failure: bool = False, token_residual: bool = False, weightless: bool = False) -> Rule:
    """The rule of Sun et al. 2403.10444 with one thing wrong."""

    def rule(
        tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
    ) -> tuple[list[int], int]:
        last = len(tokens) - 1
        end, end_weight, weight = 0, 1, 1  # the last node that was accepted, and the weight of its prefix
        for n in range(1, last + 1):
            x = tokens[n]
            weight = clipped_ratio(weight * target(n - 1)[x], drafter(n - 1)[x])
            part, whole = weight, 1
            if n < last:
                part = sum(leftover(1 if weightless else weight, target(n), drafter(n)))
                whole = part + 1 - weight
            if choose.coin(part, whole, depth=n, node=n) or weight == 1:
                end, end_weight = n, weight
            elif first_failure:
                break
        probs = target(last)
        if end < last:
            probs = residual(1 if token_residual else end_weight, target(end), drafter(end))
        return list(range(end + 1)), choose.token(probs, depth=end + 1)

    return rule


def _stale_block(
    tokens: Sequence[int], parents: Sequence[int], target: NodeProbs, drafter: NodeProbs, choose: Any
) -> tuple[list[int], int]:
    return reference_block(tokens, parents, target, _before(drafter), choose)


RULES: dict[str, Rule] = {
    "no residual: after a rejection the token is drawn from p itself": _rejection(after=lambda p, q: p),
    "the residual is drawn after everything was accepted, in place of the bonus token": _rejection(
        bonus_from_residual=True
    ),
    "the residual is |p - q| in place of its positive part": _rejection(after=_absolute_residual),
    "every draft token is accepted": _rejection(coin=lambda p, q, x: (1, 1)),
    "a draft token is accepted only if it is the target's likeliest": _rejection(
        coin=lambda p, q, x: (int(p[x] == max(p)), 1)
    ),
    "the ratio is upside down: q/p in place of p/q": _rejection(coin=lambda p, q, x: (q[x], p[x])),
    "wrong q: draft tokens are judged by a uniform q": _rejection(of_q=_uniform),
    "stale q: a draft token is judged by the q of the position before": _rejection(of_q=_before),
    "the target's distributions are shifted by one position": _rejection(of_p=_before),
    "block verification stops at the first coin that fails": _block(first_failure=True),
    "block verification with the residual of the token rule": _block(token_residual=True),
    "block verification leaves the prefix's weight out of the residual mass": _block(weightless=True),
    "stale q in block verification": _stale_block,
}
"""The mistake in words -> the rule with it. All judge chains."""


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
        record: Record = {"toys": 0, "texts": 0, "counterexample": "", "cause": "", "error": "", "distance": 0.0}
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
            record["cause"] = self._cause(configuration, wrong)
            record["counterexample"] = self._counterexample(configuration, wrong)
        return record

    def _cause(self, configuration: Configuration, toys: Sequence[oracle.Toy]) -> str:
        """The known mistake that gives the same distribution on all toys; "" if none does. They judge chains."""
        if configuration.siblings is not None:
            return ""
        rule, drafter = self.verifier.rule(configuration.siblings), configuration.drafter()
        same = list[str]()
        for length in sorted({configuration.length, 3}):
            pairs = [(toy, oracle.composed(toy, rule, drafter, length)) for toy in toys]
            same = [
                name
                for name, mistake in RULES.items()
                if all(self._as(mistake, toy, drafter, length) == written for toy, written in pairs)
            ]
            if len(same) == 1:
                return same[0]
        return " or ".join(same[:2]) if same else ""

    @staticmethod
    def _as(mistake: oracle.Rule, toy: oracle.Toy, drafter: oracle.Drafter, length: int) -> dict[Any, Fraction] | None:
        try:
            return oracle.composed(toy, mistake, drafter, length)
        except (AssertionError, IndexError, ZeroDivisionError):
            return None

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
        cause = f": {bad['cause']}" if bad["cause"] else ""
        if bad["error"]:
            part.sentence = f"Differs: the function fails. {bad['error']}"
            part.findings.append(Finding(title="the function raises an error", where=bad["key"], evidence=bad["error"]))
        else:
            part.sentence = f"Differs{cause}. The total variation is up to {bad['distance']:.3f} with {bad['key']}."
            part.findings.append(
                Finding(
                    title="the distribution is not that of plain decoding",
                    cause=bad["cause"],
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
