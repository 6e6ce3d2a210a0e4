"""Where the weights of a program come from: the tensors of a checkpoint, or a pack, by the names of their modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from outrider.kernels.cpu import Packed
from outrider.kernels.cpu.packed import rounded
from outrider.models import rotary
from outrider.models.base import check_head_ids
from outrider.models.checkpoint import Sizes
from outrider.models.matrix import Matrix, dense, rows_of
from outrider.models.tensors import Experts

LATENT = ("latent_keys", "latent_values")
"""The parts of a linear over a latent (MLA), where a checkpoint has it in two."""
_ROUTERS = ("gate", "router")  # the last part of their names; they keep their precision
_HEAD = "lm_head"


class Tensors(Protocol):
    """The tensors of a checkpoint, by the names that transformers' modules have for them. None is read before it is asked for.

    precision: of the matrices: "gguf" if some are blocks, else the dtype of the output head. floats: what blocks become in
    modules of transformers. sizes: that it needs of memory.
    """

    @property
    def precision(self) -> str: ...

    @property
    def sizes(self) -> Sizes | None: ...

    @property
    def floats(self) -> str: ...

    def has(self, name: str) -> bool:
        """Whether there is such a tensor. A tied output head is not there, and so are experts."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is not read. Raises KeyError."""
        ...

    def get(self, name: str) -> np.ndarray | Any:
        """A tensor as stored, floats or `Blocks`. It may be a view of a mapped file. Raises KeyError."""
        ...

    def experts(self, name: str) -> Experts:
        """Of the module of this name. Raises KeyError."""
        ...

    def check(self, further: bool = True) -> None:
        """Raise ValueError unless all tensors were asked for. further: also those of the layer that predicts one token
        further."""
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


