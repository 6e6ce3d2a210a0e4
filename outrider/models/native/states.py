"""The states of slots in the recurrent layers of a native program. Native code keeps them for all layers (`src/states.hpp`).

`LayerStates` is the same for one layer in Python, and the reference.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels import cpu as native

# States of a slot that are kept during a step, besides the committed one.
KEPT = 8


class NativeStates:
    """The committed states of each slot, and the scratch of a step.

    ops: the address of the program's ops, and their number. keep: what they point to. layout: the numbers of its recurrent ops.
    handle: what a forward is given.
    """

    def __init__(
        self, ops: tuple[int, int], keep: object, layout: dict[int, object], num_slots: int, kept: int = KEPT
    ) -> None:
        self._library, self._keep, self.layout, self._kept = native.library(), keep, layout, kept
        self.handle: int = self._library.states_new(*ops, num_slots, kept)
        self._size: int = self._library.states_size(self.handle)
        self._slots = num_slots
        weakref.finalize(self, self._library.states_free, self.handle)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the state after the last node of a path from the root, in all layers. Raises ValueError for nodes that are no such
        path, RuntimeError for nodes that no forward of this step has read."""
        nodes = (ctypes.c_int64 * len(path))(*path)
        wrong = self._library.states_commit(self.handle, slot, nodes, len(path))
        if wrong < 0:
            raise RuntimeError(
                f"no forward of this step has read node {path[-1 - wrong]} of slot {slot} in a recurrent layer"
            )
        if wrong:
            raise ValueError(f"{[*path]} is no path from the root")

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._library.states_reset(self.handle, slot)

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy of the committed state of a slot, of all layers."""
        state = torch.empty(self._size)
        self._library.states_read(self.handle, slot, state.data_ptr())
        return [state]

    def restore(self, slot: int, state: Sequence[Tensor]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        self._library.states_write(self.handle, slot, state[0].contiguous().data_ptr())

    @property
    def bytes(self) -> int:
        """Of the committed states of all slots, and of the others that are in memory now."""
        return 4 * self._size * max(self._slots, self._library.states_made(self.handle))

    @property
    def most_bytes(self) -> int:
        """The most that one slot takes: the committed state, and those of a step."""
        return 4 * self._size * (1 + self._kept)
