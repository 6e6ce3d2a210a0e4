"""Texts to draft from besides the running one: files, documents of a prompt, tool schemas, earlier answers.

A corpus of millions of tokens is held as a suffix array of the *reversed* text (Manber and Myers 1990). A datastore for drafting
is due to REST (arXiv 2311.08252). The array sorts the places of the text by the tokens before them. So all places where the last
tokens occurred are neighbours, and one binary search finds the longest match. It takes twelve bytes a token.

`read_corpus` makes one of what a user gives: files, folders, texts and token ids. Texts go through the target's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafters.lookup.mixture import Context, TextSource

REACH = 64  # tokens of context that are compared
SAMPLE = 64  # most places of one match that are used
Entry = str | Path | Mapping[str, str] | Sequence[int]
LARGEST = 2**18  # tokens of a segment that others are merged to, at most
BORDER = 2**31 - 1  # separates two documents; no token
_PART = 2**20  # characters of a long file that are encoded at a time


class Index:
    """Documents, and their places sorted by the `REACH` tokens before them. Immutable.

    since: the time of the oldest one, in seconds.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray | None = None, since: float = 0.0) -> None:
        """tokens: int32, of `bordered`. order: int32, the sorted places of a saved index. Without it they are sorted here, about
        a microsecond a token. Raises ValueError for an order that is none."""
        if order is not None and not (len(order) == len(tokens) > int(order.max(initial=0)) and order.min() >= 0):
            raise ValueError("the order of an index does not fit its tokens")
        self.tokens, self.since = tokens, since
        self.order = _sorted(tokens[::-1]) if order is None else order
        self._reversed = tokens[::-1].astype(">u4").tobytes()  # compared as bytes, tokens compare as numbers
        self._places = self.order.data
        self.source = TextSource(tokens.data, end=BORDER)

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, tail: Sequence[int]) -> int:
        """The length of the longest match of the text's end, at most REACH tokens."""
        at, end = self.interval(tail, REACH)[0], tail[: -REACH - 1 : -1]
        near = self._places[max(at - 1, 0) : at + 1]
        return max((alike(self.tokens[::-1][place : place + REACH].tolist(), end) for place in near), default=0)

    def interval(self, tail: Sequence[int], length: int) -> tuple[int, int]:
        """(low, high): order[low:high] are the places that follow the last `length` tokens."""
        query = np.asarray(tail[-length:][::-1], dtype=">u4").tobytes()
        key = lambda j: self._reversed[4 * j : 4 * j + len(query)]  # noqa: E731
        low = bisect_left(self._places, query, key=key)
        return low, bisect_right(self._places, query, lo=low, key=key)

    def places(self, tail: Sequence[int], length: int) -> tuple[int, ...]:
        """The places in `tokens` that follow a match of the last `length` tokens: at most SAMPLE, spread evenly."""
        low, high = self.interval(tail, length)
        step = max(1, -(-(high - low) // SAMPLE))
        return tuple(len(self) - j for j in self._places[low:high:step])


def bordered(documents: Sequence[Sequence[int]]) -> np.ndarray:
    """int32: the tokens of documents in a row, with a border after each."""
    return np.fromiter((token for d in documents for token in (*d, BORDER)), np.int32)


def alike(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Length of the common start of two token lists. start: how many tokens are known to be equal."""
    same = map(eq, islice(a, start, None), islice(b, start, None))
    return start + sum(takewhile(bool, same))


def _sorted(text: np.ndarray) -> np.ndarray:
    """int32: the suffixes of a text in the order of their first REACH tokens, by doubling."""
    n = len(text)
    rank, reach = text.astype(np.int64) + 1, 1
    order = np.empty(0, np.int64)
    while n:
        behind = np.zeros(n, np.int64)  # nothing sorts before anything
        behind[:-reach] = rank[reach:]
        key = rank * (int(behind.max()) + 1) + behind
        order = np.argsort(key)
        key = key[order]
        rank = np.empty(n, np.int64)
        rank[order] = np.concatenate([[1], 1 + np.cumsum(key[1:] != key[:-1])])
        reach *= 2
        if reach >= min(REACH, n) or rank[order[-1]] == n:
            break
    return order.astype(np.int32)


class Corpus:
    """Documents to draft from, at most `limit` tokens. Beyond that the oldest are dropped.

    New documents form sorted segments, and segments of similar size are merged. So adding costs little and a match asks few
    segments. span: seconds between the times of segments that are merged, at most. One thread may add while others look. Raises
    ValueError for a limit below 1.
    """

    def __init__(self, limit: int = 2**22, span: float = math.inf) -> None:
        if limit < 1:
            raise ValueError(f"a corpus holds 1 token or more, got limit={limit}")
        self.limit, self.span = limit, span
        self._largest = min(limit // 4, LARGEST)
        self.segments: list[Index] = []  # the oldest first

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def add(self, *documents: Sequence[int], since: float = 0.0) -> None:
        """Adds documents of one time, given as token ids. If they exceed `limit` tokens, the last tokens are kept."""
        new = bordered([d for d in documents if len(d)])
        if len(new):
            self._merge(new[-self.limit :], since, None)

    def clear(self) -> None:
        """Forget all documents."""
        self.segments = []

    def drop_before(self, oldest: float) -> None:
        """Drop segments of an earlier time."""
        self.segments = [segment for segment in self.segments if segment.since >= oldest]

    def take(self, index: Index) -> None:
        """Adds an index as it is, unless it is merged."""
        self._merge(index.tokens, index.since, index)

    def _merge(self, new: np.ndarray, since: float, index: Index | None) -> None:
        segments = list(self.segments)
        while segments:
            last, most = segments[-1], min(2 * len(new), self._largest - len(new))
            if len(last) > most or abs(since - last.since) > self.span:
                break
            new, since, index = np.concatenate([last.tokens, new]), min(since, last.since), None
            segments.pop()
        segments.append(Index(new, since=since) if index is None else index)
        while sum(map(len, segments)) > self.limit:
            segments.pop(0)
        self.segments = segments

    def contexts(self, tail: Sequence[int]) -> list[Context]:
        """The longest ends of the text that were found in the two best segments, and ends half as long."""
        segments = self.segments
        best = sorted(((s.longest(tail), at) for at, s in enumerate(segments)), reverse=True)[:2]
        contexts = []
        for length, at in best:
            while length and length >= best[0][0] // 2:
                segment = segments[at]
                contexts.append(Context(segment.source, segment.places(tail, length), float(length) ** 2, length))
                length //= 2
        return contexts


# -- what a user gives ----------------------------------------------------------------------------------------------------


def fingerprint(tokenizer: Any | None) -> str:
    """A short name of a tokenizer: tokenizers with equal vocabularies have equal names. "" without one."""
    if tokenizer is None:
        return ""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def read_corpus(entries: Entry | Sequence[Entry], tokenizer: Any | None, vocab_size: int, limit: int = 2**22) -> Corpus:
    """A corpus of a file, a folder (all text files in it), {"text": ...}, token ids, or a list of these.

    Stops at `limit` tokens and warns about what was left out. Raises ValueError, with the name of the entry, if it is empty,
    missing, binary or not UTF-8. In a folder, files that are not text are skipped.
    """
    many = _entries(entries)
    if not many:
        raise ValueError("the corpus is an empty list; name a file or a folder, or leave it out")
    documents, room, corpus = list[list[int]](), limit, Corpus(limit)
    for at, entry in enumerate(many):
        tokens = 0
        for name, ids in _token_lists(entry, tokenizer, vocab_size):
            if len(ids) >= room:  # the border after it takes one
                corpus.add(*documents, ids[: max(room - 1, 0)])
                others = f", and {', '.join(map(_name, many[at + 1 : at + 4]))}" if many[at + 1 :] else ""
                warnings.warn(
                    f"the corpus is full at {limit:,} tokens; cut or left out: from {name} on{others}; raise corpus_tokens in "
                    "speculative_config to take it in",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return corpus
            documents.append(ids)
            room -= len(ids) + 1
            tokens += len(ids)
        if not tokens:
            raise ValueError(f"the corpus {_name(entry)} is empty: it has no text to draft from; leave it out")
    corpus.add(*documents)
    return corpus


def read_texts(
    entries: Entry | Sequence[Entry], tokenizer: Any | None, vocab_size: int
) -> Iterator[tuple[str, list[int]]]:
    """(name, token ids) of each text of what `read_corpus` takes, long files in parts.

    Raises ValueError, with the name of the entry, for what cannot be read.
    """
    for entry in _entries(entries):
        yield from _token_lists(entry, tokenizer, vocab_size)


def _entries(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, Path, Mapping)) or _is_ids(given) else list(given)


def _token_lists(entry: Any, tokenizer: Any | None, vocab_size: int) -> Iterator[tuple[str, list[int]]]:
    for name, part in _parts(entry):
        if not isinstance(part, str):
            ids = list(part)
        elif tokenizer is not None:  # verbose=False: no warning about the length
            ids = list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        else:
            raise ValueError(
                f"the corpus {name} is text and this model has no tokenizer; give token ids, e.g. [17, 4, 9]"
            )
        wrong = [t for t in (min(ids, default=0), max(ids, default=0)) if not 0 <= t < vocab_size]
        if wrong:
            raise ValueError(f"the corpus {name} holds token {wrong[0]}, outside the target's {vocab_size} tokens")
        yield name, ids


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, Sequence) and bool(entry) and all(isinstance(t, int) for t in entry)


def _name(entry: Any) -> str:
    if isinstance(entry, (str, Path)):
        return repr(str(entry))
    return "given as text" if isinstance(entry, Mapping) else "given as token ids"


def _parts(entry: Any) -> Iterator[tuple[str, str | Sequence[int]]]:
    """(name, text or ids) of one entry, long files in parts."""
    if isinstance(entry, Mapping):
        if set(entry) != {"text"} or not isinstance(entry["text"], str):
            raise ValueError(f'a corpus given as text is {{"text": "..."}}, got keys {sorted(entry)}')
        yield _name(entry), entry["text"]
    elif not isinstance(entry, (str, Path)):
        if not _is_ids(entry):
            raise ValueError(f"a corpus given as token ids is a list of integers, got {str(entry)[:60]}")
        yield _name(entry), entry
    elif (path := Path(entry)).is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        for file in inside:
            hidden = any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
            if not hidden:
                try:
                    yield from _text(file)
                except UnicodeDecodeError:
                    continue
    elif path.is_file():
        try:
            yield from _text(path)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the corpus {str(path)!r} is not UTF-8 text ({error.reason}): a binary file, or another encoding; "
                f"convert it, e.g. iconv -f latin1 -t utf-8 {path.name} > text.txt"
            ) from None
    else:
        raise ValueError(
            f'there is no file or folder {str(path)!r} for the corpus; to give a text itself, write {{"text": "..."}}'
        )


def _text(path: Path) -> Iterator[tuple[str, str]]:
    """A file in parts that end at the end of a line. Raises UnicodeDecodeError if it is not text."""
    with path.open(encoding="utf-8") as file:
        while part := file.read(_PART):
            part += file.readline(_PART)
            if "\0" in part:
                raise UnicodeDecodeError("utf-8", b"\0", part.index("\0"), part.index("\0") + 1, "a zero byte")
            yield repr(str(path)), part
