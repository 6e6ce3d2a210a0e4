"""The table of commands: those of the engine, and those that packages bring by the entry point group `outrider.commands`."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from light import HAS_RAY
from typer.testing import CliRunner

from outrider.cli import main as cli

ENTRIES = {
    name: entry
    for folder in ("lab", "ray")
    for name, entry in tomllib.loads((Path(__file__).parents[3] / folder / "pyproject.toml").read_text())["project"][
        "entry-points"
    ][cli.GROUP].items()
}


def bring(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Let installed packages bring these commands, and no others."""
    given = [EntryPoint(name, value, cli.GROUP) for name, value in entries.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: given)


def shown(*words: str) -> Any:
    return CliRunner().invoke(cli.app, [*words], env={"COLUMNS": "200"})


@pytest.mark.skipif(not HAS_RAY, reason="needs outrider-ray")
def test_each_command_of_another_package_has_an_extra_that_brings_it() -> None:
    assert {*ENTRIES} == {*cli.EXTRAS}
    assert not {*ENTRIES} & {*cli.ENGINE}
    assert {*cli.CommandTable()} == {*cli.ENGINE, *ENTRIES}, "the metadata is old: make install"


@pytest.mark.parametrize("name", ENTRIES)
def test_without_its_package_a_command_says_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(monkeypatch)
    line = {"ray": "pip install ./ray", "lab": "pip install ./lab"}[cli.EXTRAS[name]]
    for words in ([], ["--help"], ["a.jsonl", "--method", "suffix", "-n", "3"]):
        done = shown(name, *words)
        assert done.exit_code == 2
        assert f"error: outrider {name} needs outrider-{cli.EXTRAS[name]}, which is not installed" in done.stderr
        assert line in done.stderr


def test_a_package_that_a_command_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, certify=ENTRIES["certify"])
    monkeypatch.delitem(sys.modules, "outrider_lab.cli.certify", raising=False)
    monkeypatch.setitem(sys.modules, "outrider_certify.cli", None)
    done = shown("certify", "builtin:code")
    assert (done.exit_code, "outrider_certify.cli, which is not installed: pip install ./certify" in done.stderr) == (
        2,
        True,
    )
    top = shown("--help").stdout
    assert all(f"│ {name} " not in top for name in {*ENTRIES} - {"certify"})


def test_a_package_brings_a_command_and_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = typer.Typer(add_completion=False)
    mine.command("greet")(lambda: print("hello"))
    monkeypatch.setattr(sys.modules[__name__], "greet", mine, raising=False)
    bring(monkeypatch, greet=f"{__name__}:greet", run=f"{__name__}:greet")
    assert shown("greet").stdout == "hello\n"
    assert "hello" not in shown("run", "--help").stdout


def test_a_fault_of_the_package_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, bench="outrider.cli.no_such_file:bench")
    assert isinstance(shown("bench").exception, ModuleNotFoundError)
