"""Qwen 3.5 without experts: the gated delta rule, and gated attention in each fourth layer."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.parts import gated_mlp
from outrider.models.native.program import Builder, Value

_TINY = 1e-6  # transformers' l2norm


@family("Qwen3_5ForCausalLM")
def qwen3_5(b: Builder, c: Any) -> None:
    """norm, delta rule or attention, residual, norm, gated MLP, residual."""
    eps = float(c.rms_norm_eps)
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps, one_added=True)
        if c.layer_types[i] == "full_attention":
            _attention(b, c, h, x, f"{layer}.self_attn", table)
        else:
            _delta_net(b, c, h, x, f"{layer}.linear_attn")
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps, one_added=True)
        gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act)
    b.head(b.norm(x, "model.norm", eps=eps, one_added=True))


def _attention(b: Builder, c: Any, h: Value, x: Value, name: str, table: int) -> None:
    """The queries of a head are followed by its gate."""
    heads, kv_heads, dim, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, float(c.rms_norm_eps)
    width, kv_width = heads * dim, kv_heads * dim
    made = b.linear(h, *(f"{name}.{n}_proj" for n in "qkv"), width=2 * width + 2 * kv_width)
    both, key, value = made.split(2 * width, kv_width, kv_width)
    query, gate = b.value(width), b.value(width)
    first, second, *_ = both.split(*[dim] * (2 * heads))
    for to, given in ((query, first), (gate, second)):
        b.move(given, heads, step=2 * dim, out=to.split(*[dim] * heads)[0], out_step=dim)
    for part, norm in ((query, f"{name}.q_norm"), (key, f"{name}.k_norm")):
        b.norm(part, norm, eps=eps, group=dim, one_added=True, out=part)
        b.rope(part, table, dim)
    cache = b.store(key, value, kv_heads)
    b.rows()
    attended = b.attend(query, cache, heads=heads, scale=dim**-0.5)
    b.gate(gate, attended, "sigmoid", out=attended)
    b.linear(attended, f"{name}.o_proj", width=x.width, add_to=x)


def _delta_net(b: Builder, c: Any, h: Value, x: Value, name: str) -> None:
    heads, groups = c.linear_num_value_heads, c.linear_num_key_heads
    keys, width = c.linear_key_head_dim, c.linear_value_head_dim
    made = b.linear(h, f"{name}.in_proj_qkv", width=2 * groups * keys + heads * width)
    mixed = b.conv(made, f"{name}.conv1d", activation=c.hidden_act)
    both, _ = mixed.split(2 * groups * keys, heads * width)
    b.l2_norm(both, group=keys, eps=_TINY)
    more = b.linear(h, f"{name}.in_proj_b", f"{name}.in_proj_a", width=2 * heads)
    beta, decay = more.split(heads, heads)
    b.map(beta, "sigmoid", out=beta)
    b.map(decay, "softplus", shift=b.vector(f"{name}.dt_bias", heads), out=decay)
    b.map(decay, "exp", scale=-b.vector(f"{name}.A_log", heads).exp(), out=decay)
    y = b.delta_rule(mixed, more, heads=heads, keys=keys, width=width, groups=groups, factor=keys**-0.5)
    gate = b.linear(h, f"{name}.in_proj_z", width=heads * width)
    b.norm(y, f"{name}.norm", eps=float(c.rms_norm_eps), group=width, out=y)
    b.gate(gate, y, "silu", out=y)
    b.linear(y, f"{name}.out_proj", width=x.width, add_to=x)