class TensorSource:
    """The weights of a program by the names of modules, from the tensors of a checkpoint. Matrices are packed when they are asked
    for. Raises KeyError for a name that is not there.

    Args:
        tensors: of the checkpoint.
        config: its configuration.
        packing: the precision; "auto" is that of the tensors.
        head_ids: as for `NativeModel`.
        further: with the layer that predicts one token further, if there is one.

    `facts` is what was read beside tensors. `named` is what was given, by the names that a `StoredSource` has for it.
    """

    def __init__(
        self,
        tensors: Tensors,
        config: Any,
        packing: str = "auto",
        head_ids: np.ndarray | None = None,
        further: bool = True,
    ) -> None:
        self.tensors, self.config, self._prefix, self._further = tensors, config, "", further
        self.packing = tensors.precision if packing == "auto" else packing
        self.facts, self.named = dict[str, Any](), dict[str, Any]()
        head = f"{_HEAD}.weight"
        self.vocab_size = tensors.shape(head)[0] if tensors.has(head) else int(config.vocab_size)
        self.head_ids = None if head_ids is None else check_head_ids(head_ids, self.vocab_size)

    def part(self, name: str) -> TensorSource | None:
        """The model of one layer below this name, with the same embedding and output head unless it has its own."""
        if not (self._further and self.tensors.has(f"{name}.fc.weight")):
            return None
        part = copy.copy(self)
        part._prefix = f"{name}."
        return part

    def matrix(self, *names: str, paired: bool = False) -> Packed:
        """The linears of these names side by side, with their biases. paired: gate and up, see `Packed`; one name is of a linear
        that has both."""
        if names == (_HEAD,) and not (self._prefix and self._has(_HEAD)):
            return self.named[_HEAD]  # packed with the embedding
        matrices = [self._get(f"{name}.weight") for name in names]
        biases = [self._bias(name, matrix.shape[0]) for name, matrix in zip(names, matrices, strict=True)]
        if paired and len(names) == 1:
            half = matrices[0].shape[0] // 2
            parts = slice(half), slice(half, None)
            matrices = [rows_of(matrices[0], part) for part in parts]
            biases = [None if biases[0] is None else biases[0][part] for part in parts]
        kind = "gguf" if names[0].rpartition(".")[2] in _ROUTERS else self.packing
        return self._keep(names[0], self._packed(matrices, kind, biases, paired))

    def table(self, name: str) -> Packed | np.ndarray:
        """An embedding: packed, or floats [vocab, hidden]."""
        if self._prefix and not self._has(name):
            return self.named[name]
        if _HEAD not in self.named:
            return self._embedding(name)
        return self._keep(name, self._table(self._get(f"{name}.weight")))

    def experts(self, name: str) -> Sequence[Packed]:
        """Of a mixture: gate and up side by side (paired), or up alone, and then down, of each expert in turn."""
        mixture = self.tensors.experts(self._prefix + name)
        if self.packing == "gguf" and mixture.stored is not None:
            self.named[self._prefix + name] = mixture.stored
            matrices = mixture.stored.packed()
        else:
            matrices = list[Packed]()
            for expert in mixture:
                biases = expert.up_biases or [None] * len(expert.up)
                matrices.append(self._packed(expert.up, self.packing, biases, mixture.gated))
                matrices.append(self._packed([expert.down], self.packing, [expert.down_bias]))
        self.named |= expert_names(self._prefix + name, matrices)
        return matrices

    def latent(self, name: str, heads: int, keys: int) -> Sequence[Packed]:
        """Of the linear that makes the keys and values of all heads of a latent: [heads * latent, keys], which takes a query of a
        head to the latent, and [heads * values, latent]. keys: numbers of a key."""
        if self._has(f"{name}.{LATENT[0]}"):
            matrices = [self._get(f"{name}.{part}.weight") for part in LATENT]
        else:
            both = self._get(f"{name}.weight")
            both = both if isinstance(both, np.ndarray) else both.dense()
            both = both.reshape(heads, -1, both.shape[1])
            first, last = both[:, :keys].swapaxes(1, 2), both[:, keys:]
            matrices = [part.reshape(-1, part.shape[2]) for part in (first, last)]
        return [
            self._keep(f"{name}.{part}", self._packed([matrix], self.packing, [None]))
            for part, matrix in zip(LATENT, matrices, strict=True)
        ]

    def tensor(self, name: str) -> np.ndarray | None:
        """A parameter or buffer as contiguous float32; None if there is none."""
        if self.tensors.has(self._prefix + name):
            values = np.array(dense(self._get(name)), order="C")  # a copy, so that no file stays mapped
            return self._keep(name, values)
        kind, is_angles, _ = name.rpartition(".")[2].rpartition("inv_freq")
        return self._keep(name, rotary.of_config(self.config, kind.rstrip("_"))[0]) if is_angles else None

    def number(self, name: str, default: Any = None) -> Any:
        """A number that goes with a tensor, such as `model.rotary_emb.attention_scaling`."""
        kind, is_scale, _ = name.rpartition(".")[2].rpartition("attention_scaling")
        self.facts[name] = rotary.of_config(self.config, kind.rstrip("_"))[1] if is_scale else default
        return self.facts[name]

    def _embedding(self, name: str) -> Packed | np.ndarray:
        """The first table, and the output head, which may be tied to it.

        A forward reads only a few rows of a table, so floats are not packed."""
        ids, tied = self.head_ids, not self._has(_HEAD)
        matrix = self._get(f"{name if tied else _HEAD}.weight")
        bias = self._bias(_HEAD, matrix.shape[0])
        if ids is not None:  # the largest first: while a matrix is packed, it is in memory twice
            matrix, bias = rows_of(matrix, ids), None if bias is None else bias[ids]
        head = self._packed([matrix], "int8" if self.packing == "int4" else self.packing, [bias])
        del matrix
        self.named[_HEAD] = head
        return self._keep(name, head if tied and ids is None else self._table(self._get(f"{name}.weight")))

    def _has(self, name: str) -> bool:
        return self.tensors.has(f"{self._prefix}{name}.weight")

    def _get(self, name: str) -> Any:
        return self.tensors.get(self._prefix + name)

    def _bias(self, name: str, rows: int) -> np.ndarray | None:
        return dense(self._get(f"{name}.bias")) if self._has_bias(name, rows) else None

    def _has_bias(self, name: str, rows: int) -> bool:
        if not self.tensors.has(full := f"{self._prefix}{name}.bias"):
            return False
        if (shape := self.tensors.shape(full)) != (rows,):
            raise ValueError(f"{full} has shape {[*shape]} for {rows} outputs")
        return True

    def _packed(self, matrices: Sequence[Any], kind: str, biases: Sequence[Any], paired: bool = False) -> Packed:
        """kind: "gguf" keeps everything in the format it has; others convert, see `Packed`."""
        if kind == "gguf":
            floats = {m.dtype for m in matrices if isinstance(m, np.ndarray)}
            kind = floats.pop().name if len(floats) == 1 else "float32"
        else:
            matrices = [m if isinstance(m, np.ndarray) else m.dense() for m in matrices]
        return Packed(matrices, kind, biases, paired=paired)

    def _table(self, matrix: Matrix) -> Packed | np.ndarray:
        """A copy, so that no file stays mapped."""
        return np.array(matrix) if isinstance(matrix, np.ndarray) else self._packed([matrix], "gguf", [None])

    def _keep(self, name: str, part: Any) -> Any:
        self.named[self._prefix + name] = part
        return part


