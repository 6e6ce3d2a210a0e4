"""One pack: writes a loaded model into a folder, and makes it again from there.

    outrider_pack.json                     what the pack is; the settings of its matrices and a checksum of each tensor
    packed.safetensors                     the packed matrices, and the parameters and buffers that are not packed
    config.json and the tokenizer's files  as save_pretrained writes them

A model that the native step runs is restored as its `LlamaWeights`, without transformers. Any other one is restored as a model
of transformers without weights. The modules whose matrices are packed hold them as `packed`, as they do after packing
(`models.matrix`). So `LlamaModel` and `HFModel` are made of it as of any model, and give the same bits.
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
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.core.files import read_settings
from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.checkpoint import check_numbers, header
from outrider.models.llama_weights import LlamaSettings, LlamaWeights
from outrider.models.packs.modules import give_packed_, packed_in
from outrider.models.tokenizer import LazyTokenizer, settings_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MANIFEST, WEIGHTS, CONFIG = "outrider_pack.json", "packed.safetensors", "config.json"
LAYOUT = 1  # of the folder; a pack of another layout is made again
_PART = ".packed."  # between the name of a module and that of a buffer of its matrix
_SAME = "same"  # the settings of a matrix that two modules share: the name of the first
_LONGEST_READ = 1 << 28  # bytes that one thread reads by one call of the system, unless a tensor is larger
_MOST_BUFFERS = 512  # of one call; Linux takes 1024
# What a pack may lack: older ones do.
_LATER = ("native", "tokenizer")
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
    native: the `LlamaSettings` of a model that the native step runs. tokenizer: the settings of a `LazyTokenizer`. None: it is
    restored by transformers.
    """

    source: str
    weights: str
    end_ids: tuple[int, ...]
    matrices: dict[str, Any]
    sums: dict[str, int]
    layout: int = LAYOUT
    kernels: str = ""
    transformers: str = ""
    native: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)), encoding="utf-8")


def is_pack(folder: str | Path) -> bool:
    return Path(folder, MANIFEST).exists()


