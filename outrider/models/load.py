"""Finds and loads a model: built-in names, local folders, hub names, and model objects."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from outrider.core.extras import needs
from outrider.core.suggest import did_you_mean
from outrider.kernels import OWN_GPU, gpu, why_no_kernels
from outrider.models import checkpoint
from outrider.models.base import LanguageModel
from outrider.models.builtin.download import DOWNLOADS
from outrider.models.cache import check_kv_cache_dtype
from outrider.models.checkpoint import LoadRequest, ReadModel, token_ids
from outrider.models.config import Config
from outrider.models.dtypes import DTYPES, QUANTIZATIONS, parse_dtype
from outrider.models.files import cached, folder_of, gguf_files, names
from outrider.models.hf.checked import differs
from outrider.models.native.model import NativeModel, build, outlined
from outrider.models.native.program import Program
from outrider.models.native.weights import Tensors, TensorSource
from outrider.models.packs import folder as packs
from outrider.models.packs import store
from outrider.models.tokenizer import of_folder, tokenizer_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

# Where the drivers of GPUs are: NVIDIA's, AMD's, and those of Windows below Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# A start from a pack reads so many bytes a second. A pack is kept if it saves so much time, and is not small.
_READ_SPEED, WORTH_SECONDS, WORTH_BYTES = 1e9, 0.25, 50e6


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run."""

    model: LanguageModel  # what runs
    name: str  # as given to `load`
    tokenizer: Any | None  # None if it has none
    end_ids: tuple[int, ...]  # the end tokens
    weights: str  # the precision of the weights
    # what `load` was given; a second copy with another precision is loaded from it.
    source: str | Path | PreTrainedModel
    config: Any = None  # the model's configuration

    @property
    def checkpoint(self) -> str:
        """The name or path of its files; empty for a model object that was made here."""
        named = getattr(self.config, "_name_or_path", "") if _is_module(self.source) else self.source
        return str(named)

    @property
    def program(self) -> Program | None:
        """What native code runs; None where the modelling code of transformers runs."""
        return getattr(self.model, "program", None)

    @property
    def has_mtp(self) -> bool:
        """Whether its files hold an MTP layer that can draft."""
        if self.program is not None:
            return self.program.mtp is not None
        if self.config is None or why_no_kernels("cpu"):
            return False
        from outrider.models.folder import tensors_with_layer

        return tensors_with_layer(self.checkpoint, self.config) is not None


def tensors(loaded: Loaded) -> Tensors:
    """The tensors that a loaded model was made of, opened again at its source. Raises what `load` raises."""
    request = LoadRequest(str(loaded.source), tokenizer=False, cache=False, unpacked=True)
    read = _read(request)[0] if isinstance(loaded.source, (str, Path)) else _read_object(loaded.source)
    return cast("Tensors", read.model)


class Contents(NamedTuple):
    """What is known of a model before its weights are packed."""

    name: str  # as given to `load`
    stored: str  # the precision in which its weights would be kept
    weights: int  # numbers in the matrices that a forward of one token multiplies with, all experts counted
    vocab_size: int  # tokens of the output head
    end_ids: tuple[int, ...]  # the end tokens
    tokenizer: Any | None  # None if it has none
    quantizable: bool  # whether int8 and int4 weights can be used here


# How the weights of a model are to be kept: (quantization, head_ids), see `load` and `NativeModel`.
Reduction = tuple[str | None, "np.ndarray | None"]


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    reduce: Callable[[Contents], Reduction] | None = None,
) -> Loaded:
    """Load a model.

    Args:
        model: a built-in name, a folder, a GGUF file, a hub name, `owner/name:file.gguf` on the hub, or a model object.
        tokenizer: an object, or a name or path as for the model; None for the model's own.
        dtype: "auto" keeps the precision of the checkpoint.
        device: "cpu" or "cuda"; "auto" is that of a model object, else a GPU if there is one.
        quantization: "int8" or "int4" weights, on the CPU, or by our own kernels on a GPU.
        kv_cache_dtype: "float32", "bfloat16" or "int8" keys and values; "auto" is bfloat16 on the CPU, and float32 where the
            weights are, too.
        reduce: decides what a draft model can do without, once its sizes are known. Its quantization counts if none is given.

    Raises FileNotFoundError, ConnectionError, ValueError, MemoryError or UnsupportedModel. The message says what would work. It
    is raised before anything large is done.
    """
    check_kv_cache_dtype(kv_cache_dtype)
    started = perf_counter()
    request = _request(model, tokenizer, dtype, device, quantization, cache=reduce is None)
    read, pack_name = _read(request) if isinstance(model, (str, Path)) else (_read_object(model, quantization), None)
    loaded = _made(model, read, request, tokenizer, kv_cache_dtype, reduce)
    if pack_name is not None:
        _keep(pack_name, loaded, perf_counter() - started)
    checkpoint.give_back()
    return loaded


