"""Words on a terminal: never broken at its edge, and nothing of a text is lost."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from outrider.cli.conversation import WordWrap

WORDS = st.text(alphabet="ab,.éẞ·", min_size=1, max_size=12)
GAPS = st.sampled_from([" ", "  ", "\n", "\n\n", "\n    "])


def wrapped(text: str, cuts: list[int], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    wrap = WordWrap(out)
    at = 0
    for cut in sorted({min(c, len(text)) for c in cuts} | {len(text)}):
        wrap.write(text[at:cut])
        at = cut
    wrap.end()
    return out.getvalue()


@given(
    parts=st.lists(st.tuples(WORDS, GAPS), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 400)),
    width=st.integers(16, 60),
)
def test_no_word_is_broken_and_none_is_lost(parts: list[tuple[str, str]], cuts: list[int], width: int) -> None:
    text = "".join(word + gap for word, gap in parts).rstrip()
    with pytest.MonkeyPatch.context() as patch:
        shown = wrapped(text, cuts, width, patch)
        assert shown == wrapped(text, [], width, patch)  # however it came
    assert shown.split() == text.split()
    lines = shown.split("\n")
    assert all(cell_len(line) <= width for line in lines)
    if all(len(line) <= width for line in text.split("\n")):
        assert shown == "\n".join(line.rstrip() for line in text.split("\n"))  # code keeps its indentation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a blue pigment\n", "a blue\npigment\n"),
        ("日本語の文章です", "日本語の文\n章です"),  # two cells each; no spaces
        ("0123456789ab c", "0123456789ab c"),  # the terminal breaks it: there is no other way
        ("ab\tc\td", "ab      c\nd"),
        ("1234567890\nx", "1234567890\nx"),
        ("1234567890 x", "1234567890\nx"),
    ],
)
def test_lines_of_ten_cells(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped(text, [], 10, monkeypatch) == expected


def test_a_word_is_whole_and_its_draft_tokens_are_green(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens come one by one, some of them of a drafter, and the edge of the terminal is near."""
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr("outrider.cli.terminal.plain", lambda _: False)
    out = io.StringIO()
    wrap = WordWrap(out)
    for text, colour in (("the light", ""), ("ho", "32"), ("use", "32"), ("s", ""), (" ", "32")):
        wrap.write(text, colour)
    wrap.end()
    assert out.getvalue() == "the\nlight\x1b[32mhouse\x1b[0ms"
