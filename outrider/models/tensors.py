"""What a checkpoint gives, whatever file it is in: the experts of its mixtures, and the error for a tensor that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outrider.kernels.blocks import Blocks
from outrider.models.matrix import rows_of

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


def stacked_experts(
    get: Callable[[str, int], Any], shape: tuple[int, ...], *, gated: bool, alternate: bool, biased: bool
) -> Experts:
    """Experts that are in one tensor for each part: gate and up, or up alone, and down.

    Args:
        get: a matrix [out, in] or a bias of one expert: ("down_proj", its number).
        shape: (count, rows of gate and up, columns).
        gated: they have a gate.
        alternate: the rows of gate and up alternate. Else they follow one another.
        biased: they have biases.
    """
    first, (count, rows, columns) = "gate_up_proj" if gated else "up_proj", shape

    def parts(whole: Any) -> tuple[Any, ...]:
        half = whole.shape[0] // 2
        cuts = (slice(0, None, 2), slice(1, None, 2)) if alternate else (slice(half), slice(half, None))
        return tuple(rows_of(whole, cut) for cut in cuts) if gated else (whole,)

    def read(i: int) -> Expert:
        expert = Expert(parts(get(first, i)), get("down_proj", i))
        if not biased:
            return expert
        return expert._replace(up_biases=parts(get(f"{first}_bias", i)), down_bias=get("down_proj_bias", i))

    return Experts((count, rows // 2 if gated else rows, columns), gated, read)


class MissingTensor(KeyError, ValueError):
    """A tensor that a model has and its files do not."""

    def __str__(self) -> str:
        return str(self.args[0])


def missing_tensor(model: str, name: str, kind: str, config: Any, held: Iterable[str]) -> MissingTensor:
    """The error for a tensor that is in no file. kind: the class of the model. held: names of tensors that are in its files."""
    packed = [n for n in sorted(held) if n.endswith((".qweight", ".weight_packed", "_blocks"))]
    if packed and getattr(config, "quantization_config", None) is None:
        return MissingTensor(
            f"{model} has tensor {packed[0]}, so its weights are quantised, and config.json has no quantization_config, "
            "which says how; take config.json from where the weights are from"
        )
    return MissingTensor(
        f"the weights of {model} are incomplete: {name} of a {kind} is in no file. Download it again, or "
        "save it again with save_pretrained"
    )
