"""Finds and loads a model: built-in names, local folders, hub names, and model objects."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import HfApi, errors, try_to_load_from_cache
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from outrider.core.suggest import did_you_mean
from outrider.kernels import for_device
from outrider.models import checkpoint
from outrider.models import native_llama as llama
from outrider.models.base import LanguageModel
from outrider.models.builtin.download import DOWNLOADS, fetch
from outrider.models.builtin.scale_up import SIZES, scaled_up
from outrider.models.cache import check_kv_cache_dtype
from outrider.models.dtypes import DTYPES, QUANTIZATIONS, parse_dtype
from outrider.models.gguf.architectures import architecture_of
from outrider.models.gguf.files import gguf_files
from outrider.models.gguf.model import build, dense_, precision, sizes
from outrider.models.gguf.reader import GGUFFile, read
from outrider.models.gguf.tokenizer import tokenizer_of
from outrider.models.hf.experts import mixtures
from outrider.models.hf.model import HFModel, UnsupportedModel, refuse, shared_copy
from outrider.models.packs import folder as packs
from outrider.models.packs import store

DATA = Path(__file__).resolve().parent.parent / "data"
BUILTIN = {
    "builtin:code": "a small Python code model",
    "builtin:code-draft": "its draft model, distilled from it",
}
# The sizes that fit a laptop.
SYNTHETIC = tuple(f"builtin:code-{size}" for size in SIZES if size not in ("15M", "8B"))
# Seconds that the hub has to answer. transformers would try for half a minute per file.
_HUB_TIMEOUT = 5.0
# transformers makes a model by changing torch's functions for that time, so two threads cannot.
_ONE_AT_A_TIME = RLock()
# A start from a pack reads so many bytes a second. A pack is kept if it saves so much time, and is not small.
_READ_SPEED, _WORTH_SECONDS, _WORTH_BYTES = 1e9, 1.0, 50e6


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run.

    name: as given to `load`. end_ids: the end tokens. weights: the precision of the weights. source: what `load` was given; a
    second copy with another precision is loaded from it. config: the model's configuration of transformers.
    """

    model: LanguageModel
    name: str
    tokenizer: Any | None
    end_ids: tuple[int, ...]
    weights: str
    source: str | Path | PreTrainedModel
    config: Any = None

    @property
    def kv_cache_dtype(self) -> str:
        """How its caches keep keys and values, as given to `load`."""
        return self.model.kv_cache_dtype


def modules(loaded: Loaded) -> PreTrainedModel:
    """The modules that a loaded model was made of, read again from its source. `models.matrix` gives their matrices.

    Raises what `load` raises.
    """
    if isinstance(loaded.source, PreTrainedModel):
        return loaded.source
    with _ONE_AT_A_TIME:
        return _open(str(loaded.source), "auto", torch.device("cpu"), None, given=True, cache=False).raw


class Contents(NamedTuple):
    """What is known of a model before its weights are packed.

    name: as given to `load`. stored: the precision in which its weights would be kept. weights: numbers in the matrices that
    a forward of one token multiplies with, all experts counted. quantizable: whether int8 and int4 weights can be used
    here.
    """

    name: str
    stored: str
    weights: int
    vocab_size: int
    end_ids: tuple[int, ...]
    tokenizer: Any | None
    quantizable: bool


