"""What one model knows of earlier texts, in files: the second level of the prefix cache.

A segment is some tokens behind all tokens before them. Its name is a chain of hashes, from all that its bytes depend on to
the last of its tokens. It has a file of keys and values, and with recurrent layers one of their states after its last token. The
end of a long text is a segment of fewer tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from outrider.core.store import Store
from outrider.kernels import ARITHMETIC
from outrider.kernels.machine import machine
from outrider.models.cache import SlotCache
from outrider.models.files import content
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

SEGMENT = 64  # tokens of a file
OF_STATES = 256  # the same with recurrent layers, whose states are as large as the keys of many tokens
END_OF = 100  # times as long as its end a text must be, so that both ends, of a prompt and its answer, take a fiftieth
READERS = 4  # threads: one waits for the disk or for memory while another one checks sums
SECONDS = 0.05  # after which a step stops to read, so that other sequences go on
_KINDS = ("keys", "states")  # of files
_FORMAT = 1  # of the files; raise it with each change of what they hold


class _Segment(NamedTuple):
    """Tokens from `start` to `end`. chain: digest of all that its bytes depend on. stem: path of its files, without a kind."""

    start: int
    end: int
    chain: bytes
    stem: str

    def file(self, kind: str) -> Path:
        return Path(f"{self.stem}.{kind}")


class PrefixFiles:
    """The files of one model in a folder. read: tokens that came from them. segment: tokens of a file."""

    def __init__(self, folder: Store, loaded: Loaded) -> None:
        """Raises ValueError for a model whose content has no name."""
        if loaded.model.device != "cpu":
            raise ValueError(f"prefix_dir is for models on the CPU, and {loaded.name} is not; leave it out")
        self.folder, self.read, self.segment = folder, 0, OF_STATES if loaded.model.new_cache(1, 1).states else SEGMENT
        self._model = loaded.model
        # other machines give other bits, unless the path is native
        where = None if loaded.model.path == "native" else sorted(machine().items())
        self._about = (
            _FORMAT,
            self.segment,
            ARITHMETIC,
            content(loaded.source),
            loaded.weights,
            loaded.model.path,
            where,
        )
        self._root = b""  # digest of `_about` and of what the cache keeps
        self._has_keys = False  # whether a layer has keys
        self._newest = array("q"), list[_Segment]()  # the tokens of the last call, and their segments
        self._readers = ThreadPoolExecutor(READERS, "outrider-prefix-reader")

    def load(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> int:
        """Continue a slot that holds a beginning of `tokens`, and commit it. Returns how many tokens are new.

        Stops after a while: the next call goes on.
        """
        if len(tokens) < self.segment:
            return 0
        self._prepare(cache, slot)
        held, segments = cache.length[slot], self._segments(tokens)
        there = [*takewhile(self._is_there, segments[held // self.segment :])]
        there += self._end(segments[: held // self.segment + len(there)], tokens, held)
        while cache.states and there and not there[-1].file("states").exists():
            there.pop()
        if not there:
            return 0
        cache.reserve([slot], len(tokens) + 1 - held)
        cells, began, count = _cells(cache, slot), perf_counter(), 0
        for at in range(0, len(there), READERS):
            some = there[at : at + READERS]
            count += len([*takewhile(bool, self._readers.map(partial(self._fill, cells), some))])
            if count < at + len(some) or perf_counter() - began > SECONDS:
                break
        snapshot = cache.snapshot(slot)
        while cache.states and count and not self._fill_states(there[count - 1], snapshot):
            count -= 1
        if not count:
            return 0
        cache.restore(slot, there[count - 1].end, snapshot)
        self.read += cache.length[slot] - held
        return cache.length[slot] - held

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], ended: bool) -> None:
        """Write the segments of a slot in the background.

        With recurrent layers only a segment that ends where the slot does is written: earlier states were overwritten.

        Args:
            cache: The cache.
            slot: The slot.
            tokens: What the slot holds.
            ended: Whether a prompt or a text ends here, and not a chunk of it.
        """
        if len(tokens) < self.segment:
            return
        self._prepare(cache, slot)
        segments, cells, (keys, states) = self._segments(tokens), _cells(cache, slot), _KINDS
        if ended and 0 < len(tokens) % self.segment * END_OF <= len(tokens):
            segments.append(self._segment(segments[-1].chain, array("q", tokens), segments[-1].end, len(tokens)))

        def content(one: _Segment) -> list[memoryview]:
            copy = np.empty((one.end - one.start) * cache.bytes_per_token, np.uint8)
            for part, place in _parts(cells, copy, one):
                place[:] = part
            return [copy.data]

        for one in segments:
            if cache.states and one.end != len(tokens):
                continue
            self.folder.write(one.file(keys), (one.end - one.start) * cache.bytes_per_token, partial(content, one))
            if cache.states:
                self.folder.write(one.file(states), cache.bytes_per_slot, partial(_state_bytes, cache, slot))
        if ended:
            self.folder.used(one.file(kind) for one in segments for kind in _KINDS)

    def _prepare(self, cache: SlotCache, slot: int) -> None:
        """Learn what the cache keeps, by one token in its scratch."""
        if self._root and bool(cache.layers) == self._has_keys:
            return
        self._model.forward(Nodes(np.zeros((1, 1), np.int64), cache, [slot]), want="none")
        self._has_keys = bool(cache.layers)
        shapes = [(t.shape[1], t.shape[3], str(t.dtype)) for pair in cache.layers for t in pair]
        states = [(t.shape, str(t.dtype)) for part in cache.snapshot(slot) for t in part]
        self._root = hashlib.sha256(repr((self._about, shapes, states)).encode()).digest()
        self._newest = array("q"), []

    def _segments(self, tokens: Sequence[int]) -> list[_Segment]:
        """The names of whole segments. Those of the last call are not computed again."""
        ids, (old, earlier) = array("q", tokens), self._newest
        segments = [*takewhile(lambda one: old[one.start : one.end] == ids[one.start : one.end], earlier)]
        for start in range(len(segments) * self.segment, len(ids) - self.segment + 1, self.segment):
            before = segments[-1].chain if segments else self._root
            segments.append(self._segment(before, ids, start, start + self.segment))
        self._newest = ids, segments
        return [*segments]

    def _segment(self, before: bytes, ids: array[int], start: int, end: int) -> _Segment:
        """before: the chain up to its first token."""
        chain = hashlib.sha256(before + ids[start:end].tobytes()).digest()
        stem = self.folder.path / self._root.hex()[:16] / f"{before.hex()[:16]}-{chain.hex()[:40]}"
        return _Segment(start, end, chain, str(stem))

    def _end(self, before: Sequence[_Segment], tokens: Sequence[int], held: int) -> list[_Segment]:
        """The longest end of an earlier text that follows these segments and has more than the slot, if there is one."""
        ids, start = array("q", tokens), before[-1].end if before else 0
        for end in range(min(start + self.segment - 1, len(ids)) if before else 0, max(held, start), -1):
            one = self._segment(before[-1].chain, ids, start, end)
            if self._is_there(one):
                return [one]
        return []

    def _is_there(self, segment: _Segment) -> bool:
        return segment.file("keys").exists()

    def _fill(self, cells: Sequence[np.ndarray], segment: _Segment) -> bool:
        """Put a segment into the cells of its tokens. Returns whether its file is whole."""
        count = segment.end - segment.start
        content = self.folder.read(
            segment.file(_KINDS[0]), count * sum(part.shape[0] * part.shape[2] for part in cells)
        )
        if content is None:
            return False
        for part, place in _parts(cells, np.frombuffer(content, np.uint8), segment):
            part[:] = place
        return True

    def _fill_states(self, segment: _Segment, states: Sequence[Sequence[np.ndarray]]) -> bool:
        into = [_bytes(t) for part in states for t in part]
        content = self.folder.read(segment.file("states"), sum(map(len, into)))
        if content is None:
            return False
        for part in into:
            part[:], content = content[: len(part)], content[len(part) :]
        return True


def _cells(cache: SlotCache, slot: int) -> list[np.ndarray]:
    """The bytes of a slot: of each layer the keys, then the values, uint8 [kv_head, cell, byte] each."""
    return [t[slot].view(np.uint8) for pair in cache.layers for t in pair if t.shape[1]]


def _parts(
    cells: Sequence[np.ndarray], content: np.ndarray, segment: _Segment
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each tensor what a segment has in the cache, and in the content of its file."""
    at = 0
    for whole in cells:
        part = whole[:, segment.start : segment.end]
        yield part, content[at : at + part.size].reshape(part.shape)
        at += part.size


def _state_bytes(cache: SlotCache, slot: int) -> list[memoryview]:
    return [_bytes(t) for part in cache.snapshot(slot) for t in part]


def _bytes(t: np.ndarray) -> memoryview:
    """The memory of an array in one piece."""
    return t.reshape(-1).view(np.uint8).data
