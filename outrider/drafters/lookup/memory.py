"""Texts of earlier requests, of this process and of others before it: a corpus for each client, in files.

A finished text is cut into pieces, and those that the client's corpus does not have are added. So the prompt that an agent
sends in each turn is kept once. Each segment of a corpus is a file. It never changes: a merged segment is a new file, and then
those that it was made of go. A process that is killed between the two leaves some texts twice, and the next one drops them.

A text is only drafted from. So nothing in the folder can change what a model writes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from time import time
from typing import Any

import numpy as np

from outrider.core.files import MEMORY_BY, byte_count, discard
from outrider.core.infill import Marks, gap_marks, in_order
from outrider.core.store import HEAD, TEXTS, Store
from outrider.drafters.lookup.corpus import BORDER, REACH, Corpus, Index, fingerprint
from outrider.models.load import Loaded

CLIENTS = 64  # that are held in memory; files of others are read again
PENDING = 256  # texts that wait to be kept; what comes while the disk is so late is not kept
_LEAD = 16  # known tokens that are kept on both sides of a piece, so that its ends can be found
_PERIODS = 8  # a file's texts differ in age by this part of the oldest age, at most
_NUMBERS = 8  # bytes of a token in a file: it, and its place in the order
_FORMAT = 1  # of the files; raise it with each change of what they hold


def text_memory(loaded: Loaded, path: str | PathLike[str], disk: int | str, days: float, by: str) -> TextMemory:
    """The memory of a model, as `LLM` takes it. Raises ValueError for a folder or a bound that cannot be."""
    if by not in MEMORY_BY:
        raise ValueError(f"memory_by is one of {', '.join(MEMORY_BY)}, got {by!r}")
    if not days > 0:
        raise ValueError(f"memory_days must be more than 0, got {days}; for example memory_days=30")
    folder = Store.open(path, byte_count(disk), TEXTS, 86400 * days)
    return TextMemory(folder, loaded.tokenizer, loaded.model.vocab_size, by == "all")


class _Client:
    """What is held of a client. files: of the corpus' segments."""

    def __init__(self, name: str, corpus: Corpus) -> None:
        self.name, self.corpus, self.files = name, corpus, dict[Index, Path]()


class TextMemory:
    """The texts of a folder for models of one tokenizer. The folder's thread reads, sorts and writes; no step waits for it.

    shared: all clients have one corpus. Otherwise no draft of a client has a token from a text of another one.
    """

    def __init__(self, folder: Store, tokenizer: Any | None, vocab_size: int, shared: bool = False) -> None:
        self.folder, self.shared = folder, shared
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._clients = OrderedDict[str, _Client]()
        self._asked = self._done = 0  # texts; each is counted by one thread

    def corpus(self, client: str) -> Corpus:
        """What is known for a client. It is empty until the thread has read the files."""
        return self._client(client).corpus

    def keep(self, client: str, tokens: Sequence[int]) -> None:
        """Keep a text: later."""
        if self._asked - self._done < PENDING:
            self._asked += 1
            self.folder.later(self._keep, self._client(client), list(tokens), time())

    def forget(self, client: str) -> None:
        """Remove all texts of a client, those of other tokenizers too. Other processes that run may still hold them."""
        self.folder.later(self._forget, "" if self.shared else client).result()

    def _client(self, client: str) -> _Client:
        name = "" if self.shared else client
        if name not in self._clients:
            corpus = Corpus(max(int(self.folder.limit) // _NUMBERS, 1), span=self.folder.age / _PERIODS)
            self._clients[name] = _Client(name, corpus)
            self.folder.later(self._load, self._clients[name])
        self._clients.move_to_end(name)
        while len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return self._clients[name]

    # -- in the folder's thread -----------------------------------------------------------------------------------------

    @cached_property
    def _gap(self) -> Marks | None:
        return gap_marks(self._tokenizer)

    @cached_property
    def _kind(self) -> str:
        """The beginning of the names of files that these models can read."""
        about = repr((_FORMAT, fingerprint(self._tokenizer), self._vocab_size))
        return hashlib.sha256(about.encode()).hexdigest()[:16]

    def _path(self, client: _Client) -> Path:
        """The folder of a client, with the texts of all models."""
        return self.folder.path / hashlib.sha256(repr((self.shared, client.name)).encode()).hexdigest()[:16]

    def _load(self, client: _Client) -> None:
        entries = list[tuple[float, Index, Path]]()
        for file in self._path(client).glob(f"{self._kind}-*.texts"):
            with suppress(OSError):  # another process may have merged it
                if (index := self._read(file)) is not None:
                    entries.append((index.since, index, file))
        chosen, seen = list[tuple[float, Index, Path]](), set[bytes]()
        for since, index, file in sorted(entries, key=lambda one: -len(one[1])):
            parts = np.split(index.tokens, np.flatnonzero(index.tokens == BORDER) + 1)
            documents = {document.tobytes() for document in parts}
            if not documents <= seen:
                chosen.append((since, index, file))
                seen |= documents
        client.files |= {index: file for _, index, file in entries}
        for _, index, _ in sorted(chosen, key=lambda one: one[0]):
            client.corpus.take(index)
        self._settle(client)

    def _read(self, file: Path) -> Index | None:
        about = file.stat()
        if not S_ISREG(about.st_mode) or about.st_size > self.folder.limit + HEAD:
            return None
        content = self.folder.read(file, about.st_size - HEAD)
        if content is None or len(content) % _NUMBERS:
            return None
        tokens, order = np.frombuffer(content, np.int32).reshape(2, -1).copy()  # aligned
        try:
            index = Index(tokens, order, about.st_mtime)
        except ValueError:
            return None
        real = tokens[tokens != BORDER]
        return index if not len(real) or 0 <= real.min() <= real.max() < self._vocab_size else None

    def _keep(self, client: _Client, tokens: list[int], now: float) -> None:
        self._done += 1
        client.corpus.add(*_unknown(client.corpus, in_order(tokens, self._gap)), since=now)
        self._settle(client)

    def _settle(self, client: _Client) -> None:
        """Drop segments that are too old, and let the folder hold those that are left."""
        corpus = client.corpus
        corpus.drop_before(time() - self.folder.age)
        before, client.files, whole = client.files, {}, True
        for segment in corpus.segments:
            file = before.get(segment)
            if file is None:
                name = hashlib.sha256(segment.tokens.tobytes()).hexdigest()[:40]
                file = self._path(client) / f"{self._kind}-{name}.texts"
                whole &= self.folder.put(file, [segment.tokens.tobytes(), segment.order.tobytes()], segment.since)
            client.files[segment] = file
        if whole:
            for file in {*before.values()} - {*client.files.values()}:
                discard(file)

    def _forget(self, name: str) -> None:
        held = self._clients.get(name) or _Client(name, Corpus())
        held.corpus.clear()
        held.files = {}
        for file in self._path(held).glob("*.texts"):
            discard(file)


def _unknown(corpus: Corpus, tokens: list[int]) -> list[list[int]]:
    """The parts of a text that a corpus does not have, with some known tokens on both sides."""
    parts, start = list[list[int]](), -1
    for at in range(0, len(tokens) + REACH, REACH):
        piece = tokens[at : at + REACH]
        is_known = not piece or any(segment.longest(piece) == len(piece) for segment in reversed(corpus.segments))
        if is_known and start >= 0:
            parts.append(tokens[max(start - _LEAD, 0) : at + _LEAD])
            start = -1
        elif not is_known and start < 0:
            start = at
    return parts
