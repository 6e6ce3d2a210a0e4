"""Reads GGUF files. The header is checked against the size of the file before anything is believed.

The format is described in the repository of ggml. The `gguf` package has a reader too. It trusts the counts of a file, and it
takes seconds for the 150,000 tokens of a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import StoredTensor

# ggml's name of a format -> the dtype of one weight. All other formats are blocks.
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# The block formats that the kernels compute with. Others are dequantised.
PACKED_FORMATS = tuple(name for name in native.FORMATS if name not in native.KINDS)
# GGUF's types of values, as numpy calls them.
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# No array of a real model is longer. A corrupt count must not fill the memory with empty strings.
LONGEST_ARRAY = 2**24
_MOST_DIMENSIONS = 4  # of ggml
_LFS = b"version https://git"


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, or of all parts of a split one.

    metadata: values by key, as in the file. tensors: by name. Nothing of the weights is in memory.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @cached_property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def largest(self) -> int:
        """The rows or columns of the tensor that has most."""
        return max(max(t.shape) for t in self.tensors.values())

    @cached_property
    def quantization_level(self) -> str:
        """What its maker calls its precision, such as Q4_K_M; the format of most of its weights if the file does not say it."""
        from gguf import LlamaFileType

        with suppress(ValueError):
            named = LlamaFileType(self.metadata.get("general.file_type")).name  # such as MOSTLY_Q4_K_M, ALL_F32
            return named.removeprefix("MOSTLY_").removeprefix("ALL_")
        weights = Counter[str]()
        for tensor in self.tensors.values():
            weights[tensor.format] += tensor.weights
        return max(weights, key=weights.__getitem__)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture: `get("block_count")` is `llama.block_count` of a llama."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def matrix(self, name: str, order: np.ndarray | None = None) -> np.ndarray | Blocks:
        """A tensor over the mapped file: plain for F32, F16 and BF16, else blocks. It unmaps its part of the file when freed.

        order: int64 [out], the rows that are wanted.
        """
        return matrix_at(self.tensors[name], order)

    def floats(self, name: str) -> np.ndarray:
        """float32, in the shape of the tensor. A copy: the file is not mapped any more."""
        return floats_at(self.tensors[name])


def matrix_at(stored: StoredTensor, order: np.ndarray | None = None) -> np.ndarray | Blocks:
    """See `GGUFFile.matrix`."""
    data = _mapped(stored.path, stored.offset, stored.bytes)
    if stored.format in FLOATS:
        plain = data.view(FLOATS[stored.format]).reshape(stored.shape)
        return plain if order is None else plain[order]
    return Blocks(data.reshape(math.prod(stored.shape[:-1]), -1), stored.format, stored.shape[-1], order)


def floats_at(stored: StoredTensor) -> np.ndarray:
    """See `GGUFFile.floats`."""
    matrix = matrix_at(stored)
    return (matrix.dense() if isinstance(matrix, Blocks) else matrix.astype(np.float32)).reshape(stored.shape)


@dataclass(frozen=True)
class StoredExperts:
    """Where a file has the experts of a layer.

    tensors: by name, [expert, out, in], in formats of the kernels: gate and up, or both in one, or up alone; down; then their
    biases, [expert, out], if there are any."""

    tensors: Mapping[str, StoredTensor]

    def packed(self) -> list[native.Packed]:
        """Gate and up side by side (paired), or up alone, and then down, of each expert in turn."""
        reserve, out = native.Reserve(), list[native.Packed]()
        count = next(iter(self.tensors.values())).shape[0]
        weights = {name: t for name, t in self.tensors.items() if name.endswith("weight")}
        parts = [p for name, t in weights.items() for p in expert_parts(name, matrix_at(t), count)]
        biases: list[list[Any]] = [[*floats_at(t)] for name, t in self.tensors.items() if name not in weights]
        biases = biases or [[None] * count] * len(parts)
        for *first, down in zip(*(zip(*both, strict=True) for both in zip(parts, biases, strict=True)), strict=True):
            matrices, added = zip(*first, strict=True)
            out.append(native.Packed(matrices, "float32", added, paired=len(first) > 1, later=reserve))
            out.append(native.Packed(down[:1], "float32", down[1:], later=reserve))
        return out


def expert_parts(name: str, matrices: np.ndarray | Blocks, count: int) -> list[list[Any]]:
    """The matrix of each expert, of a tensor of this name. Two lists if it has gate and up in one."""
    cuts = 2 if name.endswith("gate_up_exps.weight") else 1
    if isinstance(matrices, np.ndarray):
        each: list[Any] = [*matrices.reshape(cuts * count, -1, matrices.shape[-1])]
    else:
        each = [replace(matrices, data=rows) for rows in np.array_split(matrices.data, cuts * count)]
    return [each[i::cuts] for i in range(cuts)]


def read(paths: Sequence[Path]) -> GGUFFile:
    """Read the headers of a model's files, in the order of its parts.

    Raises ValueError for a file that is not whole, not GGUF or not consistent, and FileNotFoundError for one that is missing.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, path in enumerate(paths):
        values, part = _Header(path).read()
        if len(paths) > 1:
            _check_part(path, values, number, len(paths))
        elif values.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is part {values.get('split.no', 0) + 1} of {values['split.count']}, and its name does not say which "
                f"the others are; name them like {path.stem}-00001-of-{values['split.count']:05}.gguf"
            )
        metadata = metadata or values
        if twice := sorted(tensors.keys() & part.keys()):
            raise ValueError(f"{path} has tensor {twice[0]!r} of another part again; download the parts again")
        tensors |= part
    whole = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and whole != len(tensors):
        raise ValueError(f"the parts of {paths[0]} have {len(tensors)} tensors of {whole}; download them again")
    return GGUFFile(tuple(paths), metadata, tensors)


