"""LFM2, also with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.parts import Sublayer, attends, by_kind, decoder, mixture, unused
from outrider.models.native.program import Value


@family("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
def lfm2(b: Builder, c: Any) -> None:
    """norm, convolution or attention, residual, norm, gated MLP or mixture, residual."""
    eps, width = float(c.norm_eps), c.intermediate_size
    unused(c, "full_attn_idxs", "conv_bias")  # `layer_types` and the weights show them
    experts, first = getattr(c, "num_experts", 0), getattr(c, "num_dense_layers", 0)
    if not experts and c.block_auto_adjust_ff_dim:
        width = int(c.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // c.block_multiple_of) * c.block_multiple_of
    table = b.rotary(c.rope_parameters, module="model.pos_emb" if experts else "model.rotary_emb")
    names = ("q_layernorm", "k_layernorm")
    attention = attends(b, c, lambda layer: table, eps=eps, norms=names, out="out_proj")

    def convolution(h: Value, x: Any, layer: str) -> None:
        joint = b.linear(h, f"{layer}.conv.in_proj", width=3 * x.width)
        before, after, read = joint.split(x.width, x.width, x.width)
        b.gate(before, read, "identity", out=read)
        convolved = b.conv(read, f"{layer}.conv.conv")
        b.gate(after, convolved, "identity", out=convolved)
        b.linear(convolved, f"{layer}.conv.out_proj", width=x.width, add_to=x)

    def dense(h: Value, x: Any, layer: str) -> None:
        name = f"{layer}.feed_forward"
        middle = b.linear(h, f"{name}.w1", f"{name}.w3", width=width, gate="silu")
        b.linear(middle, f"{name}.w2", width=x.width, add_to=x)

    feed = dense
    if experts:
        sparse = mixture(
            b,
            c,
            "feed_forward",
            count=experts,
            kind="sigmoid_top",
            activation="silu",
            normalised=bool(c.norm_topk_prob),
            width=c.moe_intermediate_size,
            scaling=float(c.routed_scaling_factor),
            correction="expert_bias" if c.use_expert_bias else None,
            added=1e-6,
        )
        kinds = ["dense" if i < first else "sparse" for i in range(c.num_hidden_layers)]
        feed = by_kind(b, kinds, dense=dense, sparse=sparse)
    first = Sublayer(by_kind(b, c.layer_types, full_attention=attention, conv=convolution), "operator_norm")
    decoder(b, c, first, Sublayer(feed, "ffn_norm"), last="model.embedding_norm", eps=eps)
