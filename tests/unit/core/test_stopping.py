"""Text as it grows: the same as decoding the whole, ended by stop strings across token borders."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import single_bytes

from outrider.core.detokenizer import TokenBytes
from outrider.core.params import SamplingParams
from outrider.core.stopping import StopChecker

TOKENS = TokenBytes(single_bytes())


def run(text: str, **params) -> StopChecker:
    ending = StopChecker(SamplingParams(**{"max_tokens": 1000, **params}), (0,), 1000, TOKENS)
    for token in text.encode():
        if ending.push(token):
            break
    return ending


def test_a_stop_string_across_tokens_ends_and_is_cut() -> None:
    ending = run("def f():\n    return 1\n\n\ndef g()", stop=["\n\n\n", "xyz"])
    assert (ending.text, ending.end.finish, ending.end.reason) == ("def f():\n    return 1", "stop", "\n\n\n")  # type: ignore[union-attr]
    assert ending.count == len("def f():\n    return 1\n\n\n")
    assert run("ab STOP cd", stop="STOP", include_stop_str_in_output=True).text == "ab STOP"


def test_the_earliest_stop_string_wins() -> None:
    assert run("one two three", stop=["two three", "two"]).text == "one "
    assert run("abcd", stop=["cd", "bcd"]).text == "a"


def test_text_that_may_be_a_stop_string_waits() -> None:
    ending = StopChecker(SamplingParams(stop=["</end>"]), (), 99, TOKENS)
    shown = [ending.settled for token in b"ab</e!cd" if not ending.push(token)]
    assert all("ab</e!cd".startswith(s) for s in shown)
    assert not any(s.endswith("</e") for s in shown)


@pytest.mark.parametrize(
    ("params", "text", "count", "finish"),
    [
        ({}, "ab\0cd", 3, "stop"),
        ({"stop_token_ids": [ord("c")]}, "abcd", 3, "stop"),
        ({"stop_token_ids": [ord("a")], "min_tokens": 3}, "abca", 4, "stop"),
        ({"stop": ["b"], "min_tokens": 3}, "abcbd", 4, "stop"),
    ],
)
def test_where_texts_end(params: dict, text: str, count: int, finish: str | None) -> None:
    ending = run(text, **params)
    assert (ending.count, ending.end and ending.end.finish) == (count, finish)


@pytest.mark.parametrize("given", [{}, {"stop_token_ids": [ord("c")]}])
def test_a_token_that_ends_a_text_is_no_part_of_it(given: dict) -> None:
    """Also an end token that the vocabulary does not call special."""
    ends = () if given else (ord("c"),)
    for more, text in (({}, "ab"), ({"include_stop_str_in_output": True}, "abc"), ({"min_tokens": 4}, "abc")):
        ending = StopChecker(SamplingParams(max_tokens=9, **given, **more), ends, 4, TOKENS)
        for token in b"abcd":
            if ending.push(token):
                break
        assert ending.text == text + "d" * ("min_tokens" in more)


def test_the_last_token_of_a_limit_ends_the_text() -> None:
    ending = StopChecker(SamplingParams(), (), 2, TOKENS)
    assert ending.push(65) is None
    assert ending.push(66).finish == "length"  # type: ignore[union-attr]


@given(
    st.text("a🙂�\u0301漢", max_size=8), st.text("a🙂�漢", min_size=1, max_size=3), st.booleans(), st.integers(0, 12)
)
def test_a_stop_string_is_found_wherever_it_ends(text: str, stop: str, included: bool, cut: int) -> None:
    """Also across characters and tokens, and in what an unfinished character becomes at the end. Each delta was right."""
    data, params = text.encode(), {"stop": [stop], "include_stop_str_in_output": included}
    ending, shown = StopChecker(SamplingParams(**params), (), max(1, len(data) - cut), TOKENS), ""
    for byte in data:
        end = ending.push(byte)
        assert ending.text.startswith(shown)
        shown = ending.settled
        if end:
            break
    whole = data[: max(1, len(data) - cut)].decode(errors="replace")
    at = whole.find(stop)
    if at < 0:
        assert ending.text == whole
        assert ending.end is None or ending.end.finish == "length"
    else:
        assert (ending.text, ending.end.reason) == (whole[: at + len(stop) * included], stop)  # type: ignore[union-attr]
    assert ending.marks == sorted(ending.marks)


@pytest.mark.parametrize(
    ("stop", "skip", "minimum", "text"),
    [
        ("<stop>", True, 0, "ab"),
        ("<stop>", False, 0, "ab"),
        ("<stop>", True, 4, "abcd"),
        ("<stop>c", False, 0, "ab"),
        ("<end>", False, 0, "ab<stop>cd"),
        ("<end>", True, 0, "abcd"),
    ],
)
def test_the_text_of_a_special_token_is_a_stop_string(stop: str, skip: bool, minimum: int, text: str) -> None:
    """Texts are shown without special tokens, and clients give them as stop strings."""
    params = SamplingParams(stop=[stop], skip_special_tokens=skip, min_tokens=minimum)
    ending = StopChecker(params, (), 99, TOKENS)
    for token in (*b"ab", 257, *b"cd", 256):
        if ending.push(token):
            break
    assert ending.text == text
    assert (ending.end and ending.end.reason) == (None if minimum else stop)


class Nosy(TokenBytes):
    """When the text is made of the token `x`, another thread asks for it, too."""

    ending: StopChecker
    asks: threading.Thread | None = None

    def after(self, before: int | None, token: int) -> bytes:
        if token == ord("x") and self.asks is None:
            self.asks = threading.Thread(target=lambda: self.ending.text)
            self.asks.start()
            self.asks.join(0.5)  # it has its text, or waits for this thread
        return super().after(before, token)


def test_two_threads_may_ask_for_the_text_at_once() -> None:
    """The engine makes it, and the answer's thread asks where a token begins: no token is read twice."""
    tokens = Nosy(single_bytes())
    tokens.ending = StopChecker(SamplingParams(max_tokens=99), (), 99, tokens)
    for token in b"axb":
        tokens.ending.push(token)
    assert tokens.ending.text == "axb"
    assert tokens.ending.marks == [1, 2, 3]
    assert tokens.asks is not None
    tokens.asks.join()
    assert tokens.ending.text == "axb"
