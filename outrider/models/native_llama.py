"""The Llama family in one native call per forward, without the modelling code of transformers.

A node has the same bits as a node of a tree, in a batch, and in any chunk of a prompt. The reference is `HFModel`, which
runs the modelling code of transformers. The two agree up to rounding, not to the bit.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import LayerStruct, ModelStruct, PairsStruct
from outrider.models.base import (
    EMBEDDING,
    Chain,
    DrawnChain,
    LanguageModel,
    Output,
    Want,
    check_layers,
    check_taps,
    over_vocabulary,
)
from outrider.models.cache import SlotCache
from outrider.models.dtypes import dtype_name
from outrider.models.llama_weights import ACTIVATIONS, LlamaLayerWeights, LlamaSettings, LlamaWeights
from outrider.models.matrix import float_rows
from outrider.models.native_decoder import NativeDecoder
from outrider.models.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
# Numbers that settings and the native struct call the same.
_SIZES = ("hidden", "intermediate", "heads", "kv_heads", "dim")
_FACTORS = ("eps", "scale", "rope_factor", "embedding_factor", "residual_factor", "logits_factor")
# Rotary types whose frequencies do not depend on the length of the text.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


def supports(model: PreTrainedModel) -> str | None:
    """None if the native step can run this model, else the reason why not."""
    name, config = type(model).__name__, model.config
    if not native.available():
        return f"the native kernels are not available: {native.why()}"
    if name not in _FAMILY:
        return f"{name} is not one of {', '.join(_FAMILY)}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _FIXED_ROTARY:
        return f"its rotary embedding ({kind}) changes with the length of the text"
    if config.hidden_act not in ACTIVATIONS:
        return f"its activation is {config.hidden_act}"
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"its linears are {type(module).__name__}, not plain matrices"
    for p in model.parameters():
        if p.device.type not in ("cpu", "meta") or p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"a weight is {p.dtype} on {p.device}"
    return None


class LlamaModel(LanguageModel):
    """A Llama, Mistral, Qwen2, Qwen3 or Granite model, run by the native step.

    model: of transformers, or its `LlamaWeights`; then weights, own and head_ids are those that they were made with.
    weights: the precision of the packed weights: float32, bfloat16, float16, int8, int4, or gguf for the blocks of a GGUF
    file. "auto" keeps the checkpoint's own. With int4 weights the output head is int8, and so is an embedding that is tied
    to it. A separate embedding of floats is not packed, because a forward reads only a few of its rows.
    own: free the weights of `model` as they are packed. `model` cannot be used afterwards.
    head_ids: int64 [n], ascending: the tokens that the output head keeps. All other logits are -inf, and their weights are
    not read. None keeps all. A tied embedding is then kept as a table of its own, with every token.
    kv_cache_dtype: how the caches of `new_cache` keep keys and values. A forward takes a cache of any dtype.
    packed_weights: what it computes with.

    Raises ValueError if the native step cannot run the model (see `supports`), or for tokens that it does not have.
    """

    has_draft_chains = True

    def __init__(
        self,
        model: PreTrainedModel | LlamaWeights,
        weights: str = "auto",
        own: bool = False,
        head_ids: Tensor | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if not isinstance(model, LlamaWeights):
            reason = supports(model)
            if reason is not None:
                raise ValueError(f"the native step cannot run this model: {reason}; HFModel can")
            model = LlamaWeights.of_model(model, weights, own, head_ids)
        self.packed_weights = model  # what the C structs point to
        settings = model.settings
        self.vocab_size, self.max_length, self.hidden = settings.vocab_size, settings.max_length, settings.hidden
        self.num_layers, self.kv_cache_dtype = len(model.layers), kv_cache_dtype
        self.device = torch.device("cpu")
        self.batch_invariant = True
        matrices = [model.head, *(m for w in model.layers for m in (w.qkv, w.out, w.gate_up, w.down))]
        self.weight_bytes, self.head_bytes = sum(m.bytes for m in matrices), model.head.bytes
        layers = (LayerStruct * self.num_layers)(*map(layer_struct, model.layers, settings.windows))
        struct = model_struct(settings, model.head, model.table, model.head_ids, model.final_norm, model.inv_freq)
        self._decoder = NativeDecoder(struct, layers, range(self.num_layers), model)

    @property
    def path(self) -> str:
        return "native"

    def layer_subset(self, layers: Sequence[int]) -> LlamaModel:
        chosen = check_layers(layers, self.num_layers)
        out = copy.copy(self)
        out.num_layers = len(chosen)
        out._decoder = self._decoder.layer_subset(chosen)
        return out

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length, self.kv_cache_dtype)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Raises ValueError for tokens, parents or a cache that do not fit, IndexError for slots."""
        check_taps(taps, self.num_layers)
        logits, features, _ = self._decoder.forward(nodes, taps, want)
        if self.packed_weights.head_ids is not None:
            logits = over_vocabulary(logits, self.packed_weights.head_ids, self.vocab_size)
        for i, t in enumerate(taps):
            if features is not None and t == EMBEDDING:
                features[..., i * self.hidden : (i + 1) * self.hidden] = self._embedded(nodes.tokens)
        return Output(logits, features)

    @property
    def embedding_table(self) -> native.Packed | Tensor:
        return self.packed_weights.table

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        return float_rows(self.packed_weights.table, tokens)

    def head_rows(self, tokens: Tensor) -> Tensor:
        kept = self.packed_weights.head_ids
        places = tokens if kept is None else torch.searchsorted(kept, tokens)
        if kept is not None and not torch.equal(kept[places.clamp_max(len(kept) - 1)], tokens):
            raise ValueError(
                "the output head of this model does not keep some of these tokens; load it without head_ids"
            )
        return float_rows(self.packed_weights.head, places)

    def output_head(self, hidden: Tensor) -> Tensor:
        if self.packed_weights.head_ids is not None:
            raise ValueError("the output head of this model keeps some of its tokens only; load it without head_ids")
        return self.packed_weights.head.linear(hidden)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """float32 [batch, node, hidden]: the input of layer 0."""
        return self.embedding_rows(tokens) * self.packed_weights.settings.embedding_factor

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        return self._decoder.draft_chains(cache, chains)


