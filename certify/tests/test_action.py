"""The action of GitHub: its file, and what it runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_plugin import ENGINES

from outrider_certify import action
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion

FILE = Path(__file__).parents[1] / "action.yml"


def test_each_input_reaches_the_command() -> None:
    given = yaml.safe_load(FILE.read_text())
    [step] = [s for s in given["runs"]["steps"] if s.get("id") == "certify"]
    assert {f"${{{{ inputs.{name} }}}}" for name in given["inputs"]} == set(step["env"].values())
    read = set(re.findall(r'inputs(?:\.get\(|\[)"([A-Z]+)"', Path(action.__file__).read_text()))
    assert read == set(step["env"])


@pytest.mark.parametrize(
    ("engine", "strict", "code", "verdict"),
    [("wrong", "false", 1, "differs"), ("right", "false", 0, "holds"), ("none", "true", 2, "")],
)
def test_the_verdict_is_the_exit_code_and_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, strict: str, code: int, verdict: str
) -> None:
    (tmp_path / "engines_for_action.py").write_text(ENGINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{FILE.parent}")
    for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        (tmp_path / name).touch()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SUBJECT", f"engines_for_action:{engine}")
    monkeypatch.setenv("OPTIONS", "--kind contract")
    monkeypatch.setenv("BUDGET", "1h")
    monkeypatch.setenv("STRICT", strict)
    assert action.main() == code
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == (f"verdict={verdict}\n" if verdict else "")
    assert ("| contract | **" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()) == bool(verdict)


def test_what_cannot_be_told_fails_only_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUBJECT", "mine:engine")
    for code in range(4):
        monkeypatch.setattr(action.subprocess, "run", lambda *_, code=code, **__: SimpleNamespace(returncode=code))
        for strict in ("true", "false"):
            monkeypatch.setenv("STRICT", strict)
            assert action.main() == (0 if (code, strict) == (3, "false") else code)


def test_a_summary_shows_texts_of_models_as_text() -> None:
    part = CertificatePart(kind="seeded", conclusion=Conclusion.DIFFERS, sentence="a | <b>\nc")
    assert "a &#124; &lt;b> c" in action.summary(Certificate(subject="x", parts=[part]))
