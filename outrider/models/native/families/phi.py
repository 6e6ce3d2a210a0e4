"""Phi-1 and Phi-2: attention and an MLP without a gate side by side, layer norms, and biases everywhere."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, heads_of, unused
from outrider.models.native.program import Builder


@family("PhiForCausalLM")
def phi(b: Builder, c: Any) -> None:
    """h = norm(x); x += attention(h) + MLP(h)."""
    eps = float(c.layer_norm_eps)
    unused(c, "embd_pdrop", "qk_layernorm", "resid_pdrop")  # the weights show the norms
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for layer in b.layers(x, c.num_hidden_layers):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps, kind="layer")
        attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            table=table,
            **heads_of(c),
            eps=eps,
            norms=("q_layernorm", "k_layernorm"),
            kind="layer",
            out="dense",
        )
        middle = b.linear(h, f"{layer}.mlp.fc1", width=c.intermediate_size)
        b.gate(middle, None, c.hidden_act, out=middle)
        b.linear(middle, f"{layer}.mlp.fc2", width=x.width, add_to=x)
    b.head(b.norm(x, "model.final_layernorm", eps=eps, kind="layer"))
