"""What is asked of a checkpoint and what it gives; and its checks before weights are read: are its files whole, do they fit?"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.core.files import read_settings
from outrider.models.dtypes import DTYPES, QUANTIZATIONS, STORED_DTYPES, WEIGHT_BYTES
from outrider.models.files import part_names

_LONGEST_HEADER = 100_000_000  # the limit of safetensors' own reader
# Memory that a model needs, relative to its weights: caches, activations and what is being converted.
_SPARE = 1.1


# Numbers of a configuration that code counts to, so that a huge one would never end; and those that no model is without.
_COUNT = re.compile(r"(\w+_)?(num|n)_(\w+_)?(layers?|heads?|experts|blocks|groups)")
_POSITIVE = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "n_embd",
    "n_head",
)
# What a folder's model depends on: weights, configuration and tokenizer.
_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".model", ".jinja", ".txt")
# How the text model is named in the files of one that also reads images or sound -> its own names.
TEXT_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?": "model.",
}
_SAMPLES, _SAMPLE = 16, 1 << 16  # pieces of a file that are read for its fingerprint, and bytes of each
_MANY = 512  # layers or heads that no tensor needs to prove


class UnsupportedModel(ValueError):
    """The model cannot be run with a cache that keeps single nodes."""


class StoredTensor(NamedTuple):
    """Where a tensor lies. shape: torch's order, the last dimension is contiguous. format: the code of a safetensors header, such
    as "BF16", or ggml's name, such as "Q4_K"."""

    path: Path
    offset: int
    bytes: int
    shape: tuple[int, ...]
    format: str

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


class Sizes(NamedTuple):
    """What a model needs of memory."""

    stored: str  # the precision that "auto" loads: that of the configuration or of most weights; "gguf" for blocks
    matrices: int  # number of weights that can be kept at another precision
    rest: int  # bytes of the others (embeddings, norms), which stay as they are
    blocks: int = 0  # bytes of the matrices as blocks

    def bytes(self, weights: str) -> float:
        return self.rest + (self.blocks if weights == "gguf" else self.matrices * WEIGHT_BYTES[weights])


class LoadRequest(NamedTuple):
    """A model that is asked for by name. name, dtype, quantization: as for `load`.

    tokenizer: its own is wanted. cache: its pack may be in the cache. unpacked: its tensors are wanted, so a folder of packed
    weights stands for the model that it was made of.
    """

    name: str
    dtype: str = "auto"
    device: str = "cpu"
    quantization: str | None = None
    tokenizer: bool = True
    cache: bool = True
    unpacked: bool = False

    @property
    def weights(self) -> str | None:
        """The precision that is asked for; None for that of the checkpoint."""
        return self.quantization or (None if self.dtype == "auto" else self.dtype)


class ReadModel(NamedTuple):
    """A model that was read. tokenizer: its own, if it was wanted. weights: their precision if it is decided, else None.

    config: of the model. A program comes from a pack, so nothing of it can be reduced.
    """

    model: Any
    tokenizer: Any | None
    weights: str | None
    end_ids: tuple[int, ...]
    config: Any


def token_ids(given: Any) -> tuple[int, ...]:
    """End tokens as a configuration has them: one, several or None."""
    return tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (int(given),)


def end_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The end tokens of a model in a folder, by its settings for generation, else by its configuration."""
    generation = folder / "generation_config.json"
    end = (read_settings(generation) if generation.is_file() else {}).get("eos_token_id")
    return token_ids(config.eos_token_id if end is None else end)


def settings(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says; nothing if there is none."""
    file = folder / "config.json"
    return read_settings(file) if file.is_file() else {}


def weight_files(name: str, folder: Path) -> list[Path]:
    """A folder's safetensors files; none if it holds only older weights (*.bin). Raises FileNotFoundError for missing ones."""
    index = folder / "model.safetensors.index.json"
    one = folder / "model.safetensors"  # beside it, some have the same weights under the names of their authors
    files = {*indexed(index).values()} if index.exists() else {one} if one.exists() else {*folder.glob("*.safetensors")}
    if missing := sorted(f.name for f in files if not f.exists()):
        raise FileNotFoundError(
            f"{name}: {len(missing)} of {len(files)} files of weights are missing from {folder}, {missing[0]} among "
            "them; the download is incomplete"
        )
    if not files and not [*folder.glob("*.bin")]:
        raise FileNotFoundError(
            f"{folder} has a config.json and no weights (*.safetensors); the download is incomplete"
        )
    return sorted(files)


