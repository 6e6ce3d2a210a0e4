"""Granite 4, and Bamba: Mamba 2, and attention in some layers."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, mamba2, mixture, unused
from outrider.models.native.program import Builder, Value


@family("GraniteMoeHybridForCausalLM")
def granite_hybrid(b: Builder, c: Any) -> None:
    """norm, mixer or attention, residual, norm, gated MLP beside a mixture, residual; each residual has a factor."""
    unused(c, "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    eps, factor, width = float(c.rms_norm_eps), float(c.residual_multiplier), c.shared_intermediate_size
    x = b.embed(factor=float(c.embedding_multiplier))
    table = b.rotary(c.rope_parameters) if c.position_embedding_type == "rope" else None
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        _mixer(b, c, h, x, layer, c.layer_types[i], table, float(c.attention_multiplier), factor)
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps)
        if c.num_local_experts:
            mixture(
                b, h, x, f"{layer}.block_sparse_moe", router="router", count=c.num_local_experts, k=c.num_experts_per_tok,
                kind="top_softmax", width=c.intermediate_size, activation=c.hidden_act, factor=factor,
            )  # fmt: skip
        made = b.linear(h, f"{layer}.shared_mlp.input_linear", width=2 * width)
        gate, up = made.split(width, width)
        b.gate(gate, up, c.hidden_act, out=up)
        b.linear(up, f"{layer}.shared_mlp.output_linear", width=x.width, factor=factor, add_to=x)
    b.head(b.norm(x, "model.norm", eps=eps), factor=1.0 / float(c.logits_scaling))


@family("BambaForCausalLM")
def bamba(b: Builder, c: Any) -> None:
    """norm, mixer or attention, residual, norm, gated MLP, residual."""
    eps, own = float(c.rms_norm_eps), c.attn_layer_indices or ()
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    dim = c.hidden_size // c.num_attention_heads
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        _mixer(b, c, h, x, layer, "full_attention" if i in own else "linear_attention", table, dim**-0.5, 1.0)
        h = b.norm(x, f"{layer}.pre_ff_layernorm", eps=eps)
        gated_mlp(b, h, x, f"{layer}.feed_forward", width=c.intermediate_size, activation=c.hidden_act)
    b.head(b.norm(x, "model.final_layernorm", eps=eps))


def _mixer(
    b: Builder, c: Any, h: Value, x: Value, layer: str, kind: str, table: int | None, scale: float, factor: float
) -> None:
    if kind in ("attention", "full_attention"):
        attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            dim=c.hidden_size // c.num_attention_heads,
            table=table,
            scale=scale,
            eps=0.0,
            factor=factor,
        )
        return
    mamba2(
        b,
        h,
        x,
        f"{layer}.mamba",
        heads=c.mamba_n_heads,
        channels=c.mamba_d_head,
        width=c.mamba_d_state,
        groups=c.mamba_n_groups,
        activation=c.hidden_act,
        eps=float(c.rms_norm_eps),
        factor=factor,
    )
