"""Falcon-H1: a mixer of Mamba 2 beside attention in each layer, with factors from muP."""

from __future__ import annotations

from typing import Any

import torch

from outrider.models.native.families import family
from outrider.models.native.parts import attention, mamba2, unused
from outrider.models.native.program import Builder, NotNative


@family("FalconH1ForCausalLM")
def falcon_h1(b: Builder, c: Any) -> None:
    """norm, mixer and attention, residual, norm, gated MLP, residual."""
    dim, eps, into = (
        getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        float(c.rms_norm_eps),
        c.attention_in_multiplier,
    )
    unused(c, "mamba_d_ssm", "mamba_rms_norm", "mamba_conv_bias")  # the weights show them
    if c.attention_bias or c.mlp_bias or c.projectors_bias or c.mamba_proj_bias:
        raise NotNative("its factors and biases would not commute")
    heads, groups, width = c.mamba_n_heads, c.mamba_n_groups, c.mamba_d_state
    inner = heads * c.mamba_d_head
    sizes = torch.tensor([inner, inner, groups * width, groups * width, heads])
    scale = (torch.tensor(c.ssm_multipliers) * c.ssm_in_multiplier).repeat_interleave(sizes).float()
    x = b.embed(factor=float(c.embedding_multiplier))
    table = b.rotary(c.rope_parameters)
    for layer in b.layers(x, c.num_hidden_layers):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        mamba2(
            b,
            h,
            x,
            f"{layer}.mamba",
            heads=heads,
            channels=c.mamba_d_head,
            width=width,
            groups=groups,
            activation=c.hidden_act,
            eps=eps,
            norm_group=inner // groups,
            norm_first=bool(c.mamba_norm_before_gate),
            scale=None if bool((scale == 1).all()) else scale,
            factor=float(c.ssm_out_multiplier),
        )
        attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            dim=dim,
            table=table,
            scale=float(dim**-0.5 * c.key_multiplier * into**2),
            eps=eps,
            factor=float(c.attention_out_multiplier * into),
        )
        h, mlp = b.norm(x, f"{layer}.pre_ff_layernorm", eps=eps), f"{layer}.feed_forward"
        gate = b.linear(h, f"{mlp}.gate_proj", width=c.intermediate_size, factor=float(c.mlp_multipliers[0]))
        up = b.linear(h, f"{mlp}.up_proj", width=c.intermediate_size)
        b.gate(gate, up, c.hidden_act, out=up)
        b.linear(up, f"{mlp}.down_proj", width=x.width, factor=float(c.mlp_multipliers[1]), add_to=x)
    b.head(b.norm(x, "model.final_layernorm", eps=eps), factor=float(c.lm_head_multiplier))
