"""The rule of words holds in docstrings, comments and identifiers too, and sentences are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from prose import LONGEST_SENTENCE, banned, comments, docstring_sentences, docstrings, identifiers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[str, ast.Module]]:
    """The text and the syntax tree of each file of the package."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "outrider").rglob("*.py"))}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


def wrong_words(source: str, tree: ast.Module) -> Iterator[str]:
    for line, text in (*docstrings(tree), *comments(source), *identifiers(tree)):
        for word, instead in banned(text).items():
            yield f"line {line}: {word!r}; write: {instead}"


def test_words_are_those_of_the_field(sources: dict[str, tuple[str, ast.Module]]) -> None:
    assert not [f"{file}, {wrong}" for file, source in sources.items() for wrong in wrong_words(*source)]


def test_sentences_of_docstrings_are_short(sources: dict[str, tuple[str, ast.Module]]) -> None:
    long = [
        f"{file}, line {line}: more than {LONGEST_SENTENCE} words: {sentence}"
        for file, (_, tree) in sources.items()
        for line, text in docstrings(tree)
        for words, sentence in docstring_sentences(text)
        if words > LONGEST_SENTENCE
    ]
    assert not long


@pytest.mark.parametrize(
    "source",
    ['"""A guess."""', "x = 1  # somebody reads it", "target_law = 1", "def whom(): ...", "class DearToken: ..."],
)
def test_a_wrong_word_is_seen(source: str) -> None:
    assert [*wrong_words(source, ast.parse(source))]


def test_a_long_sentence_is_seen() -> None:
    [text] = [text for _, text in docstrings(ast.parse(f'"""{"word " * 26}end. A short one."""'))]
    assert max(words for words, _ in docstring_sentences(text)) > LONGEST_SENTENCE