def model_struct(
    settings: LlamaSettings,
    head: native.Packed,
    table: native.Packed | Tensor | None,
    ids: Tensor | None,
    final_norm: Tensor | None,
    inv_freq: Tensor,
    pairs: PairsStruct | None = None,
) -> ModelStruct:
    """What native code is told of a model or of a trained head. It points to the arguments, so keep them."""
    return ModelStruct(
        pairs=None if pairs is None else ctypes.addressof(pairs),
        head=ctypes.addressof(head.struct),
        head_ids=address(ids),
        table=ctypes.addressof(table.struct) if isinstance(table, native.Packed) else None,
        embedding=table.data_ptr() if isinstance(table, Tensor) else None,
        final_norm=address(final_norm),
        inv_freq=inv_freq.data_ptr(),
        rotary=2 * len(inv_freq),
        vocab=settings.vocab_size,
        embedding_format=native.FORMATS[dtype_name(table.dtype)] if isinstance(table, Tensor) else 0,
        activation=ACTIVATIONS[settings.activation],
        **{name: getattr(settings, name) for name in (*_SIZES, *_FACTORS)},
    )


def layer_struct(layer: LlamaLayerWeights, window: int) -> LayerStruct:
    return LayerStruct(
        **{n: ctypes.addressof(getattr(layer, n).struct) for n in ("qkv", "out", "gate_up", "down")},
        **{n: address(getattr(layer, n)) for n in ("norm1", "norm2", "q_norm", "k_norm")},
        window=window,
    )


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