def sizes(name: str, folder: Path) -> Sizes | None:
    """Read the headers of a folder's safetensors files. None if it holds only older weights (*.bin).

    A configuration may say another precision than the files have: then the weights get that one when they are loaded.

    Raises FileNotFoundError for missing weights and ValueError for an incomplete file.
    """
    counts: dict[str, int] = {}
    matrices = rest = others = 0
    for tensor, stored in tensors(weight_files(name, folder)).items():
        counts[stored.format] = counts.get(stored.format, 0) + stored.weights
        if len(stored.shape) > 1 and "embed" not in tensor and "wte" not in tensor:
            matrices += stored.weights
        else:
            rest, others = rest + stored.bytes, others + stored.weights
    if not counts:
        return None
    most = STORED_DTYPES.get(max(counts, key=lambda code: counts[code]), STORED_DTYPES["F32"]).name
    if most not in DTYPES:
        return Sizes("float32", matrices, rest)
    said = str(settings(folder).get("dtype") or settings(folder).get("torch_dtype"))
    if said in DTYPES and said != most:
        return Sizes(said, matrices, others * int(WEIGHT_BYTES[said]))
    return Sizes(most, matrices, rest)


def tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, by name. Raises ValueError as `header` does."""
    out: dict[str, StoredTensor] = {}
    for file in files:
        table, start = header(file)
        for name, entry in table.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                out[name] = StoredTensor(file, start + first, end - first, tuple(entry["shape"]), entry["dtype"])
    return out


def view(content: np.ndarray, tensor: StoredTensor, name: str) -> np.ndarray:
    """A tensor in the bytes of its file. name: for the error. Raises ValueError for numbers of an unknown kind."""
    if tensor.format not in STORED_DTYPES:
        raise ValueError(f"{name} has type {tensor.format}, which outrider does not read")
    raw, dtype = content[tensor.offset :][: tensor.bytes].view(np.ndarray), STORED_DTYPES[tensor.format]
    raw = raw if tensor.offset % dtype.itemsize == 0 else raw.copy()
    return raw.view(dtype).reshape(tensor.shape)


def let_go(part: Any) -> None:
    """Give the pages of an array's mapped file back to the system, if it is of one. They come again when they are read."""
    while isinstance(part, np.ndarray):
        part = part.base
    if isinstance(part, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        part.madvise(mmap.MADV_DONTNEED)


def text_names(names: Collection[str]) -> dict[str, str]:
    """The tensors of the text model, by its own names; the values are the names in the files.

    names: of all tensors. They are their own where there is no part for images or sound.
    """
    out = dict[str, str]()
    for name in names:
        short = next((re.sub(there, here, name) for there, here in TEXT_NAMES.items() if re.match(there, name)), name)
        if short != name or name.startswith("lm_head."):
            out[short] = name
    if all(short == name for short, name in out.items()):  # Qwen2-VL names its text model as others do
        return {name: name for name in names if not name.startswith("visual.")}
    return out


def indexed(index: Path) -> dict[str, Path]:
    """The file of each tensor that an index of weights names. Raises ValueError for a file that is none."""
    try:
        return {name: index.parent / str(file) for name, file in read_settings(index)["weight_map"].items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights ({error}); download it again") from error


def check_folder(folder: Path) -> None:
    """`check_numbers` of a folder's config.json, if it has one. Raises ValueError, also for a header that contradicts itself."""
    if said := settings(folder):
        check_numbers(folder / "config.json", said, shapes(folder))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a folder's safetensors files, by name. Raises ValueError as `header` does."""
    return {name: tensor.shape for name, tensor in tensors(sorted(folder.glob("*.safetensors"))).items()}


def check_numbers(file: Path, given: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], part: str = "") -> None:
    """Raise ValueError for a number of a configuration that no model of these tensors has. Nothing is made of it before.

    file: for the message. given: the configuration, or a `part` of it. shapes: of the tensors, by name; empty if unknown.
    """
    numbered = [int(match[1]) + 1 for name in shapes if (match := re.search(r"\.(\d+)\.", name))]
    widest, deepest = max((max(s, default=1) for s in shapes.values()), default=2**31), max(numbered, default=1)
    for key, value in given.items():
        if isinstance(value, dict) and part.count(".") < 4:
            check_numbers(file, value, shapes, f"{part}{key}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        has, most = ("layers", deepest) if "layer" in key else ("rows or columns in a tensor", widest)
        if _COUNT.fullmatch(key) and value > max(most, _MANY):
            raise ValueError(f"{file}: {part}{key} is {value}, and the weights beside it have at most {most} {has}")
        if key in _POSITIVE and part in ("", "text_config.") and value < 1:
            raise ValueError(f"{file}: {part}{key} is {value}, and a model has at least one")
        if abs(value) >= 2**63:
            raise ValueError(f"{file}: {part}{key} is beyond 64 bits; no setting of a model is so large")


def fits(
    name: str, need: Sizes, weights: str | None, where: str, formats: Collection[str] = tuple(WEIGHT_BYTES)
) -> None:
    """Raise MemoryError if the weights, kept as `weights` (None: as stored), need more memory than is free.

    formats: those that the message may propose.
    """
    weights = weights or need.stored
    wanted, free = need.bytes(weights), free_memory(where)
    if not free or wanted * _SPARE <= free:
        return
    smaller = [w for w in formats if need.bytes(w) < wanted and need.bytes(w) * _SPARE <= free]
    if where != "cpu":  # only the CPU has int8 and int4 weights
        smaller = [w for w in smaller if w in DTYPES]
    hint = "no precision of this model fits here"
    if smaller:
        how = f"quantization={smaller[0]!r}" if smaller[0] in QUANTIZATIONS else f"dtype={smaller[0]!r}"
        hint = f"{smaller[0]} weights would fit ({need.bytes(smaller[0]) / 2**30:.1f} GiB): {how}"
    raise MemoryError(
        f"{name} needs {wanted / 2**30:.1f} GiB as {weights}, and {free / 2**30:.1f} GiB are free on {where}; {hint}"
    )


def fingerprint(source: Any) -> str:
    """A digest that changes when a model's folder, a GGUF file or one of its parts, or another file is written again.

    It covers names, sizes and times of the weights, the configuration and the tokenizer, and samples of their content. "" if it
    is not a path here: a built-in name, a hub name or a loaded model.
    """
    path = Path(source).expanduser() if isinstance(source, (str, Path)) else None
    if path is None or not path.exists():
        return ""
    parts = sorted(path.iterdir()) if path.is_dir() else [path.with_name(name) for name in part_names(path.name)]
    digest = hashlib.sha256()
    for file in parts:
        if file.is_file() and (file.suffix in _SUFFIXES or not path.is_dir()):
            size = file.stat().st_size
            digest.update(repr((file.name, size, file.stat().st_mtime_ns)).encode())
            with file.open("rb") as f:
                for at in sorted({i * max(size - _SAMPLE, 0) // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                    f.seek(at)
                    digest.update(f.read(_SAMPLE))
    return digest.hexdigest()[:16]


def free_memory(where: str) -> int:
    """Bytes of free memory."""
    if where != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(where)[0])
    try:
        free = (
            int(dict(x.split(":") for x in Path("/proc/meminfo").read_text().splitlines())["MemAvailable"][:-3]) << 10
        )
    except (OSError, LookupError, ValueError):  # another system
        import psutil

        free = psutil.virtual_memory().available
    # A container has a limit of its own. The page cache counts against it, but can be given back.
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{f}").read_text().strip() for f in ("max", "current"))
        stat = dict(x.split() for x in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        if limit != "max":
            free = min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return free


def give_back() -> None:
    """Return freed memory to the system. glibc keeps it: a vocabulary of 262,144 tokens leaves 60 MB behind."""
    with suppress(AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        ctypes.CDLL(None).malloc_trim(0)


def header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data start.

    Raises ValueError if the file is not as long as its header says, or if an entry has other bytes than its shape.
    """
    size = file.stat().st_size
    broken = f"{file} is not whole: "
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            f.seek(0)
            if f.read(20).startswith(b"version https://git"):
                raise ValueError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` there")
            raise ValueError(f"{broken}its table alone is longer than the {size} bytes there are; download it again")
        try:
            table = json.loads(f.read(length))
            end = max((_end_of(k, e) for k, e in table.items() if k != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{broken}its table cannot be read ({error}); download it again") from error
    if size < 8 + length + end:
        raise ValueError(f"{broken}it has {size} bytes of {8 + length + end}; download it again")
    return table, 8 + length


def _end_of(name: str, entry: dict[str, Any]) -> int:
    """Where the bytes of a tensor end. Raises ValueError, KeyError or TypeError for an entry that contradicts itself."""
    (first, end), shape, code = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not all(type(n) is int and n >= 0 for n in (first, end, *shape)) or end < first:
        raise ValueError(f"tensor {name} has shape {shape} from byte {first} to {end}")
    if code in STORED_DTYPES and (need := math.prod(shape) * STORED_DTYPES[code].itemsize) != end - first:
        raise ValueError(
            f"tensor {name} of shape {shape} in {code} takes {need} bytes, and its place has {end - first}"
        )
    return end
