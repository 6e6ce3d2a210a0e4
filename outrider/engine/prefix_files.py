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
import torch
from torch import Tensor

from outrider.core.contents import ContentFolder
from outrider.kernels import ARITHMETIC
from outrider.kernels.machine import machine
from outrider.models.cache import SlotCache
from outrider.models.identity import content
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

SEGMENT = 64  # tokens of a file
OF_STATES = 256  # the same with recurrent layers, whose states are as large as the keys of many tokens
END_OF = 100  # times as long as its end a text must be, so that both ends, of a prompt and its answer, take a fiftieth
READERS = 4  # threads: one waits for the disk or for memory while another one checks sums
SECONDS = 0.05  # after which a step stops to read, so that other sequences go on
_KINDS = ("keys", "states")  # of files
_FORMAT = 1  # of the files; raise it with each change of what they hold
_NEWEST = 0.3  # weight of the newest measurement
_DOUBT = 0.9  # a disk that was too slow may have become faster: what is believed of it, at each prompt


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

    def __init__(self, folder: ContentFolder, loaded: Loaded) -> None:
        """Raises ValueError for a model whose content has no name."""
        if loaded.model.device.type != "cpu":
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
        self._second_of_token = self._second_of_byte = 0.0  # 0: not measured yet

    def computed(self, tokens: int, seconds: float) -> None:
        """The model has read tokens in this time."""
        self._second_of_token = _moved(self._second_of_token, seconds / tokens)

    def load(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> int:
        """Continue a slot that holds a beginning of `tokens`, and commit it. Returns how many tokens are new.

        Stops after a while: the next call goes on. Loads nothing where the model is faster than the disk.
        """
        if len(tokens) < self.segment:
            return 0
        self._prepare(cache, slot)
        held, segments = cache.length[slot], self._segments(tokens)
        known = [*takewhile(self._is_there, segments[held // self.segment :])]
        whole = held // self.segment + len(known)
        self.folder.forget(one.file(kind) for one in segments[whole:] for kind in _KINDS)
        known += self._ends(segments[:whole], tokens, held)
        while cache.states and known and not known[-1].file("states").exists():
            known.pop()
        if not known or not self._is_faster(cache):
            return 0
        cache.reserve([slot], len(tokens) + 1 - held)
        cells, began, fastest, found = _cells(cache, slot), perf_counter(), float("inf"), 0
        for at in range(0, len(known), READERS):
            some, last = known[at : at + READERS], perf_counter()
            read = [*takewhile(bool, self._readers.map(partial(self._fill, cells), some))]
            now, size = perf_counter(), cache.bytes_per_token * sum(one.end - one.start for one in some)
            found += len(read)
            fastest = min(fastest, (now - last) / max(size, 1))
            if len(read) < len(some) or now - began > SECONDS:
                break
        # the first files also wait until the system has found memory for a new slot: that is not the disk
        self._second_of_byte = _moved(self._second_of_byte, fastest)
        states = cache.snapshot(slot)
        while cache.states and found and not self._fill_states(known[found - 1], states):
            found -= 1
        if not found:
            return 0
        cache.restore(slot, known[found - 1].end, states)
        self.read += cache.length[slot] - held
        return cache.length[slot] - held

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], ended: bool) -> None:
        """Write the segments of a slot, which holds `tokens`, in the background.

        ended: a prompt or a text ends here, and not a chunk of it.

        With states only a segment that ends where the slot does is written: the states of the others are gone.
        """
        if len(tokens) < self.segment:
            return
        self._prepare(cache, slot)
        segments, cells = self._segments(tokens), _cells(cache, slot)
        rest = len(tokens) % self.segment
        if ended and 0 < rest * END_OF <= len(tokens):
            ids, start = array("q", tokens), segments[-1].end
            segments.append(self._segment(segments[-1].chain, ids, start, len(ids)))
        keys, states = _KINDS
        for one in segments:
            count = one.end - one.start
            if cache.states and one.end != len(tokens):
                continue
            if self.folder.wants(one.file(keys), size := count * cache.bytes_per_token):
                content = np.empty(size, np.uint8)
                for part, kept in _parts(cells, content, one):
                    kept[:] = part
                self.folder.write(one.file(keys), [content.data])
            if cache.states and self.folder.wants(one.file(states), cache.bytes_per_slot):
                self.folder.write(one.file(states), [_bytes(t) for part in cache.snapshot(slot) for t in part])
        if ended:
            self.folder.used(one.file(kind) for one in segments for kind in _KINDS)

    def _prepare(self, cache: SlotCache, slot: int) -> None:
        """Learn what the cache keeps, by one token in its scratch."""
        if self._root and bool(cache.layers) == self._has_keys:
            return
        self._model.forward(Nodes(torch.zeros(1, 1, dtype=torch.long), cache, [slot]), want="none")
        self._has_keys = bool(cache.layers)
        kept = [(t.shape[1], t.shape[3], str(t.dtype)) for pair in cache.layers for t in pair]
        states = [(t.shape, str(t.dtype)) for part in cache.snapshot(slot) for t in part]
        self._root = hashlib.sha256(repr((self._about, kept, states)).encode()).digest()
        self._newest = array("q"), []

    def _segments(self, tokens: Sequence[int]) -> list[_Segment]:
        """The names of whole segments. Those of the last call are not computed again."""
        ids, (old, known) = array("q", tokens), self._newest
        found = [*takewhile(lambda one: old[one.start : one.end] == ids[one.start : one.end], known)]
        for start in range(len(found) * self.segment, len(ids) - self.segment + 1, self.segment):
            before = found[-1].chain if found else self._root
            found.append(self._segment(before, ids, start, start + self.segment))
        self._newest = ids, found
        return [*found]

    def _segment(self, before: bytes, ids: array[int], start: int, end: int) -> _Segment:
        """before: the chain up to its first token."""
        chain = hashlib.sha256(before + ids[start:end].tobytes()).digest()
        stem = self.folder.path / self._root.hex()[:16] / f"{before.hex()[:16]}-{chain.hex()[:40]}"
        return _Segment(start, end, chain, str(stem))

    def _ends(self, before: Sequence[_Segment], tokens: Sequence[int], held: int) -> list[_Segment]:
        """The longest end of an earlier text that follows these segments and has more than the slot, if there is one."""
        if not before:
            return []
        ids, start = array("q", tokens), before[-1].end
        for end in range(min(start + self.segment - 1, len(ids)), max(held, start), -1):
            one = self._segment(before[-1].chain, ids, start, end)
            if self._is_there(one):
                return [one]
        return []

    def _is_there(self, segment: _Segment) -> bool:
        return segment.file(_KINDS[0]).exists()

    def _fill(self, cells: Sequence[np.ndarray], segment: _Segment) -> bool:
        """Put a segment into the cells of its tokens. Returns whether its file is whole."""
        count = segment.end - segment.start
        content = self.folder.read(
            segment.file(_KINDS[0]), count * sum(part.shape[0] * part.shape[2] for part in cells)
        )
        if content is None:
            return False
        for part, kept in _parts(cells, np.frombuffer(content, np.uint8), segment):
            part[:] = kept
        return True

    def _fill_states(self, segment: _Segment, states: Sequence[Sequence[Tensor]]) -> bool:
        into = [_bytes(t) for part in states for t in part]
        content = self.folder.read(segment.file("states"), sum(map(len, into)))
        if content is None:
            return False
        for part in into:
            part[:], content = content[: len(part)], content[len(part) :]
        return True

    def _is_faster(self, cache: SlotCache) -> bool:
        """Whether the disk is, or one of the two is not measured yet."""
        faster = self._second_of_byte * cache.bytes_per_token <= self._second_of_token or not self._second_of_token
        if not faster:
            self._second_of_byte *= _DOUBT
        return faster


def _cells(cache: SlotCache, slot: int) -> list[np.ndarray]:
    """The bytes of a slot: of each layer the keys, then the values, uint8 [kv_head, cell, byte] each."""
    return [t[slot].view(torch.uint8).numpy() for pair in cache.layers for t in pair if t.shape[1]]


def _parts(
    cells: Sequence[np.ndarray], content: np.ndarray, segment: _Segment
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each tensor what a segment has in the cache, and in the content of its file."""
    at = 0
    for whole in cells:
        part = whole[:, segment.start : segment.end]
        yield part, content[at : at + part.size].reshape(part.shape)
        at += part.size


def _bytes(t: Tensor) -> memoryview:
    """The memory of a tensor in one piece."""
    return t.view(-1).view(torch.uint8).numpy().data


def _moved(old: float, new: float) -> float:
    return new if not old else old + _NEWEST * (new - old)
