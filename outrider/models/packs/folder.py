"""One pack: writes a loaded model into a folder, and makes it again from there.

    outrider_pack.json                     what the pack is; the settings of its matrices and a checksum of each tensor
    packed.safetensors                     the packed matrices, and the parameters and buffers that are not packed
    config.json and the tokenizer's files  as save_pretrained writes them

Only models that the native step runs have packs. A pack is read as a `Program`, without transformers.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore
from typing import Any, NamedTuple

import numpy as np

from outrider.core.files import disk_bytes, read_settings, written_whole
from outrider.kernels import cpu as native
from outrider.models import checkpoint
from outrider.models.checkpoint import LoadRequest, ReadModel
from outrider.models.config import config_of
from outrider.models.dtypes import STORED_DTYPES
from outrider.models.files import gguf_files
from outrider.models.gguf import reader
from outrider.models.native import families
from outrider.models.native.model import stored
from outrider.models.native.program import Program
from outrider.models.native.weights import expert_names
from outrider.models.tokenizer import FILE, FastTokenizer, tokenizer_of

MANIFEST, WEIGHTS, CONFIG = "outrider_pack.json", "packed.safetensors", "config.json"
LAYOUT = 6  # of the folder; a pack of another layout is made again
_PART = ".packed."  # between the name of a module and that of a buffer of its matrix
_SAME = "same"  # the settings of a matrix that two modules share: the name of the first
_LINE = 64  # bytes of the caches' lines
_LARGE = 4 << 20  # bytes that are written at once: so Linux keeps a file in large pages
_FIRST, _MOSTLY = 64 << 20, 0.9  # bytes of a file, of which this part must be in large pages, or it is not mapped
_POPULATE_READ = 22  # of madvise, since Linux 5.14


class BadPack(ValueError):
    """A pack that cannot be used: damaged, or of another version. The message ends with what to do."""


@dataclass(frozen=True)
class Manifest:
    """What a pack is."""

    source: str  # what the model was loaded from
    weights: str  # the precision
    end_ids: tuple[int, ...]
    made_by: dict[str, Any]  # what a reader must have in common with the writer
    matrices: dict[str, Any]  # the settings of each `Packed`, by the name of its module
    sums: dict[str, int]  # a checksum of each tensor of the file
    native: dict[str, Any]  # the `Program.facts`
    experts: dict[str, list[str]] = field(default_factory=dict)  # the tensors of mixtures that stay in their GGUF file


def is_pack(folder: str | Path) -> bool:
    return Path(folder, MANIFEST).exists()


def made_by() -> dict[str, Any]:
    """Packed weights are for the library that packed them: another one may round, or order them, in another way."""
    return {"layout": LAYOUT, "kernels": native.build().split()[0], "programs": families.digest()}


def manifest(folder: Path) -> Manifest:
    """Raises BadPack for a pack that other kernels, or other code, have packed."""
    try:
        settings = read_settings(folder / MANIFEST)
        if (theirs := settings.get("made_by")) != (mine := made_by()):
            raise BadPack(f"{folder} was packed with another version ({theirs}; here it is {mine})")
        ends = tuple(settings.pop("end_ids"))
        if not all(type(i) is int and i >= 0 for i in ends):
            raise ValueError(f"end_ids are tokens, got {ends}")
        return Manifest(end_ids=ends, **settings)
    except BadPack:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadPack(f"{folder / MANIFEST} cannot be read ({error!r})") from error


class PackContents(NamedTuple):
    """What a pack will hold. files: the small ones, by name. manifest: without checksums."""

    manifest: Manifest
    tensors: dict[str, np.ndarray]
    files: dict[str, bytes]

    def write(self, folder: Path) -> int:
        """Write the pack, which replaces the folder if it is there. Returns its bytes. Raises OSError if it cannot be written."""
        with written_whole(folder) as half:
            self.write_to(half)
        return disk_bytes(folder)

    def write_to(self, folder: Path) -> None:
        """Write the pack to a new folder, its manifest last. Raises OSError if it cannot be written."""
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        save(self.tensors, folder / WEIGHTS)
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # only its owner can read what was saved
        summed = replace(self.manifest, sums={name: checksum(t) for name, t in self.tensors.items()})
        (folder / MANIFEST).write_text(json.dumps(asdict(summed)), encoding="utf-8")


def contents(loaded: ReadModel, program: Program, weights: str, source: str, beside: bool = False) -> PackContents:
    """The pack of a program. The tensors are those of the program, not copies.

    loaded: its configuration, tokenizer and end tokens count. beside: the GGUF file stays, so the pack leaves out the
    experts that are in it.
    """
    experts = _stored_in(program) if beside else {}
    tensors, matrices, names = dict[str, np.ndarray](), dict[str, Any](), dict[int, str]()
    for name, part in _kept(program, experts):
        if not isinstance(part, native.Packed):
            tensors[name] = part
        elif (first := names.setdefault(id(part), name)) != name:
            matrices[name] = {_SAME: first}
        else:
            matrices[name], parts = part.state()
            tensors |= {f"{name}{_PART}{buffer}": t for buffer, t in parts.items()}
    with TemporaryDirectory() as temporary:
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(temporary)
        small = {f.name: f.read_bytes() for f in Path(temporary).iterdir() if f.is_file()}
    if FILE in small:
        small[FILE] = _quicker(small[FILE])
    small[CONFIG] = json.dumps(loaded.config.to_dict(), indent=1, default=str).encode()
    places = {name: [*stored.tensors] for name, stored in experts.items()}
    summary = Manifest(source, weights, loaded.end_ids, made_by(), matrices, {}, program.facts, places)
    return PackContents(summary, tensors, small)


def _quicker(tokenizer: bytes) -> bytes:
    """The same tokenizer.json in three quarters of the time: of it the library makes a tree, with a node for each text."""
    settings = json.loads(tokenizer)
    model = settings["model"]
    if model["type"] == "BPE":
        model["vocab"] = dict(sorted(model["vocab"].items()))
        merges = [" ".join(pair) for pair in model["merges"]]
        if all(text.count(" ") == 1 and not text.startswith("#version") for text in merges):  # a comment in older files
            model["merges"] = merges
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode()


def bytes_of(program: Program) -> int:
    """What the pack of a program takes beside its GGUF file, without its tokenizer."""
    parts = {id(part): part for _, part in _kept(program, _stored_in(program))}
    return sum(part.bytes if isinstance(part, native.Packed) else part.nbytes for part in parts.values())


def _kept(
    program: Program, without: Mapping[str, reader.StoredExperts]
) -> Iterator[tuple[str, np.ndarray | native.Packed]]:
    """The weights by name. without: mixtures whose matrices are left out."""
    starts = tuple(f"{name}." for name in without)
    for name, part in program.named.items():
        if not (isinstance(part, reader.StoredExperts) or name.startswith(starts)):
            yield name, part


def _stored_in(program: Program) -> dict[str, reader.StoredExperts]:
    return {name: part for name, part in program.named.items() if isinstance(part, reader.StoredExperts)}


def source_of(folder: Path) -> tuple[str | None, str]:
    """What a pack was made of, if that is still here and the manifest says so, and the precision."""
    try:
        settings = read_settings(folder / MANIFEST)
        source, weights = str(settings["source"]), str(settings["weights"])
    except (OSError, ValueError, KeyError):
        return None, ""
    return (source if source.startswith("builtin:") or Path(source).exists() else None), weights


def read(folder: Path, request: LoadRequest) -> ReadModel:
    """Read a pack. The name of the request is for messages.

    Raises BadPack if anything is missing or damaged, ValueError if it has another precision than the request, and MemoryError.
    """
    pack = manifest(folder)
    if request.weights not in (None, pack.weights):
        raise ValueError(
            f"{request.name} is packed in {pack.weights}, not in {request.weights}; pack the model again, or leave it out"
        )
    checkpoint.fits(request.name, checkpoint.Sizes("gguf", 0, disk_bytes(folder)), None, request.device)
    try:
        settings = read_settings(folder / CONFIG)
        config = config_of(settings)
        matrices, tensors, tokenizer = _read_parts(folder, pack, request.tokenizer)
        checkpoint.check_numbers(folder / CONFIG, settings, {n: part.shape for n, part in (matrices | tensors).items()})
        model = stored(pack.native, matrices | tensors | _experts_of(pack, request))
        layers, said = (where.get("num_hidden_layers") for where in (pack.native["config"], settings))
        if said not in (None, layers):
            raise ValueError(f"{MANIFEST} has {layers} layers, and {CONFIG} says {said}")
        if (length := settings.get("max_position_embeddings")) != model.max_length:
            raise ValueError(f"max_length is {model.max_length}, and {CONFIG} says {length}")
    except BadPack:
        raise
    except Exception as error:  # transformers, and files that are not what they were, raise many kinds of errors
        raise BadPack(f"{folder} cannot be read ({error!r})") from error
    return ReadModel(model, tokenizer, pack.weights, pack.end_ids, config)


def _read_parts(
    folder: Path, pack: Manifest, with_tokenizer: bool
) -> tuple[dict[str, native.Packed], dict[str, np.ndarray], Any]:
    """The packed matrices, the other tensors, and the tokenizer."""
    tokenizer = None
    with _reading(folder / WEIGHTS, pack.sums) as tensors:
        if with_tokenizer:
            tokenizer = FastTokenizer.of_folder(folder) if (folder / FILE).is_file() else tokenizer_of(str(folder))
            checkpoint.give_back()
    parts: dict[str, dict[str, np.ndarray]] = {name: {} for name in pack.matrices}
    for name in [*tensors]:
        owner, is_part, part = name.partition(_PART)
        if is_part:
            parts[owner][part] = tensors.pop(name)
    packed: dict[str, native.Packed] = {}
    for name, settings in pack.matrices.items():
        same = settings.get(_SAME)
        packed[name] = packed[same] if same else native.Packed.from_state(settings, parts[name])
    return packed, tensors, tokenizer


def _experts_of(pack: Manifest, request: LoadRequest) -> dict[str, Any]:
    """The mixtures that stay in their GGUF file, and their matrices."""
    mixtures = dict[str, Any]()
    if not pack.experts:
        return mixtures
    tensors = reader.read(gguf_files(request.name) or ()).tensors
    for name, names in pack.experts.items():
        mixtures[name] = stored_experts = reader.StoredExperts({n: tensors[n] for n in names})
        mixtures |= expert_names(name, stored_experts.packed())
    return mixtures


def save(arrays: Mapping[str, np.ndarray], file: Path) -> None:
    """Write a safetensors file. Its tensors begin at multiples of what their bytes are a multiple of, up to a cache's line."""
    codes, table, end = {dtype: code for code, dtype in STORED_DTYPES.items()}, dict[str, Any](), 0
    ordered = sorted(arrays.items(), key=lambda item: -min(item[1].nbytes & -item[1].nbytes or _LINE, _LINE))
    for name, array in ordered:
        place = [end, end := end + array.nbytes]
        table[name] = {"dtype": codes[array.dtype], "shape": array.shape, "data_offsets": place}
    header = json.dumps(table).encode()
    header += b" " * (-(len(header) + 8) % _LINE)
    left = bytearray(len(header).to_bytes(8, "little") + header)
    with file.open("wb", buffering=_LARGE) as opened:
        for _, array in ordered:
            left += _raw(array).data
            whole = len(left) // _LARGE * _LARGE
            opened.write(left[:whole])
            del left[:whole]
        opened.write(left)


