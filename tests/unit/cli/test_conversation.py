"""A conversation with a model that only notes what it is asked: the commands, the seeds, ctrl-C and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.cli.conversation import HELP, Conversation, repeated
from outrider.cli.run import message
from outrider.core.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from outrider.core.types import Guarantee


class Noted:
    """A model that answers `words`, each of them two tokens.

    Attributes:
        asked: The messages and the parameters of each call.
        ends: How it ends; an exception is raised.
    """

    def __init__(self, *words: str, ends: Any = "stop") -> None:
        self.words, self.ends, self.closed = words, ends, 0
        self.asked = list[tuple[list[dict[str, str]], SamplingParams]]()

    def stream(self, messages: Any, params: SamplingParams) -> Iterator[Delta]:
        self.asked.append(([dict(m) for m in messages], params))
        try:
            for word in self.words:
                yield Delta(word, [1, 2], [(word, False)], drafted=4, accepted=1)
            if isinstance(self.ends, BaseException):
                raise self.ends
            one = CompletionOutput(0, "", [], self.ends, None, params.seed or 0, Guarantee.EXACT_TOKENS)
            yield Delta("", [], output=RequestOutput("", "", [], [one], RequestMetrics(None, 1.0, None)), ended=True)
        finally:
            self.closed += 1


def talk(model: Noted, system: str | None = None, stats: bool = False, **options: Any) -> Conversation:
    return Conversation("noted", model.stream, {"temperature": 0.7, "seed": 5, **options}, system=system, stats=stats)


def test_the_model_sees_the_conversation_and_each_answer_has_its_own_seed(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Noted("It is", " blue.")
    chat = talk(backend, system="Be brief.")
    assert chat.handle("Why?")
    assert chat.handle("And now?")
    assert [len(messages) for messages, _ in backend.asked] == [2, 4]
    assert [m["role"] for m in backend.asked[1][0]] == ["system", "user", "assistant", "user"]
    assert backend.asked[1][0][2]["content"] == "It is blue."
    assert [params.seed for _, params in backend.asked] == [5, 6]
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
    assert all(name in HELP for name in chat.commands)
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
    ],
)
def test_commands_that_cannot_be_obeyed_change_nothing(typed: str, words: str) -> None:
    chat = talk(Noted())
    before = dict(chat.options)
    with pytest.raises(ValueError, match=words):
        chat.handle(typed)
    assert chat.options == before


def test_parameters_are_set_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Noted("x")
    chat = talk(backend)
    typed = ("/set parameter top_k 7", "/set stop ###", "/set temperature 0", '/set system "Be a poet."', "Hi", "/show")
    for line in (*typed, "/set verbose", "/set num_predict 9", "/set num_predict"):
        chat.handle(line)
    assert chat.stats
    messages, params = backend.asked[0]
    assert params == SamplingParams(temperature=0, seed=5, top_k=7, stop="###", max_tokens=None)
    assert messages[0] == {"role": "system", "content": "Be a poet."}
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("noted", "Be a poet.", "top_k", "###"))
    chat.handle("/set top_k")
    chat.handle("/set temperature")
    chat.handle("/system")
    chat.handle("Hi")
    messages, params = backend.asked[1]
    assert params == SamplingParams(temperature=0.7, seed=6, stop="###", max_tokens=None)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


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


def test_an_answer_that_fails_leaves_the_conversation_as_it_was() -> None:
    chat = talk(Noted("half", ends=ValueError("the prompt has 9000 tokens")))
    with pytest.raises(ValueError, match="9000"):
        chat.handle("Hi")
    assert chat.messages == []


@pytest.mark.parametrize(
    ("model", "options", "note"),
    [
        (Noted("a", "b", ends="length"), {"max_tokens": 4},
         "cut at 4 tokens; -n 8 allows more, and in a conversation /set max_tokens 8"),
        (Noted("a", ends="length"), {}, "the conversation fills the model's context; /clear starts anew"),
        (Noted("  "), {}, "the model wrote nothing"),
        (Noted("a"), {}, ""),
    ],
)  # fmt: skip
def test_an_answer_says_why_it_ended(
    model: Noted, options: dict[str, Any], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(model, **options).handle("Hi")
    assert capsys.readouterr().err.strip() == note


def test_figures_are_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Noted("x"))
    chat.handle("Hi")
    assert capsys.readouterr().err == ""
    line = r"2 tokens, [\d.]+ tokens/s, acceptance length 1.50 \(bonus counted\), acceptance rate 0.25, seed {}, exact-tokens\n"
    chat.handle("/stats")
    assert re.fullmatch(line.format(5), capsys.readouterr().err)
    chat.handle("/stats on")
    chat.handle("Hi")
    assert re.fullmatch("figures are on\n" + line.format(6), capsys.readouterr().err)


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
