"""The rule of words holds in docstrings, comments and identifiers too, and sentences are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from prose import LONGEST_SENTENCE, banned, comments, docstring_sentences, docstrings, identifiers

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "outrider").rglob("*.py"))


def wrong_words(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    for line, text in (*docstrings(tree), *comments(source), *identifiers(tree)):
        for word, instead in banned(text).items():
            yield f"line {line}: {word!r}; write: {instead}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_those_of_the_field(path: Path) -> None:
    assert not [*wrong_words(path.read_text())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_docstrings_are_short(path: Path) -> None:
    for line, text in docstrings(ast.parse(path.read_text())):
        long = [sentence for words, sentence in docstring_sentences(text) if words > LONGEST_SENTENCE]
        assert not long, f"line {line}: more than {LONGEST_SENTENCE} words: {long}"


@pytest.mark.parametrize(
    "source",
    ['"""A guess."""', "x = 1  # somebody reads it", "target_law = 1", "def whom(): ...", "class DearToken: ..."],
)
def test_a_wrong_word_is_seen(source: str) -> None:
    assert [*wrong_words(source)]


def test_a_long_sentence_is_seen() -> None:
    [text] = [text for _, text in docstrings(ast.parse(f'"""{"word " * 26}end. A short one."""'))]
    assert max(words for words, _ in docstring_sentences(text)) > LONGEST_SENTENCE
