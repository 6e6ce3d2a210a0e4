"""The states of recurrent layers: linear attention, Mamba, short convolutions.

Keys and values can be dropped token by token. A state cannot: it holds all tokens at once. So a slot has one committed state
in each recurrent layer, and the scratch of a step has what each node read there. The state after a node is the state after
its parent, moved on by what the node read. A commit names the path that is kept, and its last state becomes the committed
one. Nothing is undone.

The states after the last nodes of a step are kept, because a commit or a child will ask for them. Those of earlier nodes are
computed again, by the same arithmetic, on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.core.types import PADDING

# States of each slot and layer that stay in memory during a step, besides the committed one.
KEPT = 16

Step = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]
"""(what a node reads, state before it), [1, ...] each -> (state after it, output). It leaves the state before as it was."""


@dataclass
class _Node:
    """A node of the scratch. step: moves a state on by what the node has read; None for padding. state: after it, if kept."""

    parent: int
    step: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    state: Tensor | None = None


class LayerStates:
    """The states of one recurrent layer, in all slots.

    committed: [slot, ...], the state after the committed tokens of each slot.
    """

    def __init__(self, start: Tensor, num_slots: int) -> None:
        """start: the state before the first token, [1, ...]."""
        self._start = start
        self.committed = start.repeat(num_slots, *[1] * (start.dim() - 1))
        self._scratch: list[list[_Node]] = [[] for _ in range(num_slots)]

    def scan(
        self, slots: Sequence[int], trees: Sequence[list[int]], count: int, step: Step, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Move the states on by the new nodes, each from the state after its parent. The nodes are in the scratch then.

        Args:
            slots: `slots` of `Nodes`.
            trees: their `parent_lists`.
            count: their `count`.
            step: moves a state on by one node.
            inputs: what each node reads, [batch * node, ...] each.

        Returns the outputs, [batch * node, ...]; zeros for padding.
        """
        outputs = dict[int, Tensor]()
        for b, (slot, parents) in enumerate(zip(slots, trees, strict=True)):
            nodes, held = self._scratch[slot], len(parents) - count
            if len(nodes) < held:
                raise RuntimeError(f"slot {slot} has {len(nodes)} nodes in a recurrent layer, not {held}")
            del nodes[held:]  # a forward writes them again
            for row, parent in enumerate(parents[held:], b * count):
                node = _Node(parent, None)
                if parent != PADDING:
                    node.step = partial(step, [t[row : row + 1] for t in inputs])
                    node.state, outputs[row] = node.step(self.after(slot, parent))
                nodes.append(node)
                if len(nodes) > KEPT:
                    nodes[-KEPT - 1].state = None
        empty = torch.zeros_like(next(iter(outputs.values())))
        return torch.cat([outputs.get(row, empty) for row in range(len(inputs[0]))])

    def after(self, slot: int, node: int) -> Tensor:
        """The state after a node of the scratch; -1: after the committed tokens. It must not be changed.

        Raises RuntimeError for a node that no forward of this step has read.
        """
        nodes, steps = self._scratch[slot], []
        while node >= 0 and (node >= len(nodes) or nodes[node].state is None):
            if node >= len(nodes) or (step := nodes[node].step) is None:
                raise RuntimeError(f"no forward of this step has read node {node} of slot {slot} in a recurrent layer")
            steps.append(step)
            node = nodes[node].parent
        state = self.committed[slot : slot + 1] if node < 0 else nodes[node].state
        for step in reversed(steps):
            state, _ = step(state)
        assert state is not None
        return state

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the state after the last node of a path from the root. Raises ValueError for nodes that are no such path.

        Node i of the scratch is then node i - len(path), as in the cache's cells. What followed the path goes on from the
        committed state. Nodes beside the path can have no children any more.
        """
        if not len(path):
            return
        nodes, count, state = self._scratch[slot], len(path), self.after(slot, path[-1])
        if (parents := [nodes[n].parent for n in path]) != [-1, *path[:-1]]:
            raise ValueError(f"{[*path]} is no path from the root; the parents are {parents}")
        self.committed[slot] = state[0]
        places = {path[-1]: -1}
        for n, node in enumerate(nodes[count:], count):
            follows = node.parent in places
            nodes[n] = replace(node, parent=places[node.parent]) if follows else _Node(PADDING, None)
            if follows:
                places[n] = n - count
        del nodes[:count]

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._scratch[slot] = []
        self.committed[slot] = self._start[0]

    def snapshot(self, slot: int) -> list[np.ndarray]:
        """A copy of the committed state of a slot, in float32."""
        return [self.committed[slot].to("cpu", torch.float32, copy=True).numpy()]

    def restore(self, slot: int, state: Sequence[np.ndarray]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        self._scratch[slot] = []
        self.committed[slot] = torch.tensor(state[0])

    @property
    def bytes(self) -> int:
        """Of the committed states of all slots, and of the states after nodes that are in memory now."""
        kept = sum(node.state is not None for nodes in self._scratch for node in nodes)
        return self._start.nbytes * (len(self.committed) + kept)

    @property
    def most_bytes(self) -> int:
        """The most that one slot takes: the committed state, and those of a step."""
        return self._start.nbytes * (1 + KEPT)