@contextmanager
def _reading(file: Path, sums: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
    """Threads read every tensor of a safetensors file, while the block runs. The dict has them at the end of the block.

    The block may keep the interpreter to itself: a thread reads its part by one call of the system. A file that can be mapped is
    looked through after the block, which may need memory for a moment. Raises ValueError for a damaged file.
    """
    table = checkpoint.tensors([file])
    if table.keys() != sums.keys():
        raise ValueError(f"{file} has other tensors than its manifest says")
    mapped = _mapped(file)
    memory = native.zeros_in_large_pages(file.stat().st_size) if mapped is None else mapped
    begun, tensors = Semaphore(0), dict[str, np.ndarray]()

    def read(descriptor: int, names: Sequence[str]) -> None:
        begun.release()
        at, end = table[names[0]].offset, table[names[-1]].offset + table[names[-1]].bytes
        while mapped is None and at < end:
            got = os.preadv(descriptor, [memory[at:end].data], at)
            if not got:
                raise ValueError(f"{file} ends in the middle of {names[0]} to {names[-1]}")
            at += got
        for name in names:
            tensors[name] = checkpoint.view(memory, table[name], name)
            if checksum(tensors[name]) != sums[name]:
                raise ValueError(f"{file} is damaged: {name} has another checksum than when it was written")

    threads = max(native.num_threads(), 2)
    with file.open("rb") as opened, ThreadPoolExecutor(threads) as pool:
        names = sorted(table, key=lambda name: table[name].offset)
        size = -(-len(names) // threads)
        parts = [names[i : i + size] for i in range(0, len(names), size or 1)]
        jobs = [pool.submit(read, opened.fileno(), part) for part in parts if mapped is None]
        for _ in jobs:
            begun.acquire()
        yield tensors
        for job in jobs or [pool.submit(read, opened.fileno(), part) for part in parts]:
            job.result()


def _mapped(file: Path) -> np.ndarray | None:
    """uint8 [n]: a file as Linux keeps it. None if that is not in large pages: small ones make each step of a model slower."""
    before = _in_large_pages()
    try:
        with file.open("rb") as opened:
            pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_HUGEPAGE)
        pages.madvise(_POPULATE_READ, 0, first := min(_FIRST, len(pages)))
        if _in_large_pages() - before < _MOSTLY * first:
            return None
    except (AttributeError, OSError, ValueError):  # an older system, or another one
        return None
    return np.frombuffer(pages, np.uint8)


def _in_large_pages() -> int:
    """Bytes of files that this process has mapped in large pages."""
    try:
        found = re.search(r"FilePmdMapped: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def _raw(array: np.ndarray) -> np.ndarray:
    """uint8 [n]: its bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def checksum(array: np.ndarray) -> int:
    """The sum of its 64-bit words, and of the bytes after the last one. A flipped bit always changes it."""
    raw = _raw(array)
    whole = raw.size // 8 * 8
    return int(raw[:whole].view(np.int64).sum()) ^ int(raw[whole:].sum())
