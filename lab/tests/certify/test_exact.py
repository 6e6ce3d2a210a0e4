"""Verifier functions by enumeration: a broken rule is found, with a counterexample; a right one passes."""

from __future__ import annotations

import pytest

from outrider.verify import VERIFIERS
from outrider.verify.reference import clipped_ratio, leftover, normalized
from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds
from outrider_lab.certify import exact
from outrider_lab.certify.exact import CHAINS, Exact, VerifierFunction


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


@pytest.fixture(autouse=True)
def _fewer_counterexamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_SMALLEST", 8)
    monkeypatch.setattr(exact, "_TOYS", 9)


def chain_rule(residual=None, accept=None, bonus=None):
    """Rejection on a chain, with some of it replaced."""

    def rule(tokens, parents, target, drafter, choose):
        for n in range(1, len(tokens)):
            p, q, x = target(n - 1), drafter(n - 1), tokens[n]
            if not (accept or (lambda p, q, x, coin: coin(p[x], q[x])))(
                p, q, x, lambda part, whole, n=n: choose.coin(part, whole, depth=n, node=n)
            ):
                rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
                rest = normalized(rest) if sum(rest) else p
                return list(range(n)), choose.token((residual or (lambda p, q, rest: rest))(p, q, rest), depth=n)
        last = len(tokens) - 1
        return list(range(last + 1)), choose.token(target(last), depth=last + 1)

    return rule


def block_rule(*, first_failure=False, wrong_residual=False):
    def rule(tokens, parents, target, drafter, choose):
        best, best_weight, weight, end = 0, 1, 1, len(tokens) - 1
        for i in range(1, end + 1):
            weight = clipped_ratio(weight * target(i - 1)[tokens[i]], drafter(i - 1)[tokens[i]])
            mass = sum(leftover(weight, target(i), drafter(i))) if i < end else 0
            taken = weight == 1 or (
                choose.coin(weight, 1, depth=i, node=i)
                if i == end
                else choose.coin(mass, mass + 1 - weight, depth=i, node=i)
            )
            if taken:
                best, best_weight = i, weight
            elif first_failure:
                break
        if best == end:
            return list(range(best + 1)), choose.token(target(best), depth=best + 1)
        rest = leftover(1 if wrong_residual else best_weight, target(best), drafter(best))
        return list(range(best + 1)), choose.token(rest if sum(rest) else target(best), depth=best + 1)

    return rule


BROKEN_RULES = {
    "no residual": chain_rule(residual=lambda p, q, rest: p),
    "absolute residual": chain_rule(residual=lambda p, q, rest: [abs(a - b) for a, b in zip(p, q, strict=True)]),
    "everything accepted": chain_rule(accept=lambda p, q, x, coin: True),
    "argmax accepted": chain_rule(accept=lambda p, q, x, coin: p[x] == max(p)),
    "first-failure block rule": block_rule(first_failure=True),
    "token residual in the block rule": block_rule(wrong_residual=True),
}


@pytest.mark.parametrize("name", list(BROKEN_RULES))
def test_a_broken_rule_is_found_by_enumeration(name: str) -> None:
    part = certified(Exact(VerifierFunction(BROKEN_RULES[name], name)))
    assert part.conclusion is Conclusion.DIFFERS
    assert "<- too" in part.findings[0].evidence


@pytest.mark.parametrize("rule", [chain_rule(), block_rule(), *(v.reference for v in VERIFIERS.values())])
def test_a_right_rule_is_exact(rule) -> None:
    part = certified(Exact(VerifierFunction(rule, "right", trees=False)), most=4)
    assert part.conclusion is Conclusion.SAME_DISTRIBUTION, part.sentence


def test_a_right_rule_is_exact_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CHAINS", CHAINS[:1])
    part = certified(Exact(VerifierFunction(VERIFIERS["rejection"].reference, "rejection", trees=True)), most=2)
    assert part.conclusion is Conclusion.SAME_DISTRIBUTION, part.sentence
    assert "trees" in part.tested["configurations"]


def test_a_chain_rule_that_claims_trees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CHAINS", CHAINS[:1])
    part = certified(Exact(VerifierFunction(VERIFIERS["block"].reference, "block", trees=True)))
    assert part.conclusion is Conclusion.DIFFERS
    assert "trees" in part.findings[0].where


def test_a_function_that_fails_is_shown() -> None:
    def rule(tokens, parents, target, drafter, choose):
        return [0], target(99)

    part = certified(Exact(VerifierFunction(rule, "fails")))
    assert part.conclusion is Conclusion.DIFFERS
    assert "IndexError" in part.sentence
