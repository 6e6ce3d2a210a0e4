"""From what a user names to a subject: outrider's own are added to those of `outrider_certify`."""

from __future__ import annotations

from typing import Any

from outrider.lab.certify.engine import EngineSubject
from outrider.lab.certify.exact import VerifierFunction
from outrider.models.load import files_of
from outrider_certify.cli import CertifyOptions, parse_json, read_prompts, server_subject
from outrider_certify.subject import Subject
from outrider_certify.subjects.function import EXAMPLE, imported, is_python_name, python_subject


def subject_of(options: CertifyOptions, speculative_config: dict[str, Any] | None, load: dict[str, Any]) -> Subject:
    """The subject of a command line. load: as `outrider.models.load.load` takes it. Raises ValueError for no subject."""
    name = options.subject or ""
    if server := server_subject(options, lambda model, prompts: EngineSubject(model, None, prompts, **load)):
        return server
    if is_python_name(name):
        target = imported(name)
        if VerifierFunction.recognizes(target):
            return VerifierFunction(target, name)
        return python_subject(target, name, f"a verifier is f(tokens, parents, target, drafter, choose); {EXAMPLE}")
    prompts = read_prompts(options)
    if not options.generate:
        return EngineSubject(name, speculative_config, prompts, **load)
    from outrider_certify.subjects.transformers_generate import TransformersSubject

    generate = parse_json(options.generate, "--generate")
    return TransformersSubject(name, generate, prompts, dtype=load["dtype"], find=files_of)
