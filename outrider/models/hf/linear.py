"""Linears whose rows have the same bits for every number of rows, in place of a model's own.

Native: weights in panels at the precision they are kept in, activations and sums in float32. Without the native kernels:
oneDNN prepacked for 8 rows, float32, which was found to have the same property (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from outrider.kernels import cpu as native
from outrider.kernels import for_device
from outrider.kernels.blocks import Blocks
from outrider.models.dtypes import DTYPES, dtype_name
from outrider.models.matrix import matrix_of, packed
from outrider.models.packs.modules import packed_before


class PackedLinear(nn.Module):
    """y = x W^T + b. weights: float32, bfloat16, float16, int8, int4 or gguf; "auto" is what `weight` has.

    weight: [out, in]. Takes and returns float32 (other dtypes are converted on the way), any leading dimensions.
    """

    def __init__(self, weight: Tensor | Blocks, bias: Tensor | None = None, weights: str = "auto") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        stored = "gguf" if isinstance(weight, Blocks) else dtype_name(weight.dtype)
        self.kind = stored if weights == "auto" else weights
        if isinstance(weight, Blocks) or for_device(weight.device).linear is not None:
            made = packed([weight], self.kind, [None if bias is None else bias.detach()])
            self._run: Callable[[Tensor], Tensor] = made.linear
            self.packed: native.Packed | None = made
        else:
            self._run, self.packed = _onednn(weight.detach(), bias, self.kind), None

    @classmethod
    def of(cls, packed: native.Packed) -> PackedLinear:
        """Over a matrix that is packed already, with its bias."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.kind = packed.n, packed.k, "+".join(packed.formats)
        self._run, self.packed = packed.linear, packed
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self._run(x)
        return self._run(x.float()).to(x.dtype)

    @property
    def bytes(self) -> int:
        """What a product reads."""
        return 4 * self.out_features * self.in_features if self.packed is None else self.packed.bytes

    @property
    def rounds_inputs(self) -> bool:
        """Whether the kernels round the inputs to integers, as they do for quantised weights."""
        return self.packed is not None and any(name not in DTYPES for name in self.packed.formats)

    @property
    def weight(self) -> Tensor:
        """float32 [out, in]: the matrix that the kernels multiply with. Each use of its values unpacks them."""
        if self.packed is None:
            raise AttributeError("the weights are in oneDNN's own layout")
        return _OnRequest(self.packed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.kind}"


class _OnRequest(Tensor):
    """A packed matrix as a tensor without memory. Some modelling code asks a matrix for its dtype in every forward."""

    @staticmethod
    def __new__(cls, packed: native.Packed) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, (packed.n, packed.k), dtype=torch.float32)  # pyright: ignore

    def __init__(self, packed: native.Packed) -> None:
        self.packed = packed

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.packed.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


class PackedEmbedding(nn.Module):
    """The rows of a packed matrix, float32, times a factor. A head that is tied to it has the same packed matrix."""

    def __init__(self, table: native.Packed, factor: float = 1.0) -> None:
        super().__init__()
        self.packed, self.factor = table, factor
        self.num_embeddings, self.embedding_dim = table.n, table.k

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]."""
        rows = torch.stack([self.packed.row(t) for t in tokens.flatten().tolist()])
        return rows.view(*tokens.shape, self.embedding_dim) * self.factor


def _onednn(weight: Tensor, bias: Tensor | None, kind: str) -> Callable[[Tensor], Tensor]:
    if kind not in DTYPES:
        raise ValueError(f"{kind} weights need the native kernels: {for_device(weight.device).missing}")
    # The prepacked weight of a 16-bit model is the float32 copy: exact, and twice the memory.
    b = None if bias is None else bias.detach().float()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(DTYPES[kind]).float().contiguous(), 8)

    def run(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")

    return run


def pack_linears_(model: nn.Module, weights: str = "auto") -> int:
    """Replace every nn.Linear and Conv1D in place. Returns how many were replaced.

    A matrix shared with the embedding is packed as another copy, and the embedding stays. An embedding in blocks is packed, too,
    and shares the packed matrix. The other matrices are freed one by one, so only one extra matrix is in memory at a time.
    """
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    # The largest first: while a matrix is packed, it is in memory twice.
    names.sort(key=lambda name: -math.prod(_shape(model.get_submodule(name))))
    made: dict[int, PackedLinear] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        module = owner.get_submodule(child)
        if (before := packed_before(module)) is not None:
            new = PackedLinear.of(before)
        elif isinstance(module, Conv1D):
            new = PackedLinear(module.weight.detach().T, module.bias, weights)
        elif isinstance(module, nn.Linear):
            matrix = matrix_of(module)
            new = PackedLinear(matrix, module.bias, weights)
            if isinstance(matrix, Blocks):
                made[id(matrix)] = new
        else:
            continue
        setattr(owner, child, new.train(module.training))
    _pack_embeddings_(model, weights, made)
    return len(names)


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(module.weight.shape) if isinstance(module, Conv1D) else tuple(matrix_of(module).shape)


def _pack_embeddings_(model: nn.Module, weights: str, linears: dict[int, PackedLinear]) -> None:
    """Replace embeddings whose matrix is in blocks, or packed before. linears: those that are packed already, by the matrix.

    int4 would cost more accuracy in an embedding than memory in a second copy, so it becomes int8.
    """
    for name, module in [*model.named_modules()]:
        if not isinstance(module, nn.Embedding):
            continue
        blocks, table = matrix_of(module), packed_before(module)
        if table is None and isinstance(blocks, Blocks):
            tied = linears.get(id(blocks)) if weights != "int4" else None
            table = tied.packed if tied and tied.packed else packed([blocks], weights.replace("int4", "int8"), [None])
        if table is not None:
            model.set_submodule(name, PackedEmbedding(table, getattr(module, "scalar_embed_scale", 1.0)))
