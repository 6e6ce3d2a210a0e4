"""What the commands share on the terminal: nothing slow runs in silence, and a path is short enough to read."""

from __future__ import annotations

import errno
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
        (PLAN, "planning for 1 requests/s on l40s ..."),
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


def test_an_error_of_the_system_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["replay", "run.jsonl"])
    assert (done.exit_code, done.stderr) == (2, "error: run.jsonl: No such file or directory\n")

    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    done = CliRunner().invoke(app, ["explain", "--no-open", "-o", "page.html"])
    assert done.stderr.splitlines()[-1] == "error: page.html: No space left on device"
