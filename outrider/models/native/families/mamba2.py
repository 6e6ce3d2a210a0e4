"""Mamba 2 alone, and Nemotron-H: each layer is a mixer of Mamba 2, attention, or an MLP."""

from __future__ import annotations

from typing import Any

from outrider.models.native import parts
from outrider.models.native.families import family
from outrider.models.native.program import Builder, NotNative

_EXPERTS = (
    "n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size num_experts_per_tok n_group "
    "topk_group norm_topk_prob routed_scaling_factor"
)


@family("Mamba2ForCausalLM")
def mamba2(b: Builder, c: Any) -> None:
    """norm, mixer, residual."""
    eps = float(c.layer_norm_epsilon)
    x = b.embed("backbone.embeddings")
    for layer in b.layers(x, c.num_hidden_layers, "backbone.layers"):
        h = b.norm(x, f"{layer}.norm", eps=eps)
        parts.mamba2(
            b,
            h,
            x,
            f"{layer}.mixer",
            heads=c.num_heads,
            channels=c.head_dim,
            width=c.state_size,
            groups=c.n_groups,
            activation=c.hidden_act,
            eps=eps,
        )
    b.head(b.norm(x, "backbone.norm_f", eps=eps))


@family("NemotronHForCausalLM")
def nemotron_h(b: Builder, c: Any) -> None:
    """norm, one of three, residual. It has no rotary embedding."""
    eps, inner = float(c.layer_norm_epsilon), c.mamba_num_heads * c.mamba_head_dim
    x = b.embed("model.embeddings")
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h, mixer, kind = b.norm(x, f"{layer}.norm", eps=eps), f"{layer}.mixer", c.layers_block_type[i]
        if kind in ("mamba", "linear_attention"):
            parts.mamba2(
                b,
                h,
                x,
                mixer,
                heads=c.mamba_num_heads,
                channels=c.mamba_head_dim,
                width=c.ssm_state_size,
                groups=c.n_groups,
                activation=c.mamba_hidden_act,
                eps=eps,
                norm_group=inner // c.n_groups,
            )
        elif kind in ("attention", "full_attention"):
            parts.attention(
                b,
                h,
                x,
                mixer,
                table=None,
                **parts.heads_of(c),
                eps=eps,
            )
        elif kind == "mlp":
            up = b.linear(h, f"{mixer}.up_proj", width=c.intermediate_size)
            b.gate(up, None, c.mlp_hidden_act, out=up)
            b.linear(up, f"{mixer}.down_proj", width=x.width, add_to=x)
        else:
            raise NotNative(f"its layer {i} is a {kind}")
    parts.unused(c, *_EXPERTS.split())
    b.head(b.norm(x, "model.norm_f", eps=eps))
