"""`outrider doctor` and `outrider methods`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli import doctor
from outrider.cli.main import app
from outrider.drafters.registry import METHODS


def run(*words: str):
    return CliRunner().invoke(app, [*words], env={"COLUMNS": "80"})


def test_doctor_says_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run("doctor")
    named = [line.split()[1] for line in done.stdout.splitlines() if line[0] != " "]
    assert named[:6] == ["versions", "processor", "kernels", "memory", "torch", "cache"]
    assert done.exit_code == int("✗" in done.stdout)


def test_doctor_gives_a_line_to_type_for_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outrider.kernels import cpu

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(cpu, "why", lambda: "no compiler was there")
    done = run("doctor")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("✗ kernels"))
    assert "no compiler was there" in lines[at]
    assert lines[at + 1].strip().startswith("pip install")


def test_doctor_sees_a_used_port_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        assert "--port 0" in doctor._port().fix
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "xgrammar")
    fixes = {check.name: (check.found, check.fix, check.wrong) for check in doctor._packages()}
    assert fixes["extra grammar"] == ("missing: xgrammar", "pip install '.[grammar]'   # in the checkout", False)
    assert fixes["extra serve"] == ("installed", "", False)


def test_methods_lists_the_registry() -> None:
    shown = run("methods").stdout
    words = shown.split()
    assert set(METHODS) <= set(words)
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert METHODS["eagle"].needs == "-d FOLDER, a trained head"
    assert METHODS["draft_model"].needs == "-d MODEL"
    assert METHODS["ngram"].needs == "nothing"
