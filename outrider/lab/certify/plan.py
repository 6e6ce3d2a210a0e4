"""From what a user names to a subject, its kinds of test, and an empty certificate."""

from __future__ import annotations

import datetime
import json
import os
from importlib.metadata import version
from typing import Any

from outrider.core.params import SamplingParams
from outrider.kernels.machine import machine
from outrider.lab.bench.prompts import read
from outrider.lab.certify.engine import EngineSubject
from outrider.lab.certify.exact import Exact, VerifierFunction
from outrider_certify.certificate import Certificate
from outrider_certify.contract import Contract
from outrider_certify.quality import Quality, read_problems
from outrider_certify.run import CertificateKind
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import RecordedTexts, Statistical
from outrider_certify.subjects.base import Job, Prompt, Subject, Unsupported
from outrider_certify.subjects.function import find, is_python_name
from outrider_certify.subjects.huggingface import TransformersSubject
from outrider_certify.texts import read_texts
from outrider_certify.two_sample import TwoSample

_VERSIONS = ("python", "torch", "transformers", "outrider")


def subject_of(name: str, given: dict[str, Any]) -> Subject | VerifierFunction:
    """The subject of a name. given: the options of the command line, by name. Raises ValueError for what cannot be certified."""
    server = name.startswith(("http://", "https://"))
    for option in ("plain_url", "off_body", "served_model", "reference"):
        if given[option] and not server:
            raise ValueError(
                f"--{option.replace('_', '-')} is for a server, and {name} is none: give its address, http://..."
            )
    if given["endpoint"] != "completions" and not server:
        raise ValueError(f"--endpoint is for a server, and {name} is none: give its address, http://...")
    if is_python_name(name):
        return find(name)
    prompts = _prompts(given)
    if server:
        return _server(name, given, prompts)
    if given["generate"]:
        return TransformersSubject(name, _json(given["generate"], "--generate"), prompts, dtype=given["load"]["dtype"])
    return EngineSubject(name, given["speculative_config"], prompts, **given["load"])


def _server(url: str, given: dict[str, Any], prompts: list[Prompt]) -> Subject:
    from outrider_certify.subjects.server import ServerSubject

    reference = EngineSubject(given["reference"], None, prompts, **given["load"]) if given["reference"] else None
    return ServerSubject(
        url,
        prompts,
        plain_url=given["plain_url"],
        off_body=_json(given["off_body"], "--off-body") if given["off_body"] else None,
        reference=reference,
        model=given["served_model"],
        api_key=os.environ.get("OUTRIDER_API_KEY"),
        timeout=given["timeout"],
        endpoint=given["endpoint"],
    )


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}), got {text}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} is a JSON object, got {text}")
    return found


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    found, _ = read(given["prompts"], given["num_prompts"])
    return [p.text for p in found]


def kinds_of(subject: Subject | VerifierFunction, given: dict[str, Any]) -> list[CertificateKind]:
    """The kinds of test that suit a subject, or those that were asked for. Raises ValueError for one that does not suit."""
    wanted, confidence, length, seed = given["kind"], given["confidence"], given["max_tokens"], given["seed"]
    if isinstance(subject, VerifierFunction):
        known: dict[str, CertificateKind] = {"exact": Exact(subject)}
    elif given["texts"]:
        if not isinstance(subject, EngineSubject):
            raise ValueError(
                "--texts needs the model that the texts are claimed to come from: outrider certify MODEL --texts ..."
            )
        texts = read_texts(given["texts"], subject.llm)
        known = {"statistical": RecordedTexts(subject, texts, confidence=confidence, deviation=given["deviation"])}
    else:
        known = {
            "seeded": Seeded(subject, confidence=confidence, length=length, seed=seed),
            "statistical": _statistical(subject, given),
            "contract": Contract(subject, length=min(length, 32), seed=seed),  # last: parameters may end a server
        }
        if given["problems"]:
            known["quality"] = Quality(subject, read_problems(given["problems"]))
    missing = [k for k in wanted or () if k not in known]
    if missing:
        hint = "; name the problems: --problems FILE.jsonl" if missing == ["quality"] else ""
        raise ValueError(f"{subject.name} cannot have the kind {missing[0]!r}; it can have {', '.join(known)}{hint}")
    return [kind for name, kind in known.items() if not wanted or name in wanted]


def _statistical(subject: Subject, given: dict[str, Any]) -> CertificateKind:
    """With the target's probabilities if the subject knows them, else a comparison of texts."""
    confidence, length, seed = given["confidence"], given["max_tokens"], given["seed"]
    try:
        job = Job(subject.prompts()[0], SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=seed))
        [text] = subject.write([job], subject.ways()[0])
        subject.rows(job, text)
    except (Unsupported, ConnectionError):
        return TwoSample(subject, confidence=confidence, length=length, seed=seed)
    return Statistical(subject, confidence=confidence, deviation=given["deviation"], length=length, seed=seed)


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
