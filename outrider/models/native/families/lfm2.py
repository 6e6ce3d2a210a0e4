"""LFM2, also with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, heads_of, mixture, unused
from outrider.models.native.program import Builder


@family("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
def lfm2(b: Builder, c: Any) -> None:
    """norm, convolution or attention, residual, norm, gated MLP or mixture, residual."""
    eps = float(c.norm_eps)
    width = c.intermediate_size
    unused(c, "full_attn_idxs", "conv_bias")  # `layer_types` and the weights show them
    experts, dense = getattr(c, "num_experts", 0), getattr(c, "num_dense_layers", 0)
    if not experts and c.block_auto_adjust_ff_dim:
        width = int(c.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // c.block_multiple_of) * c.block_multiple_of
    x = b.embed()
    table = b.rotary(c.rope_parameters, module="model.pos_emb" if experts else "model.rotary_emb")
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.operator_norm", eps=eps)
        if c.layer_types[i] == "full_attention":
            attention(
                b,
                h,
                x,
                f"{layer}.self_attn",
                table=table,
                **heads_of(c),
                eps=eps,
                norms=("q_layernorm", "k_layernorm"),
                out="out_proj",
            )
        else:
            made = b.linear(h, f"{layer}.conv.in_proj", width=3 * c.hidden_size)
            before, after, read = made.split(c.hidden_size, c.hidden_size, c.hidden_size)
            b.gate(before, read, "identity", out=read)
            convolved = b.conv(read, f"{layer}.conv.conv")
            b.gate(after, convolved, "identity", out=convolved)
            b.linear(convolved, f"{layer}.conv.out_proj", width=c.hidden_size, add_to=x)
        h = b.norm(x, f"{layer}.ffn_norm", eps=eps)
        feed = f"{layer}.feed_forward"
        if experts and i >= dense:
            mixture(
                b, h, x, feed, router="gate", count=experts, k=c.num_experts_per_tok, kind="sigmoid_top", activation="silu",
                normalised=bool(c.norm_topk_prob), width=c.moe_intermediate_size, scaling=float(c.routed_scaling_factor),
                correction=f"{feed}.expert_bias" if c.use_expert_bias else None, added=1e-6,
            )  # fmt: skip
            continue
        middle = b.linear(h, f"{feed}.w1", f"{feed}.w3", width=width, gate="silu")
        b.linear(middle, f"{feed}.w2", width=c.hidden_size, add_to=x)
    b.head(b.norm(x, "model.embedding_norm", eps=eps))
