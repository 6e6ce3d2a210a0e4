"""Models on an NVIDIA GPU. A node has the same bits alone, in a chain, in a tree, in a batch, and in any chunk of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from outrider.core.types import PADDING
from outrider.kernels import gpu
from outrider.kernels.gpu import APART, linear
from outrider.kernels.gpu.jit import power_of_two
from outrider.models.base import (
    Chain,
    DrawnChain,
    LanguageModel,
    Output,
    Pending,
    Verification,
    Want,
    check_layers,
    check_taps,
    check_whole_head,
    over_vocabulary,
)
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.checkpoint import free_memory
from outrider.models.gpu.cache import GpuCache
from outrider.models.gpu.chains import GpuChains
from outrider.models.gpu.plan import MAX_ROWS, GpuPlan
from outrider.models.gpu.rows import RowBuffer, Rows, paths_of, reach
from outrider.models.gpu.step import GpuStep
from outrider.models.gpu.weights import DeviceMatrix
from outrider.models.native.program import Program
from outrider.models.nodes import Nodes

_GROUP = 32  # nodes of a long prompt that are an entry of `Rows`: fewer are padding at its end
_WIDTH = 16  # nodes: the longest path is rounded up to a multiple, so that few shapes are compiled


class GpuModel(LanguageModel):
    """A program over the matrices of a `DeviceSource`, run by the kernels of `outrider.kernels.gpu`.

    Args:
        program: what it computes.
        device: where its weights are, as torch names it. With "cpu" Triton's interpreter runs the kernels, for proofs.
        max_rows: nodes that the kernels read together; more are read in pieces.

    Raises NotOnGpu for a program that has ops without a kernel.
    """

    kv_cache_dtype = "bfloat16"
    batch_invariant = skips_padding = True

    def __init__(self, program: Program, device: str, max_rows: int = MAX_ROWS) -> None:
        self.vocab_size, self.max_length, self.device = program.vocab_size, program.max_length, device
        self.path = f"gpu: {gpu.arithmetic(device)}"
        self.weight_bytes = sum(m.bytes for m in program.matrices)
        self._run(program, max_rows)

    def _run(self, program: Program, max_rows: int) -> None:
        self.program, self.num_layers, self.windows = program, program.num_layers, program.windows
        self.plan, self._buffer = GpuPlan(program, self.device, max_rows), RowBuffer(self.device, max_rows, 4 * _WIDTH)
        # both draw from the whole vocabulary
        self.has_draft_chains = program.head_ids is None
        self._steps = GpuStep(self.plan) if self.has_draft_chains else None
        self._chains: GpuChains | None = None

    def layer_subset(self, layers: Sequence[int]) -> GpuModel:
        out = copy.copy(self)
        out._run(self.program.subset(check_layers(layers, self.num_layers)), self.plan.max_rows)
        return out

    def new_cache(self, num_slots: int, max_length: int) -> GpuCache:
        if self._steps is not None:
            self._steps.forget()
        return self.plan.new_cache(num_slots, max_length)

    def longest(self, num_slots: int) -> int:
        """Half of what is free is for this cache: drafters, prefixes and graphs come after it."""
        token = 2 * num_slots * sum(heads * (dim + value_dim) for heads, dim, value_dim in self.program.cells.values())
        return max(min(self.max_length, free_memory(self.device) // (2 * token) - SCRATCH), 1)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Raises ValueError for tokens, parents or a cache that do not fit, IndexError for slots."""
        check_taps(taps, self.num_layers)
        self._check(nodes)
        self.plan.turn += 1
        cache, (batch, count) = cast("GpuCache", nodes.cache), nodes.tokens.shape
        size = count if count <= min(APART, self.plan.max_rows) else min(_GROUP, self.plan.max_rows)
        fields = _grouped(nodes, size)
        groups, last = len(fields["slots"]), np.array(nodes.last)
        ends = np.arange(batch) * (groups // batch) + last // size  # the groups with the last nodes
        shown = (groups, size) if want == "all" else (batch, 1 if want == "last" else 0)
        logits = np.zeros((*shown, self.program.head.n), np.float32)
        features = np.zeros((groups, size, len(taps) * self.program.hidden), np.float32)
        real = np.flatnonzero((fields["positions"] >= 0).any(1))
        most = min((self.plan.logit_rows if want == "all" else self.plan.max_rows) // size, self.plan.logit_rows)
        for at in range(0, len(real), most):
            piece = real[at : at + most]
            entries = np.flatnonzero(np.isin(ends, piece))
            wanted = np.searchsorted(piece, ends[entries]) * size + last[entries] % size
            rows = self._rows(
                {name: each[piece] for name, each in fields.items()}, wanted, min(reach(nodes.span), cache.capacity)
            )
            some, tapped = self.plan.run(rows, cache, taps, "none" if want == "last" and not len(entries) else want)
            if want == "all":
                logits[piece] = some.cpu().numpy().reshape(len(piece), size, -1)
            elif want == "last":
                logits[entries, 0] = some[: len(entries)].cpu().numpy()
            if tapped is not None:
                features[piece] = tapped.cpu().numpy().reshape(len(piece), size, -1)
        if want == "all":
            logits = logits.reshape(batch, -1, self.program.head.n)[:, :count]
        if self.program.head_ids is not None:
            logits = over_vocabulary(logits, self.program.head_ids, self.vocab_size)
        return Output(logits, features.reshape(batch, -1, features.shape[2])[:, :count] if taps else None)

    def _rows(self, fields: dict[str, np.ndarray], wanted: np.ndarray, length: int) -> Rows:
        """Rows on the device. wanted: those whose logits are, if only those of some are."""
        width = fields["paths"].shape[2] if "paths" in fields else 0
        if width > self._buffer.width:
            self._buffer = RowBuffer(self.device, self.plan.max_rows, width)
        entries, nodes = fields["tokens"].shape
        rows, host = self._buffer.views(entries, nodes, width, length)
        for name, each in fields.items():
            host[name][:] = each.reshape(host[name].shape)
        host["last"][:] = 0
        host["last"][: len(wanted)] = wanted
        self._buffer.send(rows.size)
        return rows

    def step(self, cache: SlotCache, slots: list[int], check: Verification, *, taps: tuple[int, ...] = ()) -> Pending:
        """See `LanguageModel.step`. One graph, but for sequences whose parameters read tokens or cut the distribution."""
        check_taps(taps, self.num_layers)
        by_host = [active or cut for active, cut in zip(check.warp.active, check.warp.filtered, strict=True)]
        launched = None
        if check.verifier.name == "match" and self._steps is not None and isinstance(cache, GpuCache):
            launched = self._steps.launch(cache, slots, taps, check, by_host)
        if launched is None:
            return super().step(cache, slots, check, taps=taps)
        out = Output(cast("Any", launched.logits), cast("Any", launched.features))
        return Pending(out, lambda: check.completed(launched.verdicts(), by_host, out.logits), launched.first)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. All levels are on the device; chains that end early are cut on the host."""
        self._chains = self._chains or GpuChains(self.plan)
        asked, drawn = [chain for chain in chains if chain.depth > 0], list[DrawnChain]()
        held = [len(chain.tokens) - 1 if len(chain.tokens) > APART else 0 for chain in asked]
        for chain, count in zip(asked, held, strict=True):
            if count:
                self.forward(Nodes(np.array([chain.tokens[:count]]), cache, [chain.slot]), want="none")
        longest = max((len(chain.tokens) - count for chain, count in zip(asked, held, strict=True)), default=1)
        step = self._chains.most // power_of_two(longest)
        for at in range(0, len(asked), step):
            drawn += self._chains.draw(cast("GpuCache", cache), asked[at : at + step], held[at : at + step])
        following = iter(drawn)
        return [next(following) if chain.depth > 0 else DrawnChain([], [], []) for chain in chains]

    def _check(self, nodes: Nodes) -> None:
        """Raise ValueError or IndexError for nodes that kernels cannot read."""
        tokens, slots, cache = nodes.tokens, nodes.slots, nodes.cache
        if len(slots) != len(tokens) or not tokens.size or nodes.held < 0:
            raise ValueError(
                f"tokens are {tokens.shape} for the cache slots {slots} and the parents of {nodes.total} nodes: give each slot a "
                "line of one token at least, and each node a parent"
            )
        if not isinstance(cache, GpuCache) or not self.program.cells.items() <= cache.shapes.items():
            raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
        if min(slots) < 0 or max(slots) >= cache.num_slots:
            raise IndexError(f"slots are 0 to {cache.num_slots - 1} of this cache, got {slots}")
        _ = nodes.plan  # it raises ValueError for parents that do not fit
        outside = ((tokens < 0) | (tokens >= self.vocab_size)) & (nodes.tree[:, nodes.held :] != PADDING)
        if outside.any():
            entry, node = np.argwhere(outside)[0]
            raise ValueError(
                f"token {tokens[entry, node]} (entry {entry}, node {node}) is not in the vocabulary of {self.vocab_size}"
            )
        cache.reserve(slots, nodes.total)

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        return cast("DeviceMatrix", self.program.table).rows(tokens)

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        check_whole_head(self.program.head_ids)
        return cast("DeviceMatrix", self.program.head).rows(tokens)

    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        check_whole_head(self.program.head_ids)
        head = cast("DeviceMatrix", self.program.head)
        x = torch.from_numpy(np.ascontiguousarray(hidden, np.float32)).to(self.device).view(-1, head.k)
        out = torch.empty(1, len(x), head.n, device=self.device)
        linear.linear(x, head.weight, out, head.bias)
        return out.cpu().numpy().reshape(*hidden.shape[:-1], head.n)


def _grouped(nodes: Nodes, size: int) -> dict[str, np.ndarray]:
    """The fields of `Rows`, [group, ...]. A group is so many nodes of one slot, and a slot's last one ends with padding."""
    (batch, count), tree, held = nodes.tokens.shape, nodes.tree, nodes.held
    starts, each, parents = np.array(nodes.lengths), -(-count // size), tree[:, held:]

    def cut(values: np.ndarray, fill: int) -> np.ndarray:
        """[batch, node, ...] -> [group, node, ...]."""
        padded = np.full((batch, each * size, *values.shape[2:]), fill, np.int32)
        padded[:, :count] = values
        return padded.reshape(batch * each, size, *values.shape[2:])

    fields = {
        "slots": np.repeat(nodes.slots, each),
        "starts": np.repeat(starts, each),
        "parents": cut(parents, PADDING),
    }
    fields["tokens"] = cut(np.where(parents == PADDING, 0, nodes.tokens), 0)
    fields["positions"] = cut(np.where(parents == PADDING, -1, nodes.positions), -1)
    fields["cells"] = cut(starts[:, None] + held + np.arange(count), 0)
    if ((tree != np.arange(-1, tree.shape[1] - 1)) & (tree != PADDING)).any():  # else each is a chain
        each_path = [paths_of(parents) for parents in tree.tolist()]
        width = -(-max(len(path) for one in each_path for path in one) // _WIDTH) * _WIDTH
        wide = [[path + [0] * (width - len(path)) for path in one] for one in each_path]
        fields["paths"] = cut(np.array(wide)[:, held:], 0)
    return fields
