"""Cohere's Command R and R7B, and StableLM: layer norms, and one norm for attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, heads_of, unused, window_of
from outrider.models.native.program import Builder, NotNative


@family("CohereForCausalLM", "Cohere2ForCausalLM", "StableLmForCausalLM")
def cohere(b: Builder, c: Any) -> None:
    """h = norm(x); x += attention(h) + MLP(h). StableLM may have a second norm, for the MLP.

    R7B rotates only the layers that have a window."""
    eps, stable = float(c.layer_norm_eps), hasattr(c, "use_parallel_residual")
    unused(c, "use_parallel_residual", "use_qk_norm", "use_qkv_bias")
    if getattr(c, "qk_layernorm", False):
        raise NotNative("it has a norm for each head")
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h, window = b.norm(x, f"{layer}.input_layernorm", eps=eps, kind="layer"), window_of(c, i)
        attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            table=None if hasattr(c, "layer_types") and not window else table,
            **heads_of(c),
            eps=eps,
            window=window,
            kind="layer",
            per_group=True,
            interleaved=not stable,
        )
        second = f"{layer}.post_attention_layernorm"
        h = b.norm(x, second, eps=eps, kind="layer") if b.has(second) else h
        gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act)
    b.head(b.norm(x, "model.norm", eps=eps, kind="layer"), factor=float(getattr(c, "logit_scale", 1.0)))
