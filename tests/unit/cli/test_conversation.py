"""A conversation over a backend that only notes what it is asked: the commands, the seeds, ctrl-C and errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.conversation import HELP, Conversation, repeated
from outrider.cli.keyboard import message

END = {
    "choices": [{"finish_reason": "stop"}],
    "usage": {"completion_tokens": 2, "prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}},
    "metrics": {"tokens_per_second": 50.0},
    "guarantee": "exact-tokens",
}


class Noted:
    """A backend that answers `words`. asked: the messages and options of each call. ends: how; an exception is raised."""

    name = "noted"

    def __init__(self, *words: str, ends: Any = END) -> None:
        self.words, self.ends = words, ends
        self.asked = list[tuple[list[dict[str, str]], dict[str, Any]]]()
        self.closed = 0

    def answer(self, messages: Any, options: Any):
        self.asked.append(([dict(m) for m in messages], dict(options)))
        try:
            for word in self.words:
                yield {"choices": [{"delta": {"content": word}}]}
            if isinstance(self.ends, BaseException):
                raise self.ends
            yield self.ends
        finally:
            self.closed += 1


def talk(backend: Noted, system: str | None = None, stats: bool = False, **options: Any) -> Conversation:
    return Conversation(backend, {"temperature": 0.7, "seed": 5, **options}, system=system, stats=stats)


def test_the_model_sees_the_conversation_and_each_answer_has_its_own_seed(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Noted("It is", " blue.")
    chat = talk(backend, system="Be brief.")
    assert chat.handle("Why?")
    assert chat.handle("And now?")
    assert [len(messages) for messages, _ in backend.asked] == [2, 4]
    assert [m["role"] for m in backend.asked[1][0]] == ["system", "user", "assistant", "user"]
    assert backend.asked[1][0][2]["content"] == "It is blue."
    assert [options["seed"] for _, options in backend.asked] == [5, 6]
    assert capsys.readouterr() == ("It is blue.\nIt is blue.\n", "")  # a pipe gets the texts alone
    chat.handle("/set seed 5")
    chat.handle("/clear")
    chat.handle("Why?")
    assert backend.asked[2] == backend.asked[0]  # all over again


@pytest.mark.parametrize("typed", ["/nonsense", "/hepl", "/etc/passwd please", "/"])
def test_unknown_commands_never_reach_the_model(typed: str) -> None:
    backend = Noted("x")
    with pytest.raises(ValueError, match=r"there is no /.*; /help lists the commands"):
        talk(backend).handle(typed)
    assert not backend.asked
    chat = talk(backend)
    chat.handle(typed + "\nand more")  # several lines are a message
    assert len(backend.asked) == 1


def test_every_command_is_in_the_help_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Noted())
    assert all(name in HELP for name in chat._commands)
    assert all(len(line) <= 80 for line in HELP.splitlines())
    chat.handle("/help")
    assert capsys.readouterr().out == HELP + "\n"
    assert not chat.handle("/bye")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/set temprature 1", "did you mean 'temperature'"),
        ("/set temperature hot", "temperature must be a number, got 'hot'"),
        ("/set temperature -1", "temperature must be from 0"),
        ("/set top_k 0.5", "top_k must be"),
        ("/stats maybe", "on or off"),
        ("/save", "needs the name of a file"),
        ("/load /no/such/file", "No such file"),
    ],
)
def test_commands_that_cannot_be_obeyed_change_nothing(typed: str, words: str) -> None:
    chat = talk(Noted())
    before = dict(chat.options)
    with pytest.raises((ValueError, OSError), match=words):
        chat.handle(typed)
    assert chat.options == before


def test_parameters_are_set_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Noted("x")
    chat = talk(backend)
    typed = ("/set parameter top_k 7", "/set stop ###", "/set temperature 0", '/set system "Be a poet."', "Hi", "/show")
    for line in (*typed, "/set verbose", "/set num_predict 9", "/set num_predict"):
        chat.handle(line)
    assert chat.stats
    messages, options = backend.asked[0]
    assert options == {"temperature": 0, "seed": 5, "top_k": 7, "stop": "###"}
    assert messages[0] == {"role": "system", "content": "Be a poet."}
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("noted", "Be a poet.", "top_k", "###"))
    chat.handle("/set top_k")
    chat.handle("/set temperature")
    chat.handle("/system")
    chat.handle("Hi")
    messages, options = backend.asked[1]
    assert options == {"temperature": 0.7, "seed": 6, "stop": "###"}
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


def test_a_conversation_is_saved_and_gone_on_with(tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "notes.txt"
    other.write_text("mine")
    chat = talk(Noted("blau"), system="Deutsch.")
    chat.handle("Warum?")
    chat.handle(f"/save {file}")
    chat.handle(f"/save {file}")
    with pytest.raises(ValueError, match="no saved conversation"):
        chat.handle(f"/save {other}")
    assert other.read_text() == "mine"
    assert json.loads(file.read_text())["messages"] == chat.messages
    again = talk(backend := Noted("x"))
    again.handle(f"/load {file}")
    again.handle("Und?")
    assert [m["content"] for m in backend.asked[0][0]] == ["Deutsch.", "Warum?", "blau", "Und?"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Noted("Once upon", ends=KeyboardInterrupt())
    chat = talk(backend)
    assert chat.say("A story") is True
    assert [m["content"] for m in chat.messages] == ["A story", "Once upon"]
    assert capsys.readouterr().err == "stopped\n"
    assert backend.closed == 1
    backend.words = ()
    chat.handle("More")  # stopped before the first word: as if it had not been asked
    assert len(chat.messages) == 2


def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    talk(Noted("a blue pig", "ment is here")).handle("Hi")
    assert screen.getvalue() == "a blue\npigment is\nhere\n"


def test_an_answer_that_fails_leaves_the_conversation_as_it_was() -> None:
    chat = talk(Noted("half", ends=ValueError("the prompt has 9000 tokens")))
    with pytest.raises(ValueError, match="9000"):
        chat.handle("Hi")
    assert chat.messages == []


@pytest.mark.parametrize(
    ("end", "options", "note"),
    [
        ({"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 8, "prompt_tokens": 1}}, {"max_tokens": 8},
         "cut at 8 tokens; -n 16 allows more, and in a conversation /set max_tokens 16"),
        ({"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 8, "prompt_tokens": 1}}, {},
         "the conversation fills the model's context; /clear starts anew"),
        ({"choices": [{"finish_reason": "length", "stop_reason": "it is late"}]}, {}, "the answer ended early: it is late"),
    ],
)  # fmt: skip
def test_an_answer_that_ends_early_says_why(
    end: dict[str, Any], options: dict[str, Any], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(Noted("x", ends=end), **options).handle("Hi")
    assert capsys.readouterr().err == note + "\n"


def test_figures_are_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Noted("x"))
    chat.handle("Hi")
    assert capsys.readouterr().err == ""
    line = "2 tokens, 50.0 tokens/s, prompt of 40, 8 of them new, seed {}, exact-tokens\n"
    chat.handle("/stats")
    assert capsys.readouterr().err == line.format(5)
    chat.handle("/stats on")
    chat.handle("Hi")
    assert capsys.readouterr().err == "figures are on\n" + line.format(6)


def lines(*typed: str) -> Callable[[str], str | None]:
    left = list(typed)
    return lambda prompt: left.pop(0) if left else None


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["hello"], "hello"),
        (['"""hello"""'], "hello"),
        (['"""', "one", "", "  two", '"""'], "one\n\n  two"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""/one\n\ntwo"""'], "/one\n\ntwo"),  # pasted
        (["one\ntwo"], "one\ntwo"),
        (['"""one'], None),
        ([], None),
    ],
)
def test_messages_of_several_lines(typed: list[str], expected: str | None) -> None:
    assert message(lines(*typed)) == expected


