"""Where the weights of a program come from: modules of transformers, a pack, or plain tensors, by the names of their modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.kernels.border import as_tensor
from outrider.kernels.cpu import Packed
from outrider.kernels.cpu.packed import rounded
from outrider.models.base import check_head_ids
from outrider.models.matrix import (
    EXPERTS,
    LATENT,
    STORED,
    Matrix,
    free_matrix_,
    latent_matrices,
    matrix_of,
    packed,
    precision,
    rows_of,
    share_matrix,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightSource(Protocol):
    """Gives weights by the names of modules. Raises KeyError for a name that is not there.

    vocab_size: tokens of the model. head_ids: int64 [n], ascending: the tokens that its output head keeps; None for all.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def head_ids(self) -> Tensor | None: ...

    def matrix(self, *names: str, paired: bool = False) -> Packed:
        """The linears of these names side by side, with their biases. paired: gate and up, see `Packed`; one
        name is of a linear that has both."""
        ...

    def table(self, name: str) -> Packed | Tensor:
        """An embedding: packed, or floats [vocab, hidden]."""
        ...

    def experts(self, name: str) -> Sequence[Packed]:
        """Of a mixture: gate and up side by side (paired), or up alone, and then down, of each expert in turn."""
        ...

    def latent(self, name: str, heads: int, keys: int) -> Sequence[Packed]:
        """Of the linear that makes the keys and values of all heads of a latent: [heads * latent, keys], which takes a query of a
        head to the latent, and [heads * values, latent]. keys: numbers of a key."""
        ...

    def tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer as contiguous float32; None if there is none."""
        ...

    def number(self, name: str, default: Any = None) -> Any:
        """A setting: an attribute of a module, such as `model.rotary_emb.attention_scaling`."""
        ...


class Facts:
    """The settings that a family reads, remembered for packs. `facts.x` is setting x of the configuration.

    It raises AttributeError for a setting that the configuration does not have, ValueError for one that differs by layer.
    """

    def __init__(self, config: Any) -> None:
        self._config, self.read = config, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        self.read[name] = None
        try:
            value = getattr(self._config, name)
        except AttributeError:
            del self.read[name]
            raise
        except Exception as error:  # transformers has an error of its own for this
            raise ValueError(f"its {name} differs by layer") from error
        # transformers gives a view of whole configurations
        self.read[name] = value = self._config.to_dict()[name] if name == "per_layer_config" else value
        return value


class ModuleSource:
    """The modules of a transformers model. Its matrices are packed when they are asked for.

    Args:
        model: of transformers.
        packing: the precision.
        own: free the weights of the model as they are packed.
        head_ids: as for `NativeModel`.

    `facts` is what was read of the modules' attributes. `named` is what was given, by the names that a `StoredSource` has for it.
    """

    def __init__(self, model: PreTrainedModel, packing: str, own: bool, head_ids: Tensor | None) -> None:
        self.packing = precision(model) if packing == "auto" else packing
        self.facts, self.named, self._own, self._prefix = dict[str, Any](), dict[str, Any](), own, ""
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        inputs, outputs = cast("Any", model.get_input_embeddings()), cast("Any", model.get_output_embeddings())
        self.vocab_size = int(outputs.out_features)
        self.head_ids = None if head_ids is None else check_head_ids(head_ids, self.vocab_size)
        # The largest first: while a matrix is packed, it is in memory twice.
        self._head, self._table = self._embeddings(inputs, outputs)
        self._outputs, self._inputs = outputs, inputs

    def matrix(self, *names: str, paired: bool = False) -> Packed:
        linears = [self._modules[name] for name in names]
        if linears == [self._outputs]:
            self.named[names[0]] = self._head
            return self._head
        plain = all(isinstance(m, nn.Linear) for m in linears)  # a router is none: it keeps its precision
        matrices, biases = [matrix_of(m) for m in linears], [getattr(m, "bias", None) for m in linears]
        if paired and len(linears) == 1:
            halves = torch.arange(matrices[0].shape[0]).chunk(2)
            matrices = [rows_of(matrices[0], half) for half in halves]
            biases = [None if linears[0].bias is None else linears[0].bias[half] for half in halves]
        matrix = packed(matrices, self.packing if plain else "gguf", biases, paired=paired)
        if self._own:
            free_matrix_(*linears)
        self.named[self._prefix + names[0]] = matrix
        return matrix

    def part(self, name: str) -> ModuleSource | None:
        """A model that is a module of this one, with the same embedding and output head unless it has its own."""
        if name not in self._modules:
            return None
        part, inner = copy.copy(self), self._modules[name]
        shared = {n: m for n, m in self._modules.items() if m in (self._inputs, self._outputs)}
        part._modules, part._prefix = shared | dict(inner.named_modules()), f"{name}."
        part._tensors = dict(inner.named_parameters()) | dict(inner.named_buffers())
        return part

    def experts(self, name: str) -> Sequence[Packed]:
        module, experts = self._modules[name], list[Packed]()
        if self.packing == "gguf" and STORED in module.__dict__:
            self.named[self._prefix + name] = module.__dict__[STORED]
            experts = module.__dict__[STORED].packed()
        for i in range(0 if experts else len(module.down_proj)):
            gate_up, biases = _expert(module, "gate_up_proj" if module.has_gate else "up_proj", i)
            if module.has_gate and len(gate_up) == 1:
                gate_up, biases = _halves(module, gate_up[0]), _halves(module, biases[0])
            experts.append(packed(gate_up, self.packing, biases, paired=module.has_gate))
            down, biases = _expert(module, "down_proj", i)
            experts.append(packed(down, self.packing, biases))
        if self._own:
            module.__dict__.pop(EXPERTS, None)
            for parameter in [*module._parameters]:
                module._parameters[parameter] = None
        self.named |= expert_names(self._prefix + name, experts)
        return experts

    def latent(self, name: str, heads: int, keys: int) -> Sequence[Packed]:
        module = self._modules[name]
        parts = [packed([matrix], self.packing, [None]) for matrix in latent_matrices(module, heads, keys)]
        if self._own:
            free_matrix_(module)
            for part in LATENT:
                module._modules.pop(part, None)
        self.named |= {f"{self._prefix}{name}.{part}": matrix for part, matrix in zip(LATENT, parts, strict=True)}
        return parts

    def table(self, name: str) -> Packed | Tensor:
        if self._modules[name] is self._inputs:
            table = self.named[name] = self._table
        else:
            table = self.named[self._prefix + name] = _table(matrix_of(self._modules[name]))
        return table

    def tensor(self, name: str) -> Tensor | None:
        if (weight := self._tensors.get(name)) is None:
            return None
        values = self.named[self._prefix + name] = _floats(weight)
        return values

    def number(self, name: str, default: Any = None) -> Any:
        owner, _, leaf = name.rpartition(".")
        self.facts[name] = value = getattr(self._modules[owner], leaf, default)
        return value

    def _embeddings(self, inputs: Any, outputs: Any) -> tuple[Packed, Packed | Tensor]:
        """The output head, and the embedding. A forward reads only a few rows of a table, so floats are not packed."""
        matrix, bias, ids = matrix_of(outputs), outputs.bias, self.head_ids
        tied, embedding = ids is None and share_matrix(inputs, outputs), matrix_of(inputs)
        if ids is not None:
            matrix, bias = rows_of(matrix, ids), None if bias is None else bias[ids]
        head = packed([matrix], "int8" if self.packing == "int4" else self.packing, [bias])
        table = _table(head if tied else embedding)
        if self._own:
            free_matrix_(outputs)
            if not isinstance(table, Tensor):
                free_matrix_(inputs)
        return head, table


def expert_names(name: str, matrices: Sequence[Packed]) -> dict[str, Packed]:
    """The matrices of a mixture of this name, by the names that a pack has for them."""
    parts = ("packed_pair", matrices[::2]), ("packed_down", matrices[1::2])
    return {f"{name}.{part}.{i}": matrix for part, each in parts for i, matrix in enumerate(each)}


def _expert(module: Any, name: str, index: int) -> tuple[list[Matrix], list[Tensor | None]]:
    """The matrices [out, in] and the bias of an expert: one, or gate and up."""
    blocks = module.__dict__.get(EXPERTS, {}).get(name)
    bias = getattr(module, f"{name}_bias")[index] if module.has_bias else None
    if blocks is None:
        matrix = getattr(module, name)[index]
        return [matrix.T if module.is_transposed else matrix], [bias]
    matrices = [*blocks[index]]
    return matrices, [*_halves(module, bias)] if len(matrices) == 2 else [bias]


def _halves(module: Any, rows: Any) -> list[Any]:
    """Rows of gate and up. They alternate where the matrices of a mixture are transposed."""
    if rows is None:
        return [None, None]
    order = torch.arange(rows.shape[0])
    orders = (order[::2], order[1::2]) if module.is_transposed else order.chunk(2)
    return [rows_of(rows, part) for part in orders]


def _table(matrix: Matrix) -> Packed | Tensor:
    return matrix.contiguous() if isinstance(matrix, Tensor) else packed([matrix], "gguf", [None])


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().clone(memory_format=torch.contiguous_format)


class StoredSource:
    """A pack: packed matrices and tensors by the names of their modules, and the facts that were read when it was made."""

    head_ids = None

    def __init__(self, facts: Mapping[str, Any], named: Mapping[str, Any], vocab_size: int) -> None:
        self.facts, self.named, self.vocab_size = facts, named, vocab_size

    def part(self, name: str) -> StoredSource | None:
        """As in `ModuleSource`."""
        start, named = f"{name}.", self.named
        if not any(n.startswith(start) for n in named):
            return None
        outer = {n: part for n, part in named.items() if ".layers." not in n and not n.startswith(start)}
        inner = {n.removeprefix(start): part for n, part in named.items() if n.startswith(start)}
        return StoredSource(self.facts, outer | inner, self.vocab_size)

    def matrix(self, *names: str, paired: bool = False) -> Packed:
        return self.named[names[0]]

    def experts(self, name: str) -> Sequence[Packed]:
        count = sum(1 for n in self.named if n.startswith(f"{name}.packed_down."))
        return [self.named[f"{name}.{part}.{i}"] for i in range(count) for part in ("packed_pair", "packed_down")]

    def latent(self, name: str, heads: int, keys: int) -> Sequence[Packed]:
        return [self.named[f"{name}.{part}"] for part in LATENT]

    def table(self, name: str) -> Packed | Tensor:
        table = self.named[name]
        return as_tensor(table) if isinstance(table, np.ndarray) else table

    def tensor(self, name: str) -> Tensor | None:
        weight = self.named.get(name)
        return None if weight is None else _floats(as_tensor(weight) if isinstance(weight, np.ndarray) else weight)

    def number(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)


class _MatrixSize(NamedTuple):
    """What a program asks of a matrix before it is packed."""

    n: int
    k: int
    formats: tuple[str, ...] = ("",)


class ShapeSource(ModuleSource):
    """The sizes of the modules alone: a program over it shows whether the native step can run a model."""

    def matrix(self, *names: str, paired: bool = False) -> Packed:
        shapes = [matrix_of(self._modules[name]).shape for name in names]
        n = 2 * rounded(shapes[0][0] // (3 - len(shapes))) if paired else sum(shape[0] for shape in shapes)
        return cast("Packed", _MatrixSize(n, shapes[0][1]))

    def experts(self, name: str) -> Sequence[Packed]:
        module = self._modules[name]
        count, hidden, middle = module.down_proj.shape
        if module.is_transposed:
            hidden, middle = middle, hidden
        both = _MatrixSize(2 * rounded(middle) if module.has_gate else middle, hidden), _MatrixSize(hidden, middle)
        return cast("list[Packed]", both * count)

    def latent(self, name: str, heads: int, keys: int) -> Sequence[Packed]:
        module = self._modules[name]
        if hasattr(module, LATENT[0]):
            sizes = [tuple(matrix_of(module.get_submodule(part)).shape) for part in LATENT]
        else:
            n, k = matrix_of(module).shape
            sizes = [(heads * k, keys), (n - heads * keys, k)]
        return cast("list[Packed]", [_MatrixSize(size[0], size[1]) for size in sizes])

    def table(self, name: str) -> Packed | Tensor:
        rows, width = matrix_of(self._modules[name]).shape
        return cast("Packed", _MatrixSize(rows, width))

    def _embeddings(self, inputs: Any, outputs: Any) -> tuple[Packed, Packed | Tensor]:
        empty = torch.empty(0)
        return cast("Packed", empty), empty