def load_manifest(folder: Path) -> Pack:
    """Raises BadPack for a pack that these kernels or this version of transformers cannot read."""
    try:
        given = read_settings(folder / MANIFEST)
        values: dict[str, Any] = {
            f.name: given[f.name] for f in fields(Pack) if f.name in given or f.name not in _LATER
        }
        values["end_ids"] = tuple(values["end_ids"])
        if not all(type(i) is int and i >= 0 for i in values["end_ids"]):
            raise ValueError(f"end_ids are tokens, got {values['end_ids']}")
        pack = Pack(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadPack(f"{folder / MANIFEST} cannot be read ({error!r})") from error
    mine = {"layout": LAYOUT, "kernels": kernel_layout(), "transformers": version("transformers")}
    for name, value in mine.items():
        if (theirs := getattr(pack, name)) != value:
            raise BadPack(f"{folder} was packed with another version ({name} {theirs}; here it is {value})")
    return pack


@functools.cache
def kernel_layout() -> str:
    """A digest of how the kernels round weights and where they put them: a small matrix in each format."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

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


class PackContents(NamedTuple):
    """What a pack will hold. files: the small ones, by name. pack: the manifest, without checksums."""

    pack: Pack
    tensors: dict[str, Tensor]
    files: dict[str, bytes]

    def write(self, folder: Path) -> int:
        """Write the pack into a folder that exists. Returns its bytes. Needs no lock.

        Raises OSError if it cannot be written. What the folder holds then is no pack.
        """
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        _save(self.tensors, folder / WEIGHTS)
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # only its owner can read what was saved
        replace(self.pack, sums={name: _checksum(t) for name, t in self.tensors.items()}).save(folder)
        return size(folder)


def contents(
    model: PreTrainedModel,
    weights: str,
    end_ids: tuple[int, ...],
    tokenizer: Any,
    source: str,
    native: LlamaSettings | None = None,
) -> PackContents:
    """The pack of a model whose linears are packed. The tensors are those of the model, not copies.

    model: the modules, after `LlamaModel` or `HFModel` was made of them. native: the settings of the `LlamaModel`. Raises
    NotRestorable.
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
    with TemporaryDirectory() as temporary:
        model.config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        files = {f.name: f.read_bytes() for f in Path(temporary).iterdir() if f.is_file()}
    pack = Pack(
        source,
        weights,
        end_ids,
        matrices,
        {},
        kernels=kernel_layout(),
        transformers=version("transformers"),
        native=None if native is None else native.as_dict(),
        tokenizer=settings_of(tokenizer),
    )
    return PackContents(pack, tensors, files)


def bytes_of(model: PreTrainedModel) -> int:
    """What the pack of a model takes, without its tokenizer."""
    packed = {id(p): p.bytes for _, p in packed_in(model)}
    return sum(packed.values()) + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def source_of(folder: Path) -> tuple[str | None, str]:
    """What a pack was made of, if that is still here and the manifest says so, and the precision."""
    try:
        given = read_settings(folder / MANIFEST)
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


class LazyConfig:
    """The configuration of transformers, which is made when anything is asked of it. folder: has its config.json."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / CONFIG
        self.given = read_settings(self._file)

    @functools.cached_property
    def complete(self) -> PretrainedConfig:
        from transformers import CONFIG_MAPPING

        try:
            config = CONFIG_MAPPING[self.given["model_type"]].from_dict(self.given)
        except Exception as error:  # each architecture checks its settings in its own way
            raise BadPack(f"{self._file} makes no configuration ({error!r})") from error
        config._attn_implementation = None  # see `pretrained.read_config`
        return config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.complete, name)


class RestoredModel(NamedTuple):
    """What a pack gives to start from. tokenizer: None if transformers has to read it, or if none was asked for."""

    folder: Path
    pack: Pack
    model: LlamaWeights | PreTrainedModel
    config: LazyConfig
    tokenizer: LazyTokenizer | None


def start(folder: Path, pack: Pack, *, tokenizer: bool = True, modules: bool = False) -> RestoredModel:
    """Read a pack. tokenizer: its tokenizer, too. modules: as a model of transformers in any case.

    Raises BadPack if anything is missing or damaged.
    """
    try:
        config = LazyConfig(folder)
        lazy: LazyTokenizer | None = None

        def meanwhile() -> None:
            nonlocal lazy
            if tokenizer and pack.tokenizer is not None:
                lazy = LazyTokenizer(folder, pack.tokenizer)

        matrices, tensors = _read_parts(folder, pack, meanwhile)
        shapes = {n: (m.n, m.k) for n, m in matrices.items()} | {n: t.shape for n, t in tensors.items()}
        check_numbers(folder / CONFIG, config.given, shapes)
        if pack.native is None or modules:
            return RestoredModel(folder, pack, _restored(config.complete, pack, matrices, tensors), config, lazy)
        made = LlamaWeights.of_pack(pack.native, matrices, tensors)
        if (length := config.given.get("max_position_embeddings")) != made.settings.max_length:
            raise ValueError(f"max_length is {made.settings.max_length}, and {CONFIG} says {length}")
        return RestoredModel(folder, pack, made, config, lazy)
    except BadPack:
        raise
    except Exception as error:  # transformers, and files that are not what they were, raise many kinds of errors
        raise BadPack(f"{folder} cannot be read ({error!r})") from error


def _read_parts(
    folder: Path, pack: Pack, meanwhile: Callable[[], None]
) -> tuple[dict[str, native.Packed], dict[str, Tensor]]:
    """The packed matrices, and the other tensors."""
    tensors = _read(folder / WEIGHTS, pack.sums, meanwhile)
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in pack.matrices}
    for name in [*tensors]:
        owner, is_part, part = name.partition(_PART)
        if is_part:
            parts[owner][part] = tensors.pop(name)
    made: dict[str, native.Packed] = {}
    for name, settings in pack.matrices.items():
        same = settings.get(_SAME)
        made[name] = made[same] if same else native.Packed.from_state(settings, parts[name])
    return made, tensors


def _restored(
    config: PretrainedConfig, pack: Pack, matrices: Mapping[str, native.Packed], tensors: Mapping[str, Tensor]
) -> PreTrainedModel:
    model = skeleton(config)
    give_packed_(model, matrices)
    for name, t in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        place = module._buffers.get(leaf, module._parameters.get(leaf))
        if place is not None and place.shape != t.shape:
            raise ValueError(f"{name} is {list(t.shape)}, and {CONFIG} asks for {list(place.shape)}")
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


def skeleton(config: Any) -> PreTrainedModel:
    """The modules without memory for their weights."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)


def _check_skeleton(model: PreTrainedModel, known: Set[str]) -> None:
    """Raise NotRestorable if the model needs a tensor that is in no pack. known: names of tensors, and of packed modules."""
    empty = skeleton(copy.deepcopy(model.config))
    lost = [n for n, _ in empty.named_buffers(remove_duplicate=False) if not known & {n, n.rpartition(".")[0]}]
    lost += [f"{n}.{k}" for n, m in empty.named_modules() for k, v in m.__dict__.items() if isinstance(v, Tensor)]
    if lost or type(empty) is not type(model):
        raise NotRestorable(
            f"a {type(model).__name__} cannot be restored from a pack: it would lack {', '.join(lost[:3])}"
        )


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, file)
    except Exception as error:  # its own class, which is no OSError
        raise OSError(f"{file} cannot be written: {error}") from error


