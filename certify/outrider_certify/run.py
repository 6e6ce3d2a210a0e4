"""From a subject to its certificate: the kinds of test that suit it, and a run of them within a budget."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from outrider_certify._version import __version__
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion, Finding
from outrider_certify.contract import Contract
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.subject import SamplingParams, Subject, TextRequest, Unsupported
from outrider_certify.texts import read_texts
from outrider_certify.trials import CertificateKind, OwnKinds, TrialJournal, judged, run_kinds
from outrider_certify.two_sample import TwoSample

KINDS = ("exact", "seeded", "statistical", "contract")
_TEXTS = 20  # a change of one text in 20 / deviation is to be excluded: one in 200 at 0.1


@dataclass(frozen=True, kw_only=True)
class TestSettings:
    """How much is tested."""

    confidence: float = 0.99  # of every statement
    deviation: float = 0.1  # the total variation that is to be excluded
    max_tokens: int = 48  # of a text
    seed: int = 0  # of all texts
    texts: Path | None = None  # a file of recorded texts, which are audited in place of new ones


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__()
        self.certificate = certificate  # what was tested so far


def certify(
    subject: Subject,
    budget: float = 600.0,
    kinds: Sequence[str] = (),
    settings: TestSettings = TestSettings(),  # noqa: B008
    journal: TrialJournal | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """Test a subject and say what would have been found.

    Args:
        budget: Seconds for all kinds together.
        kinds: Names of `KINDS`; none for all that suit the subject.
        settings: How much is tested.
        journal: Of a file, so that the same call goes on after an interruption.
        progress: Is told each trial.

    Raises ValueError for a kind that does not suit, and Interrupted on ctrl-C.
    """
    tests = kinds_of(subject, kinds, settings)
    certificate = described(subject.name)
    certificate.properties, certificate.weights = subject.properties, subject.weights
    certificate.versions |= subject.versions
    certificate.budget, certificate.confidence = budget, settings.confidence
    journal = journal or TrialJournal(None, {})
    try:
        for part in run_kinds(tests, journal, budget, progress=progress, ready=subject.ready):
            certificate.parts.append(part)
    except KeyboardInterrupt:
        judged_already = {part.kind for part in certificate.parts}
        certificate.parts += [judged(t, r) for t in tests if t.name not in judged_already and (r := journal.of(t.name))]
        raise Interrupted(certificate) from None
    if troubles := subject.troubles():
        certificate.parts.append(_troubled(troubles))
    certificate.complete = not subject.ready()
    return certificate


def _troubled(troubles: dict[str, int]) -> CertificatePart:
    """What went wrong with the answers. Whether speculation is to blame, the other parts say."""
    lines = [f"{what}: {count} times" for what, count in troubles.items()]
    return CertificatePart(
        kind="server",
        conclusion=Conclusion.NOT_TESTED,
        sentence=f"The server did not answer at once: {'; '.join(lines)}.",
        findings=[Finding(title=what, where=f"{count} times", error=False) for what, count in troubles.items()],
    )


def kinds_of(subject: Subject, names: Sequence[str], settings: TestSettings) -> list[CertificateKind]:
    """The kinds of test that suit a subject, or those that were asked for. Raises ValueError for one that does not suit."""
    if wrong := [name for name in names if name not in KINDS]:
        several = [word for part in wrong[0].split(",") for word in ("--kind", part.strip())]
        hint = f"; several are given as {' '.join(several)}" if set(several[1::2]) <= {*KINDS} else ""
        raise ValueError(f"unknown kind {wrong[0]!r}; known: {', '.join(KINDS)}{hint}")
    suited = subject.kinds() if isinstance(subject, OwnKinds) else engine_kinds(subject, settings)
    if missing := [name for name in names if name not in suited]:
        raise ValueError(f"{subject.name} cannot have the kind {missing[0]!r}; it can have {', '.join(suited)}")
    return [kind for name, kind in suited.items() if not names or name in names]


def engine_kinds(subject: Subject, settings: TestSettings) -> dict[str, CertificateKind]:
    """The kinds of test of an engine, by name. Recorded texts have no others than the audit."""
    confidence, length, seed = settings.confidence, settings.max_tokens, settings.seed
    if settings.texts:
        texts = read_texts(settings.texts, subject)
        audit = Statistical(subject, confidence=confidence, deviation=settings.deviation, seed=seed, recorded=texts)
        return {"statistical": audit}
    sampled = (
        Statistical(subject, confidence=confidence, deviation=settings.deviation, length=length, seed=seed)
        if _tells_distributions(subject, seed)
        else TwoSample(subject, confidence=confidence, length=length, seed=seed)
    )
    return {
        "seeded": Seeded(subject, confidence=confidence, length=length, seed=seed, rate=settings.deviation / _TEXTS),
        "statistical": sampled,
        "contract": Contract(subject, length=min(length, 32), seed=seed),  # last: parameters may end a server
    }


def _tells_distributions(subject: Subject, seed: int) -> bool:
    """Whether the subject knows the target's probabilities. Else texts are compared with texts."""
    try:
        params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=seed)
        request = TextRequest(subject.prompts()[0], params)
        [text] = subject.generate([request], subject.variants()[0])
        subject.distributions(request, text)
    except (Unsupported, ConnectionError):
        return False
    return True


def described(name: str) -> Certificate:
    """A certificate without parts, of this machine and time.

    Args:
        name: Of the subject.
    """
    cpu = platform.processor() or platform.machine()
    if (file := Path("/proc/cpuinfo")).exists() and (line := re.search(r"model name\s*: (.*)", file.read_text())):
        cpu = line[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Certificate(
        subject=name,
        machine={"cpu": cpu, "cores": str(cores)},
        versions={
            "python": platform.python_version(),
            "outrider-certify": __version__,
            "numpy": version("numpy"),
        },
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
