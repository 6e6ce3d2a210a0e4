"""OLMo 2 and 3, and EXAONE 4: norms after each part, and none before."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import attention, gated_mlp, heads_of, tables_by_type, unused, window_of
from outrider.models.native.program import Builder


@family("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM")
def olmo(b: Builder, c: Any) -> None:
    """x += norm(attention(x)); x += norm(MLP(x)). OLMo norms all queries and all keys together, EXAONE each head of them.

    EXAONE rotates only the layers that have a window, if some have one."""
    eps, exaone = float(c.rms_norm_eps), hasattr(c, "sliding_window_pattern")
    unused(c, "sliding_window_pattern")
    x = b.embed()
    table = tables_by_type(b, c) if "full_attention" in c.rope_parameters else None
    only = b.rotary(c.rope_parameters) if table is None else 0
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        window = window_of(c, i) if getattr(c, "layer_types", None) else 0
        plain = exaone and c.sliding_window and not window
        made = attention(
            b,
            x,
            None,
            f"{layer}.self_attn",
            table=None if plain else table(i) if table else only,
            **heads_of(c),
            eps=eps,
            window=window,
            whole=not exaone,
        )
        b.norm(made, f"{layer}.post_attention_layernorm", eps=eps, add_to=x)
        made = gated_mlp(b, x, None, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act)
        b.norm(made, f"{layer}.post_feedforward_layernorm", eps=eps, add_to=x)
    b.head(b.norm(x, "model.norm", eps=eps))
