"""Text as it grows: the same as decoding the whole, ended by stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from outrider.core.stopping import Detokenizer, StopChecker


class Bytes:
    """One token a byte."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Pieces:
    """Pieces that lose a leading space at the start of a text, as SentencePiece does."""

    words = ("▁the", "▁cat", "s", "▁sat", "!", "▁", "and")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = "".join(self.words[i] for i in ids).replace("▁", " ")
        return text.removeprefix(" ")


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_pushed_pieces_join_to_the_whole_text(text: str) -> None:
    reader, out = Detokenizer(Bytes(), []), ""
    for byte in text.encode():
        new = reader.push(byte)
        out += new
        assert "�" not in new or "�" in text
    assert out + reader.flush() == text == reader.text


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 6))
@settings(max_examples=100)
def test_spaces_after_the_prompt_survive(ids: list[int], cut: int) -> None:
    prompt, rest = ids[:cut], ids[cut:]
    reader = Detokenizer(Pieces(), prompt)
    for token in rest:
        reader.push(token)
    assert Pieces().decode(prompt) + reader.text == Pieces().decode(ids)


def run(text: str, **params) -> StopChecker:
    ending = StopChecker(SamplingParams(**{"max_tokens": 1000, **params}), (0,), 1000, Bytes(), b"")
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
    ending = StopChecker(SamplingParams(stop=["</end>"]), (), 99, Bytes(), b"")
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
        ending = StopChecker(SamplingParams(max_tokens=9, **given, **more), ends, 4, Bytes(), b"")
        for token in b"abcd":
            if ending.push(token):
                break
        assert ending.text == text + "d" * ("min_tokens" in more)


def test_length_and_missing_tokenizer() -> None:
    ending = StopChecker(SamplingParams(), (), 2, Bytes(), b"")
    assert ending.push(65) is None
    assert ending.push(66).finish == "length"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="need a tokenizer"):
        StopChecker(SamplingParams(stop="x"), (), 2)