def _request(
    model: str | Path | PreTrainedModel,
    tokenizer: Any | None,
    dtype: str | torch.dtype,
    device: str,
    quantization: str | None,
    **more: bool,
) -> LoadRequest:
    """The arguments of `load`, checked. Raises ValueError."""
    is_object = _is_module(model)
    if not model or not (is_object or isinstance(model, (str, Path))):
        raise ValueError(f"a model is a folder, a GGUF file, a hub name, or one of {names()}; got {model!r:.80}")
    kind = parse_dtype(dtype)
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(
            f"quantization must be None, 'int8' or 'int4', got {quantization!r}{did_you_mean(str(quantization), QUANTIZATIONS)}"
        )
    where = device_of(device, model)
    if quantization and not _own_gpu(where) and (missing := why_no_kernels(where)):
        raise ValueError(f"quantization={quantization!r} needs the native CPU kernels: {missing}; leave it out")
    config = getattr(model, "config", None)
    name = (config and config._name_or_path) or type(model).__name__ if is_object else str(model)
    return LoadRequest(name, kind, where, quantization, tokenizer is None, **more)


def _made(
    source: str | Path | PreTrainedModel,
    read: ReadModel,
    request: LoadRequest,
    tokenizer: Any | None = None,
    kv_cache_dtype: str = "auto",
    reduce: Callable[[Contents], Reduction] | None = None,
) -> Loaded:
    """The model that runs, of one that was read. source: what `load` was given, and so are the others."""
    tokenizer = read.tokenizer if tokenizer is None else tokenizer
    if isinstance(tokenizer, (str, Path)):
        tokenizer = tokenizer_named(str(tokenizer))
    ends = read.end_ids or token_ids(getattr(tokenizer, "eos_token_id", None))
    where, config = request.device, read.config
    if isinstance(read.model, Program):
        weights = str(read.weights)
        model = NativeModel(read.model, kv_cache_dtype=_kept(kv_cache_dtype, weights, where))
        return Loaded(model, request.name, tokenizer, ends, weights, source, config)
    tensors, (outline, why) = read.model, _outline(config, read.model, where)

    def chosen(stored: str, multiplied: int, tokens: int) -> tuple[str, Any]:
        """The precision of the weights, and the tokens of the head."""
        if reduce is None:
            return stored, None
        can = not why_no_kernels(where)
        reduced, ids = reduce(Contents(request.name, stored, multiplied, tokens, ends, tokenizer, can))
        return request.quantization or reduced or stored, ids

    weights = read.weights or (tensors.precision if request.dtype == "auto" else request.dtype)
    if _own_gpu(where):
        outline, why = _on_gpu(config, tensors, weights, kv_cache_dtype, where)
        if outline is not None:
            from outrider.models.gpu.model import GpuModel
            from outrider.models.gpu.weights import DeviceSource

            weights, ids = chosen(weights, sum(m.n * m.k for m in outline.matrices), outline.vocab_size)
            program = build(config.kind, config, DeviceSource(tensors, config, where, ids, weights))
            return Loaded(GpuModel(program, where), request.name, tokenizer, ends, weights, source, config)
        if request.quantization:
            raise ValueError(
                f"quantization={request.quantization!r} needs our kernels: {why}; leave it out, or use device='cpu'"
            )
        _say_once(f"{request.name} runs by the modelling code of transformers, because {why}")
    if outline is not None:
        weights, ids = chosen(weights, sum(m.n * m.k for m in outline.matrices), outline.vocab_size)
        further = outline.mtp is not None and reduce is None  # a draft model drafts for another one
        program = build(config.kind, config, TensorSource(tensors, config, weights, ids, further))
        model = NativeModel(program, kv_cache_dtype=_kept(kv_cache_dtype, weights, where))
        return Loaded(model, request.name, tokenizer, ends, weights, source, config)
    with needs("torch", f"{request.name} ({why})"):
        from outrider.models.hf import experts, skeleton
        from outrider.models.hf import model as hf
    raw: Any = getattr(tensors, "raw", None)  # a model object, if it is one
    if raw is None:
        weights = weights.replace("gguf", "float32" if why_no_kernels("cpu") and where == "cpu" else tensors.floats)
        if tensors.sizes is not None:
            checkpoint.fits(request.name, tensors.sizes, request.quantization or weights, where)
        raw = skeleton.module_of(tensors, config, weights if weights in DTYPES else "float32")
    weights, ids = chosen(weights, experts.multiplied(raw), hf.vocabulary(raw))
    kept = _kept(kv_cache_dtype, weights, where)
    model = hf.HFModel(raw, weights=weights, own=source is not raw, head_ids=ids, kv_cache_dtype=kept, device=where)
    return Loaded(model, request.name, tokenizer, ends, weights, source, config)


