"""`outrider run` as a person has it: at a terminal, in a pipe, and beside a server."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from serving import builtin, serving
from terminal import Terminal
from typer.testing import CliRunner

import outrider
from outrider.cli import main as cli
from outrider.cli.backends import LocalBackend, ServerBackend
from outrider.cli.conversation import Conversation
from outrider.engine import Engine
from outrider.models.builtin.shipped import builtin_folder
from outrider.serve.assembly import set_chat_template

CODE = "builtin:code"
HERE = ("run", CODE, "--seed", "5")
NO_MODEL = """
from contextlib import contextmanager
from outrider.cli import main, run
class Silent:
    name = "silent"
@contextmanager
def here(*_):
    yield Silent()
run._here = here
main.main()
"""  # the command with a model that loads nothing and is never asked


def invoke(*words: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(words), input=stdin)


def conversation(backend: Any) -> Conversation:
    options = {"temperature": 0.8, "max_tokens": 24, "seed": 3}
    return Conversation(backend, options, system="Be brief.", stats=False)


def test_a_model_here_answers_as_a_server_does() -> None:
    """The same template, sampling and seeds: each answer of a conversation is the same text."""
    typed, said = ("sort a list", "reverse it", "/set top_k 20", "and now?"), []
    for local in (True, False):
        llm = builtin(1, {"method": "auto"})
        with contextlib.ExitStack() as stack:
            if local:
                backend: Any = LocalBackend(llm, stack.enter_context(contextlib.closing(Engine(llm.runtime))))
            else:
                backend = ServerBackend(stack.enter_context(serving(llm)).url)
            talk = conversation(backend)
            for text in typed:
                talk.handle(text)
        said.append(talk.messages)
    assert said[0] == said[1]
    assert len(said[0]) == 7


def test_the_second_turn_reads_only_what_is_new() -> None:
    llm = outrider.LLM(CODE, speculative_config={"method": "auto"}, max_num_seqs=1, any_method=True)
    set_chat_template(llm, None)
    with contextlib.closing(Engine(llm.runtime)) as engine:
        talk = conversation(backend := LocalBackend(llm, engine))
        talk.handle("sort a list of numbers by their last digit, and explain why that is stable")
        talk.messages.append({"role": "user", "content": "go on"})
        *_, last = backend.answer(talk.messages, {"max_tokens": 4, "seed": 1})
    usage = last["usage"]
    # of the text before, at most the end of a block and the last token, which was never read, are read again
    new = len(llm.encode("\n# go on")) + 16
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= new + 8
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


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
        written = terminal.shown.partition("import sys\n")[2].partition("stopped\n")[0]
        assert all(cell_len(line) <= 80 for line in written.split("\n"))
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


def test_a_server_answers_a_prompt_and_a_pipe_as_a_model_here_does() -> None:
    here = invoke(*HERE, "-n", "8", "sort a list", "--stats", stdin="")
    llm = outrider.LLM(CODE, speculative_config={"method": "auto"}, max_num_seqs=1)
    set_chat_template(llm, None)
    with serving(llm) as live:
        for url in (live.url, live.url.removeprefix("http://"), live.url + "/v1"):
            there = invoke("run", url, "--seed", "5", "-n", "8", "sort", "--served-model", "code", stdin="")
            assert (there.exit_code, "cut at 8 tokens" in there.stderr) == (0, True), there.output
        assert invoke("run", url, *HERE[2:], "-n", "8", "--stats", stdin="sort a list\n").stdout == here.stdout
    assert "exact-tokens" in here.stderr
    assert not re.search("exact-tokens|seed|>>>", here.stdout)


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


@pytest.mark.parametrize("words", [HERE, ("generate", "import os", "--ignore-eos")])
def test_draft_tokens_that_were_accepted_are_green(words: tuple[str, ...], tmp_path: Path) -> None:
    with Terminal(*words, "-t", "0", "-n", "64", NO_COLOR="", XDG_STATE_HOME=str(tmp_path)) as terminal:
        if words == HERE:
            terminal.wait_for(">>> ")
            terminal.type("import os\n")
            text = terminal.wait_for(">>> ", 2).rpartition("import os\n")[2]
            terminal.type("\x04")
        assert terminal.ended() == 0
        text = text if words == HERE else terminal.shown
        assert re.search(r"\x1b\[32m[^\x1b]*[^\x1b\s][^\x1b]*\x1b\[0m", text)


def test_a_pipe_has_a_limit_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person would stop what does not end. Near the end of the context there is no need for a limit."""
    asked = list[dict[str, Any]]()

    def answer(_: Any, messages: Any, options: Any):
        asked.append(dict(options))
        yield {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}

    monkeypatch.setattr(LocalBackend, "answer", answer)
    monkeypatch.setattr("outrider.cli.run.PIPE_TOKENS", 100)
    for message in ("short", "long " * 1950):
        assert invoke("run", CODE, message, stdin="").exit_code == 0
    assert invoke("run", CODE, "short", "-n", "7", stdin="").exit_code == 0
    assert [options.get("max_tokens") for options in asked] == [100, None, 7]
