"""`outrider run` as a person has it: at a terminal and in a pipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import builtin, serving
from terminal import Terminal
from typer.testing import CliRunner

from outrider.cli import main as cli
from outrider.cli.conversation import Conversation
from outrider.cli.options import SpeculationOptions
from outrider.cli.run import chat_model
from outrider.models.builtin.shipped import builtin_folder
from outrider.serve.options import FolderOptions, LoadOptions

CODE = "builtin:code"
HERE = ("run", CODE, "--seed", "5")


def invoke(*words: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(words), input=stdin)


NO_MODEL = """
from types import SimpleNamespace
from outrider.cli import main, run
run.chat_model = lambda *_: SimpleNamespace(loaded=SimpleNamespace(name="silent"), stream=None)
main.main()
"""  # the command with a model that loads nothing and is never asked


def test_a_conversation_has_the_answers_of_a_server_and_reads_only_what_is_new() -> None:
    """The same template, sampling and seeds: each answer is the text that a server gives. What was read stays read."""
    messages, served = list[dict[str, str]](), builtin(1, {"method": "auto"})
    with serving(served) as live:
        for n, text in enumerate(("sort a list of numbers by their last digit", "reverse it", "and now?")):
            messages.append({"role": "user", "content": text})
            body = {"model": "code", "messages": messages, "temperature": 0.8, "max_tokens": 24, "seed": 3 + n}
            answer = httpx.post(f"{live.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
            messages.append({"role": "assistant", "content": answer["content"]})
    llm = chat_model(CODE, LoadOptions(), FolderOptions(), SpeculationOptions())
    llm.tokenizer.chat_template = served.tokenizer.chat_template  # pyright: ignore[reportOptionalMemberAccess]
    options = {"temperature": 0.8, "max_tokens": 24, "seed": 3}
    talk = Conversation(llm.loaded.name, llm.stream, options, system=None, stats=False)
    for message in messages[::2]:
        talk.handle(message["content"])
    assert talk.messages == messages
    assert llm.decoder.prefixes is not None
    before = llm.decoder.prefixes.hits
    talk.handle("go on")
    assert (
        llm.decoder.prefixes.hits - before > len(llm.encode(messages)) // 2
    )  # odd texts are not spelled again as they were


def test_a_person_at_a_terminal(tmp_path: Path) -> None:
    """Several lines pasted as one message, an answer stopped and gone on from, a hint for ctrl-C, an end for ctrl-D."""
    with Terminal(*HERE, "-t", "0", "-n", "1900", XDG_STATE_HOME=str(tmp_path)) as terminal:
        assert f"{CODE}, seed 5. /help lists the commands, ctrl-D ends.\n" in terminal.wait_for(">>> ")
        assert terminal.marks_pastes
        terminal.type("\x1b[200~import os\nimport sys\x1b[201~\n")
        terminal.wait_until(
            lambda shown: len(shown.partition("import sys\n")[2]) > 300
        )  # without a limit it would end, because it repeats itself
        terminal.type("/sh")  # too early: it is the beginning of the next message
        terminal.type("\x03")
        terminal.wait_for("stopped\n\n>>> /sh")
        assert "^C" not in terminal.shown
        terminal.type("ow\n")
        terminal.wait_for(">>> ", 3)
        terminal.interrupt("ctrl-D or /bye ends\n>>> ")
        terminal.type("/show\n")
        assert re.search(r"messages +2\n", terminal.wait_for("seed  ", 2))
        terminal.wait_for(">>> ", 5)
        terminal.type("/nonsense\n")
        terminal.wait_for("error: there is no /nonsense; /help lists the commands")
        terminal.wait_until(lambda shown: shown.endswith(">>> "))  # before that, the terminal takes ctrl-D for itself
        terminal.type("\x04")
        assert terminal.ended() == 0
        assert "Traceback" not in terminal.shown
    history = tmp_path / "outrider" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text() == "import os\nimport sys\n/show\n/show\n/nonsense\n"
    with Terminal("run", CODE, code=NO_MODEL, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("\x1b[A\x1b[A\n")  # arrow up, twice
        terminal.wait_for("seed  ")
        terminal.type("/bye\n")
        assert terminal.ended() == 0
    kept = history.read_text()
    with Terminal("run", CODE, "--no-history", code=NO_MODEL, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("/bye\n")
        assert terminal.ended() == 0
    assert history.read_text() == kept


def test_run_answers_a_prompt_and_a_pipe() -> None:
    words = ("run", CODE, "--seed", "5", "-n", "8")
    one = invoke(*words, "sort", "a", "list", stdin="")
    assert one.exit_code == 0
    assert one.stdout
    assert one.stderr.endswith("cut at 8 tokens; -n 16 allows more, and in a conversation /set max_tokens 16\n")
    assert invoke(*words, "sort a list", stdin="").stdout == one.stdout
    assert invoke(*words, stdin="sort a list\n").stdout == one.stdout
    both = invoke(
        *words,
        "sort",
        stdin="a list\n",
    )
    assert both.exit_code == 0
    assert invoke(*words, stdin="sort\n\na list").stdout == both.stdout
    nothing = invoke("run", CODE, stdin="")
    assert nothing.exit_code == 2
    assert "there is no message" in nothing.stderr


@pytest.mark.parametrize("words", [("run",), ("generate", "Hi", "--chat", "-m")])
def test_a_base_model_is_refused_before_it_is_loaded(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any, **more: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("outrider.engine.llm.load", load)
    folder = str(builtin_folder("builtin:code-draft"))
    done = invoke(*words, folder, stdin="Hi\n")
    assert done.exit_code == 2
    shown = " ".join(done.stderr.split())
    assert "is a base model: it has no chat template" in shown
    assert f'outrider generate "Once upon a time" -m {folder}' in shown


def test_draft_tokens_that_were_accepted_are_green(tmp_path: Path) -> None:
    with Terminal(*HERE, "-t", "0", "-n", "64", NO_COLOR="", XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("import os\n")
        text = terminal.wait_for(">>> ", 2).rpartition("import os\n")[2]
        terminal.type("\x04")
        assert terminal.ended() == 0
        assert re.search(r"\x1b\[32m[^\x1b]*[^\x1b\s][^\x1b]*\x1b\[0m", text)
