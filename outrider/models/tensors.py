"""What a checkpoint gives, whatever file it is in: the experts of its mixtures, and the error for a tensor that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outrider.kernels.blocks import Blocks

Matrix = np.ndarray | Blocks


class Expert(NamedTuple):
    """One of a mixture. up: gate and up, or up alone, each [out, in]. The biases are as the matrices; None: it has none."""

    up: tuple[Matrix, ...]
    down: Matrix
    up_biases: tuple[np.ndarray, ...] | None = None
    down_bias: np.ndarray | None = None


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture, which are read one after another. shape: (count, rows of gate or up, columns).

    stored: those that are packed from their file when a token needs them."""

    shape: tuple[int, ...]
    gated: bool
    read: Callable[[int], Expert]
    stored: Any = None

    def __iter__(self) -> Iterator[Expert]:
        return map(self.read, range(self.shape[0]))


class MissingTensor(KeyError, ValueError):
    """A tensor that a model has and its files do not."""

    def __str__(self) -> str:
        return str(self.args[0])
