"""What one model knows of earlier texts, in files: the second level of the prefix cache.

A segment is some tokens behind all tokens before them. Its name is a chain of hashes, from all that its bytes depend on to
the last of its tokens. It has a file of keys and values. Where a head reads features it has a file of them, and with recurrent
layers one of their states after its last token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.prefix_folder import PrefixFolder
from outrider.kernels import ARITHMETIC
from outrider.kernels.machine import machine
from outrider.models.cache import SlotCache
from outrider.models.identity import content
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

SEGMENT = 64  # tokens of a file: those behind the last whole segment of a prompt are read again
OF_STATES = 256  # the same with recurrent layers, whose states are as large as the keys of many tokens
SECONDS = 0.05  # after which a step stops to read, so that other sequences go on
_FORMAT = 1  # of the files; raise it with each change of what they hold
_NEWEST = 0.3  # weight of the newest measurement
_DOUBT = 0.9  # a disk that was too slow may have become faster: what is believed of it, at each prompt


class _Segment(NamedTuple):
    keys: Path
    features: Path
    states: Path


class PrefixFiles:
    """The files of one model in a folder. read: tokens that came from them. segment: tokens of a file."""

    def __init__(self, folder: PrefixFolder, loaded: Loaded, taps: tuple[int, ...] = ()) -> None:
        """taps: of the features; none if no head reads any. Raises ValueError for a model whose content has no name."""
        if loaded.model.device.type != "cpu":
            raise ValueError(f"prefix_dir is for models on the CPU, and {loaded.name} is not; leave it out")
        self.folder, self.read, self.segment = folder, 0, OF_STATES if loaded.model.new_cache(1, 1).states else SEGMENT
        self._model, self._taps = loaded.model, taps
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
        self._wide, self._has_keys = 0, False  # numbers in the features of a token; whether a layer has keys
        self._second_of_token = self._second_of_byte = 0.0  # 0: not measured yet

    def computed(self, tokens: int, seconds: float) -> None:
        """The model has read tokens in this time."""
        self._second_of_token = _moved(self._second_of_token, seconds / tokens)

    def load(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> Tensor | None:
        """Continue a slot that holds a beginning of `tokens`, and commit it. Returns the features of what is new, if any.

        Stops after a while: the next call goes on. Loads nothing where the model is faster than the disk.
        """
        if len(tokens) < self.segment:
            return None
        self._prepare(cache, slot)
        held = cache.length[slot]
        first = held // self.segment
        segments = self._segments(tokens)[first:]
        known = [*takewhile(self._is_there, segments)]
        self.folder.forget(file for segment in segments[len(known) :] for file in segment)
        while cache.states and known and not known[-1].states.exists():
            known.pop()
        if not known or not self._is_faster(cache):
            return None
        cache.reserve([slot], len(tokens) + 1 - held)  # once in a text's life; the disk is not slow for it
        began, fastest, done, states, features = perf_counter(), float("inf"), held, (), list[Tensor]()
        for start, segment in zip(range(first * self.segment, len(tokens), self.segment), known, strict=False):
            cells, own = [*_cells(cache, slot, start, start + self.segment)], torch.empty(self.segment, self._wide)
            last, whole = perf_counter(), self.folder.read(segment.keys, cells)
            fastest = min(fastest, (perf_counter() - last) / max(sum(map(len, cells)), 1))
            if not whole or (self._taps and not self.folder.read(segment.features, [_bytes(own)])):
                for part in cells:
                    part[:] = bytes(len(part))  # bits that are no numbers would spoil sums
                break
            features.append(own[max(held - start, 0) :])
            late = len(features) > 1 and perf_counter() - began > SECONDS
            if cache.states:
                if not (late or segment is known[-1]):
                    continue
                states = cache.snapshot(slot)
                if not self.folder.read(segment.states, [_bytes(t) for part in states for t in part]):
                    continue
            done = start + self.segment
            if late:
                break
        # the first file also waits until the system has found memory for a new slot: that is not the disk
        self._second_of_byte = _moved(self._second_of_byte, fastest)
        if done == held:
            return None
        cache.restore(slot, done, states)
        self.read += done - held
        return torch.cat(features)[: done - held] if self._taps else None

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], features: Tensor | None, first: int) -> None:
        """Write the whole segments of a slot, which holds `tokens`, in the background. features: of the tokens from `first` on.

        With states only a segment that ends where the slot does is written: the states of the others are gone.
        """
        if len(tokens) < self.segment:
            return
        self._prepare(cache, slot)
        segments = self._segments(tokens)
        for start, segment in zip(range(0, len(tokens), self.segment), segments, strict=False):
            end = start + self.segment
            if cache.states and end != len(tokens):
                continue
            if self.folder.wants(segment.keys, self.segment * cache.bytes_per_token):
                self.folder.write(segment.keys, [bytes(part) for part in _cells(cache, slot, start, end)])
            if (
                features is not None
                and start >= first
                and self.folder.wants(segment.features, 4 * self.segment * self._wide)
            ):
                self.folder.write(segment.features, [_bytes(features[start - first : end - first].float().clone())])
            if cache.states and self.folder.wants(segment.states, cache.bytes_per_slot):
                self.folder.write(segment.states, [_bytes(t) for part in cache.snapshot(slot) for t in part])
        self.folder.used(file for segment in segments for file in segment)

    def _prepare(self, cache: SlotCache, slot: int) -> None:
        """Learn what the cache keeps, by one token in its scratch."""
        if self._root and bool(cache.layers) == self._has_keys:
            return
        out = self._model.forward(
            Nodes(torch.zeros(1, 1, dtype=torch.long), cache, [slot]), taps=self._taps, want="none"
        )
        self._wide = 0 if out.features is None else out.features.shape[-1]
        self._has_keys = bool(cache.layers)
        kept = [(t.shape[1], t.shape[3], str(t.dtype)) for pair in cache.layers for t in pair]
        states = [(t.shape, str(t.dtype)) for part in cache.snapshot(slot) for t in part]
        self._root = hashlib.sha256(repr((self._about, kept, states)).encode()).digest()

    def _segments(self, tokens: Sequence[int]) -> list[_Segment]:
        """The names of whole segments."""
        ids, chain, found = array("q", tokens), self._root, list[_Segment]()
        folder = self.folder.path / self._root.hex()[:16]
        taps = "f" + hashlib.sha256(repr(self._taps).encode()).hexdigest()[:8]
        for start in range(0, len(ids) - self.segment + 1, self.segment):
            before, chain = chain, hashlib.sha256(chain + ids[start : start + self.segment].tobytes()).digest()
            stem = f"{before.hex()[:16]}-{chain.hex()[:40]}"
            found.append(_Segment(*(folder / f"{stem}.{kind}" for kind in ("keys", taps, "states"))))
        return found

    def _is_there(self, segment: _Segment) -> bool:
        return segment.keys.exists() and (not self._taps or segment.features.exists())

    def _is_faster(self, cache: SlotCache) -> bool:
        """Whether the disk is, or one of the two is not measured yet."""
        faster = self._second_of_byte * cache.bytes_per_token <= self._second_of_token or not self._second_of_token
        if not faster:
            self._second_of_byte *= _DOUBT
        return faster


def _cells(cache: SlotCache, slot: int, start: int, end: int) -> Iterator[memoryview]:
    """The bytes of a segment in the cache: of each layer the keys, then the values, [kv_head, cell, head_dim] each."""
    for pair in cache.layers:
        for t in pair:
            yield from map(_bytes, t[slot, :, start:end])


def _bytes(t: Tensor) -> memoryview:
    """The memory of a tensor in one piece."""
    return t.view(-1).view(torch.uint8).numpy().data


def _moved(old: float, new: float) -> float:
    return new if not old else old + _NEWEST * (new - old)
