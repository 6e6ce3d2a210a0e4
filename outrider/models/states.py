"""The states of recurrent layers: linear attention, Mamba, short convolutions.

Keys and values can be dropped token by token. A state cannot: it holds all tokens at once. So a slot has one committed state
in each recurrent layer, and the scratch of a step has what each node read there. The state after a node is the state after
its parent, moved on by what the node read. A commit names the path that is kept, and its last state becomes the committed
one. Nothing is undone.

The states after the last nodes of a step are kept, because a commit or a child will ask for them. Those of earlier nodes are
computed again, by the same arithmetic, if somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.types import PADDING

if TYPE_CHECKING:
    from outrider.models.nodes import Nodes

# What a layer remembers of a sequence: one or more tensors, [1, ...] each.
State = tuple[Tensor, ...]
# Moves a state on by one node: (state after the parent, what the node read, [1, ...] each) -> (state after the node, output
# [1, ...]). It leaves the state that it is given as it was.
Advance = Callable[[State, list[Tensor]], tuple[State, Tensor]]

# States of each slot and layer that stay in memory during a step, besides the committed one.
KEPT = 16


class _Scratch:
    """The nodes of a step in one slot. parents: of each node. read: what each read; None for padding."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.read: list[tuple[Advance, list[Tensor]] | None] = []
        self.states: dict[int, State] = {}  # of the last nodes, oldest first


class LayerStates:
    """The states of one recurrent layer, in all slots.

    committed: [slot, ...], the state after the committed tokens of each slot; one tensor for each part of the state.
    """

    def __init__(self, start: Sequence[Tensor], num_slots: int) -> None:
        """start: the parts of the state before the first token, [1, ...] each."""
        self._start = tuple(start)
        self.committed = [t.repeat(num_slots, *[1] * (t.dim() - 1)) for t in start]
        self._scratch: dict[int, _Scratch] = {}

    def scan(self, nodes: Nodes, advance: Advance, inputs: Sequence[Tensor]) -> Tensor:
        """Move the states on by the new nodes, each from the state after its parent. The nodes are in the scratch then.

        Nodes go one by one, so the arithmetic of one cannot depend on others. inputs: what each node reads, [batch * node, ...]
        each. Returns the outputs, [batch * node, ...]; zeros for padding.
        """
        rows = list(zip(*(t.split(1) for t in inputs), strict=True))
        outputs: list[Tensor | None] = [None] * len(rows)
        for b, (slot, parents) in enumerate(zip(nodes.slots, nodes.parent_lists, strict=True)):
            scratch = self._scratch.setdefault(slot, _Scratch())
            self._cut(slot, nodes.held)
            for n, parent in enumerate(parents[nodes.held :]):
                scratch.parents.append(parent)
                if parent == PADDING:
                    scratch.read.append(None)
                    continue
                row = b * nodes.count + n
                read = list(rows[row])
                state, outputs[row] = advance(self.after(slot, parent), read)
                scratch.read.append((advance, read))
                self._remember(scratch, nodes.held + n, state)
        some = next(t for t in outputs if t is not None)
        return torch.cat([torch.zeros_like(some) if t is None else t for t in outputs])

    def after(self, slot: int, node: int) -> State:
        """The state after a node of the scratch; -1: after the committed tokens. It must not be changed.

        Raises RuntimeError for a node that no forward of this step has read.
        """
        scratch, path = self._scratch.get(slot), list[int]()
        while node >= 0 and (scratch is None or node not in scratch.states):
            if scratch is None or node >= len(scratch.read) or scratch.read[node] is None:
                raise RuntimeError(f"no forward of this step has read node {node} of slot {slot} in a recurrent layer")
            path.append(node)
            node = scratch.parents[node]
        state = (
            tuple(t[slot : slot + 1] for t in self.committed) if scratch is None or node < 0 else scratch.states[node]
        )
        for n in reversed(path):
            assert scratch is not None
            advance, read = scratch.read[n]  # pyright: ignore[reportGeneralTypeIssues]
            state, _ = advance(state, read)
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
        for kept, new in zip(self.committed, state, strict=True):
            kept[slot] = new[0]
        self._renumber(slot, scratch, len(path), path[-1])

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._scratch.pop(slot, None)
        for kept, start in zip(self.committed, self._start, strict=True):
            kept[slot] = start[0]

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy of the committed state of a slot."""
        return [t[slot].clone() for t in self.committed]

    def restore(self, slot: int, state: Sequence[Tensor]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        self._scratch.pop(slot, None)
        for kept, old in zip(self.committed, state, strict=True):
            kept[slot] = old

    @property
    def bytes(self) -> int:
        """Of the committed state of one slot."""
        return sum(t.numel() * t.element_size() for t in self._start)

    @property
    def scratch_bytes(self) -> int:
        """Of the states after nodes that are in memory now."""
        return self.bytes * sum(len(scratch.states) for scratch in self._scratch.values())

    def _remember(self, scratch: _Scratch, node: int, state: State) -> None:
        scratch.states[node] = state
        if len(scratch.states) > KEPT:
            del scratch.states[next(iter(scratch.states))]

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
        parents, read, states = list[int](), list[tuple[Advance, list[Tensor]] | None](), dict[int, State]()
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