def _read(file: Path, sums: Mapping[str, int], meanwhile: Callable[[], None]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, read once into memory of its own. Raises ValueError for a damaged one.

    Read and not mapped, because a mapped file has small pages, which makes each step of the model slower. meanwhile: is called
    while threads read. It may keep the interpreter to itself: a thread reads many tensors by one call of the system.
    """
    table, start = header(file)
    table.pop("__metadata__", None)
    if table.keys() != sums.keys():
        raise ValueError(f"{file} has other tensors than its manifest says")
    made = {name: native.room(math.prod(e["shape"]), _DTYPES[e["dtype"]]) for name, e in table.items()}
    descriptor, begun = os.open(file, os.O_RDONLY), Semaphore(0)

    def read(names: Sequence[str]) -> None:
        """Tensors that lie one after another."""
        buffers = [made[name].view(torch.uint8).numpy().data for name in names if made[name].numel()]
        at = start + table[names[0]]["data_offsets"][0]
        begun.release()
        while buffers:
            got = os.preadv(descriptor, buffers, at)
            if not got:
                raise ValueError(f"{file} ends in the middle of {names[0]} to {names[-1]}")
            at += got
            while buffers and got >= len(buffers[0]):
                got -= len(buffers.pop(0))
            if got:
                buffers[0] = buffers[0][got:]
        for name in names:
            if _checksum(made[name]) != sums[name]:
                raise ValueError(f"{file} is damaged: {name} has another checksum than when it was written")

    try:
        with ThreadPoolExecutor(max(torch.get_num_threads(), 2)) as pool:
            jobs = [pool.submit(read, names) for names in _stretches(table)]
            if jobs:
                begun.acquire()
            meanwhile()
            for job in jobs:
                job.result()
    finally:
        os.close(descriptor)
    return {name: t.view(table[name]["shape"]) for name, t in made.items()}


def _stretches(table: Mapping[str, Any]) -> list[list[str]]:
    """The names of a header, in stretches of the file that one call reads. Raises ValueError for tensors that do not touch."""
    found: list[list[str]] = []
    end = length = 0
    for name in sorted(table, key=lambda n: table[n]["data_offsets"]):
        first, last = table[name]["data_offsets"]
        if first != end:
            raise ValueError(f"{name} begins at byte {first}, and the tensor before ends at {end}")
        if not found or length + last - first > _LONGEST_READ or len(found[-1]) == _MOST_BUFFERS:
            found.append([])
            length = 0
        found[-1].append(name)
        end, length = last, length + last - first
    return found


def _checksum(t: Tensor) -> int:
    """The sum of its 64-bit words, and of the bytes after the last one. A flipped bit always changes it."""
    raw = t.reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64) if raw.storage_offset() % 8 == 0 else raw[:whole].clone().view(torch.int64)
    return int(words.sum()) ^ int(raw[whole:].sum())
