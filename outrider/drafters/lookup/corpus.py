"""Texts to draft from besides the running one: files, documents of a prompt, tool schemas, earlier answers.

A corpus of millions of tokens is held as a suffix array of the *reversed* text (Manber and Myers 1990). A datastore for drafting
is due to REST (arXiv 2311.08252). The array sorts the places of the text by the tokens before them. So all places where the last
tokens occurred are neighbours, and one binary search finds the longest match. It takes twelve bytes a token.
"""

from __future__ import annotations

import json
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.drafters.lookup.mixture import Context, TextSource

REACH = 64  # tokens of context that are compared
SAMPLE = 64  # most places of one match that are used
VERSION = 1
_BORDER = 2**31 - 1  # separates two documents; no token


class Index:
    """Documents, and their places sorted by the `REACH` tokens before them. Immutable."""

    def __init__(self, tokens: np.ndarray, order: np.ndarray | None = None) -> None:
        """tokens: int32, of `bordered`. order: int32, the sorted places of a saved index. Without it they are sorted here, about
        a microsecond a token."""
        self.tokens = tokens
        self.order = _sorted(tokens[::-1]) if order is None else order
        self._reversed = tokens[::-1].astype(">u4").tobytes()  # compared as bytes, tokens compare as numbers
        self._places = self.order.data
        self.source = TextSource(tokens.data, end=_BORDER)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def vocabulary(self) -> list[int]:
        """The least and the largest token."""
        real = self.tokens[self.tokens != _BORDER]
        return [int(real.min()), int(real.max())] if len(real) else []

    def longest(self, tail: Sequence[int]) -> int:
        """The length of the longest match of the text's end, at most REACH tokens."""
        query = _query(tail)
        at = bisect_left(self._places, query, key=lambda j: self._reversed[4 * j : 4 * j + len(query)])
        best = 0
        for place in self._places[max(at - 1, 0) : at + 1]:
            text = self._reversed[4 * place : 4 * place + len(query)].ljust(len(query), b"\xff")
            differing = (int.from_bytes(text) ^ int.from_bytes(query)).bit_length()
            best = max(best, (8 * len(query) - differing) // 32)
        return best

    def interval(self, tail: Sequence[int], length: int) -> tuple[int, int]:
        """(low, high): order[low:high] are the places that follow the last `length` tokens."""
        query = _query(tail[-length:])
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
    return _joined([np.asarray([*d, _BORDER], np.int32) for d in documents])


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _query(tail: Sequence[int]) -> bytes:
    return np.asarray(tail[-REACH:][::-1], dtype=">u4").tobytes()


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
    segments. tokenizer: a name of the tokenizer, kept in saved files (`fingerprint`). Raises ValueError for a limit below 1.
    """

    def __init__(self, limit: int = 2**22, tokenizer: str = "") -> None:
        if limit < 1:
            raise ValueError(f"a corpus holds 1 token or more, got limit={limit}")
        self.limit, self.tokenizer = limit, tokenizer
        self.segments: list[Index] = []  # the oldest first
        self.dropped = 0  # tokens that had to go

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def add(self, *documents: Sequence[int]) -> None:
        """Adds documents, given as token ids. If they exceed `limit` tokens, the last tokens are kept."""
        new = bordered([d for d in documents if len(d)])
        self.dropped += max(0, len(new) - self.limit)
        new = new[-self.limit :]
        if not len(new):
            return
        while self.segments and len(self.segments[-1]) <= min(2 * len(new), self.limit // 4 - len(new)):
            new = np.concatenate([self.segments.pop().tokens, new])
        self.segments.append(Index(new))
        while len(self) > self.limit:
            self.dropped += len(self.segments.pop(0))

    def contexts(self, tail: Sequence[int]) -> list[Context]:
        """The longest ends of the text that were found in the two best segments, and ends half as long."""
        best = sorted(((s.longest(tail), at) for at, s in enumerate(self.segments)), reverse=True)[:2]
        found = []
        for length, at in best:
            while length and length >= best[0][0] // 2:
                segment = self.segments[at]
                found.append(Context(segment.source, segment.places(tail, length), float(length) ** 2, length))
                length //= 2
        return found

    def save(self, path: str | Path) -> None:
        """Writes the corpus to one file, sorted, so that it loads quickly."""
        head = {"corpus": VERSION, "tokenizer": self.tokenizer, "lengths": [len(s) for s in self.segments]}
        with Path(path).open("wb") as file:
            np.savez(
                file,
                head=np.frombuffer(json.dumps(head).encode(), np.uint8),
                tokens=_joined([s.tokens for s in self.segments]),
                order=_joined([s.order for s in self.segments]),
            )

    @classmethod
    def load(cls, path: str | Path, tokenizer: str = "", limit: int = 2**22) -> Corpus:
        """Reads a saved corpus. Raises ValueError for another version, another tokenizer, or another kind of file."""
        again = f"make it again with Corpus(...).save({str(path)!r})"
        try:
            with np.load(path, allow_pickle=False) as file:
                head, tokens, order = json.loads(file["head"].tobytes()), file["tokens"], file["order"]
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{path} is not a saved corpus ({error}); {again}") from None
        if head.get("corpus") != VERSION:
            raise ValueError(f"{path} is a corpus of version {head.get('corpus')}, this is version {VERSION}; {again}")
        if head["tokenizer"] != tokenizer:
            raise ValueError(
                f"{path} was made with another tokenizer ({head['tokenizer'] or 'none'}, here {tokenizer or 'none'}), and "
                f"its token ids mean other texts; {again} and this model's tokenizer"
            )
        ends = np.cumsum(head["lengths"]).tolist()
        whole = len(tokens) == len(order) == (ends or [0])[-1] and tokens.dtype == order.dtype == np.int32
        corpus, start = cls(max(limit, len(tokens)), tokenizer), 0
        for end in ends if whole else ():
            places = order[start:end]
            if whole := bool(len(places)) and places.min() >= 0 and places.max() < end - start:
                corpus.segments.append(Index(tokens[start:end], places))
            start = end
        if not whole:
            raise ValueError(f"{path} is damaged: its parts do not fit together; {again}")
        return corpus