def _outline(config: Any, tensors: Tensors, where: str) -> tuple[Program | None, str]:
    """The native program in outline; None, and why, for a model that transformers runs."""
    if why := why_no_kernels(where):
        if where == "cpu":
            _say_once(f"outrider's native kernels are not in use ({why}); running in float32 on oneDNN")
        return None, why
    if not isinstance(config, Config):
        return None, f"a {config.model_type} has no native program"
    try:
        outline = outlined(config, tensors)
    except ValueError as error:
        return None, str(error)
    if why := differs(config, outline.facts["config"]):
        _say_once(why)
        return None, why
    return outline, ""


def _own_gpu(where: str) -> bool:
    """Whether our kernels for GPUs are asked for."""
    return where != "cpu" and os.environ.get(OWN_GPU) == "1"


def _on_gpu(config: Any, tensors: Tensors, weights: str, kv_cache_dtype: str, where: str) -> tuple[Program | None, str]:
    """The program in outline, if the kernels of a GPU can run it; None, and why, if they cannot."""
    if why := gpu.why_not(where):
        return None, why
    if weights not in ("bfloat16", "gguf", *QUANTIZATIONS) or kv_cache_dtype not in ("auto", "bfloat16"):
        return None, (
            f"our kernels for GPUs take weights in bfloat16 or fewer bits, and keys and values in bfloat16; these are {weights} "
            f"and {kv_cache_dtype}: give dtype='bfloat16', kv_cache_dtype='auto'"
        )
    outline, why = _outline(config, tensors, "cpu")
    if outline is None:
        return None, why
    from outrider.models.gpu import plan

    why = plan.why_not(outline)
    return (None, f"our kernels for GPUs cannot run it: {why}") if why else (outline, "")


def _kept(kv_cache_dtype: str, weights: str, where: str) -> str:
    """How caches keep keys and values. "auto" rounds them where the native kernels read them and the weights are rounded, too."""
    if kv_cache_dtype != "auto" or weights == "float32" or why_no_kernels(where):
        return kv_cache_dtype
    return "bfloat16"


def _read(request: LoadRequest) -> tuple[ReadModel, str | None]:
    """Read a model, from its pack if there is one. Also the name that its pack gets in the cache; None if it gets none."""
    name = request.name
    if packs.is_pack(folder := Path(name).expanduser()):
        return _read_pack(request, folder), None
    files = gguf_files(name)
    path = name if files else folder_of(name)
    pack_name = None
    repacked = bool(files) or (request.quantization is not None and Path(path).is_dir())
    if request.cache and repacked and not why_no_kernels(request.device) and store.limit() > 0:
        pack_name = store.name_of(files[0] if files else path, request)
        if restored := store.restored(pack_name, request):
            return restored, None
    pack_name = pack_name if request.tokenizer else None  # a pack has the model's own tokenizer
    if not files:
        return _read_folder(request, path), pack_name
    from outrider.models.gguf.model import read_model

    return read_model(request, files), pack_name


def _read_folder(request: LoadRequest, path: str) -> ReadModel:
    """By its tensors, if its class has a native program; else as transformers reads it."""
    from outrider.models.folder import read_model

    if (read := read_model(request, path)) is not None:
        return read
    with needs("torch", f"{request.name}, whose class has no native program,"):
        from outrider.models.hf.folder import read_folder
    return read_folder(request, path)


def _read_object(model: Any, quantization: str | None = None) -> ReadModel:
    from outrider.models.hf.folder import read_object

    return read_object(model, quantization)


def _read_pack(request: LoadRequest, folder: Path) -> ReadModel:
    """A folder that `outrider models pack` wrote. If it cannot be read any more, the model that it was made of."""
    if missing := why_no_kernels(request.device):
        raise ValueError(
            f"{request.name} has packed weights, which need the native CPU kernels: {missing}; give the model itself"
        )
    try:
        if request.unpacked:
            raise packs.BadPack(f"{folder} has packed weights alone, and the model that it was made of must be here")
        return packs.read(folder, request)
    except packs.BadPack as error:
        source, weights = packs.source_of(folder)
        if source is None:
            raise ValueError(f"{error}; make it again: outrider models pack MODEL -o {folder}") from error
        if not request.unpacked:
            again = f"outrider models pack {source} -o {folder}"
            text = f"{error}; loading {source} in its place. Make it again: {again}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        dtype, quantization = weights if weights in DTYPES else "auto", weights if weights in QUANTIZATIONS else None
        return _read(request._replace(name=source, dtype=dtype, quantization=quantization))[0]


