"""Functions as subjects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toy_server import certified

from outrider_certify.certificate import Conclusion
from outrider_certify.seeded import Seeded
from outrider_certify.subjects.function import FunctionSubject, imported, is_python_name, python_subject


def generate(prompt, params, speculate):
    """A function of an author: the right answer is always token 3, and speculation writes 4 at the third place."""
    tokens = [3] * params.max_tokens
    if speculate and len(tokens) > 2:
        tokens[2] = 4
    return tokens


def test_a_function_that_differs_is_found() -> None:

    part = certified(Seeded(FunctionSubject(generate, "generate"), length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.DIFFERS


def test_a_function_that_fails_under_speculation_is_a_finding() -> None:
    def fails(prompt, params, speculate):
        if speculate:
            raise RuntimeError("no memory for the draft")
        return [3] * params.max_tokens

    part = certified(Seeded(FunctionSubject(fails, "fails"), length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.DIFFERS
    assert part.findings[0].title == "the engine fails under speculation"
    assert "no memory for the draft" in part.findings[0].evidence


def test_a_difference_of_an_engine_that_tells_no_probabilities_is_unclear() -> None:
    class Rounds(FunctionSubject):
        exact_numbers = False

    part = certified(Seeded(Rounds(generate, "generate"), length=8, rounds=1), most=1)
    assert part.figures["unclear"] > 0 == part.figures["errors"]
    assert "Whether these are ties is not known" in part.sentence


def test_a_subject_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_certify.py").write_text(
        "from outrider_certify import Subject\n"
        "class Engine(Subject):\n    name = 'mine'\n"
        "def generate(prompt, params, speculate):\n    return [3] * params.max_tokens\n"
        "def other(a, b):\n    return 1\nnumber = 3\n"
    )
    found = {n: python_subject(imported(f"mine_for_certify:{n}"), n) for n in ("generate", "Engine")}
    assert certified(Seeded(found["generate"], length=8, rounds=1), most=2).conclusion is Conclusion.EXACT_TOKENS
    assert found["Engine"].name == "mine"
    for name, why in (("other", "takes"), ("number", "int"), ("nothing", "cannot be imported")):
        with pytest.raises(ValueError, match=why):
            python_subject(imported(f"mine_for_certify:{name}"), name)
    sys.modules.pop("mine_for_certify", None)
    assert is_python_name("a.b:c")
    assert not is_python_name("builtin:code")
    assert not is_python_name("http://127.0.0.1:8000")
