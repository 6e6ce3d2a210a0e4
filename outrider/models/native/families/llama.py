"""Llama, and what has its layers: Mistral, Qwen 2 and 3, and Granite with its four factors."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp
from outrider.models.native.program import Builder


@family("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
def llama(b: Builder, c: Any) -> None:
    """norm, attention, residual, norm, gated MLP, residual."""
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    eps, factor = float(c.rms_norm_eps), float(getattr(c, "residual_multiplier", 1.0))
    scale = float(getattr(c, "attention_multiplier", dim**-0.5))
    types, window = getattr(c, "layer_types", None), getattr(c, "sliding_window", None) or 0
    x = b.embed(factor=float(getattr(c, "embedding_multiplier", 1.0)))
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            dim=dim,
            table=table,
            scale=scale,
            eps=eps,
            window=window if types is None or types[i] == "sliding_attention" else 0,
            factor=factor,
        )
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps)
        gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act, factor=factor)
    b.head(b.norm(x, "model.norm", eps=eps), factor=1.0 / float(getattr(c, "logits_scaling", 1.0)))
