"""What the commands share on the terminal: nothing slow runs in silence, and a path is short enough to read."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.terminal import command, home, say
from outrider_lab.cli.demo import next_command
from outrider_lab.cli.shared import program


def test_home_is_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert home(Path("/home/ada/models/a.gguf")) == "~/models/a.gguf"
    assert home(Path("/home/adam/a.gguf")) == "/home/adam/a.gguf"


def test_what_takes_seconds_says_what_it_does_and_where_the_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["explain", "--no-open", "-o", "page.html"])
    assert done.exit_code == 0, done.output
    assert ("explaining a built-in run ..." in done.stderr, "explaining" in done.stdout) == (True, False)
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


WORDS = [
    "curl -N http://127.0.0.1:8000/v1/chat/completions", "-H 'Content-Type: application/json'",
    """-d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "A story about a dog."}], "max_tokens": 64}'""",
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 100])
def test_a_command_on_a_terminal_breaks_between_words_and_can_be_copied(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*WORDS) == " ".join(WORDS)  # in a pipe
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = command(*WORDS)
    assert max(map(len, shown.split("\n"))) <= width
    copied, whole = (shlex.split(text.replace("\\\n", "")) for text in (shown, " ".join(WORDS)))
    assert [" ".join(word.split()) for word in copied] == whole


def test_a_line_on_a_terminal_breaks_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "health: http://127.0.0.1:8000/health   metrics: http://127.0.0.1:8000/metrics\nstop: ctrl-C"
    say(text)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say(text)
    whole, *wrapped = capsys.readouterr().out.split("\nstop: ctrl-C\n")
    assert (whole, wrapped[0].split()) == (text.partition("\n")[0], text.split()[:-2])
    assert max(map(len, wrapped[0].split("\n"))) <= 40


def test_what_comes_next_can_be_typed_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell has not heard of the environment that `make demo` has made."""
    own = tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "outrider"):
        (own / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert next_command(None, None, chat=True) == ".venv/bin/outrider run smollm2"
    assert next_command("m.gguf", "d.gguf", chat=True) == ".venv/bin/outrider run m.gguf -d d.gguf"
    assert next_command(None, None, chat=False) == ".venv/bin/outrider generate 'def fibonacci(n):'"
    assert next_command("a b", None, chat=False) == ".venv/bin/outrider generate 'def fibonacci(n):' -m 'a b'"
    monkeypatch.setenv("PATH", str(own))
    assert program() == "outrider"
    (other := tmp_path / "outrider").touch(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{own}")
    assert shutil.which("outrider") == str(other)  # another one
    assert program() == ".venv/bin/outrider"