def tokenizer_named(name: str) -> Any:
    """The tokenizer of a model that is given by name, without its weights. Raises OSError or ValueError if it has none."""
    if files := gguf_files(name):
        from outrider.models.gguf import reader, tokenizer

        return tokenizer.tokenizer_of(reader.read(files))
    return of_folder(folder_of(name))


def has_chat_template(name: str) -> bool:
    """Whether a model has a chat template, found without its weights. Raises what `load` raises for a name that means none."""
    if name in DOWNLOADS:
        return True
    if files := gguf_files(name):
        from outrider.models.gguf import reader

        return bool(reader.read(files).metadata.get("tokenizer.chat_template"))
    return bool(getattr(tokenizer_of(folder_of(name)), "chat_template", None))


def stored_bytes(name: str, weights: str | None = None) -> int:
    """Bytes of the weights of a model once it is loaded, by its files. weights: their precision, None for "auto".

    Asks no hub: 0 for a model that is only there. Raises what `load` raises for a path that is no model.
    """
    files = gguf_files(name)
    path = Path(files[0] if files else folder_of(name, cached))
    if not files and path.is_dir() and not packs.is_pack(path):
        quantised = weights is None and "quantization_config" in checkpoint.settings(path)
        need = None if quantised else checkpoint.sizes(name, path)
        if need is not None:
            return int(need.bytes(weights or need.stored))
    return sum(file.stat().st_size for file in files or [*path.glob("*.safetensors"), *path.glob("*.bin")])


def pack(
    model: str | Path, folder: str | Path, *, dtype: str | torch.dtype = "auto", quantization: str | None = None
) -> int:
    """Save a model as the kernels keep it. `load(folder)` then starts without quantising. Returns the bytes of the folder.

    Args:
        model: as for `load`.
        folder: a new or empty folder, or an older pack, which is replaced.
        dtype: as for `load`.
        quantization: as for `load`.

    Raises FileExistsError for another folder, and what `load` raises.
    """
    out = Path(folder).expanduser()
    if out.exists() and not (out.is_dir() and (packs.is_pack(out) or not any(out.iterdir()))):
        raise FileExistsError(f"{out} is there and is no pack; give a folder that is new or empty")
    if missing := why_no_kernels("cpu"):
        raise ValueError(f"weights are packed for the native CPU kernels: {missing}")
    request = _request(str(model), None, dtype, "cpu", quantization)
    loaded = _made(model, _read(request)[0], request)
    if loaded.program is None:
        raise ValueError(
            f"{model} runs by the modelling code of transformers ({loaded.model.path}), and a pack holds the program of a "
            f"native model; load it as it is: outrider serve {model}"
        )
    return _contents_of(loaded, loaded.program).write(out)


def _contents_of(loaded: Loaded, program: Program, beside: bool = False) -> packs.PackContents:
    path = Path(str(loaded.source)).expanduser()
    source = str(path.resolve()) if path.exists() else str(loaded.source)
    content = ReadModel(program, loaded.tokenizer, loaded.weights, loaded.end_ids, loaded.config)
    return packs.contents(content, program, loaded.weights, source, beside)


def _keep(name: str, loaded: Loaded, seconds: float) -> None:
    """Add a native model's pack to the cache, if a start from it saves a quarter of a second. seconds: of this start."""
    program = loaded.program
    if program is None:
        return
    size = packs.bytes_of(program)
    if size < WORTH_BYTES or seconds < WORTH_SECONDS + size / _READ_SPEED:
        return
    if store.keep(name, size, lambda: _contents_of(loaded, program, beside=True)):
        warnings.warn(
            f"keeping the packed weights ({size / 1e9:.2f} GB), so the next start is quicker. To remove them: "
            f"`outrider rm {name}`; {store.LIMIT}=0 keeps none",
            RuntimeWarning,
            stacklevel=3,
        )


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _is_module(model: object) -> bool:
    """Whether it is a module of torch, which is imported then."""
    return isinstance(model, getattr(sys.modules.get("torch.nn"), "Module", ()))


def device_of(given: str, model: Any = None) -> str:
    """Where a model runs, as torch names it: cpu, or cuda with or without a number."""
    if given == "auto" and _is_module(model):
        return str(next(model.parameters()).device)
    if given == "auto":
        return "cuda" if _has_cuda() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(given)):
        raise ValueError(f"device must be auto, cpu or cuda, got {given!r}")
    if str(given).startswith("cuda") and not _has_cuda():
        raise ValueError(f"device={given!r}: torch finds no CUDA device here; use device='cpu'")
    return str(given)


def _has_cuda() -> bool:
    """Whether torch finds a GPU. It is asked where a driver is, and else stays unimported."""
    if find_spec("torch") is None or not (sys.platform == "win32" or any(Path(file).exists() for file in _DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()
