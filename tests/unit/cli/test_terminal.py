"""What the commands share on the terminal: nothing slow runs in silence, and a path is short enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.terminal import home

PLAN = ["plan", "--model-params", "8B", "--hardware", "l40s", "--qps", "1", "--output", "8"]


def test_home_is_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert home(Path("/home/ada/models/a.gguf")) == "~/models/a.gguf"
    assert home(Path("/home/adam/a.gguf")) == "/home/adam/a.gguf"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (PLAN, "simulating 1 requests a second on l40s ..."),
        (["explain", "--no-open", "-o", "page.html"], "explaining a built-in run ..."),
    ],
)
def test_what_takes_seconds_says_what_it_does(words, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert said in done.stderr
    assert said not in done.stdout


def test_explain_says_where_its_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["explain", "--no-open", "-o", "page.html"])
    assert done.stdout.splitlines()[-1] == "The page is page.html. Open it in a browser."