def _check_part(path: Path, values: dict[str, Any], number: int, count: int) -> None:
    inside = (values.get("split.no"), values.get("split.count"))
    if inside != (number, count):
        raise ValueError(
            f"{path} is part {number} (from 0) of {count} by its name, and {inside[0]} of {inside[1]} inside"
        )


def _mapped(path: Path, offset: int, size: int) -> np.ndarray:
    """uint8 [size]. The mapping is private, so a write to a page does not reach the file."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), offset - start + size, access=mmap.ACCESS_COPY, offset=start)
    return np.frombuffer(view, np.uint8, size, offset - start)


class _Header:
    """Reads one header from start to end. Every count is checked against the bytes that are left."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self.size = path.stat().st_size

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self.size < 24:
            raise ValueError(f"{self.path} is no GGUF file: it has {self.size} bytes; download it again")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self.data = data
            try:
                return self._read()
            finally:
                del self.data

    def _read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        version = self._check_start()
        if version not in _VERSIONS:
            raise ValueError(
                f"{self.path} is GGUF version {version}, and outrider reads versions 2 and 3; convert the model again with a "
                "newer llama.cpp"
            )
        self.at = 8
        tensor_count, key_count = self._numbers("u8", 2)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("strict")
            (kind,) = self._numbers("u4")
            if key in metadata:
                raise self._broken(f"it has the key {key!r} twice")
            metadata[key] = self._value(key, kind)
        return metadata, self._tensors(tensor_count, metadata.get("general.alignment", 32))

    def _check_start(self) -> int:
        """The version. Raises ValueError for other kinds of files."""
        start = self.data[:24]
        if start.startswith(_LFS):
            raise ValueError(f"{self.path} is a Git LFS pointer, not the model; run `git lfs pull` there")
        if start[:4] == b"GGUF" and start[6:8] != b"\0\0" and start[4:6] == b"\0\0":
            raise ValueError(
                f"{self.path} is a big-endian GGUF file, and outrider reads little-endian ones; get the little-endian file, or "
                "convert it with `gguf-convert-endian FILE little`"
            )
        if start[:4] != b"GGUF":
            raise ValueError(f"{self.path} is no GGUF file: it starts with {start[:4]!r}; download it again")
        return int.from_bytes(start[4:8], "little")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise self._broken(f"its key {key!r} has type {kind}, which GGUF does not have")
        (kind,), (count,) = self._numbers("u4"), self._numbers("u8")
        if count > LONGEST_ARRAY:
            raise self._broken(f"its key {key!r} has {count} entries")
        if kind == _STRING:
            self._room(count, 8, f"entries of {key!r}")
            return self._strings(count)
        if kind not in _SCALARS:
            raise self._broken(f"its key {key!r} is an array of type {kind}, which outrider does not read")
        return self._numbers(_SCALARS[kind], count, f"entries of {key!r}")

    def _tensors(self, count: int, alignment: Any) -> dict[str, StoredTensor]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > self.size:
            raise self._broken(f"its alignment is {alignment}, which is no power of two from 8")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string("strict")
            (dimensions,) = self._numbers("u4")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._broken(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(reversed(self._numbers("u8", dimensions)))
            if name in entries:
                raise self._broken(f"it has the tensor {name!r} twice")
            entries[name] = (shape, *self._numbers("u4"), *self._numbers("u8"))
        start = -(-self.at // alignment) * alignment
        return {name: self._stored(name, *entry, start, alignment) for name, entry in entries.items()}

    def _stored(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
    ) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # a start from a pack needs none of it

        try:
            form = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {kind}, which the installed gguf package does not know; a newer one may "
                "(pip install -U gguf), or get the model in another quantisation"
            ) from error
        together, size = GGML_QUANT_SIZES[form]
        if min(shape) < 1 or shape[-1] % together:
            raise self._broken(f"tensor {name!r} of shape {list(shape)} cannot be {form.name}, in blocks of {together}")
        stored = StoredTensor(self.path, start + offset, math.prod(shape) // together * size, shape, form.name)
        if offset % alignment:
            raise self._broken(f"tensor {name!r} starts at {offset}, which is no multiple of {alignment}")
        if stored.offset + stored.bytes > self.size:
            raise self._broken(f"tensor {name!r} ends at byte {stored.offset + stored.bytes} of {self.size}")
        return stored

    def _numbers(self, kind: str, count: int = 1, what: str = "header") -> list[Any]:
        dtype = np.dtype(f"<{kind}")
        self._room(count, dtype.itemsize, what)
        numbers = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return numbers

    def _string(self, errors: str = "replace") -> str:
        return self._strings(1, errors)[0]

    def _strings(self, count: int, errors: str = "replace") -> list[str]:
        """errors: what to do with bytes that are not UTF-8. Texts may have some; names may not."""
        texts, data, size, at, length = list[str](), self.data, self.size, self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size:
                    raise self._broken(f"a text of its header has {at - start} bytes, and {size - start} are left")
                texts.append(str(data[start:at], "utf-8", errors))
        except struct.error as error:
            raise self._broken("its header ends in the middle") from error
        except UnicodeDecodeError as error:
            raise self._broken("a name of its header is no text") from error
        self.at = at
        return texts

    def _room(self, count: int, each: int, what: str) -> None:
        if count * each > self.size - self.at:
            raise self._broken(f"its {what} need {count} times {each} bytes, and {self.size - self.at} are left")

    def _broken(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is not whole or not consistent: {why}; download it again")
