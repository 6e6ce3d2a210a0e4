"""Functions as subjects."""

from __future__ import annotations

from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.run import CertificateKind, TrialJournal, run_kinds
from outrider_certify.seeded import Seeded
from outrider_certify.subjects.function import FunctionSubject


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


def generate(prompt, params, speculate):
    """A function of an author: the right answer is always token 3, and speculation writes 4 at the third place."""
    tokens = [3] * params.max_tokens
    if speculate and len(tokens) > 2:
        tokens[2] = 4
    return tokens


def test_a_function_that_differs_is_found() -> None:

    part = certified(Seeded(FunctionSubject(generate, "generate"), length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.DIFFERS
