"""Texts a user hands in: found by suffix array as by counting, bounded, and bad ones refused by name."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.lookup.corpus import REACH, SAMPLE, Corpus, Index, bordered, fingerprint, read_corpus
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.load import load

documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5)


class Letters:
    """A tokenizer of one token a character."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i + self.shift for i in range(128)}

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) + self.shift for c in text]}


def brute(docs: list[list[int]], end: list[int]) -> list[int]:
    """Where the continuations of `end` stand, in the documents put together with a border after each."""
    whole = [t for d in docs for t in (*d, -1)]
    return [i + len(end) for i in range(len(whole) - len(end)) if whole[i : i + len(end)] == end]


@given(documents, st.lists(st.integers(0, 4), min_size=1, max_size=12))
@settings(max_examples=200)
def test_matches_and_their_counts_are_those_of_counting(docs: list[list[int]], tail: list[int]) -> None:
    index = Index(bordered(docs))
    longest = max(n for n in range(len(tail) + 1) if n == 0 or brute(docs, tail[-n:]))
    assert index.longest(tail) == longest
    for n in range(1, len(tail) + 1):
        low, high = index.interval(tail, n)
        expected = brute(docs, tail[-n:])
        assert high - low == len(expected)
        if len(expected) <= SAMPLE:
            assert sorted(index.places(tail, n)) == expected


def test_long_texts_are_distinguished_up_to_its_reach() -> None:
    rng = np.random.default_rng(0)
    text = np.tile(rng.integers(0, 50, 300), 4).tolist()
    index = Index(bordered([text]))
    assert index.longest([7, *text[:250]]) == REACH
    low, high = index.interval(text[:250], REACH)
    assert high - low == 4
    many = Index(bordered([[1, 2] * 500]))
    assert len(many.places([1, 2], 1)) <= SAMPLE
    assert {many.tokens[p] for p in many.places([5, 1], 1)} == {2}


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(20, 150))
@settings(max_examples=60)
def test_a_corpus_stays_within_its_bound_and_the_oldest_go_first(sizes: list[int], limit: int) -> None:
    corpus = Corpus(limit)
    for name, size in enumerate(sizes):
        corpus.add([name] * size)
    whole = np.concatenate([s.tokens for s in corpus.segments] or [np.empty(0)]).tolist()
    everything = [t for name, size in enumerate(sizes) for t in (*[name] * size, 2**31 - 1)]
    assert len(corpus) == len(whole) <= limit
    assert whole == everything[len(everything) - len(whole) :]
    if sizes and sizes[-1] > 1:
        assert corpus.contexts([len(sizes) - 1])


def test_many_documents_make_few_segments() -> None:
    corpus = Corpus(2000)
    for name in range(100):
        corpus.add([name] * 9)
        assert len(corpus.segments) <= 10
    assert max(map(len, corpus.segments)) <= 500  # so that no more than a quarter goes at a time


def test_files_folders_texts_and_ids_are_read(tmp_path) -> None:
    (tmp_path / "one.txt").write_text("hello")
    sub = tmp_path / "docs"
    sub.mkdir()
    for name, content in (("b.md", b"bb"), ("a.md", b"aa"), ("c.png", b"\x89\0\xff"), (".git", b"no"), ("empty", b"")):
        (sub / name).write_bytes(content)

    def text(entries) -> str:
        corpus = read_corpus(entries, Letters(), 128)
        return "".join(chr(t) if t < 128 else "|" for s in corpus.segments for t in s.tokens)

    assert text(str(tmp_path / "one.txt")) == text(tmp_path / "one.txt") == "hello|"
    assert text(sub) == "aa|bb|"
    assert text([sub, {"text": "tool"}, [65, 66]]) == "aa|bb|tool|AB|"
    assert text([65, 66]) == "AB|"
    assert fingerprint(Letters()) != fingerprint(Letters(1))


def test_a_corpus_that_is_too_large_says_what_is_left_out(tmp_path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name * 40)
    with pytest.warns(RuntimeWarning, match=r"full at 100 tokens; cut or left out: from '.*c' on"):
        corpus = read_corpus(tmp_path, Letters(), 128, limit=100)
    assert len(corpus) <= 100
    with pytest.warns(RuntimeWarning, match=r"from '.*b' on, and '.*d'.*raise corpus_tokens"):
        read_corpus([tmp_path / "a", tmp_path / "b", tmp_path / "d"], Letters(), 128, limit=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_corpus(tmp_path, Letters(), 128, limit=164)) == 164


def test_bad_corpora_are_refused_by_name(tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin1"))
    (tmp_path / "bytes").write_bytes(b"abc\0def")
    (tmp_path / "folder").mkdir()
    for entries, words in (
        (tmp_path / "empty.txt", "empty.txt' is empty"),
        (tmp_path / "folder", "folder' is empty"),
        (tmp_path / "latin.txt", "latin.txt' is not UTF-8 text .*iconv"),
        (tmp_path / "bytes", "bytes' is not UTF-8 text .a zero byte."),
        (tmp_path / "nowhere", 'no file or folder .*nowhere.* write {"text": "..."}'),
        ({"text": ""}, "given as text is empty"),
        ({"txt": "a"}, r"got keys \['txt'\]"),
        ([[1, "a"]], "list of integers"),
        ([[1, 900]], "holds token 900, outside the target's 128 tokens"),
        ([-1], "holds token -1"),
        ([], "an empty list"),
    ):
        with pytest.raises(ValueError, match=words):
            read_corpus(entries, Letters(), 128)
    with pytest.raises(ValueError, match="this model has no tokenizer; give token ids"):
        read_corpus({"text": "a"}, None, 128)
    with pytest.raises(ValueError, match="1 token or more"):
        Corpus(0)


def test_the_built_in_tokenizer_has_a_lasting_name() -> None:
    tokenizer = load(str(builtin_folder("builtin:code-draft"))).tokenizer
    assert fingerprint(tokenizer) == fingerprint(load("builtin:code-draft").tokenizer) != ""
