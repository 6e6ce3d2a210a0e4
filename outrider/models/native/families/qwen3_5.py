"""Qwen 3.5 and Qwen3-Next: the gated delta rule, gated attention in each fourth layer, and an MLP or a mixture."""

from __future__ import annotations

from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.families.mixtures import qwen_feed
from outrider.models.native.parts import Sublayer, by_kind, decoder
from outrider.models.native.program import Value

_TINY = 1e-6  # transformers' l2norm


@family("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
def qwen3_5(b: Builder, c: Any) -> None:
    """norm, delta rule or attention, residual, norm, MLP or mixture, residual. Qwen 3.5 always divides the weights of experts by
    their sum."""
    table = b.rotary(c.rope_parameters)

    def attention(h: Value, x: Any, layer: str) -> None:
        _attention(b, c, h, x, f"{layer}.self_attn", table)

    def delta_net(h: Value, x: Any, layer: str) -> None:
        _delta_net(b, c, h, x, f"{layer}.linear_attn")

    mixer = by_kind(b, c.layer_types, full_attention=attention, linear_attention=delta_net)
    feed = qwen_feed(b, c, normalised=bool(getattr(c, "norm_topk_prob", True)))
    first, second = Sublayer(mixer, "input_layernorm"), Sublayer(feed, "post_attention_layernorm")
    decoder(b, c, first, second, eps=float(c.rms_norm_eps), one_added=True)


def _attention(b: Builder, c: Any, h: Value, x: Value, name: str, table: int) -> None:
    """The queries of a head are followed by its gate."""
    heads, kv_heads, dim, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, float(c.rms_norm_eps)
    width, kv_width = heads * dim, kv_heads * dim
    joint = b.linear(h, *(f"{name}.{n}_proj" for n in "qkv"), width=2 * width + 2 * kv_width)
    both, key, value = joint.split(2 * width, kv_width, kv_width)
    query, gate = b.value(width), b.value(width)
    first, second, *_ = both.split(*[dim] * (2 * heads))
    for to, start in ((query, first), (gate, second)):
        b.move(start, heads, step=2 * dim, out=to.split(*[dim] * heads)[0], out_step=dim)
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
    sizes = keys, keys, heads // groups * width, heads // groups * width
    parts = _by_group if c.model_type == "qwen3_next" else _by_part
    joint, gate, more = parts(b, h, name, heads, groups, sizes)
    mixed = b.conv(joint, f"{name}.conv1d", activation=c.hidden_act)
    both, _ = mixed.split(2 * groups * keys, heads * width)
    b.l2_norm(both, group=keys, eps=_TINY)
    beta, decay = more.split(heads, heads)
    b.map(beta, "sigmoid", out=beta)
    b.map(decay, "softplus", shift=b.vector(f"{name}.dt_bias", heads), out=decay)
    b.map(decay, "exp", scale=b.decay(f"{name}.A_log", heads), out=decay)
    y = b.delta_rule(mixed, more, heads=heads, keys=keys, width=width, groups=groups, factor=keys**-0.5)
    b.norm(y, f"{name}.norm", eps=float(c.rms_norm_eps), group=width, out=y)
    b.gate(gate, y, "silu", out=y)
    b.linear(y, f"{name}.out_proj", width=x.width, add_to=x)


def _by_part(b: Builder, h: Value, name: str, heads: int, groups: int, sizes: tuple[int, ...]) -> tuple[Value, ...]:
    """Queries, keys and values; gates; beta and decay. sizes: of a group's queries, keys, values and gates."""
    joint = b.linear(h, f"{name}.in_proj_qkv", width=groups * sum(sizes[:3]))
    gates = b.linear(h, f"{name}.in_proj_z", width=groups * sizes[3])
    return joint, gates, b.linear(h, f"{name}.in_proj_b", f"{name}.in_proj_a", width=2 * heads)


def _by_group(b: Builder, h: Value, name: str, heads: int, groups: int, sizes: tuple[int, ...]) -> tuple[Value, ...]:
    """The same of Qwen3-Next, whose matrices have one group of heads after another."""
    each = heads // groups
    joint = b.linear(h, f"{name}.in_proj_qkvz", width=groups * sum(sizes))
    ratios = b.linear(h, f"{name}.in_proj_ba", width=2 * groups * each)
    mixed, gates, more = b.value(groups * sum(sizes[:3])), b.value(groups * sizes[3]), b.value(2 * groups * each)
    places = [*mixed.split(*(groups * n for n in sizes[:3])), gates]
    places += more.split(groups * each, groups * each)
    starts = [*joint.part(0, sum(sizes)).split(*sizes), *ratios.part(0, 2 * each).split(each, each)]
    for start, place in zip(starts, places, strict=True):
        step = 2 * each if start.register == ratios.register else sum(sizes)
        b.move(start, groups, step=step, out=place.part(0, start.width), out_step=start.width)
    return mixed, gates, more
