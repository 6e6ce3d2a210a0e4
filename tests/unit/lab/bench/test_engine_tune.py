"""`outrider tune --engine`: a real process is started for each candidate, measured, and stopped with all its children."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.tune import EngineOptions, candidates, show_trials, tune_engine, verdict
from outrider.drafters.method import TuneInputs
from outrider.lab.bench.prompts import Prompt
from outrider.lab.bench.run import Sample
from outrider.lab.plan.acceptance_curve import find_curve
from outrider.lab.tune.engine import (
    AGAIN,
    EngineSearch,
    EngineServer,
    EngineTrial,
    ServerFailed,
    command_words,
    free_port,
    members,
    taken,
)
from outrider.lab.tune.race import as_run

FAKE = [sys.executable, str(Path(__file__).parents[3] / "support" / "fake_engine.py")]
PROMPTS = [Prompt(word, "", f"{word} words") for word in ("one", "two", "six")]
SAMPLING = {"temperature": 0.0, "max_tokens": 24, "seed": 0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 2}


def search(tmp_path: Path, *configs: dict[str, Any], bad: str = "", command: str = "", **more: Any) -> EngineSearch:
    words = [*FAKE, *(["--bad", bad] if bad else [])]
    named = [(config["method"], config) for config in configs]
    return EngineSearch(
        "vllm", command or shlex.join(words), PROMPTS, named, SAMPLING, logs=tmp_path, ready=20.0, timeout=10.0, **more
    )


def run(found: EngineSearch) -> list[str]:
    return list(found.run())


@pytest.fixture
def no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is measured with its own length only."""
    monkeypatch.setattr("outrider.lab.tune.engine.LONGEST", 0)


