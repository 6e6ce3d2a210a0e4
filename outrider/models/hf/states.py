"""The states of recurrent layers: linear attention, Mamba, short convolutions.

Keys and values can be dropped token by token. A state cannot: it holds all tokens at once. So a slot has one committed state
in each recurrent layer, and the scratch of a step has what each node read there. The state after a node is the state after
its parent, moved on by what the node read. A commit names the path that is kept, and its last state becomes the committed
one. Nothing is undone.

The states after the last nodes of a step are kept, because a commit or a child will ask for them. Those of earlier nodes are
computed again, by the same arithmetic, on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.types import PADDING

# What a layer remembers of a sequence: one or more tensors, [1, ...] each.
State = tuple[Tensor, ...]

# States of each slot and layer that stay in memory during a step, besides the committed one.
KEPT = 16


class NodeChain(NamedTuple):
    """Nodes of which each is the parent of the next.

    start: the state before the first. rows: of the nodes, in what they read. wanted: whether the state after each is wanted.
    """

    start: State
    rows: list[int]
    wanted: list[bool]


# Moves states on along chains: (chains, what the nodes read, [row, ...] each) -> (outputs [row, ...] with zeros for rows of no
# chain, the wanted states, chain by chain). It leaves the starts as they were. A node's bits do not depend on others.
Advance = Callable[[Sequence[NodeChain], Sequence[Tensor]], tuple[Tensor, list[list[State]]]]


def one_by_one(step: Callable[[State, list[Tensor]], tuple[State, Tensor]]) -> Advance:
    """Move states on node by node. step: (state before, what a node reads, [1, ...] each) -> (state after, output [1, ...])."""

    def advance(chains: Sequence[NodeChain], inputs: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
        outputs, states = dict[int, Tensor](), list[list[State]]()
        for state, rows, wanted in chains:
            states.append([])
            for row, keep in zip(rows, wanted, strict=True):
                state, outputs[row] = step(state, [t[row : row + 1] for t in inputs])
                if keep:
                    states[-1].append(state)
        empty = torch.zeros_like(next(iter(outputs.values())))
        return torch.cat([outputs.get(row, empty) for row in range(len(inputs[0]))]), states

    return advance


class _Read(NamedTuple):
    """What a node of the scratch read: a row of the inputs of a scan."""

    scan: tuple[Advance, Sequence[Tensor]]
    row: int


class _Scratch:
    """The nodes of a step in one slot. parents: of each node. read: what each read; None for padding."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.read: list[_Read | None] = []
        self.states: dict[int, State] = {}  # of the last nodes


class _Growing:
    """A chain while its nodes are found. first: the parent of its first node. wave: how many chains go before it."""

    def __init__(self, slot: int, first: int, wave: int) -> None:
        self.slot, self.first, self.wave = slot, first, wave
        self.nodes: list[int] = []


