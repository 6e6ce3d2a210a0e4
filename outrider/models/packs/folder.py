"""One pack: writes a loaded model into a folder, and makes it again from there.

    outrider_pack.json                     what the pack is; the settings of its matrices and a checksum of each tensor
    packed.safetensors                     the packed matrices, and the parameters and buffers that are not packed
    config.json and the tokenizer's files  as save_pretrained writes them

A restored model is one of transformers without weights. The modules whose matrices are packed hold them as `packed`, as they do
after packing (`models.matrix`). So `LlamaModel` and `HFModel` are made of it as of any model, and give the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import header
from outrider.models.packs.modules import give_packed_, packed_in

MANIFEST, WEIGHTS = "outrider_pack.json", "packed.safetensors"
LAYOUT = 1  # of the folder; a pack of another layout is made again
_PART = ".packed."  # between the name of a module and that of a buffer of its matrix
_SAME = "same"  # the settings of a matrix that two modules share: the name of the first
_LONGEST_READ = 1 << 30  # bytes of one system call; Linux reads less than 2 GiB at once
_DTYPES = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}
_DTYPES |= {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class BadPack(ValueError):
    """A pack that cannot be used: damaged, or of another version. The message ends with what to do."""


class NotRestorable(ValueError):
    """A model that needs more than its matrices, parameters and buffers."""


@dataclass(frozen=True)
class Pack:
    """The manifest of a pack.

    source: what the model was loaded from. weights: the precision. end_ids: the end tokens. layout, kernels, transformers:
    what a reader must have in common with the writer.
    matrices: the settings of each `Packed`, by the name of its module. sums: a checksum of each tensor of the file.
    """

    source: str
    weights: str
    end_ids: tuple[int, ...]
    matrices: dict[str, Any]
    sums: dict[str, int]
    layout: int = LAYOUT
    kernels: str = ""
    transformers: str = transformers.__version__

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)), encoding="utf-8")


def is_pack(folder: str | Path) -> bool:
    return Path(folder, MANIFEST).exists()


def load_manifest(folder: Path) -> Pack:
    """Raises BadPack for a pack that these kernels or this version of transformers cannot read."""
    try:
        given = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        values: dict[str, Any] = {f.name: given[f.name] for f in fields(Pack)}
        values["end_ids"] = tuple(values["end_ids"])
        pack = Pack(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadPack(f"{folder / MANIFEST} cannot be read ({error!r})") from error
    mine = {"layout": LAYOUT, "kernels": kernel_layout(), "transformers": transformers.__version__}
    for name, value in mine.items():
        if (theirs := getattr(pack, name)) != value:
            raise BadPack(f"{folder} was packed with another version ({name} {theirs}; here it is {value})")
    return pack


@functools.cache
def kernel_layout() -> str:
    """A digest of how the kernels round weights and where they put them: a small matrix in each format."""
    matrix = (torch.arange(17 * 256) * 7919 % 4093 - 2046).float().view(17, 256) / 1000
    digest = hashlib.sha256()
    for name in (*native.KINDS, *native.FORMATS):
        kind, source = name, matrix
        if name not in native.KINDS:
            together, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
            rows = (torch.arange(17 * 256 // together * size) * 7919 % 251).to(torch.uint8).view(17, -1)
            kind, source = "float32", Blocks(rows, name, 256)
        settings, buffers = native.Packed([source], kind).state()
        digest.update(repr((settings, [(n, t.numpy().tobytes()) for n, t in buffers.items()])).encode())
    return digest.hexdigest()[:16]


def write(
    folder: Path, model: PreTrainedModel, weights: str, end_ids: tuple[int, ...], tokenizer: Any, source: str
) -> int:
    """Write the pack of a model whose linears are packed. Returns its bytes.

    model: the modules, after `LlamaModel` or `HFModel` was made of them. folder: must exist. Raises OSError if it cannot be
    written, and NotRestorable. What the folder holds then is no pack.
    """
    tensors, matrices = dict[str, Tensor](), dict[str, Any]()
    names: dict[int, str] = {}
    for name, packed in packed_in(model):
        if (first := names.setdefault(id(packed), name)) != name:
            matrices[name] = {_SAME: first}
            continue
        matrices[name], parts = packed.state()
        tensors |= {f"{name}{_PART}{part}": t for part, t in parts.items()}
    seen = {t.data_ptr() for t in tensors.values()}
    for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if t.numel():
            t = t.detach().contiguous()
            tensors[name] = t.clone() if t.data_ptr() in seen else t
            seen.add(t.data_ptr())
    _check_skeleton(model, {*tensors, *matrices})
    model.config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    try:
        save_file(tensors, folder / WEIGHTS)
    except Exception as error:  # its own class, which is no OSError
        raise OSError(f"{folder / WEIGHTS} cannot be written: {error}") from error
    shutil.copymode(folder / "config.json", folder / WEIGHTS)  # save_file lets nobody else read it
    sums = {name: _checksum(t) for name, t in tensors.items()}
    Pack(source, weights, end_ids, matrices, sums, kernels=kernel_layout()).save(folder)
    return size(folder)


def bytes_of(model: PreTrainedModel) -> int:
    """What the pack of a model takes, without its tokenizer."""
    packed = {id(p): p.bytes for _, p in packed_in(model)}
    return sum(packed.values()) + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def source_of(folder: Path) -> tuple[str | None, str]:
    """What a pack was made of, if that is still here and the manifest says so, and the precision."""
    try:
        given = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        source, weights = str(given["source"]), str(given["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    return (source if source.startswith("builtin:") or Path(source).exists() else None), weights


def size(folder: Path) -> int:
    """Bytes of its files. A file that another process removes meanwhile counts as nothing."""
    total = 0
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def restore(folder: Path, pack: Pack) -> PreTrainedModel:
    """The model of a pack, ready for the class that runs it. Raises BadPack if anything is missing or damaged."""
    try:
        return _restore(folder, pack)
    except BadPack:
        raise
    except Exception as error:  # transformers, and files that are not what they were, raise many kinds of errors
        raise BadPack(f"{folder} cannot be read ({error!r})") from error


def _restore(folder: Path, pack: Pack) -> PreTrainedModel:
    model, tensors = _skeleton(AutoConfig.from_pretrained(folder)), _read(folder / WEIGHTS, pack.sums)
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in pack.matrices}
    for name in [*tensors]:
        owner, is_part, part = name.partition(_PART)
        if is_part:
            parts[owner][part] = tensors.pop(name)
    made: dict[str, native.Packed] = {}
    for name, settings in pack.matrices.items():
        same = settings.get(_SAME)
        made[name] = made[same] if same else native.Packed.from_state(settings, parts[name])
    give_packed_(model, made)
    for name, t in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = t
        else:
            module._parameters[leaf] = nn.Parameter(t, requires_grad=False)
    for module in model.modules():  # what is packed is nowhere else
        for leaf, p in module._parameters.items():
            if p is not None and p.is_meta:
                module._parameters[leaf] = None if leaf == "bias" else nn.Parameter(torch.empty(0), requires_grad=False)
        module._buffers |= {n: torch.empty(0) for n, b in module._buffers.items() if b is not None and b.is_meta}
    if model.generation_config is not None and pack.end_ids:
        model.generation_config.eos_token_id = list(pack.end_ids)
    return model.eval()


def _skeleton(config: Any) -> PreTrainedModel:
    """The modules without memory for their weights."""
    with no_init_weights(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)


def _check_skeleton(model: PreTrainedModel, known: Set[str]) -> None:
    """Raise NotRestorable if the model needs a tensor that is in no pack. known: names of tensors, and of packed modules."""
    empty = _skeleton(copy.deepcopy(model.config))
    lost = [n for n, _ in empty.named_buffers(remove_duplicate=False) if not known & {n, n.rpartition(".")[0]}]
    lost += [f"{n}.{k}" for n, m in empty.named_modules() for k, v in m.__dict__.items() if isinstance(v, Tensor)]
    if lost or type(empty) is not type(model):
        raise NotRestorable(
            f"a {type(model).__name__} cannot be restored from a pack: it would lack {', '.join(lost[:3])}"
        )


def _read(file: Path, sums: Mapping[str, int]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, read once into memory of its own. Raises ValueError for a damaged one.

    Read and not mapped, because a mapped file has small pages, which makes each step of the model slower.
    """
    table, start = header(file)
    if table.keys() - {"__metadata__"} != sums.keys():
        raise ValueError(f"{file} has other tensors than its manifest says")
    descriptor = os.open(file, os.O_RDONLY)

    def read(name: str) -> Tensor:
        entry = table[name]
        t = native.room(math.prod(entry["shape"]), _DTYPES[entry["dtype"]])
        first, end = entry["data_offsets"]
        into = t.view(torch.uint8).numpy().data
        while first < end:
            got = os.preadv(descriptor, [into[: min(end - first, _LONGEST_READ)]], start + first)
            if not got:
                raise ValueError(f"{file} ends in the middle of {name}")
            into, first = into[got:], first + got
        if _checksum(t) != sums[name]:
            raise ValueError(f"{file} is damaged: {name} has another checksum than when it was written")
        return t.view(entry["shape"])

    try:
        with ThreadPoolExecutor(max(torch.get_num_threads(), 2)) as pool:
            return dict(zip(sums, pool.map(read, sums), strict=True))
    finally:
        os.close(descriptor)


def _checksum(t: Tensor) -> int:
    """The sum of its 64-bit words, and of the bytes after the last one. A flipped bit always changes it."""
    raw = t.reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64) if raw.storage_offset() % 8 == 0 else raw[:whole].clone().view(torch.int64)
    return int(words.sum()) ^ int(raw[whole:].sum())
