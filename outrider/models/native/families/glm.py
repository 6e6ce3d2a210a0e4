"""GLM-4: rotary pairs of neighbours over half a head. The models of 2025 norm both sides of each part."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, heads_of
from outrider.models.native.program import Builder


@family("GlmForCausalLM", "Glm4ForCausalLM")
def glm(b: Builder, c: Any) -> None:
    """x += [norm](attention(norm(x))); x += [norm](MLP(norm(x)))."""
    eps = float(c.rms_norm_eps)
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for layer in b.layers(x, c.num_hidden_layers):
        after = b.has(f"{layer}.post_self_attn_layernorm")
        made = attention(
            b,
            b.norm(x, f"{layer}.input_layernorm", eps=eps),
            None if after else x,
            f"{layer}.self_attn",
            table=table,
            **heads_of(c),
            interleaved=True,
        )
        if after:
            b.norm(made, f"{layer}.post_self_attn_layernorm", eps=eps, add_to=x)
        h, width = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps), c.intermediate_size
        made = gated_mlp(b, h, None if after else x, f"{layer}.mlp", width=width, activation=c.hidden_act, joined=True)
        if after:
            b.norm(made, f"{layer}.post_mlp_layernorm", eps=eps, add_to=x)
    b.head(b.norm(x, "model.norm", eps=eps))
