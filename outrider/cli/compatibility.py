"""Whether a model runs here, from its configuration and the table of classes: nothing is fetched, no weights are read, and no
code of the model runs.

`docs/models.py` makes the table. It puts a tiny model of each class through every check, with the default settings of that class.
What other settings change is asked of the modules without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.core.files import read_settings
from outrider.models import checkpoint, pretrained
from outrider.models.builtin.download import DOWNLOADS, find
from outrider.models.builtin.shipped import BUILTIN, builtin_folder
from outrider.models.dtypes import DTYPES, WEIGHT_FORMATS
from outrider.models.files import gguf_files
from outrider.models.gguf import reader as gguf
from outrider.models.gguf.architectures import config_of
from outrider.models.gguf.model import sizes as gguf_sizes
from outrider.models.hf.model import UnsupportedModel, refuse
from outrider.models.native.model import supports
from outrider.models.pretrained import skeleton
from outrider.models.quantised import formats

TABLE = Path(__file__).resolve().parents[1] / "data" / "classes.json"
SPEEDS = {
    "native": "fastest: one native call runs a whole forward",
    "general": "fast: transformers' code over our kernels for matrices, experts and attention",
}
_INSTEAD = {
    "refused": "give another model; docs/models.md lists the classes that run",
    "unavailable": "install what the reason names, or give another model; docs/models.md lists the classes that run",
    "untried": "load it: its logits are then compared with those of its own forward; or give a class of docs/models.md",
}


def check(name: str) -> dict[str, Any]:
    """What is known of a model before its weights are here; "reason" says why it does not run.

    name: a folder, a config.json, a GGUF file, a built-in name, or a hub name whose config.json is in the hub's cache. Raises
    FileNotFoundError or ValueError, with the line that works, if there is no configuration to read. memory_bytes: of the
    weights, by precision. kv_bytes_per_token: of the cache, as "auto" keeps it; 0 if unknown.
    """
    answer: dict[str, Any] = {"name": name, "runs": False}
    try:
        config, sizes = _configuration(name)
        answer["model_type"] = config.model_type
        try:
            shell = skeleton(config)
        except Exception as error:  # each class checks its settings in its own way
            return answer | {"status": "unavailable", "reason": " ".join(str(error).split()) or type(error).__name__}
        refuse(shell)
    except UnsupportedModel as error:
        return answer | {"status": "refused", "reason": str(error)}
    table: dict[str, Any] = read_settings(TABLE)
    answer["name"] = kind = type(shell).__name__
    if kind not in table["classes"]:
        reason = f"no {kind} was tried with transformers {table['transformers']}, of which the table of classes is made"
        return answer | {"status": "untried", "reason": reason}
    answer |= table["classes"][kind]
    if "reason" in answer:
        return answer | {"status": "refused"}
    if answer["path"] == "native" and supports(shell):
        answer["path"] = "general"
    answer.pop("whole", None)  # whether layers can be left out is of no matter here
    sizes = sizes or _sizes(shell, config)
    return answer | {
        "runs": True,
        "status": "runs",
        "speed": SPEEDS[answer["path"]],
        "parameters": sum(p.numel() for p in shell.parameters()),
        "stored": (getattr(config, "quantization_config", None) or {}).get("quant_method") or sizes.stored,
        "memory_bytes": {kind: sizes.bytes(kind) for kind in (*(["gguf"] if sizes.blocks else []), *WEIGHT_FORMATS)},
        "kv_bytes_per_token": _kv_bytes(config, 4 if sizes.stored == "float32" else 2, answer["path"]),
    }


def lines(name: str, answer: dict[str, Any]) -> Iterator[str]:
    """What `check` found of this model, as text."""
    if not answer["runs"]:
        yield f"{name}: does not run here"
        yield f"why: {answer['reason']}"
        yield f"instead: {_INSTEAD[answer['status']]}"
        return
    yield f"{name}: runs here ({answer['name']}, {answer['parameters'] / 1e6:,.1f} M parameters, stored as {answer['stored']})"
    yield f"path: {answer['path']}. Speed: {answer['speed']}"
    yield f"guarantee with speculation: {answer['guarantee']}"
    if "note" in answer:
        yield f"note: {answer['note']}"
    parts = (f"{kind} {size / 2**30:.2f} GiB" for kind, size in answer["memory_bytes"].items())
    free = checkpoint.free_memory(torch.device("cpu"))
    yield f"memory of the weights: {', '.join(parts)}; {free / 2**30:.1f} GiB are free"
    if answer["kv_bytes_per_token"]:
        yield f"memory of the cache: {answer['kv_bytes_per_token'] / 2**20:.3f} MiB for each token"


def _configuration(name: str) -> tuple[Any, checkpoint.Sizes | None]:
    """The configuration, and the sizes that a GGUF file tells. Reads no weights."""
    if name in DOWNLOADS:
        here = find(DOWNLOADS[name])
        if here is None:
            raise FileNotFoundError(f"{name} is not here yet; `outrider generate -m {name} Hello` fetches it")
        name = str(here)
    path = Path(name).expanduser()
    if name in BUILTIN:
        path = builtin_folder(name)
    elif path.name.endswith(".gguf") or (path.is_dir() and not (path / "config.json").exists()):
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}; a check reads files that are here, and fetches none")
        if (files := gguf_files(str(path))) is None:
            raise FileNotFoundError(f"{path} has no config.json and no .gguf file; give the folder of a model")
        file = gguf.read(files)
        return config_of(file), gguf_sizes(file)
    elif not path.exists():
        path = _cached(name)
    config = pretrained.read_config(name, str(path))
    if settings := getattr(config, "quantization_config", None):
        formats.check(name, settings)
    return config, None


def _cached(name: str) -> Path:
    """The config.json of a hub name, from the hub's cache."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"there is no file or folder {name}, and it cannot be a name on the hub") from error
    if not isinstance(cached, str):
        raise FileNotFoundError(
            f"{name} is no file or folder here, and the hub's cache has no config.json of it. It is enough to fetch that file: "
            f"`hf download {name} config.json`"
        )
    return Path(cached)


