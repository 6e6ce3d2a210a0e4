"""`outrider serve` and `outrider run` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from typer.testing import CliRunner

from outrider.cli import main as cli
from outrider.cli.serve import ready_lines
from outrider.serve import pool
from outrider.serve.options import ServeOptions


def test_serve_starts_streams_to_the_curl_it_prints_and_hands_back_partial_text_when_told_to_stop(
    tmp_path: Path,
) -> None:
    """Without a traceback, whatever libraries have to say when the interpreter ends. A pipe is told at once what is loaded."""
    options = ["serve", "builtin:code", "--port", "0", "--shutdown-timeout", "0", "--log-file", str(tmp_path / "log")]
    options += ["--max-num-seqs", "2", "--metrics-prefix", "vllm", "--api-key", "k3y"]
    environment = {**os.environ, "OUTRIDER_API_KEY": "not this one"}

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, where these tests themselves run in the background

    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=listen,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            ready, curl = process.stdout.readline(), process.stdout.readline()
            assert re.match(
                r"builtin:code is ready after [\d.]+ s: auto, exact-tokens, 2 sequences of 2048 tokens", ready
            )
            assert "chat messages reach it as comments before code; clients call it code" in ready
            found = re.search(r"(http://127\.0\.0\.1:\d+)(/v1/completions) .* -d '(.*)'", curl)
            assert found is not None
            assert "Bearer '$OUTRIDER_API_KEY" in curl
            body = {**json.loads(found[3]), "ignore_eos": True, "max_tokens": 2000}
            assert body["model"] == "code"  # a colon in a name breaks clients
            with httpx.Client(base_url=found[1], headers={"authorization": "Bearer k3y"}) as client:
                assert "vllm:spec_decode_num_drafts_total" in client.get("/metrics").text
                chat = {"model": "builtin:code", "max_tokens": 4, "ignore_eos": True}
                chat["messages"] = [{"role": "user", "content": "sort a list"}]
                answer = client.post("/v1/chat/completions", json=chat).json()
                assert (answer["model"], answer["usage"]["completion_tokens"]) == ("code", 4)
                with client.stream("POST", found[2], json=body) as response:
                    lines = (line for line in response.iter_lines() if line)
                    first = next(lines)
                    process.send_signal(signal.SIGINT)
                    events = [line.removeprefix("data: ") for line in (first, *lines)]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
            assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-2])
        except BaseException:
            process.kill()
            raise
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said.splitlines()) == (130, ["loading builtin:code ...", "interrupted"])
    log = (tmp_path / "log").read_text()
    assert "POST /v1/completions 200" in log
    assert "quicksort" not in log
    assert [line.partition(" INFO ")[2] for line in log.splitlines() if "stop" in line] == [
        *("stopping: 0 s for 1 running requests", "stopped"),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["serve", "missing.gguf"], "error: there is no file missing.gguf"),
        (["serve", "builtin:cod"], "did you mean 'builtin:code'"),
        (["serve", "builtin:code", "-d", "no/draft.gguf"], "there is no file no/draft.gguf"),
        (["serve", "builtin:code", "--speculative-config", "{"], "not JSON"),
        (["serve", "builtin:code", "--kv-cache-memory-bytes", "1000000"], "would fit"),
        (["serve", "builtin:code", "--tool-call-parser", "pythonic"], "is one of auto, none, hermes"),
        (["serve", "builtin:code", "--api-key-file", "/dev/null"], "has no key"),
        (["serve", "builtin:code", "--api-key", " "], "an API key is empty"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str) -> None:
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "loading" not in result.output or words == "would fit"  # the weights say how much


def test_a_port_in_use_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "assemble", lambda *_: pytest.fail("it loads the model first"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli.app, ["serve", "builtin:code", "--port", port])
    assert result.exit_code == 2
    why = f"error: cannot listen at 127.0.0.1:{port}: Address already in use; --port 0 takes a free port"
    assert " ".join(result.output.split()) == why


@pytest.mark.parametrize("chat", [True, False])
def test_the_start_prints_a_request_that_fits_the_model_and_the_pages(
    chat: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ready_lines(ServeOptions(model="m", host="::1", api_key=["k"] if chat else []), 8000, chat, "ctrl-C")
    curl, pages, watched = capsys.readouterr().out.splitlines()
    at = "http://[::1]:8000"
    assert curl.startswith(f"curl -N {at}/v1/{'chat/' if chat else ''}completions ")
    assert ("Bearer" in curl) == chat
    body = json.loads(curl[curl.index("'{") + 1 : -1])
    assert {"model", "max_tokens", "stream", "messages" if chat else "prompt"} == set(body)
    for path, line in (
        ("/ ", pages),
        ("/dashboard", pages),
        ("/health", watched),
        ("/metrics", watched),
    ):
        assert at + path in line


def test_a_narrow_terminal_breaks_no_word_of_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.cli.terminal.shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ready_lines(ServeOptions(model="m"), 8000, True, "ctrl-C")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    text = "\n".join(lines[: lines.index(next(line for line in lines if line.startswith("in a browser")))])
    curl = shlex.split(text.replace("\\\n", ""))  # as a shell joins them
    assert curl[:2] == ["curl", "-N"]
    assert json.loads(curl[-1])["stream"]
