"""What followed the ends of a text, in native code. `outrider/drafters/lookup` explains lookups, and has the twin in Python."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np

from outrider.kernels.cpu.library import LookupStruct, SegmentsStruct, SegmentStruct
from outrider.kernels.cpu.state import library

Sorted = tuple[np.ndarray, np.ndarray]
"""int32: the tokens of a text, and its places, counted from its end, in the order of the tokens before them."""


class SortedTexts:
    """Corpora, each of some sorted texts, as native code reads them. They must not change."""

    def __init__(self, corpora: Sequence[Sequence[Sorted]]) -> None:
        plain = partial(np.ascontiguousarray, dtype=np.int32)  # a view, where they are already
        self._texts = [[(plain(t), plain(order)) for t, order in texts] for texts in corpora]
        self._segments = [
            (SegmentStruct * len(texts))(*((t.ctypes.data, order.ctypes.data, len(t)) for t, order in texts))
            for texts in self._texts
        ]
        places = [(ctypes.addressof(segments), len(segments)) for segments in self._segments]
        self._structs, self.count = (SegmentsStruct * len(places))(*places), len(places)
        self.address = ctypes.addressof(self._structs)


class Lookup:
    """A growing text and what followed its ends, in itself and in corpora.

    least: a path ends where its mass falls below this. doubt: match length at which a continuation seen once has mass 1/2.
    """

    def __init__(self, least: float, doubt: float) -> None:
        self._call, self._handle = library().lookup, ctypes.c_void_p(library().lookup_new())
        weakref.finalize(self, library().lookup_free, self._handle)
        self._job, self._bounds = LookupStruct(least=least, doubt=doubt), (-1, -1, -1)
        self._texts: SortedTexts | None = None

    def offer(
        self, new: Sequence[int], texts: SortedTexts, forced: Sequence[int], depth: int, width: int, nodes: int
    ) -> tuple[list[tuple[int, int]], list[float], int]:
        """Read more of the text, and grow a tree within these bounds: (token, parent) of its nodes, the root first, their masses,
        and the length of the longest match. forced: what a grammar leaves no choice about."""
        job = self._job  # to set a field costs as much as the lookup: those that stay are left
        if self._bounds != (depth, width, nodes):
            self._bounds = job.depth, job.width, job.nodes = depth, width, nodes
            ints = ctypes.c_int32 * (nodes + 1)
            self._out = ints(), ints(), (ctypes.c_double * (nodes + 1))()
            job.tokens, job.parents, job.masses = map(ctypes.addressof, self._out)
        if self._texts is not texts:
            self._texts, job.corpora, job.corpora_count = texts, texts.address, texts.count
        ids = array("i", [*new, *forced])
        job.unread, _ = ids.buffer_info()
        job.unread_count, job.forced_count = len(new), len(forced)
        if forced:
            job.forced = job.unread + 4 * len(new)
        self._call(self._handle, job)
        tokens, parents, masses = self._out
        count = job.made
        return list(zip(tokens[:count], parents[:count], strict=True)), masses[:count], job.match
