"""Models whose MLP has no gate: StarCoder2, Nemotron, and Arcee's AFM."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, heads_of, unused, window_of
from outrider.models.native.program import Builder


@family("Starcoder2ForCausalLM", "NemotronForCausalLM", "ArceeForCausalLM")
def ungated(b: Builder, c: Any) -> None:
    """x += attention(norm(x)); x += down(act(up(norm(x)))). Nemotron's layer norms have 1 + weight."""
    own = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "arcee": "rms_norm_eps"}[c.model_type]
    kind, one_added, eps = "rms" if own == "rms_norm_eps" else "layer", own == "norm_eps", float(getattr(c, own))
    up, down = ("c_fc", "c_proj") if own == "norm_epsilon" else ("up_proj", "down_proj")
    unused(c, "use_bias")
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        attention(
            b,
            b.norm(x, f"{layer}.input_layernorm", eps=eps, kind=kind, one_added=one_added),
            x,
            f"{layer}.self_attn",
            table=table,
            **heads_of(c),
            window=window_of(c, i),
        )
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps, kind=kind, one_added=one_added)
        middle = b.linear(h, f"{layer}.mlp.{up}", width=c.intermediate_size)
        b.gate(middle, None, c.hidden_act, out=middle)
        b.linear(middle, f"{layer}.mlp.{down}", width=x.width, add_to=x)
    b.head(b.norm(x, "model.norm", eps=eps, kind=kind, one_added=one_added))
