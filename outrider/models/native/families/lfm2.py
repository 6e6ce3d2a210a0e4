"""LFM2: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, unused
from outrider.models.native.program import Builder


@family("Lfm2ForCausalLM")
def lfm2(b: Builder, c: Any) -> None:
    """norm, convolution or attention, residual, norm, gated MLP, residual."""
    heads, eps = c.num_attention_heads, float(c.norm_eps)
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    width = c.intermediate_size
    unused(c, "full_attn_idxs", "conv_bias")  # `layer_types` and the weights show them
    if c.block_auto_adjust_ff_dim:
        width = int(c.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // c.block_multiple_of) * c.block_multiple_of
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.operator_norm", eps=eps)
        if c.layer_types[i] == "full_attention":
            attention(
                b,
                h,
                x,
                f"{layer}.self_attn",
                heads=heads,
                kv_heads=c.num_key_value_heads,
                dim=dim,
                table=table,
                scale=dim**-0.5,
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
        middle = b.linear(h, f"{layer}.feed_forward.w1", f"{layer}.feed_forward.w3", width=width, gate="silu")
        b.linear(middle, f"{layer}.feed_forward.w2", width=c.hidden_size, add_to=x)
    b.head(b.norm(x, "model.embedding_norm", eps=eps))