class Reduction(NamedTuple):
    """How the weights of a model are to be kept: see `load` and `LlamaModel`."""

    quantization: str | None = None
    head_ids: Tensor | None = None


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

    model: a built-in name, a folder, a GGUF file, a hub name, `owner/name:file.gguf` on the hub, or a model object. tokenizer: an
    object, or a name or path as for the model; None for the model's own. dtype: "auto" keeps the precision of the checkpoint.
    quantization: "int8" or "int4" weights, on the CPU. kv_cache_dtype: "auto", "bfloat16" or "int8" keys and values.
    reduce: decides what a draft model can do without, once its sizes are known. Its quantization counts if none is given here.

    Raises FileNotFoundError, ConnectionError, ValueError, MemoryError or UnsupportedModel. The message says what would work. It
    is raised before anything large is done.
    """
    with _ONE_AT_A_TIME:
        started = perf_counter()
        loaded, raw, pack = _load(model, tokenizer, dtype, device, quantization, kv_cache_dtype, reduce)
        if pack is not None:
            _keep(pack, raw, loaded, perf_counter() - started)
        return loaded


def _load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any | None,
    dtype: str | torch.dtype,
    device: str,
    quantization: str | None,
    kv_cache_dtype: str,
    reduce: Callable[[Contents], Reduction] | None,
) -> tuple[Loaded, PreTrainedModel, str | None]:
    """The model, the modules that it was made of, and the name that its pack gets in the cache."""
    kind = parse_dtype(dtype)
    check_kv_cache_dtype(kv_cache_dtype)
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(
            f"quantization must be None, 'int8' or 'int4', got {quantization!r}{did_you_mean(str(quantization), QUANTIZATIONS)}"
        )
    where = _device(device, model)
    missing = for_device(where).missing
    if quantization and missing:
        raise ValueError(f"quantization={quantization!r} needs the native CPU kernels: {missing}; leave it out")
    if isinstance(model, PreTrainedModel):
        name, own = model.config._name_or_path or type(model).__name__, False
        opened = _Opened(model, None, quantization)
    else:
        name, own = str(model), True
        opened = _open(name, kind, where, quantization, given=tokenizer is not None, cache=reduce is None)
    raw = opened.raw
    tokenizer = opened.tokenizer if tokenizer is None else tokenizer
    if isinstance(tokenizer, (str, Path)):
        files = _gguf_files(str(tokenizer))
        tokenizer = tokenizer_of(read(files)) if files else AutoTokenizer.from_pretrained(_path(str(tokenizer)))
    refuse(raw)
    weights = opened.weights or (precision(raw) if kind == "auto" else kind)
    ends = _end_ids(raw, tokenizer)
    reduction = Reduction()
    if reduce is not None and not opened.packed:
        reduction = reduce(_contents(raw, name, weights, ends, tokenizer, not missing))
        weights = quantization or reduction.quantization or weights
    prepared = _prepare(raw, own, where, weights, kv_cache_dtype, reduction.head_ids)
    return Loaded(prepared, name, tokenizer, ends, weights, model, raw.config), raw, opened.pack


class _Opened(NamedTuple):
    """A model that was read. tokenizer: its own. weights: None for the precision of `raw`. packed: it comes from a pack. pack:
    the name that its pack gets in the cache; None if it gets none."""

    raw: PreTrainedModel
    tokenizer: Any | None
    weights: str | None
    packed: bool = False
    pack: str | None = None


def _open(name: str, dtype: str, where: torch.device, quantization: str | None, given: bool, cache: bool) -> _Opened:
    """Read a model by its name. given: the tokenizer is given, so its own is not read. cache: look for a pack in the cache."""
    if name in SYNTHETIC:
        return _Opened(_synthetic(name, dtype), None if given else _tokenizer(_path("builtin:code")), quantization)
    if packs.is_pack(folder := Path(name).expanduser()):
        return _from_pack(name, folder, dtype, where, quantization, given, cache)
    files = _gguf_files(name)
    path = name if files else _path(name)
    pack = None
    repacked = bool(files) or (quantization is not None and Path(path).is_dir())
    if cache and repacked and not for_device(where).missing and store.limit() > 0:
        pack = store.name_of(Path(name).stem, files or (Path(path),), f"{dtype} {quantization}")
        if found := store.restored(pack):
            return _Opened(found.model, None if given else _tokenizer(str(found.folder)), found.weights, packed=True)
        pack = None if given else pack  # a pack has the model's own tokenizer
    if files:
        file = read(files)
        raw = _from_gguf(name, file, dtype, where, quantization)
        return _Opened(raw, None if given else tokenizer_of(file), quantization, pack=pack)
    raw = _from_pretrained(name, path, dtype, where, quantization)
    return _Opened(raw, None if given else _tokenizer(path), quantization, pack=pack)


def _from_pack(
    name: str, folder: Path, dtype: str, where: torch.device, quantization: str | None, given: bool, cache: bool
) -> _Opened:
    """A folder that `outrider pack` wrote. If it cannot be read any more, the model that it was made of."""
    if missing := for_device(where).missing:
        raise ValueError(
            f"{name} has packed weights, which need the native CPU kernels: {missing}; give the model itself"
        )
    try:
        pack = packs.load_manifest(folder)
        if (wanted := quantization or dtype) not in ("auto", pack.weights):
            raise ValueError(
                f"{name} is packed in {pack.weights}, not in {wanted}; pack the model again, or leave it out"
            )
        checkpoint.fits(name, checkpoint.Sizes("gguf", 0, packs.size(folder)), None, where)
        return _Opened(
            packs.restore(folder, pack), None if given else _tokenizer(str(folder)), pack.weights, packed=True
        )
    except packs.BadPack as error:
        source, weights = packs.source_of(folder)
        if source is None:
            raise ValueError(f"{error}; make it again: outrider pack MODEL -o {folder}") from error
        again = f"outrider pack {source} -o {folder}"
        warnings.warn(f"{error}; loading {source} in its place. Make it again: {again}", RuntimeWarning, stacklevel=4)
        dtype, quantization = weights if weights in DTYPES else "auto", weights if weights in QUANTIZATIONS else None
        return _open(source, dtype, where, quantization, given, cache)


def pack(
    model: str | Path, folder: str | Path, *, dtype: str | torch.dtype = "auto", quantization: str | None = None
) -> int:
    """Save a model as the kernels keep it. `load(folder)` then starts without quantising. Returns the bytes of the folder.

    model, dtype, quantization: as for `load`. folder: a new or empty folder, or an older pack, which is replaced. Raises
    FileExistsError for another folder, and what `load` raises.
    """
    out = Path(folder).expanduser()
    if out.exists() and not (out.is_dir() and (packs.is_pack(out) or not any(out.iterdir()))):
        raise FileExistsError(f"{out} is there and is no pack; give a folder that is new or empty")
    if missing := for_device(torch.device("cpu")).missing:
        raise ValueError(f"weights are packed for the native CPU kernels: {missing}")
    with _ONE_AT_A_TIME:
        loaded, raw, _ = _load(model, None, dtype, "cpu", quantization, "auto", None)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        size = _write(partial, raw, loaded)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
        return size
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, raw: PreTrainedModel, loaded: Loaded) -> int:
    path = Path(str(loaded.source)).expanduser()
    source = str(path.resolve()) if path.exists() else str(loaded.source)
    return packs.write(folder, raw, loaded.weights, loaded.end_ids, loaded.tokenizer, source)


def _keep(name: str, raw: PreTrainedModel, loaded: Loaded, seconds: float) -> None:
    """Add a model's pack to the cache, if a start from it is faster by a second or more. seconds: that this start took."""
    size = packs.bytes_of(raw)
    if size < _WORTH_BYTES or seconds < _WORTH_SECONDS + size / _READ_SPEED:
        return
    where = store.keep(name, size, lambda folder: _write(folder, raw, loaded))
    if where is not None:
        warnings.warn(
            f"kept the packed weights ({size / 1e9:.2f} GB), so the next start is quicker. To remove them: "
            f"`outrider models --remove {name}`; {store.LIMIT}=0 keeps none",
            RuntimeWarning,
            stacklevel=3,
        )


