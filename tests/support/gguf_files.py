"""Writes small models as GGUF files, the way llama.cpp's converter does: its names, its order of rows, its norms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ggml_blocks import random_blocks
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# transformers' model type -> the architecture of the file. Others have the same name.
ARCHITECTURE = {"mistral": "llama", "gemma3_text": "gemma3"}
INTERLEAVED = ("llama", "granite")
ONE_ADDED = ("gemma", "gemma2", "gemma3")
# The gguf package cannot quantise to these; any bits do.
RANDOM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ3_S")


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write a model, and change its own weights to the values that are in the file: the reference.

    kind: of the matrices whose rows are whole blocks, or a function from a tensor's name to it; the others are F16.
    metadata: more keys, or None to leave one out.
    """
    architecture = ARCHITECTURE.get(model.config.model_type, model.config.model_type)
    tensors = _tensors(model, architecture, kind)
    values = _metadata(model, architecture) | (metadata or {})
    names = (
        [path] if parts == 1 else [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    )
    each = -(-len(tensors) // parts)
    for i, file in enumerate(names):
        split = {"split.no": i, "split.count": parts, "split.tensors.count": len(tensors)} if parts > 1 else {}
        own = values if i == 0 else {"general.architecture": architecture}
        write_file(file, own | split, dict([*tensors.items()][i * each : (i + 1) * each]))


def write_file(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    """tensors: the bytes or floats of each, and the name of its format. A value of None leaves its key out."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, pieces: str) -> dict[str, Any]:
    """The keys of a byte-level tokenizer. pieces: llama.cpp's name of how it cuts text."""
    stored = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore[reportAttributeAccessIssue]
    added = {t["id"]: t for t in stored["added_tokens"]}
    by_id = {i: t for t, i in tokenizer.get_vocab().items()}
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"]["merges"]]
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(by_id))]
    named = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pieces,
        "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": tokenizer.chat_template,
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()},
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(
    model: PreTrainedModel, architecture: str, kind: str | Callable[[str], str]
) -> dict[str, tuple[np.ndarray, str]]:
    config: Any = model.config
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    out: dict[str, Any] = {}
    for path, module in model.named_modules():
        for suffix, parameter in module.named_parameters(recurse=False):
            if module is model.get_output_embeddings() and config.tie_word_embeddings:
                continue
            each = re.fullmatch(r"(.*)\.norms\.(\d+)", path)  # one norm per head, in one tensor
            name = f"{names.get_name(each[1] if each else path)}.{suffix}"
            values, order = parameter.detach(), None
            if architecture in INTERLEAVED and (found := re.search(r"attn_([qk])\.", name)):
                heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
                # the definition in llama.cpp's converter: [head, half, pair] -> [head, pair, half]
                order = torch.arange(len(values)).view(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            if suffix == "weight" and isinstance(module, (nn.Linear, nn.Embedding)):
                out[name] = _matrix(values, order, kind if isinstance(kind, str) else kind(name))
                continue
            values = values if order is None else values[order]
            values = values + 1 if architecture in ONE_ADDED and name.endswith("norm.weight") else values
            if each:
                values = torch.cat([torch.from_numpy(out[name][0]), values[None]]) if name in out else values[None]
            out[name] = (values.numpy(), "F32")
    rotary: Any = model.model.rotary_emb
    parameters = config.rope_parameters
    if parameters.get("rope_type") == "llama3":
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        out["rope_freqs.weight"] = ((plain / rotary.inv_freq).numpy(), "F32")
    if parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(parameters[f"{length}_factor"], np.float32)
            out[f"rope_factors_{length}.weight"] = (factors, "F32")
    return out


def _matrix(values: Tensor, order: Tensor | None, kind: str) -> tuple[np.ndarray, str]:
    """The bytes in the file. `values` becomes what they mean."""
    rows = (values if order is None else values[order]).numpy()
    if rows.shape[1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
        kind = "F16"
    known = GGMLQuantizationType[kind]
    data = random_blocks(kind, *rows.shape).data.numpy() if kind in RANDOM else quants.quantize(rows, known)
    meant = torch.from_numpy(np.ascontiguousarray(quants.dequantize(data, known), dtype=np.float32)).view(rows.shape)
    values[... if order is None else order] = meant
    return data, kind


def _metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    by_layer = config.rope_parameters
    parameters = by_layer.get("full_attention", by_layer)
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None),
        "rope.freq_base": float(parameters["rope_theta"]),
        "rope.dimension_count": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
    }
    if architecture in ("gemma2", "gemma3", "phi3"):
        own["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = config.attn_logit_softcapping
        own["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture == "granite":
        own["attention.scale"] = float(config.attention_multiplier)
        own["embedding_scale"] = float(config.embedding_multiplier)
        own["residual_scale"] = float(config.residual_multiplier)
        own["logit_scale"] = float(config.logits_scaling)
    scaling = parameters.get("rope_type", "default")
    if scaling in ("linear", "yarn"):
        own["rope.scaling.type"], own["rope.scaling.factor"] = scaling, float(parameters["factor"])
    if scaling in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    return {"general.architecture": architecture, **{f"{architecture}.{k}": v for k, v in own.items()}}
