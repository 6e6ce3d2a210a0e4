"""Llama, and what has its layers: Mistral, Qwen 2 and 3, SmolLM3, Seed-OSS, ERNIE 4.5, and Granite with its four factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, head_dim, unused, window_of
from outrider.models.native.program import Builder, Value

Feed = Callable[[Value, Value, str, float], object]
"""x += factor * part(h): (h, x, name of the layer, factor)."""


@family("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
@family("SmolLM3ForCausalLM", "SeedOssForCausalLM")
def llama(b: Builder, c: Any, *, interleaved: bool = False, joined: bool = False) -> None:
    """norm, attention, residual, norm, gated MLP, residual. joined: queries, keys and values are one linear; gate and up, too."""

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        name, width = f"{layer}.mlp", c.intermediate_size
        gated_mlp(b, h, x, name, width=width, activation=c.hidden_act, factor=factor, joined=joined)

    decoder(b, c, feed, interleaved=interleaved, joined=joined)


def decoder(b: Builder, c: Any, feed: Feed, **attends: Any) -> None:
    """The layers of Llama with another part in the place of the MLP. attends: settings of `attention`."""
    dim, eps, factor = head_dim(c), float(c.rms_norm_eps), float(getattr(c, "residual_multiplier", 1.0))
    scale, rotated = float(getattr(c, "attention_multiplier", dim**-0.5)), getattr(c, "no_rope_layers", None)
    unused(c, "attention_out_bias", "no_rope_layer_interval", "use_bias")
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
            table=table if rotated is None or rotated[i] else None,
            scale=scale,
            eps=eps,
            window=window_of(c, i),
            factor=factor,
            **attends,
        )
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps)
        feed(h, x, layer, factor)
    b.head(b.norm(x, "model.norm", eps=eps), factor=1.0 / float(getattr(c, "logits_scaling", 1.0)))


@family("Ernie4_5ForCausalLM")
def ernie(b: Builder, c: Any) -> None:
    """The numbers of a rotary pair are neighbours."""
    llama(b, c, interleaved=True)


@family("Phi3ForCausalLM")
def phi3(b: Builder, c: Any) -> None:
    """Phi-3 and 4. LongRoPE has other angles where a cache may hold longer texts than the first training did."""
    unused(c, "original_max_position_embeddings", "embd_pdrop", "resid_pdrop")
    llama(b, c, joined=True)