def expert_names(name: str, matrices: Sequence[Packed]) -> dict[str, Packed]:
    """The matrices of a mixture of this name, by the names that a pack has for them."""
    parts = ("packed_pair", matrices[::2]), ("packed_down", matrices[1::2])
    return {f"{name}.{part}.{i}": matrix for part, each in parts for i, matrix in enumerate(each)}


class StoredSource:
    """As `TensorSource`, of a pack: packed matrices and tensors by the names of their modules, and facts that go with them."""

    head_ids = None

    def __init__(self, facts: Mapping[str, Any], named: Mapping[str, Any], vocab_size: int) -> None:
        self.facts, self.named, self.vocab_size = facts, named, vocab_size

    def part(self, name: str) -> StoredSource | None:
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

    def table(self, name: str) -> Packed | np.ndarray:
        return self.named[name]

    def tensor(self, name: str) -> np.ndarray | None:
        weight = self.named.get(name)
        return None if weight is None else np.array(weight, np.float32, order="C")

    def number(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)


class _MatrixSize(NamedTuple):
    """What a program asks of a matrix before it is packed."""

    n: int
    k: int
    formats: tuple[str, ...] = ("",)


class ShapeSource(TensorSource):
    """The sizes of the tensors alone: a program over it shows whether the native step can run a model."""

    def experts(self, name: str) -> Sequence[Packed]:
        mixture = self.tensors.experts(self._prefix + name)
        count, width, hidden = mixture.shape
        up = 2 * rounded(width) if mixture.gated else width
        return cast("list[Packed]", [_MatrixSize(up, hidden), _MatrixSize(hidden, width)] * count)

    def _get(self, name: str) -> Any:
        """Zeros without memory, but for angles."""
        if name.endswith("inv_freq"):
            return super()._get(name)
        return np.broadcast_to(np.float32(0), self.tensors.shape(self._prefix + name))

    def _packed(self, matrices: Sequence[Any], kind: str, biases: Sequence[Any], paired: bool = False) -> Packed:
        shapes = [matrix.shape for matrix in matrices]
        if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
            raise ValueError(f"matrices that are packed side by side have shapes {shapes}")
        n = 2 * rounded(shapes[0][0]) if paired else sum(shape[0] for shape in shapes)
        return cast("Packed", _MatrixSize(n, shapes[0][1]))

    def _table(self, matrix: Any) -> Packed | np.ndarray:
        return self._packed([matrix], "", [None])