def _contents(
    raw: PreTrainedModel, name: str, stored: str, ends: tuple[int, ...], tokenizer: Any | None, quantizable: bool
) -> Contents:
    head: Any = raw.get_output_embeddings()
    linears = [m for m in raw.modules() if isinstance(m, nn.Linear)]
    others = [p for m in (*mixtures(raw), *(m for m in raw.modules() if isinstance(m, Conv1D))) for p in m.parameters()]
    weights = sum(m.in_features * m.out_features for m in linears) + sum(p.numel() for p in others)
    return Contents(name, stored, weights, head.out_features, ends, tokenizer, quantizable)


def _prepare(
    raw: PreTrainedModel, own: bool, where: torch.device, weights: str, kv_cache_dtype: str, head_ids: Tensor | None
) -> LanguageModel:
    if not own:  # the caller's model must not be moved or converted
        raw = shared_copy(raw)
    raw.eval()
    if where.type != "cpu":
        moved: Any = raw.to(where, DTYPES[weights])  # pyright: ignore[reportArgumentType]
        return HFModel(moved, own=True, kv_cache_dtype=kv_cache_dtype, head_ids=head_ids)
    raw.to(where)  # pyright: ignore[reportArgumentType]
    if missing := for_device(where).missing:
        _say_once(f"outrider's native kernels are not in use ({missing}); running in float32 on oneDNN")
    elif llama.supports(raw) is None:
        return llama.LlamaModel(raw, weights=weights, own=own, kv_cache_dtype=kv_cache_dtype, head_ids=head_ids)
    return HFModel(raw, weights=weights, own=True, kv_cache_dtype=kv_cache_dtype, head_ids=head_ids)