def _sizes(shell: Any, config: Any) -> checkpoint.Sizes:
    """What the weights of a model take. Those of a quantised checkpoint become blocks, or floats of 16 bits."""
    inputs = shell.get_input_embeddings().weight
    matrices = pretrained.multiplied(shell)
    tied = shell.get_output_embeddings().weight is inputs
    rest = sum(p.numel() for p in shell.parameters()) - matrices + (inputs.numel() if tied else 0)
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    settings = getattr(config, "quantization_config", None)
    blocks = 0.0
    if settings:
        groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        bits = [settings.get("bits"), settings.get("w_bit"), *(weights.get("num_bits") for weights in groups)]
        small = settings.get("load_in_4bit") or settings["quant_method"] == "mxfp4"
        few = int(next(filter(None, bits), 4 if small else 8)) <= 4
        blocks = matrices * (0.625 if few else 2 if settings["quant_method"] == "fp8" else 1.0625)
    return checkpoint.Sizes(dtype, matrices, rest * (DTYPES[dtype].itemsize if dtype in DTYPES else 2), int(blocks))


def _kv_bytes(config: Any, size: int, path: str) -> int:
    """Of keys and values of a token, whose numbers have so many bytes. path: the native step keeps a latent alone."""
    text = config.get_text_config()
    layers = [*(getattr(text, "per_layer_config", None) or ())] or [text] * text.num_hidden_layers
    shared = getattr(text, "num_kv_shared_layers", 0) or 0  # the last layers read what others have stored
    return size * sum(_kv_numbers(layer, path) for layer in layers[: len(layers) - shared])


def _kv_numbers(layer: Any, path: str) -> int:
    """Of keys and values of a token in a layer. layer: its configuration."""
    heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    if latent := getattr(layer, "kv_lora_rank", None):
        key = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        return latent + layer.qk_rope_head_dim if path == "native" else heads * (key + layer.v_head_dim)
    return 2 * heads * int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
