"""Models on a GPU, by the kernels of `outrider.kernels.gpu`. A node has the same bits alone, in a chain, in a tree, in a batch, and
in any chunk of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from outrider.core.types import PADDING
from outrider.kernels.gpu import linear
from outrider.models.base import LanguageModel, Output, Want, check_layers, check_taps, check_whole_head, over_vocabulary
from outrider.models.gpu.cache import GpuCache
from outrider.models.gpu.plan import MAX_ROWS, Plan
from outrider.models.gpu.rows import RowBuffer, Rows, reach
from outrider.models.gpu.weights import DeviceMatrix
from outrider.models.native.program import Program
from outrider.models.nodes import Nodes

_WIDTH = 16  # nodes: the longest path is rounded up to a multiple, so that few shapes are compiled


class GpuModel(LanguageModel):
    """A program over the matrices of a `DeviceSource`.

    Args:
        program: what it computes.
        device: where its weights are, as torch names it. "cpu" runs the kernels in Triton's interpreter, for proofs.
        max_rows: nodes that one forward of the kernels reads; more are read in pieces.

    Raises NotOnGpu for a program that has ops without a kernel.
    """

    path = "gpu"
    kv_cache_dtype = "bfloat16"
    batch_invariant = skips_padding = True

    def __init__(self, program: Program, device: str, max_rows: int = MAX_ROWS) -> None:
        self.vocab_size, self.max_length, self.device = program.vocab_size, program.max_length, device
        self.weight_bytes, self.head_bytes = sum(m.bytes for m in program.matrices), program.head.bytes
        self._max_rows = max_rows
        self._run(program)

    def _run(self, program: Program) -> None:
        self.program, self.num_layers, self.windows = program, program.num_layers, program.windows
        self.plan = Plan(program, self.device, self._max_rows)
        self._buffer: RowBuffer | None = None

    def layer_subset(self, layers: Sequence[int]) -> GpuModel:
        out = copy.copy(self)
        out._run(self.program.subset(check_layers(layers, self.num_layers)))
        return out

    def new_cache(self, num_slots: int, max_length: int) -> GpuCache:
        return self.plan.new_cache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Raises ValueError for tokens, parents or a cache that do not fit, IndexError for slots."""
        check_taps(taps, self.num_layers)
        self._check(nodes)
        cache, (batch, count), program = cast("GpuCache", nodes.cache), nodes.tokens.shape, self.program
        shown = count if want == "all" else 1 if want == "last" else 0
        logits = np.zeros((batch, shown, program.head.n), np.float32)
        features = np.zeros((batch, count, len(taps) * program.hidden), np.float32) if taps else None
        most, last = self.plan.logit_rows if want == "all" else self.plan.max_rows, np.array(nodes.last)
        entries = min(batch, most, self.plan.logit_rows)
        step = most // entries
        for first in range(0, batch, entries):
            for begin in range(0, count, step):
                at, piece = slice(first, first + entries), slice(begin, begin + step)
                ends = last[at] - begin
                here = np.flatnonzero((ends >= 0) & (ends < step))
                wanted: Want = "none" if want == "last" and not len(here) else want
                rows = self._rows(nodes, at, piece, ends)
                some, tapped = self.plan.run(rows, cache, taps, wanted)
                if wanted == "last":
                    logits[first + here, 0] = some.cpu().numpy()[here]
                elif wanted == "all":
                    logits[at, piece] = some.cpu().numpy().reshape(rows.entries, rows.nodes, -1)
                if features is not None and tapped is not None:
                    features[at, piece] = tapped.cpu().numpy().reshape(rows.entries, rows.nodes, -1)
        if program.head_ids is not None:
            logits = over_vocabulary(logits, program.head_ids, self.vocab_size)
        return Output(logits, features)

    def _rows(self, nodes: Nodes, at: slice, piece: slice, ends: np.ndarray) -> Rows:
        """Some nodes of some entries, on the device. ends: the node of each entry whose logits are wanted."""
        tree, starts, held = nodes.tree[at], np.array(nodes.lengths[at]), nodes.held + piece.start
        tokens, positions = nodes.tokens[at, piece], nodes.positions[at, piece]
        (entries, count), parents = tokens.shape, tree[:, held : held + tokens.shape[1]]
        paths, padding = None, parents == PADDING
        if nodes.parents is not None and ((tree != np.arange(-1, tree.shape[1] - 1)) & (tree != PADDING)).any():
            paths = _paths(tree[:, : held + count])[:, held:]
        width, length = 0 if paths is None else paths.shape[2], min(reach(nodes.span), nodes.cache.capacity)
        if self._buffer is None or width > self._buffer.width:
            self._buffer = RowBuffer(self.device, self.plan.max_rows, max(width, _WIDTH))
        rows, fields = self._buffer.views(entries, count, width, length)
        fields["slots"][:], fields["starts"][:] = nodes.slots[at], starts
        fields["tokens"][:], fields["parents"][:] = tokens.reshape(-1), parents.reshape(-1)
        fields["positions"][:] = np.where(padding, -1, positions).reshape(-1)
        fields["cells"][:] = (starts[:, None] + held + np.arange(count)).reshape(-1)
        fields["last"][:] = np.arange(entries) * count + ends.clip(0, count - 1)
        if paths is not None:
            fields["paths"][:] = paths.reshape(entries * count, width)
        self._buffer.send(rows.size)
        return rows

    def _check(self, nodes: Nodes) -> None:
        """Raise ValueError or IndexError for nodes that kernels cannot read."""
        tokens, cache, slots, total = nodes.tokens, nodes.cache, nodes.slots, nodes.total
        if len(slots) != len(tokens) or not tokens.size:
            raise ValueError(f"tokens are {tokens.shape} for the cache slots {slots}: give each slot a line of one token at least")
        if not isinstance(cache, GpuCache) or not {*self.program.cells} <= {*range(len(cache.layers))}:
            raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
        if min(slots) < 0 or max(slots) >= cache.num_slots:
            raise IndexError(f"slots are 0 to {cache.num_slots - 1} of this cache, got {slots}")
        if nodes.parents is not None and (nodes.held < 0 or len(nodes.parents) != len(tokens)):
            raise ValueError(
                f"tokens are {tokens.shape}, parents {nodes.parents.shape}; one parent per node, first those of the nodes in the "
                "scratch"
            )
        tree, real = nodes.tree, nodes.tree[:, nodes.held :] != PADDING
        wrong = (tree < PADDING) | (tree >= np.arange(total)) | (np.take_along_axis(tree, tree.clip(0), 1) == PADDING) & (tree >= 0)
        if wrong.any():
            entry, node = (int(i[0]) for i in np.nonzero(wrong))
            raise ValueError(
                f"node {node} of entry {entry} has parent {tree[entry, node]}: a parent is -1 for the root, -2 for padding, else a "
                "smaller node that is no padding"
            )
        outside = ((tokens < 0) | (tokens >= self.vocab_size)) & real
        if outside.any():
            entry, node = (int(i[0]) for i in np.nonzero(outside))
            raise ValueError(
                f"token {tokens[entry, node]} (entry {entry}, node {node}) is not in the vocabulary of {self.vocab_size}"
            )
        cache.reserve(slots, total)

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        return cast("DeviceMatrix", self.program.table).rows(tokens)

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        ids, head = self.program.head_ids, cast("DeviceMatrix", self.program.head)
        places = tokens if ids is None else np.searchsorted(ids, tokens)
        if ids is not None and not np.array_equal(ids[np.minimum(places, len(ids) - 1)], tokens):
            raise ValueError("the output head of this model does not keep some of these tokens; load it without head_ids")
        return head.rows(places)

    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        check_whole_head(self.program.head_ids)
        head, flat = cast("DeviceMatrix", self.program.head), np.ascontiguousarray(hidden, np.float32).reshape(-1, hidden.shape[-1])
        out = np.empty((len(flat), head.n), np.float32)
        for at in range(0, len(flat), self.plan.logit_rows):
            x = torch.from_numpy(flat[at : at + self.plan.logit_rows]).to(self.device)
            y = torch.empty(1, len(x), head.n, device=self.device)
            linear.linear(x, head.weight, y, head.bias)
            out[at : at + len(x)] = y[0].cpu().numpy()
        return out.reshape(*hidden.shape[:-1], head.n)


def _paths(tree: np.ndarray) -> np.ndarray:
    """int32 [entry, node, deepest]: the nodes from the root down to each node."""
    batch, total = tree.shape
    every, depths = np.arange(batch), np.zeros((batch, total), np.int64)
    paths = np.zeros((batch, total, total), np.int32)
    for node, parents in enumerate(tree.T):
        below = parents >= 0
        above = parents[below]
        paths[below, node] = paths[every[below], above]
        depths[below, node] = depths[every[below], above] + 1
        paths[every, node, depths[:, node]] = node
    return paths[:, :, : -(-(int(depths.max()) + 1) // _WIDTH) * _WIDTH]
