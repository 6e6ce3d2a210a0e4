"""What the native step computes with: packed matrices, norms and settings. They come from a model of transformers or from a pack.

A pack has them under the names of the modules that they were packed for, so it needs no module to start from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.kernels.cpu import Packed
from outrider.kernels.cpu.packed import MOST, rounded
from outrider.models.base import check_head_ids
from outrider.models.matrix import (
    free_matrix_,
    give_matrix_,
    is_packed,
    matrix_of,
    packed,
    precision,
    rows_of,
    share_matrix,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS = {"silu": 2, "swish": 2, "gelu_pytorch_tanh": 3}
"""The gates that the native step has, by the name in a configuration."""
# The modules of a layer, in the order of the fields of `LlamaLayerWeights`: linears side by side, and norms.
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_MATRICES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    _GATE_UP,
    ("mlp.down_proj",),
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_TABLES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LlamaSettings:
    """The numbers of a model that its matrices do not tell.

    max_length: positions. activation: of the gate, one of ACTIVATIONS. scale: of the scores. windows: tokens that each layer
    sees, 0 for all. The factors are Granite's, and 1 elsewhere; rope_factor scales the rotary embedding.
    """

    vocab_size: int
    max_length: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    activation: str
    eps: float
    scale: float
    rope_factor: float
    embedding_factor: float
    residual_factor: float
    logits_factor: float
    windows: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no model has."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and not (type(value) is int and 0 < value <= MOST):
                raise ValueError(f"{f.name} is {value!r}, and it must be a whole number from 1 to {MOST}")
            if f.type == "float" and not (type(value) in (int, float) and math.isfinite(value)):
                raise ValueError(f"{f.name} is {value!r}, and it must be a number")
        if not self.windows or any(type(w) is not int or not 0 <= w <= MOST for w in self.windows):
            raise ValueError(f"windows must be one whole number from 0 to {MOST} for each layer")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} heads of keys do not divide {self.heads} heads")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class LlamaLayerWeights:
    """One layer. Norms are float32 [hidden], those of queries and keys [dim] or None. norm1: None in a trained head."""

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    norm1: Tensor | None
    norm2: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class LlamaWeights:
    """All that the native step needs. Make it by `of_model` or `of_parts`.

    table: the embedding: the head itself if they are tied, blocks packed as they are, or a plain table [vocab, hidden].
    inv_freq: float32 [dim / 2], the rotary frequencies. head_ids: the tokens of the head; None: all.
    """

    settings: LlamaSettings
    head: Packed
    table: Packed | Tensor
    final_norm: Tensor
    inv_freq: Tensor
    layers: tuple[LlamaLayerWeights, ...]
    head_ids: Tensor | None = None

    def __post_init__(self) -> None:
        """Native code believes the settings. So each of them is compared with the matrices and vectors that it will index.

        Raises ValueError, with both sizes, for one that does not fit."""
        s, table, rotary = self.settings, self.table, len(self.inv_freq)
        queries, rows = s.heads * s.dim, s.vocab_size if self.head_ids is None else len(self.head_ids)
        _check_matrix("lm_head", self.head, rows, s.hidden)
        tokens, width = table.shape if isinstance(table, Tensor) else (table.n, table.k)
        if tokens < s.vocab_size or width != s.hidden:
            raise ValueError(f"embed_tokens is {tokens} x {width}, and the settings say {s.vocab_size} x {s.hidden}")
        if isinstance(table, Tensor) and not (table.is_contiguous() and table.dtype in _TABLES):
            raise ValueError(f"embed_tokens is {table.dtype}, and a table is one of {', '.join(map(str, _TABLES))}")
        if not 0 < 2 * rotary <= s.dim:
            raise ValueError(f"there are {rotary} rotary frequencies for heads of {s.dim} numbers")
        _check_vector("inv_freq", self.inv_freq, rotary)
        _check_vector("norm", self.final_norm, s.hidden)
        if len(self.layers) != len(s.windows):
            raise ValueError(f"there are {len(self.layers)} layers, and windows for {len(s.windows)}")
        for i, layer in enumerate(self.layers):
            _check_matrix(f"layer {i}: qkv", layer.qkv, queries + 2 * s.kv_heads * s.dim, s.hidden)
            _check_matrix(f"layer {i}: out", layer.out, s.hidden, queries)
            _check_matrix(f"layer {i}: gate_up", layer.gate_up, 2 * rounded(s.intermediate), s.hidden)
            _check_matrix(f"layer {i}: down", layer.down, s.hidden, s.intermediate)
            if layer.norm1 is None or layer.norm2 is None:
                raise ValueError(f"layer {i} lacks a norm")
            for name, size in (("norm1", s.hidden), ("norm2", s.hidden), ("q_norm", s.dim), ("k_norm", s.dim)):
                _check_vector(f"layer {i}: {name}", getattr(layer, name), size)

    @classmethod
    def of_model(cls, model: PreTrainedModel, packing: str, own: bool, head_ids: Tensor | None) -> LlamaWeights:
        """Pack the matrices of a model, unless they are packed already. The arguments are those of `LlamaModel`."""
        if packing == "auto":
            packing = precision(model)
        settings = _settings(model.config, model.model, model.get_output_embeddings())
        ids = None if head_ids is None else check_head_ids(head_ids, settings.vocab_size)
        # The largest first: while a matrix is packed, it is in memory twice.
        head, table = _embeddings(model, packing, own, ids)
        matrices: dict[str, Packed] = {"lm_head": head}
        modules: dict[str, Any] = dict(model.named_modules())
        for layer in range(len(settings.windows)):
            for names in _MATRICES:
                linears = [modules[f"model.layers.{layer}.{name}"] for name in names]
                sources, biases = [matrix_of(m) for m in linears], [m.bias for m in linears]
                made = packed(sources, packing, biases, paired=names == _GATE_UP)
                if own:
                    free_matrix_(*linears)
                    give_matrix_(linears[0], made)
                matrices[f"model.layers.{layer}.{names[0]}"] = made
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        if isinstance(table, Packed):
            matrices["model.embed_tokens"] = table
        else:
            tensors["model.embed_tokens.weight"] = table
        return cls.of_parts(settings, matrices, tensors, ids)

    @classmethod
    def of_parts(
        cls,
        settings: LlamaSettings,
        matrices: Mapping[str, Packed],
        tensors: Mapping[str, Tensor],
        head_ids: Tensor | None = None,
    ) -> LlamaWeights:
        """From matrices and tensors by the names of their modules. Those that are packed side by side have the name of the first.

        Raises KeyError if one is missing, and ValueError if they do not fit each other."""

        def layer(i: int) -> LlamaLayerWeights:
            path = f"model.layers.{i}."
            qkv, out, gate_up, down = (matrices[path + names[0]] for names in _MATRICES)
            found = (tensors.get(f"{path}{name}.weight") for name in _NORMS)
            norm1, norm2, q_norm, k_norm = (None if norm is None else _floats(norm) for norm in found)
            return LlamaLayerWeights(qkv, out, gate_up, down, norm1, norm2, q_norm, k_norm)

        table = matrices.get("model.embed_tokens")
        return cls(
            settings,
            matrices["lm_head"],
            tensors["model.embed_tokens.weight"] if table is None else table,
            _floats(tensors["model.norm.weight"]),
            _floats(tensors["model.rotary_emb.inv_freq"]),
            tuple(map(layer, range(len(settings.windows)))),
            head_ids,
        )


def _check_matrix(name: str, given: Packed, n: int, k: int) -> None:
    if (given.n, given.k) != (n, k):
        raise ValueError(f"{name} is {given.n} x {given.k}, and the settings say {n} x {k}")


def _check_vector(name: str, given: Tensor | None, size: int) -> None:
    if given is not None and (given.shape != (size,) or given.dtype != torch.float32):
        raise ValueError(f"{name} is {given.dtype} {list(given.shape)}, and the settings say float32 [{size}]")


def _settings(config: Any, base: Any, head: Any) -> LlamaSettings:
    first, window = base.layers[0].self_attn, getattr(config, "sliding_window", None)
    return LlamaSettings(
        vocab_size=int(head.out_features),
        max_length=int(config.max_position_embeddings),
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        dim=int(first.head_dim),
        activation=str(config.hidden_act),
        eps=float(config.rms_norm_eps),
        scale=float(first.scaling),
        rope_factor=float(base.rotary_emb.attention_scaling),
        embedding_factor=float(getattr(config, "embedding_multiplier", 1.0)),
        residual_factor=float(getattr(config, "residual_multiplier", 1.0)),
        logits_factor=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        windows=tuple(getattr(layer.self_attn, "sliding_window", window) or 0 for layer in base.layers),
    )


def _embeddings(model: PreTrainedModel, packing: str, own: bool, ids: Tensor | None) -> tuple[Packed, Packed | Tensor]:
    """The output head, and the embedding. A forward reads only a few rows of a table, so floats are not packed."""
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    matrix, bias, embedding = matrix_of(outputs), outputs.bias, matrix_of(inputs)
    tied = ids is None and share_matrix(inputs, outputs)
    if ids is not None and not is_packed(outputs):
        matrix, bias = rows_of(matrix, ids), None if bias is None else bias[ids]
    head = packed([matrix], "int8" if packing == "int4" else packing, [bias])
    table = head if tied else embedding
    table = table.contiguous() if isinstance(table, Tensor) else packed([table], "gguf", [None])
    if own:
        give_matrix_(outputs, head)
        if isinstance(table, Packed):
            give_matrix_(inputs, table)
    return head, table


def _floats(weight: Tensor) -> Tensor:
    return weight.detach().float().clone(memory_format=torch.contiguous_format)
