"""Find a model and make it ready: built-in names, local folders, hub names, and models that are loaded already."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider import native
from outrider.models import linear, llama
from outrider.models.base import LanguageModel
from outrider.models.hf import HFModel, UnsupportedModel, refuse, shared_copy

DATA = Path(__file__).resolve().parent.parent / "data"
BUILTIN = {
    "builtin:code": "a small Python code model, the target of the demo",
    "builtin:code-draft": "its draft model, distilled from it",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.625}


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. name: what was asked for. end_ids: its end tokens. weights: the precision they are kept in."""

    model: LanguageModel
    name: str
    tokenizer: Any | None
    end_ids: tuple[int, ...]
    weights: str
    source: str | Path | PreTrainedModel  # what `load` was given: a second copy at another precision starts from it


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
) -> Loaded:
    """Load a model. Raises FileNotFoundError, ValueError or UnsupportedModel, each with what would work.

    dtype: "auto" keeps the checkpoint's own precision. quantization: "int8" or "int4" weights, on the CPU.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"dtype must be auto, {', '.join(_DTYPES)}; got {dtype!r} (int8 and int4 go to quantization=)")
    if quantization not in (None, "int8", "int4"):
        raise ValueError(f"quantization must be None, 'int8' or 'int4', got {quantization!r}")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if quantization and (where.type != "cpu" or not native.available()):
        raise ValueError(
            f"quantization={quantization!r} needs the native CPU kernels: {native.why() or 'device is ' + str(where)}"
        )
    if isinstance(model, PreTrainedModel):
        name, own, raw = model.config._name_or_path or type(model).__name__, False, model
    else:
        name, own = str(model), True
        raw = _from_pretrained(name, dtype, where, quantization)
        if tokenizer is None:
            tokenizer = _tokenizer(name)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = AutoTokenizer.from_pretrained(_path(str(tokenizer)))
    raw.eval()
    refuse(raw)
    end = raw.generation_config.eos_token_id if raw.generation_config else None
    end = raw.config.get_text_config().eos_token_id if end is None else end
    end_ids = tuple(end) if isinstance(end, (list, tuple)) else () if end is None else (int(end),)
    stored = str(raw.get_input_embeddings().weight.dtype).removeprefix("torch.")
    weights = quantization or (stored if dtype == "auto" else dtype)
    return Loaded(_prepare(raw, own, where, weights), name, tokenizer, end_ids, weights, model)


def _prepare(raw: PreTrainedModel, own: bool, where: torch.device, weights: str) -> LanguageModel:
    if where.type != "cpu":
        return HFModel(raw.to(where, _DTYPES[weights]), own=own)  # pyright: ignore[reportArgumentType]
    if not native.available():
        _say_once(f"outrider's native kernels are not in use ({native.why()}); running in float32 on oneDNN")
        weights = "float32"
    elif llama.supports(raw) is None:
        return llama.LlamaModel(raw, weights=weights, own=own)
    raw = raw if own else shared_copy(raw)
    linear.pack_linears_(raw, weights=weights)
    return HFModel(raw.float(), own=True)


def _from_pretrained(name: str, dtype: str, where: torch.device, quantization: str | None) -> PreTrainedModel:
    path = _path(name)
    try:
        config = AutoConfig.from_pretrained(path)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; outrider runs decoder-only causal language models")
    _fits(name, path, quantization, dtype, where)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype if dtype == "auto" else _DTYPES[dtype])
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    except Exception as error:  # safetensors raises its own type for a file that was cut short
        raise ValueError(
            f"the weights of {name} cannot be read ({type(error).__name__}: {error}); the file is damaged or incomplete, "
            "download it again"
        ) from error


def _path(name: str) -> str:
    """A folder to load from, or a hub name as it is."""
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise ValueError(f"unknown built-in model {name!r}; there are {', '.join(BUILTIN)}")
        return str(DATA / name.removeprefix("builtin:"))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"{path} has no config.json; give the folder that save_pretrained wrote")
        weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
        if not weights:
            raise FileNotFoundError(
                f"{path} has a config.json and no weights (*.safetensors); the download is incomplete"
            )
        return str(path)
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {path}; give a model folder, a hub name, or one of {', '.join(BUILTIN)}"
        )
    return name


def _fits(name: str, path: str, quantization: str | None, dtype: str, where: torch.device) -> None:
    """Raise MemoryError before loading weights that cannot fit."""
    files = [*Path(path).glob("*.safetensors")] if Path(path).is_dir() else []
    if not files or where.type != "cpu":
        return
    stored = json.loads((Path(path) / "config.json").read_text())
    kind = stored.get("dtype") or stored.get("torch_dtype") or "float32"
    count = sum(f.stat().st_size for f in files) / _BYTES.get(kind, 4)
    weights = quantization or (kind if dtype == "auto" else dtype)
    need, free = count * _BYTES.get(weights, 4), _free_memory()
    if free and need * 1.1 > free:
        fitting = [w for w in ("bfloat16", "int8", "int4") if count * _BYTES[w] * 1.1 < free]
        hint = f"; {fitting[0]} weights would fit" if fitting else "; no precision of this model fits here"
        raise MemoryError(f"{name} needs {need / 2**30:.1f} GiB as {weights} and {free / 2**30:.1f} GiB are free{hint}")


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")), 0)


def _tokenizer(name: str) -> Any | None:
    try:
        return AutoTokenizer.from_pretrained(_path(name))
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
        return None  # a model without a tokenizer still continues token ids


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
