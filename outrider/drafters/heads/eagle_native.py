"""A head of the EAGLE family by the native step: a forward is one call, and so are whole chains."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.layers import HeadOutput, precision_of
from outrider.drafters.heads.reader import HeadWeights
from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import LayerStruct, PairsStruct
from outrider.models.base import Chain, DrawnChain, LanguageModel, Want
from outrider.models.cache import SlotCache
from outrider.models.llama_weights import LlamaLayerWeights, LlamaSettings
from outrider.models.native_decoder import NativeDecoder
from outrider.models.native_llama import address, layer_struct, model_struct
from outrider.models.nodes import Nodes

_LAYER = "layers.0."


def runs_natively(head: HeadWeights[HeadConfig], target: LanguageModel) -> bool:
    """Whether the native step can run a head: one of a single layer of Llama, with an embedding that native code can read."""
    config = head.config
    if config.num_layers > 1 or config.qk_norm or config.mask_token_id is not None:
        return False
    return target.device.type == "cpu" and native.available() and _table(head, target) is not None


def _table(head: HeadWeights[HeadConfig], target: LanguageModel) -> native.Packed | Tensor | None:
    own = head.own_embedding
    return target.embedding_table if own is None else own.contiguous()


class NativeEagle:
    """weight_bytes: that a forward of one pair reads; fc is read only where features come from the target."""

    def __init__(
        self, head: HeadWeights[HeadConfig], target: LanguageModel, max_length: int, quantization: str
    ) -> None:
        config, tensors = head.config, head.tensors
        precision = precision_of(quantization, [t for n, t in tensors.items() if "norm" not in n])

        def matrix(*names: str, paired: bool = False) -> native.Packed:
            biases = [tensors.get(f"{n}.bias") for n in names]
            return native.Packed([tensors[f"{n}.weight"] for n in names], precision, biases, paired=paired)

        def norm(*names: str) -> Tensor | None:
            found = [tensors[f"{n}.weight"].float() for n in names if f"{n}.weight" in tensors]
            return torch.cat(found).contiguous() if found else None

        attention, mlp, taps = f"{_LAYER}self_attn.", f"{_LAYER}mlp.", len(config.taps)
        fc, qkv = matrix("fc"), matrix(*(f"{attention}{n}_proj" for n in "qkv"))
        out, gate_up = matrix(f"{attention}o_proj"), matrix(f"{mlp}gate_proj", f"{mlp}up_proj", paired=True)
        down, lm_head = matrix(f"{mlp}down_proj"), matrix("lm_head")
        read = [qkv, out, gate_up, down, lm_head, *([fc] if config.eagle1 else [])]
        self.weight_bytes = sum(m.bytes for m in read)
        token_norm, hidden_norm = norm(f"{_LAYER}input_layernorm"), norm(f"{_LAYER}hidden_norm")
        middle_norm, last_norm = norm(f"{_LAYER}post_attention_layernorm"), norm("norm")
        feature_norm = norm("input_norm", *(f"fc_norm.{i}" for i in range(taps)))
        frequencies, rope_factor = config.rotary()
        inv_freq, ids, table = frequencies.contiguous(), head.token_ids.long().contiguous(), _table(head, target)
        layer = LlamaLayerWeights(qkv, out, gate_up, down, None, middle_norm, None, None)
        pairs = PairsStruct(
            fc=ctypes.addressof(fc.struct),
            token_norm=address(token_norm),
            hidden_norm=address(hidden_norm),
            feature_norm=address(feature_norm),
            feature_size=config.hidden_size if config.eagle1 else taps * config.target_hidden_size,
            parts=taps if config.fc_norm else 1,
            normed_residual=int(config.norm_before_residual),
            norm_output=int(config.norm_output),
        )
        settings = LlamaSettings(
            vocab_size=config.vocab_size,
            max_length=max_length,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.head_dim,
            activation="silu",
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            rope_factor=rope_factor,
            embedding_factor=1.0,
            residual_factor=1.0,
            logits_factor=1.0,
            windows=(0,),
        )
        kept = ids if len(ids) < config.vocab_size else None
        model = model_struct(settings, lm_head, table, kept, last_norm, inv_freq, pairs)
        norms = (token_norm, hidden_norm, middle_norm, last_norm, feature_norm)
        keep = (fc, *read, *norms, inv_freq, ids, table, pairs)
        self._decoder = NativeDecoder(model, (LayerStruct * 1)(layer_struct(layer, 0)), [0], keep)

    def forward(self, nodes: Nodes, features: Tensor | None, g: Tensor | None, want: Want) -> HeadOutput:
        given = g if features is None else features
        assert given is not None
        logits, _, fed_back = self._decoder.forward(nodes, (), want, given.float().contiguous(), features is None)
        assert fed_back is not None
        return HeadOutput(logits, fed_back)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        return self._decoder.draft_chains(cache, chains)
