"""Whether a model runs here, told from its configuration alone: no weights are read or fetched, and no code of the model runs.

A tiny random model with the same kinds of layers is put through all checks of `outrider.testing.coverage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.drafters.registry import METHODS
from outrider.models import checkpoint, pretrained
from outrider.models.builtin.download import DOWNLOADS, find
from outrider.models.builtin.scale_up import SIZES
from outrider.models.dtypes import DTYPES, WEIGHT_FORMATS
from outrider.models.gguf import reader as gguf
from outrider.models.gguf.architectures import config_of
from outrider.models.gguf.files import gguf_files
from outrider.models.gguf.model import sizes as gguf_sizes
from outrider.models.hf.experts import is_mixture
from outrider.models.hf.model import HFModel, UnsupportedModel
from outrider.models.load import BUILTIN, DATA
from outrider.models.quantised import formats
from outrider.testing.coverage import REFUSED, RUNS, UNAVAILABLE, WRONG, ClassReport, report_of
from outrider.testing.tiny_models import tiny_config, tiny_model

SPEEDS = {
    "native": "fastest: one native call runs a whole forward",
    "general": "fast: transformers' code over our kernels for matrices, experts and attention",
    "masked": "slower for long texts: the model's own attention, under a mask",
    "recomputed": "slow: the model's own forward reads the whole text again for each token",
}
_INSTEAD = {
    REFUSED: "give another model; docs/models.md lists the classes that run",
    UNAVAILABLE: "install what the reason names, or give another model; docs/models.md lists the classes that run",
    WRONG: "do not use it, and report it with this configuration",
}


@dataclass(frozen=True)
class Compatibility:
    """What is known of a model before its weights are here.

    name: as given. report: of a tiny model of its class, or why there is none. parameters: numbers in all weights. stored: how
    the checkpoint keeps them. memory: bytes by precision. kv_bytes: of the cache, for a token, as float32; 0 if unknown.
    free: bytes of memory that are free. drafters: method -> what it needs, or why it cannot draft for this model.
    """

    name: str
    report: ClassReport
    parameters: int = 0
    stored: str = ""
    memory: dict[str, float] | None = None
    kv_bytes: int = 0
    free: int = 0
    drafters: dict[str, str] | None = None

    @property
    def runs(self) -> bool:
        return self.report.status == RUNS

    def lines(self) -> Iterator[str]:
        """The answer as text."""
        report = self.report
        if not self.runs:
            yield f"{self.name}: does not run here"
            yield f"why: {report.reason}"
            yield f"instead: {_INSTEAD[report.status]}"
            return
        yield f"{self.name}: runs here ({report.name}, {self.parameters / 1e6:,.1f} M parameters, stored as {self.stored})"
        yield f"path: {report.path}. Speed: {SPEEDS[report.path]}"
        yield f"guarantee with speculation: {report.guarantee}"
        if report.note:
            yield f"note: {report.note}"
        parts = (f"{kind} {size / 2**30:.2f} GiB" for kind, size in (self.memory or {}).items())
        yield f"memory of the weights: {', '.join(parts)}; {self.free / 2**30:.1f} GiB are free"
        if self.kv_bytes:
            yield f"memory of the cache: {self.kv_bytes / 2**20:.3f} MiB for each token"
        yield "drafters:"
        yield from (f"  {method}: {what}" for method, what in (self.drafters or {}).items())

    def as_dict(self) -> dict[str, Any]:
        """For a file of JSON."""
        out: dict[str, Any] = {"name": self.name, "runs": self.runs, **self.report.as_dict()}
        if self.runs:
            out |= {"speed": SPEEDS[self.report.path], "parameters": self.parameters, "stored": self.stored}
            out |= {"memory_bytes": self.memory, "kv_bytes_per_token": self.kv_bytes, "drafters": self.drafters}
        return out


def check(name: str) -> Compatibility:
    """What is known of a model. Takes seconds.

    name: a folder, a config.json, a GGUF file, a built-in name, or a hub name whose config.json is in the hub's cache. Raises
    FileNotFoundError or ValueError, with the line that works, if there is no configuration to read.
    """
    try:
        config, stored = _configuration(name)
    except UnsupportedModel as error:
        return Compatibility(name, ClassReport("", "", REFUSED, str(error)))
    kind = str(config.model_type)
    report = report_of(kind, config)
    if report.status != RUNS:
        return Compatibility(name, report)
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    sizes = stored if isinstance(stored, checkpoint.Sizes) else _sizes(shell, config)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    return Compatibility(
        name,
        report,
        sum(p.numel() for p in shell.parameters()),
        method or sizes.stored,
        {kind: sizes.bytes(kind) for kind in (*(["gguf"] if sizes.blocks else []), *WEIGHT_FORMATS)},
        8 if report.path == "recomputed" else _kv_bytes(config),
        checkpoint.free_memory(torch.device("cpu")),
        dict(_drafters(config)),
    )


def _configuration(name: str) -> tuple[Any, Any]:
    """The configuration, and the sizes that a file tells. Reads no weights."""
    if name in DOWNLOADS:
        here = find(DOWNLOADS[name])
        if here is None:
            raise FileNotFoundError(f"{name} is not here yet; `outrider generate -m {name} Hello` fetches it")
        name = str(here)
    if name in BUILTIN or name.removeprefix("builtin:code-") in SIZES:
        return pretrained.read_config(
            name, str(DATA / (name if name in BUILTIN else "builtin:code").removeprefix("builtin:"))
        ), None
    path = Path(name).expanduser()
    if path.name.endswith(".gguf") or (path.is_dir() and not (path / "config.json").exists()):
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}; a check reads files that are here, and fetches none")
        if (files := gguf_files(str(path))) is None:
            raise FileNotFoundError(f"{path} has no config.json and no .gguf file; give the folder of a model")
        file = gguf.read(files)
        return config_of(file), gguf_sizes(file)
    if not path.exists():
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


def _sizes(shell: PreTrainedModel, config: Any) -> checkpoint.Sizes:
    total = sum(p.numel() for p in shell.parameters())
    experts = sum(
        p.numel() for m in shell.modules() if is_mixture(m) for p in m.parameters(recurse=False) if p.dim() > 2
    )
    matrices = experts + sum(m.weight.numel() for m in shell.modules() if isinstance(m, nn.Linear))
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    tied = shell.get_output_embeddings().weight is shell.get_input_embeddings().weight  # pyright: ignore
    rest = total - matrices + (shell.get_input_embeddings().weight.numel() if tied else 0)  # pyright: ignore
    settings = getattr(config, "quantization_config", None) or {}
    kept = 0
    if settings:
        bits = settings.get("bits") or settings.get("w_bit") or _bits(settings)
        kept = matrices * (0.625 if bits <= 4 else 1.0625 if settings["quant_method"] != "fp8" else 2)
    return checkpoint.Sizes(dtype, matrices, rest * (DTYPES[dtype].itemsize if dtype in DTYPES else 2), int(kept))


def _bits(settings: dict[str, Any]) -> int:
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    small = settings.get("load_in_4bit") or settings["quant_method"] == "mxfp4"
    return next((int(weights["num_bits"]) for weights in groups if "num_bits" in weights), 4 if small else 8)


def _kv_bytes(config: Any) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(text, "kv_lora_rank", None):
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 4 * 2 * heads * int(size) * text.num_hidden_layers


def _drafters(config: Any) -> Iterator[tuple[str, str]]:
    """The drafting methods, with what each needs. layer_skip is asked of a tiny model."""
    text = config.get_text_config()
    mtp = any(getattr(text, n, 0) for n in ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers"))
    for method in METHODS.values():
        if method.name in ("none", "auto"):
            continue
        if method.name == "layer_skip":
            yield method.name, _skips(config)
        elif method.name == "mtp":
            yield method.name, "fits, if the checkpoint keeps its MTP layer" if mtp else "the model has no MTP layer"
        elif method.heads:
            yield method.name, "fits, with a head that was trained for this model"
        elif method.needs_model:
            yield method.name, "fits, with a smaller model of the same vocabulary"
        else:
            yield method.name, "fits"


def _skips(config: Any) -> str:
    try:
        model = HFModel(tiny_model(tiny_config(config)), own=True)
        model.layer_subset([0])
    except ValueError as error:
        return " ".join(str(error).split())
    return "fits, with the layers that `outrider layers` finds"


def as_json(found: Compatibility) -> str:
    """One line of JSON."""
    return json.dumps(found.as_dict())
