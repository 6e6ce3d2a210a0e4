"""How prose is counted: words, sentences, and the words that CONTRIBUTING.md bans, in pages and in code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache

LONGEST_SENTENCE = 25  # words
# One word for one concept: what the field calls it stands beside each word that is not used here.
BANNED = {
    r"guess(es|ed|ing)?": "draft token, predict",
    r"laws?": "distribution",
    r"dear(er|est)?": "expensive",
    r"who(ever|m)?": "which, or the name of the part; software is `it`",
    r"(no|some|any|every)body": "the name of the part",
    r"nought": "zero",
    r"forete(ll|lls|lling)|foretold": "predict",
    r"rows? (is |are )?equal": "batch invariant",
}


_ANY = re.compile(rf"\b({'|'.join(BANNED)})\b", re.I)


@cache
def banned(text: str) -> Mapping[str, str]:
    """The words of a text that are not used here, with what to write instead."""
    if not _ANY.search(text):
        return {}
    return {found[0]: use for word, use in BANNED.items() for found in re.finditer(rf"\b{word}\b", text, re.I)}


def sentences(block: str) -> Iterator[tuple[int, str]]:
    """(words, sentence) of a paragraph. A sentence ends at `.`, `!` or `?` before a space, or at the end."""
    for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+", block.replace("et al.", "et al")):
        words = re.findall(r"\S*\w\S*", sentence)
        if words:
            yield len(words), sentence


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, and of its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def docstring_sentences(text: str) -> Iterator[tuple[int, str]]:
    """`sentences` of a docstring, without code and tables. A field's name ends the sentence before it, and so does a colon."""
    text = re.sub(r"``?[^`]*``?", "CODE", text)
    for block in re.split(r"\n\s*\n|\n(?=\w+  +\S)|\n *[|*]", text):
        if not re.search(r"^ {4}", block, re.M):
            yield from sentences(re.sub(r"[:;](?=\s)", ".", " ".join(block.split())))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that the code gives or uses, its parts as words: `target_law` is `target law`."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))