class LayerStates:
    """The states of one recurrent layer, in all slots.

    committed: [slot, ...], the state after the committed tokens of each slot; one tensor for each part of the state.
    """

    def __init__(self, start: Sequence[Tensor], num_slots: int) -> None:
        """start: the parts of the state before the first token, [1, ...] each."""
        self._start = tuple(start)
        self.committed = [t.repeat(num_slots, *[1] * (t.dim() - 1)) for t in start]
        self._scratch: dict[int, _Scratch] = {}

    def scan(
        self, slots: Sequence[int], trees: Sequence[list[int]], count: int, advance: Advance, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Move the states on by the new nodes, each from the state after its parent. The nodes are in the scratch then.

        Args:
            slots: `slots` of `Nodes`.
            trees: their `parent_lists`.
            count: their `count`.
            advance: moves states on along chains.
            inputs: what each node reads, [batch * node, ...] each.

        Returns the outputs, [batch * node, ...]; zeros for padding.
        """
        chains, row_of = list[_Growing](), dict[tuple[int, int], int]()
        # By slot and node: what chains begin with; None until it is known.
        starts = dict[tuple[int, int], State | None]()
        told = advance, inputs
        for b, (slot, parents) in enumerate(zip(slots, trees, strict=True)):
            scratch, held = self._scratch.setdefault(slot, _Scratch()), len(parents) - count
            self._cut(slot, held)
            # By node: the chain that ends there, and the wave of its chain.
            ends, waves = dict[int, _Growing](), dict[int, int]()
            for node, parent in enumerate(parents[held:], held):
                scratch.parents.append(parent)
                if parent == PADDING:
                    scratch.read.append(None)
                    continue
                row_of[slot, node] = b * count + node - held
                scratch.read.append(_Read(told, row_of[slot, node]))
                if (chain := ends.pop(parent, None)) is None:
                    starts[slot, parent] = self.after(slot, parent) if parent < held else None
                    chain = _Growing(slot, parent, 1 + waves.get(parent, -1))
                    chains.append(chain)
                chain.nodes.append(node)
                ends[node], waves[node] = chain, chain.wave
            self._expect(scratch, waves)
        out = None
        for wave in range(1 + max(chain.wave for chain in chains)):
            group = [chain for chain in chains if chain.wave == wave]
            outputs, states = advance([self._chain(chain, starts, row_of) for chain in group], inputs)
            if out is None:
                out = outputs
            else:
                rows = [row_of[chain.slot, node] for chain in group for node in chain.nodes]
                out[rows] = outputs[rows]
            for chain, wanted in zip(group, states, strict=True):
                latest, after = self._scratch[chain.slot].states, iter(wanted)
                for node in chain.nodes:
                    at = chain.slot, node
                    if not (node in latest or at in starts):
                        continue
                    state = next(after)
                    if node in latest:
                        latest[node] = state
                    if at in starts:
                        starts[at] = state
        assert out is not None
        return out

    def _chain(
        self, chain: _Growing, starts: dict[tuple[int, int], State | None], row_of: dict[tuple[int, int], int]
    ) -> NodeChain:
        latest, start = self._scratch[chain.slot].states, starts[chain.slot, chain.first]
        at = [(chain.slot, node) for node in chain.nodes]
        assert start is not None  # an earlier wave, or an earlier forward, has it
        return NodeChain(start, [row_of[n] for n in at], [n in starts or n[1] in latest for n in at])

    def after(self, slot: int, node: int) -> State:
        """The state after a node of the scratch; -1: after the committed tokens. It must not be changed.

        Raises RuntimeError for a node that no forward of this step has read.
        """
        scratch, path = self._scratch.get(slot), list[_Read]()
        while node >= 0 and (scratch is None or not scratch.states.get(node)):
            read = scratch.read[node] if scratch is not None and node < len(scratch.read) else None
            if scratch is None or read is None:
                raise RuntimeError(f"no forward of this step has read node {node} of slot {slot} in a recurrent layer")
            path.append(read)
            node = scratch.parents[node]
        state = (
            tuple(t[slot : slot + 1] for t in self.committed) if scratch is None or node < 0 else scratch.states[node]
        )
        for _, reads in groupby(reversed(path), key=lambda read: id(read.scan)):
            run = [*reads]
            advance, inputs = run[0].scan
            rows = [read.row for read in run]
            _, states = advance([NodeChain(state, rows, [False] * (len(rows) - 1) + [True])], inputs)
            state = states[0][0]
        return state

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the state after the last node of a path from the root. Raises ValueError for nodes that are no such path."""
        if not len(path):
            return
        scratch = self._scratch.get(slot)
        state = self.after(slot, path[-1])
        assert scratch is not None
        if [scratch.parents[node] for node in path] != [-1, *path[:-1]]:
            raise ValueError(f"{[*path]} is no path from the root; the parents are {scratch.parents}")
        for old, new in zip(self.committed, state, strict=True):
            old[slot] = new[0]
        self._renumber(slot, scratch, len(path), path[-1])

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._scratch.pop(slot, None)
        for old, start in zip(self.committed, self._start, strict=True):
            old[slot] = start[0]

    def snapshot(self, slot: int) -> list[np.ndarray]:
        """A copy of the committed state of a slot, in float32."""
        return [t[slot].to("cpu", torch.float32, copy=True).numpy() for t in self.committed]

    def restore(self, slot: int, state: Sequence[np.ndarray]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        self._scratch.pop(slot, None)
        for old, new in zip(self.committed, state, strict=True):
            old[slot] = torch.tensor(new)

    @property
    def bytes(self) -> int:
        """Of the committed states of all slots, and of the states after nodes that are in memory now."""
        return self._each * (len(self.committed[0]) + sum(len(scratch.states) for scratch in self._scratch.values()))

    @property
    def most_bytes(self) -> int:
        """The most that one slot takes: the committed state, and those of a step."""
        return self._each * (1 + KEPT)

    @property
    def _each(self) -> int:
        return sum(t.nbytes for t in self._start)

    def _expect(self, scratch: _Scratch, new: Iterable[int]) -> None:
        """Make room for the states after new nodes, and forget those of the earliest."""
        latest = sorted({*scratch.states, *new})[-KEPT:]
        scratch.states = {node: scratch.states.get(node, ()) for node in latest}

    def _cut(self, slot: int, nodes: int) -> None:
        """Drop the scratch from this node on: a forward writes it again."""
        scratch = self._scratch[slot]
        if len(scratch.read) < nodes:
            raise RuntimeError(f"slot {slot} has {len(scratch.read)} nodes in a recurrent layer, not {nodes}")
        del scratch.read[nodes:], scratch.parents[nodes:]
        for node in [n for n in scratch.states if n >= nodes]:
            del scratch.states[node]

    def _renumber(self, slot: int, scratch: _Scratch, count: int, last: int) -> None:
        """After a commit of `count` nodes up to `last`: node i of the scratch is now node i - count, as in the cache's cells.

        What followed the path goes on from the committed state. Nodes beside the path can have no children any more.
        """
        below = {last: -1, PADDING: PADDING}
        parents, read, states = list[int](), list[_Read | None](), dict[int, State]()
        for node in range(count, len(scratch.parents)):
            parent = below.get(scratch.parents[node], PADDING)
            parents.append(parent)
            read.append(None if parent == PADDING else scratch.read[node])
            if parent != PADDING:
                below[node] = node - count
                if node in scratch.states:
                    states[node - count] = scratch.states[node]
        if any(r is not None for r in read):
            scratch.parents, scratch.read, scratch.states = parents, read, states
        else:
            del self._scratch[slot]
