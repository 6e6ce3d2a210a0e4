"""Gemma 1, 2 and 3 (text): norms with 1 + weight, an embedding that is scaled, and from 2 on norms on both sides of each part."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, tables_by_type, window_of
from outrider.models.native.program import Builder


@family("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
def gemma(b: Builder, c: Any) -> None:
    """x += norm(attention(norm(x))); x += norm(MLP(norm(x))). Gemma 1 has the inner norms only."""
    eps, scalar = float(c.rms_norm_eps), float(getattr(c, "query_pre_attn_scalar", c.head_dim))
    sandwich = hasattr(c, "query_pre_attn_scalar")
    activation = c.hidden_activation if sandwich else c.hidden_act
    x = b.embed(factor=c.hidden_size**0.5)
    table = tables_by_type(b, c) if "full_attention" in c.rope_parameters else None
    only = b.rotary(c.rope_parameters) if table is None else 0
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps, one_added=True)
        made = attention(
            b,
            h,
            None if sandwich else x,
            f"{layer}.self_attn",
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            dim=c.head_dim,
            table=table(i) if table else only,
            scale=scalar**-0.5,
            eps=eps,
            window=window_of(c, i),
            softcap=getattr(c, "attn_logit_softcapping", None) or 0.0,
            one_added=True,
        )
        if sandwich:
            b.norm(made, f"{layer}.post_attention_layernorm", eps=eps, one_added=True, add_to=x)
        before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        h = b.norm(x, f"{layer}.{before}", eps=eps, one_added=True)
        name, width = f"{layer}.mlp", c.intermediate_size
        made = gated_mlp(b, h, None if sandwich else x, name, width=width, activation=activation)
        if sandwich:
            b.norm(made, f"{layer}.post_feedforward_layernorm", eps=eps, one_added=True, add_to=x)
    h = b.norm(x, "model.norm", eps=eps, one_added=True)
    b.head(h, softcap=getattr(c, "final_logit_softcapping", None) or 0.0)