@pytest.mark.parametrize("size", [1, 7, 25, 400])
@pytest.mark.parametrize("before", ["", "Once upon a time. "])
def test_a_text_that_repeats_itself_is_found_after_thirty_pieces(size: int, before: str) -> None:
    piece = "The token was a token of the kind. "[:size] if size < 40 else "".join(f"{n} " for n in range(200))[:size]
    count = max(30, -(-300 // size))
    assert not repeated(before + piece * (count - 1))
    assert len(repeated(before + piece * count)) == size
    assert not repeated(before + piece * count + "!")


@pytest.mark.parametrize("text", ["", "-" * 80, "|" + "---|" * 20, "a\n" * 29, "".join(f"{n}, " for n in range(400))])
def test_rules_tables_and_lists_are_no_loops(text: str) -> None:
    assert not repeated(text)


def test_an_answer_that_repeats_itself_ends_and_a_limit_of_the_user_lets_it_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = ["Well. ", *["The token was a token of "] * 90]
    backend = Noted(*loop)
    chat = talk(backend)
    assert not chat.say("Tell me")
    shown = capsys.readouterr()
    assert shown.out == "Well. " + "The token was a token of " * 30 + "\n"
    assert "ended: it repeats itself, 25 characters 30 times" in shown.err
    assert backend.closed == 1
    assert chat.messages[-1]["content"] == shown.out.removesuffix("\n")
    chat.handle("/set max_tokens 4000")
    chat.say("Tell me")
    assert capsys.readouterr().out == "".join(loop) + "\n"


def test_a_limit_for_a_pipe_is_not_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"choices": [{"finish_reason": "length"}], "usage": {**END["usage"], "completion_tokens": 64}}
    backend = Noted(*["again "] * 90, ends=END | cut)
    chat = talk(backend)
    chat.limit = 64
    chat.say("Tell me")
    assert "it repeats itself" in capsys.readouterr().err
    backend.words = ("one ", "two ")
    chat.say("Tell me")
    assert "cut at 64 tokens; -n 128 allows more" in capsys.readouterr().err
    chat.handle("/set max_tokens 9")
    chat.say("Tell me")
    assert [options.get("max_tokens") for _, options in backend.asked] == [64, 64, 9]
