"""From what a user names to a subject, its kinds of test, and an empty certificate."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from typing import Any

from outrider.bench.prompts import read
from outrider.certify.certificate import Certificate
from outrider.certify.contract import Contract
from outrider.certify.exact import Exact, VerifierFunction
from outrider.certify.run import CertificateKind
from outrider.certify.seeded import Seeded
from outrider.certify.statistical import Statistical
from outrider.certify.subjects.base import Prompt, Subject
from outrider.certify.subjects.function import find, is_python_name
from outrider.kernels.machine import machine

_VERSIONS = ("python", "torch", "transformers", "outrider")


def subject_of(name: str, given: dict[str, Any]) -> Subject | VerifierFunction:
    """The subject of a name. given: the options of the command line, by name. Raises ValueError for what cannot be certified."""
    if is_python_name(name):
        return find(name)
    prompts = _prompts(given)
    from outrider.certify.subjects.engine import EngineSubject

    return EngineSubject(name, given["speculative_config"], prompts, **given["load"])


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    found, _ = read(given["prompts"], given["num_prompts"])
    return [p.text for p in found]


def kinds_of(subject: Subject | VerifierFunction, given: dict[str, Any]) -> list[CertificateKind]:
    """The kinds of test that suit a subject, or those that were asked for. Raises ValueError for one that does not suit."""
    wanted, confidence, length = given["kind"], given["confidence"], given["max_tokens"]
    if isinstance(subject, VerifierFunction):
        known: dict[str, CertificateKind] = {"exact": Exact(subject)}
    else:
        known = {
            "seeded": Seeded(subject, confidence=confidence, length=length, seed=given["seed"]),
            "statistical": Statistical(
                subject, confidence=confidence, deviation=given["deviation"], length=length, seed=given["seed"]
            ),
            "contract": Contract(subject, length=min(length, 32), seed=given["seed"]),
        }
    missing = [k for k in wanted or () if k not in known]
    if missing:
        raise ValueError(f"{subject.name} cannot have the kind {missing[0]!r}; it can have {', '.join(known)}")
    return [kind for name, kind in known.items() if not wanted or name in wanted]


def blank(subject: Subject | VerifierFunction, command: str, seconds: float, confidence: float) -> Certificate:
    """A certificate without parts."""
    about = {k: str(v) for k, v in machine().items()}
    own = isinstance(subject, Subject)
    versions = {k: about.pop(k) for k in _VERSIONS} | {"scipy": version("scipy")}
    return Certificate(
        subject=subject.name,
        properties=subject.properties if own else {"function": subject.name, "trees": json.dumps(subject.trees)},
        weights=subject.weights if own else {},
        machine=about,
        versions=versions | (subject.versions if own else {}),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        budget=seconds,
        confidence=confidence,
    )
