"""Folders of safetensors: their tensors by the names that the modules of transformers have. They are read when asked for."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np

from outrider.models import checkpoint
from outrider.models.checkpoint import Sizes, StoredTensor
from outrider.models.config import Config, exact_tensors, optional_tensors
from outrider.models.dtypes import DTYPES, STORED_DTYPES, dtype_name
from outrider.models.mtp import MTP, layer_in
from outrider.models.tensors import Expert, Experts, Matrix, MissingTensor, missing_tensor, stacked_experts

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
    "phimoe": ((r"\.block_sparse_moe\.", ".mlp."), (r"\.mlp\.gate\.weight", ".mlp.router.weight")),
}
# The matrices of an expert that has tensors of its own.
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


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
        further = layer_in(parts, config)
        taken = {*further.values()}
        self.parts: dict[str, StoredTensor] = {}
        for short, there in checkpoint.text_names(parts).items():
            for old, new in _RENAMED.get(config.model_type, ()):
                short = re.sub(old, new, short)
            self.parts[short] = parts[there]
        if "embed_tokens.weight" in self.parts:  # of the model without its head
            self.parts = {f"model.{short}": part for short, part in self.parts.items()}
        if config.tie_word_embeddings:
            self.parts.pop("lm_head.weight", None)
        self.parts = {short: part for short, part in self.parts.items() if part not in taken} | further
        if dtype == "auto":
            floats = (STORED_DTYPES[p.format].name for p in self.parts.values() if p.format in STORED_DTYPES)
            dtype = dtype_name(config.dtype or next((kind for kind in floats if kind in DTYPES), ""))
        self.dtype = np.dtype(dtype if dtype in DTYPES else "float32")
        self.floats = self.dtype.name
        self._optional, self._exact = optional_tensors(config), exact_tensors(config, self.dtype.name)
        self._maps, self._transposed = dict[Path, np.ndarray](), config.model_type == "gpt_oss"

    @property
    def sizes(self) -> Sizes | None:
        """What the model needs of memory."""
        return checkpoint.sizes(self.name, self.folder)

    @property
    def precision(self) -> str:
        """How the weights are kept where nothing else is wanted."""
        return self.dtype.name

    def has(self, name: str) -> bool:
        """Whether the model has this tensor. transformers reads no bias that the configuration does not ask for.

        Raises ValueError if the configuration asks for it, and it is in no file.
        """
        there, short = name in self, re.sub(r"^mtp\.|.*layers\.\d+\.", "", name)
        wanted = there if self._optional is None else self._optional.get(short, there and not name.endswith("bias"))
        if wanted and not there:
            raise self.lacks(name)
        return wanted

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def shape(self, name: str) -> tuple[int, ...]:
        return self._part(name).shape

    def get(self, name: str) -> Matrix:
        """A view of the mapped file. What has another dtype than the model is converted."""
        return self._cast(name, self.stored(name))

    def experts(self, name: str) -> Experts:
        """Those of a mixture: each has tensors of its own, or all are in one."""
        if f"{name}.down_proj" in self:
            return self._stacked(name)
        gate, up, down = (
            next((k for k in kinds if f"{name}.0.{k}.weight" in self), None) for kinds in (_GATES, _UPS, _DOWNS)
        )
        first, down = [kind for kind in (gate, up) if kind], down or _DOWNS[0]

        def read(i: int) -> Expert:
            *ups, last = (self.get(f"{name}.{i}.{kind}.weight") for kind in (*first, down))
            return Expert(tuple(ups), last)

        count = next(i for i in range(len(self.parts)) if f"{name}.{i}.{down}.weight" not in self)
        self.asked |= {f"{name}.{i}.{k}.weight" for i in range(count) for k in (*first, down)}
        return Experts((count, *self.shape(f"{name}.0.{up or _UPS[0]}.weight")), bool(gate), read)

    def _stacked(self, name: str) -> Experts:
        """In gpt-oss a matrix is [in, out], and gate and up alternate."""
        gated = f"{name}.gate_up_proj" in self
        first, last = f"{name}.{'gate_up' if gated else 'up'}_proj", f"{name}.down_proj"
        biased = self.has(f"{first}_bias") and self.has(f"{last}_bias")
        (count, rows, columns), _ = self.shape(first), self.shape(last)
        shape = (count, columns, rows) if self._transposed else (count, rows, columns)
        each = partial(self._of_stack, name)
        return stacked_experts(each, shape, gated=gated, alternate=self._transposed, biased=biased)

    def _of_stack(self, mixture: str, part: str, index: int) -> Matrix:
        """A matrix [out, in] or a bias of one expert."""
        name = f"{mixture}.{part}"
        values = self._cast(name, self.stored(name)[index])
        return values.T if self._transposed else values

    def check(self, further: bool = True) -> None:
        """transformers does not read tensors that the model does not have, and says nothing of it."""
        others = sorted(name for name in {*self.parts} - self.asked if name.startswith(f"{MTP}."))
        if further and others:
            raise ValueError(f"it also holds {others[0].removeprefix('mtp.')}, so it is that of another model")

    def _cast(self, name: str, values: np.ndarray) -> np.ndarray:
        """Numbers of a tensor in the model's dtype."""
        if values.dtype.name not in ("float64", *DTYPES):
            return values
        return values.astype(np.float32 if self._exact.search(name) else self.dtype, copy=False)

    def stored(self, name: str) -> np.ndarray:
        """As it is in the file."""
        part = self._part(name)
        if part.path not in self._maps:
            self._maps[part.path] = np.memmap(part.path, np.uint8, "c")
        return checkpoint.view(self._maps[part.path], part, f"tensor {name} of {self.name}")

    def _part(self, name: str) -> StoredTensor:
        self.asked.add(name)
        if name not in self.parts:
            raise self.lacks(name)
        return self.parts[name]

    def lacks(self, name: str) -> MissingTensor:
        """The error for a tensor that is in no file."""
        kind = getattr(self.config, "kind", self.config.model_type)
        return missing_tensor(self.name, name, kind, self.config, self.parts)
