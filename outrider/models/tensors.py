"""The tensors of a folder of safetensors, by the names that the modules of transformers have. They are read when asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.kernels.blocks import Blocks
from outrider.models import checkpoint
from outrider.models.checkpoint import Sizes, StoredTensor
from outrider.models.config import Config, exact_tensors, optional_tensors
from outrider.models.dtypes import STORED_DTYPES
from outrider.models.mtp import layer_in

Matrix = np.ndarray | Blocks
# Names of older checkpoints -> those of the modules, by model type.
_GRANITE = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".block_sparse_moe.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.layer\.weight", ".block_sparse_moe.router.weight"),
)
_RENAMED = {
    "ernie4_5_moe": ((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "mixtral": ((r"\.block_sparse_moe\.", ".mlp."),),
    "nemotron_h": ((r"^backbone\.", "model."),),
}
# The matrices of an expert that has tensors of its own.
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_DTYPES = ("float32", "float16", "bfloat16")


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


class FolderTensors:
    """The tensors of a checkpoint; of its text model, if it also reads images or sound.

    Args:
        name: of the model, for errors.
        folder: with *.safetensors.
        config: its configuration.
        dtype: of the floats; "auto" for that of the configuration, else of the first tensor.

    `parts` has the tensors by name. `asked` has the names that were asked for. Raises FileNotFoundError and ValueError as
    `checkpoint.sizes` does.
    """

    def __init__(self, name: str, folder: Path, config: Config, dtype: str = "auto") -> None:
        self.name, self.folder, self.config, self.asked = name, folder, config, set[str]()
        parts = checkpoint.tensors(checkpoint.weight_files(name, folder))
        self.parts: dict[str, StoredTensor] = {}
        for short, there in checkpoint.text_names(parts).items():
            for old, new in _RENAMED.get(config.model_type, ()):
                short = re.sub(old, new, short)
            self.parts[short] = parts[there]
        if "embed_tokens.weight" in self.parts:  # of the model without its head
            self.parts = {f"model.{short}": part for short, part in self.parts.items()}
        if config.tie_word_embeddings:
            self.parts.pop("lm_head.weight", None)
        self.parts |= layer_in(parts, config)
        if dtype == "auto":
            floats = (STORED_DTYPES[p.format].name for p in self.parts.values() if p.format in STORED_DTYPES)
            dtype = str(config.dtype or next((kind for kind in floats if kind in _DTYPES), ""))
        self.dtype = np.dtype(dtype if dtype in _DTYPES else "float32")
        self._optional, self._exact = optional_tensors(config), exact_tensors(config, self.dtype.name)
        self._maps, self._transposed = dict[Path, np.ndarray](), config.model_type == "gpt_oss"

    @property
    def precision(self) -> str:
        """How the weights are kept where nothing else is wanted."""
        return self.dtype.name

    @property
    def sizes(self) -> Sizes | None:
        """What the model needs of memory."""
        return checkpoint.sizes(self.name, self.folder)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor. transformers reads no bias that the configuration does not ask for.

        Raises ValueError if the configuration asks for it, and it is in no file.
        """
        wanted = self._optional.get(
            re.sub(r"^mtp\.|.*layers\.\d+\.", "", name), not name.endswith("bias") and name in self
        )
        if wanted and name not in self:
            raise self.lacks(name)
        return wanted

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape

    def check(self, further: bool = True) -> None:
        """A folder may have other tensors, which transformers does not read either."""

    def get(self, name: str) -> Matrix:
        """A view of the mapped file. What has another dtype than the model is converted."""
        return self.floats(name, self.stored(name))

    def experts(self, name: str) -> Experts:
        """Those of a mixture: each has tensors of its own, or all are in one."""
        if f"{name}.down_proj" in self:
            return self._stacked(name)
        gate, up, down = (
            next((k for k in kinds if f"{name}.0.{k}.weight" in self), "") for kinds in (_GATES, _UPS, _DOWNS)
        )
        first = [kind for kind in (gate, up) if kind]

        def read(i: int) -> Expert:
            return Expert(
                tuple(self.get(f"{name}.{i}.{k}.weight") for k in first), self.get(f"{name}.{i}.{down}.weight")
            )

        count = next(i for i in range(len(self.parts)) if f"{name}.{i}.{down}.weight" not in self)
        self.asked |= {f"{name}.{i}.{k}.weight" for i in range(count) for k in (*first, down)}
        return Experts((count, *self.shape(f"{name}.0.{up}.weight")), bool(gate), read)

    def _stacked(self, name: str) -> Experts:
        """In gpt-oss a matrix is [in, out], and gate and up alternate."""
        gated = f"{name}.gate_up_proj" in self
        first, last = f"{name}.{'gate_up' if gated else 'up'}_proj", f"{name}.down_proj"
        biased = self.has(f"{first}_bias") and self.has(f"{last}_bias")

        def parts(whole: Any) -> tuple[Any, ...]:
            order = np.arange(whole.shape[0])
            cuts = (order[::2], order[1::2]) if self._transposed else np.split(order, 2)
            return tuple(_rows(whole, cut) for cut in cuts) if gated else (whole,)

        def read(i: int) -> Expert:
            expert = Expert(parts(self._of_stack(first, i)), self._of_stack(last, i))
            if not biased:
                return expert
            more: tuple[Any, Any] = self._of_stack(f"{first}_bias", i), self._of_stack(f"{last}_bias", i)
            return expert._replace(up_biases=parts(more[0]), down_bias=more[1])

        (count, rows, columns), _ = self.shape(first), self.shape(last)
        rows, columns = (columns, rows) if self._transposed else (rows, columns)
        return Experts((count, rows // (2 if gated else 1), columns), gated, read)

    def _of_stack(self, name: str, index: int) -> Matrix:
        """A matrix [out, in] or a bias of one expert."""
        values = self.floats(name, self.stored(name)[index])
        return values.T if self._transposed else values

    def floats(self, name: str, values: np.ndarray) -> np.ndarray:
        """Numbers of a tensor in the model's dtype."""
        if values.dtype.name not in ("float64", *_DTYPES):
            return values
        return values.astype(np.float32 if self._exact.search(name) else self.dtype, copy=False)

    def stored(self, name: str) -> np.ndarray:
        """As it is in the file."""
        part = self._part(name)
        if part.path not in self._maps:
            self._maps[part.path] = np.memmap(part.path, np.uint8, "r")
        bytes_, dtype = self._maps[part.path][part.offset : part.offset + part.bytes], STORED_DTYPES[part.format]
        bytes_ = bytes_ if part.offset % dtype.itemsize == 0 else bytes_.copy()
        return bytes_.view(np.ndarray).view(dtype).reshape(part.shape)

    def _part(self, name: str) -> StoredTensor:
        self.asked.add(name)
        if name not in self.parts:
            raise self.lacks(name)
        return self.parts[name]

    def lacks(self, name: str) -> MissingTensor:
        """The error for a tensor that is in no file."""
        packed = [n for n in sorted(self.parts) if n.endswith((".qweight", ".weight_packed", "_blocks"))]
        if packed and getattr(self.config, "quantization_config", None) is None:
            return MissingTensor(
                f"{self.name} has tensor {packed[0]}, so its weights are quantised, and config.json has no quantization_config, "
                "which says how; take config.json from where the weights are from"
            )
        return MissingTensor(
            f"the weights of {self.name} are incomplete: {name} of a {self.config.kind} is in no file. Download it again, or "
            "save it again with save_pretrained"
        )


def _rows(matrix: Matrix, order: np.ndarray) -> Matrix:
    """Some rows of a matrix as it is stored, or numbers of a bias."""
    return matrix[order] if isinstance(matrix, np.ndarray) else replace(matrix, order=order)