def _from_pretrained(
    name: str, path: str, dtype: str, where: torch.device, quantization: str | None
) -> PreTrainedModel:
    config = _config(name, path)
    stored = checkpoint.sizes(name, Path(path)) if Path(path).is_dir() else None
    if stored:
        checkpoint.fits(name, stored, quantization or (None if dtype == "auto" else dtype), where)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype if dtype == "auto" else DTYPES[dtype], output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    raw, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the weights of {name} are incomplete: {len(missing)} tensors of a {type(raw).__name__} are in no file, "
            f"{missing[0]} among them. Download it again, or save it again with save_pretrained"
        )
    _unmap_(raw)
    return raw


def _gguf_files(name: str) -> tuple[Path, ...] | None:
    """The GGUF files that a name stands for, or None. A built-in real model is fetched if it is not here."""
    return (fetch(DOWNLOADS[name]),) if name in DOWNLOADS else gguf_files(name)


def _from_gguf(name: str, file: GGUFFile, dtype: str, where: torch.device, quantization: str | None) -> PreTrainedModel:
    """dtype "auto" keeps blocks where the kernels can, and makes them bfloat16 elsewhere."""
    architecture_of(file)  # raises for what is no model, before anybody asks its size
    kind = quantization or (None if dtype == "auto" else dtype)
    missing = for_device(where).missing
    if kind is None and missing:
        kind = "float32" if where.type == "cpu" else "bfloat16"
    checkpoint.fits(name, sizes(file), kind, where)
    raw = build(file)
    if missing:
        dense_(raw, DTYPES[kind or "bfloat16"])
    return raw


def _synthetic(name: str, dtype: str) -> PreTrainedModel:
    """The built-in model, computed with as many weights as the name says. dtype "auto" means bfloat16."""
    size = SIZES[name.removeprefix("builtin:code-")]
    kind = "bfloat16" if dtype == "auto" else dtype
    source = LlamaForCausalLM.from_pretrained(DATA / "code", dtype=torch.float32)
    matrices = size.parameters(source.config.vocab_size)
    checkpoint.fits(name, checkpoint.Sizes(kind, matrices, 0), kind, torch.device("cpu"))
    return scaled_up(source, size, DTYPES[kind])


def _unmap_(raw: PreTrainedModel) -> None:
    """Copy the weights that are not repacked out of the mapped file.

    Weights read from safetensors are views of that file. A single view that is left keeps the whole file in memory.
    """
    repacked = {id(m) for m in (*mixtures(raw), *(m for m in raw.modules() if isinstance(m, (nn.Linear, Conv1D))))}
    for module in raw.modules():
        if id(module) not in repacked:
            for p in module.parameters(recurse=False):
                p.data = p.data.clone()