def told(found: EngineSearch, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the search with these speeds, in tokens per second, in place of servers."""

    def measured(trial: EngineTrial, *, always: bool = False) -> Iterator[str]:
        for number, prompt in enumerate(PROMPTS):
            seconds = 24 / speeds[trial.name] * (1 + 0.01 * number)
            sample = Sample(
                prompt=prompt.id, setting=trial.name, repeat=0, turn=number, seconds=seconds, output_tokens=24, text="x"
            )
            trial.samples.append(sample)
        yield ""

    monkeypatch.setattr(found, "_measured", measured)
    run(found)


def test_lengths_are_tried_as_long_as_they_are_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(tmp_path, NGRAM, SUFFIX)
    speeds = {
        "plain": 100,
        "ngram": 120,
        "suffix": 110,
        "ngram k=2": 115,
        "ngram k=8": 150,
        "ngram k=16": 140,
        AGAIN: 101,
    }
    told(found, speeds, monkeypatch)
    assert [t.name for t in found.trials] == list(speeds)
    assert found.best is found.answer
    assert found.answer.name == "ngram k=8"
    assert "Speculation helps in vllm here. The best setting is ngram k=8: 1.50 times" in verdict(found)
    assert found.drift == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("ngram", "again", "said"),
    [
        (90, 100, "Speculation does not help in vllm here: the best setting, ngram, is 0.90 times"),
        (
            120,
            130,
            "Whether speculation helps in vllm is not certain: ngram is 1.20 times",
        ),  # the machine became faster
    ],
)
def test_plain_decoding_can_be_the_best(
    ngram: float, again: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(tmp_path, NGRAM)
    told(found, {"plain": 100, "ngram": ngram, "ngram k=2": 80, "ngram k=8": 80, AGAIN: again}, monkeypatch)
    assert found.answer is found.plain
    assert verdict(found).startswith(said)


def test_a_real_server_is_measured(tmp_path: Path, no_lengths: None) -> None:
    found = search(tmp_path, {**NGRAM, "num_speculative_tokens": 8})
    lines = run(found)
    assert [t.name for t in found.trials] == ["plain", "ngram", AGAIN]
    assert found.best is found.trials[1]
    assert [found.same_texts(t) for t in found.trials] == [(3, 3)] * 3
    assert (found.best.drafted, found.best.accepted) == (
        3 * 5 * 8,
        3 * 5 * 4,
    )  # without the warm-up: five events a text
    assert any("ready after" in line for line in lines)
    assert "serving {'method': 'ngram', 'num_speculative_tokens': 8" in next(tmp_path.glob("1-*.log")).read_text()
    assert not any(taken(int(line.rpartition("--port ")[2].split()[0])) for line in lines if "--port " in line)
    show_trials(found)
    as_run("m", found.prompts, found.trials, SAMPLING, complete=True).save(tmp_path / "tuned.json")
    curve = find_curve(str(tmp_path / "tuned.json"))  # for outrider plan --acceptance
    assert curve.survival == [1.0] * 4 + [0.0] * 4
    assert "setting ngram" in curve.source
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "tuned.json"), "--out", str(tmp_path / "tuned.html")])
    assert shown.exit_code == 0, shown.output


@pytest.mark.usefixtures("no_lengths")
def test_a_candidate_that_fails_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    found = search(tmp_path, SUFFIX, NGRAM, bad="suffix:crash")
    run(found)
    crashed = next(t for t in found.trials if t.name == "suffix")
    assert "ended with status 1" in crashed.dropped
    assert "no memory for this setting" in crashed.dropped  # the end of its log
    assert found.best is not None
    assert found.best.name.startswith("ngram")


@pytest.mark.usefixtures("no_lengths")
def test_requests_that_fail_are_named(tmp_path: Path) -> None:
    found = search(tmp_path, NGRAM, bad="ngram:error")
    run(found)
    failed = next(t for t in found.trials if t.name == "ngram")
    assert "1 of 3 requests failed: HTTP 500: out of blocks" in failed.dropped


@pytest.mark.usefixtures("no_lengths")
def test_a_text_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search(tmp_path, NGRAM, bad="ngram:other")
    run(found)
    assert found.same_texts(found.trials[1]) == (0, 3)
    show_trials(found)
    assert "Greedy texts differ from plain decoding: ngram" in " ".join(capsys.readouterr().out.split())


def test_plain_decoding_that_drafts_is_named(tmp_path: Path) -> None:
    found = search(tmp_path, bad="plain:drafts")
    run(found)
    [note] = found.notes
    assert "drafts tokens in plain decoding too" in note


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    port = free_port()
    words = [*FAKE, "--port", str(port), "--host", "127.0.0.1", "--bad", "plain:deaf"]
    with (
        pytest.raises(ServerFailed, match="did not answer in 1 s"),
        EngineServer(words, port, tmp_path / "log", ready=1.0),
    ):
        pass
    assert not taken(port)


def test_children_are_stopped_too(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    words = [*FAKE, "--port", str(port), "--host", "127.0.0.1", "--bad", "plain:stubborn"]
    server = EngineServer(words, port, log, ready=20.0)
    with server, pytest.MonkeyPatch.context() as patch:
        child = int(log.read_text().split("child ")[1].split()[0])
        session = os.getsid(child)
        assert child in [process.pid for process in members(session)]
        patch.setattr("outrider.lab.tune.engine._STOP", 1.0)
        server.stop()
    assert members(session) == []
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()


def test_an_interrupt_leaves_no_server(tmp_path: Path) -> None:
    """SIGTERM; Ctrl-C takes the same way."""
    words = [sys.executable, "-m", "outrider", "tune", "code", "--engine", "vllm", "--method", "ngram", "-n", "512"]
    words += ["--command", shlex.join(FAKE), "--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "out.json")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tune:
        assert tune.stderr is not None
        line = next(line for line in tune.stderr if "--port" in line)
        port = int(line.rpartition("--port ")[2].split()[0])
        assert any("ready after" in line for line in tune.stderr)
        assert taken(port)
        tune.send_signal(signal.SIGTERM)
        tune.communicate(timeout=60)
        assert tune.returncode == 130
    deadline = time.monotonic() + 5
    while taken(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not taken(port)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = search(tmp_path, NGRAM, command=shlex.join([*FAKE, "--port", str(port)]))
        lines = run(found)
    assert f"port {port} is taken" in found.plain.dropped
    assert found.answer is found.plain
    assert len(lines) == 2  # nothing else is started


def test_a_program_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(engine="vllm", command="no-such-program serve", logs=tmp_path / "logs")
    out = tmp_path / "out.json"
    code = tune_engine(options, PROMPTS, [("ngram", NGRAM)], SAMPLING, model=None, seconds=1.0, out=out)
    assert code == 1
    assert "there is no program no-such-program" in capsys.readouterr().err
    assert not out.exists()


def test_the_answer_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(engine="vllm", command=shlex.join(FAKE), logs=tmp_path / "logs", ready_timeout=20.0)
    out = tmp_path / "out.json"
    code = tune_engine(options, PROMPTS, [("ngram", NGRAM)], SAMPLING, model=None, seconds=0.0001, out=out)
    assert code == 0
    assert json.loads(out.read_text()) in ({"method": "none"}, NGRAM)
    shown = capsys.readouterr()
    assert "There it is: " in shown.out
    assert "the time was over, --seconds allows more" in " ".join(shown.out.split())


def test_a_command_line() -> None:
    assert command_words(["serve", "m"], 7, ["--x", "1"]) == [
        "serve",
        "m",
        "--x",
        "1",
        "--port",
        "7",
        "--host",
        "127.0.0.1",
    ]
    given = ["env", "A=1", "serve", "{options}", "--port", "{port}", "--host", "0.0.0.0", "--last"]
    said = ["env", "A=1", "serve", "--x", "--port", "7", "--host", "0.0.0.0", "--last"]
    assert command_words(given, 7, ["--x"]) == said
    assert command_words(["serve", "--port=9", "--host=::1"], 9, []) == ["serve", "--port=9", "--host=::1"]


@pytest.mark.parametrize(
    ("command", "said"), [("", "is empty"), ("serve 'm", "cannot be split"), ("serve --port many", "is no port")]
)
def test_a_command_that_is_none(command: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        EngineSearch("vllm", command, PROMPTS, [], SAMPLING, logs=tmp_path)


def test_options_that_lack_another() -> None:
    with pytest.raises(ValueError, match="--engine vllm"):
        EngineOptions(command="vllm serve m").check()
    with pytest.raises(ValueError, match="needs the command"):
        EngineOptions(engine="vllm").check()
    with pytest.raises(ValueError, match="add --engine"):
        EngineOptions(concurrency=4).check()
    assert not EngineOptions().check()


def test_the_methods_of_an_engine() -> None:
    assert [name for name, _ in candidates(TuneInputs("", None), None, "vllm")] == ["suffix", "ngram"]
    assert dict(candidates(TuneInputs("", "builtin:code-draft"), None, "llama.cpp")).keys() == {
        "draft_model",
        "suffix",
        "ngram",
    }
    with pytest.raises(ValueError, match="token_recycling: this engine has no such method"):
        candidates(TuneInputs("", None), ["token_recycling"], "vllm")
    with pytest.raises(ValueError, match="did you mean"):
        candidates(TuneInputs("", None), ["ngram"], "vlm")
    with pytest.raises(ValueError, match="needs a model"):
        candidates(TuneInputs("", None), ["draft_model"], "vllm")
