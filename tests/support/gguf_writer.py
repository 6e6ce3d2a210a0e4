"""Writes GGUF files, and a small model that needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from vocabularies import byte_level

_VOCAB, _WIDTH, _HEADS, _INNER, _LAYERS = 384, 64, 4, 128, 2


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


def tokenizer_metadata(tokenizer: Any, pieces: str) -> dict[str, Any]:
    """The keys of a byte-level tokenizer. pieces: llama.cpp's name of how it cuts text."""
    backend = tokenizer.backend_tokenizer
    stored = json.loads(backend.to_str())
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


def write_toy(path: Path, kind: str = "Q8_0", tokenizer: Any = None, metadata: dict[str, Any] | None = None) -> None:
    """A Llama of two layers with random weights and a chat template. Its vocabulary is byte-level unless another is given.

    metadata: more keys.
    """
    tokenizer = tokenizer or byte_level(_VOCAB)
    draw = np.random.default_rng(0)
    sizes = {"attn_q": (_WIDTH, _WIDTH), "attn_k": (_WIDTH // 2, _WIDTH), "attn_v": (_WIDTH // 2, _WIDTH)}
    sizes |= {"attn_output": (_WIDTH, _WIDTH), "ffn_gate": (_INNER, _WIDTH), "ffn_up": (_INNER, _WIDTH)}
    sizes |= {"ffn_down": (_WIDTH, _INNER)}
    shapes = {f"blk.{n}.{name}.weight": shape for n in range(_LAYERS) for name, shape in sizes.items()}
    shapes |= {"token_embd.weight": (len(tokenizer), _WIDTH), "output.weight": (len(tokenizer), _WIDTH)}
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, shape in shapes.items():
        floats = draw.normal(0, 0.2, shape).astype(np.float32)
        tensors[name] = quants.quantize(floats, GGMLQuantizationType[kind]), kind
    norms = [f"blk.{n}.{name}.weight" for n in range(_LAYERS) for name in ("attn_norm", "ffn_norm")]
    tensors |= {name: (np.ones(_WIDTH, np.float32), "F32") for name in (*norms, "output_norm.weight")}
    given = {"context_length": 256, "embedding_length": _WIDTH, "block_count": _LAYERS, "feed_forward_length": _INNER}
    given |= {"attention.head_count": _HEADS, "attention.head_count_kv": _HEADS // 2, "vocab_size": len(tokenizer)}
    given |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": _WIDTH // _HEADS, "rope.freq_base": 1e4}
    keys = {"general.architecture": "llama"} | {f"llama.{name}": value for name, value in given.items()}
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}
    write_file(path, keys | tokenizer_metadata(tokenizer, "gpt-2") | template | (metadata or {}), tensors)