def _config(name: str, path: str) -> Any:
    """The model's configuration. Raises unless it is a causal language model that this transformers knows."""
    stored = Path(path, "config.json")
    if stored.exists():
        try:
            given = json.loads(stored.read_text())
        except ValueError as error:
            raise ValueError(f"{stored} is not JSON ({error}); download it again") from error
        kind = given.get("model_type")
        if kind not in CONFIG_MAPPING:
            own = ", and its own code (trust_remote_code) is not run here" if "auto_map" in given else ""
            raise ValueError(
                f"{name} has model_type {kind!r} in its config.json, which transformers {transformers.__version__} does "
                f"not know{own}{did_you_mean(str(kind), list(CONFIG_MAPPING))}. A newer transformers may, or load the model "
                "yourself and give the object: LLM(model)"
            )
        method = (given.get("quantization_config") or {}).get("quant_method")
        if method not in (None, "mxfp4"):  # transformers itself converts mxfp4 to bfloat16
            raise UnsupportedModel(
                f"the weights of {name} are quantised by {method}, which outrider does not read; give the unquantised "
                "model, with quantization='int8' or 'int4' if it should be small"
            )
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(f"the configuration of {name} cannot be read: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; outrider runs decoder-only causal language models")
    if type(config) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportOperatorIssue]
        raise UnsupportedModel(f"{name} is a {config.model_type}, of which transformers has no causal language model")
    return config


def _path(name: str) -> str:
    """A folder to load from, or a name that the hub knows."""
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise ValueError(
                f"there is no built-in model {name!r}{did_you_mean(name, (*BUILTIN, *DOWNLOADS, *SYNTHETIC))}; there are "
                f"{_names()}, and "
                f"builtin:code at the cost of a bigger model: {', '.join(SYNTHETIC)}"
            )
        name = str(DATA / name.removeprefix("builtin:"))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(
                f"{path} has no config.json and no .gguf file; give the folder that save_pretrained wrote"
            )
        return str(path)
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file, and not a .gguf one; give the folder of the model, which must also hold config.json"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {path}; give a model folder, a GGUF file, a hub name, or one of {_names()}"
        )
    return _hub(name)


def _hub(name: str) -> str:
    """The name if the hub has it; the folder of the cached copy if the hub cannot be reached."""
    otherwise = f"Give a folder that save_pretrained wrote, or one of {_names()}"
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is not a folder here and cannot be a name on the hub. {otherwise}") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no folder {name!r} here, and no such model on the hub that can be read without logging in; check "
            f"the spelling, or run `hf auth login`. {otherwise}"
        ) from error
    except Exception as error:  # the hub's client raises many kinds of errors if the network does not answer
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise ConnectionError(
            f"{name!r} is not a folder here, no copy of it is in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}). {otherwise}; or "
            f"fetch it where there is a network (`hf download {name}`) and bring the folder"
        ) from error
    return name


def _tokenizer(path: str) -> Any | None:
    """The tokenizer, or None: a model without one can still continue token ids."""
    try:
        found = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
        return None
    # for a folder without tokenizer files, transformers makes an empty tokenizer that encodes every text as no token
    return found if len(found) > len(found.all_special_ids) else None


def _end_ids(raw: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """The end tokens of the checkpoint's generation settings, else of its configuration, else of its tokenizer."""
    known = (
        raw.generation_config.eos_token_id if raw.generation_config else None,
        getattr(raw.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    end = next((e for e in known if e is not None), None)
    return tuple(end) if isinstance(end, (list, tuple)) else () if end is None else (int(end),)


def _device(given: str, model: Any) -> torch.device:
    if given == "auto":
        if isinstance(model, PreTrainedModel):
            return next(model.parameters()).device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu or cuda, got {given!r}") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={given!r}: torch finds no CUDA device here; use device='cpu'")
    return where


def _names() -> str:
    return ", ".join((*BUILTIN, *DOWNLOADS))


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
