"""What the layers of families are made of: each part adds the ops of one module.

Its result is added to the residual x, or is a value of its own if x is None. c: a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor

from outrider.models.native.program import Builder, Value


def unused(c: Any, *names: str) -> None:
    """Settings of parts that this model does not have. Read, they do not stand in the way."""
    for name in names:
        getattr(c, name, None)


def head_dim(c: Any) -> int:
    """Numbers of a head."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


class Heads(TypedDict):
    """Of an attention, as most configurations say it. dim: of a head."""

    heads: int
    kv_heads: int
    dim: int
    scale: float


def heads_of(c: Any) -> Heads:
    dim = head_dim(c)
    return {"heads": c.num_attention_heads, "kv_heads": c.num_key_value_heads, "dim": dim, "scale": dim**-0.5}


def window_of(c: Any, layer: int) -> int:
    """Tokens that the nodes of a layer see; 0: all."""
    types, window = getattr(c, "layer_types", None), getattr(c, "sliding_window", None) or 0
    return window if types is None or types[layer] == "sliding_attention" else 0


def tables_by_type(b: Builder, c: Any) -> Callable[[int], int]:
    """The number of a layer's table of angles, for models with one for each type of layers."""
    made = {kind: b.rotary(c.rope_parameters[kind], kind) for kind in sorted({*c.layer_types})}
    return lambda layer: made[c.layer_types[layer]]


def attention(
    b: Builder,
    h: Value,
    x: Value | None,
    name: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    table: int | None,
    scale: float,
    eps: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    factor: float = 1.0,
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    whole: bool = False,
    kind: str = "rms",
    per_group: bool = False,
    one_added: bool = False,
    interleaved: bool = False,
    joined: bool = False,
    out: str = "o_proj",
    sinks: bool = False,
) -> Value:
    """x += factor * attention(h). dim: of a head. table: of the angles; None: no rotary embedding. out: the last matrix.

    norms: of queries and keys, if they are there. kind, per_group, one_added: as in `Builder.norm`. whole: they take all heads
    together. joined: queries, keys and values are one linear. sinks: each head has one."""
    width, kv_width = heads * dim, kv_heads * dim
    names = [f"{name}.qkv_proj"] if joined else [f"{name}.{n}_proj" for n in "qkv"]
    query, key, value = b.linear(h, *names, width=width + 2 * kv_width).split(width, kv_width, kv_width)
    for part, norm in zip((query, key), norms, strict=True):
        if b.has(f"{name}.{norm}"):
            group = 0 if whole else dim
            own = f"{name}.{norm}"
            b.norm(part, own, eps=eps, kind=kind, group=group, per_group=per_group, one_added=one_added, out=part)
        if table is not None:
            b.rope(part, table, dim, interleaved=interleaved)
    cache = b.store(key, value, kv_heads)
    b.rows()
    sink = f"{name}.sinks" if sinks else None
    attended = b.attend(query, cache, heads=heads, scale=scale, window=window, softcap=softcap, sinks=sink)
    return b.linear(attended, f"{name}.{out}", width=(h if x is None else x).width, factor=factor, add_to=x)


def latent_attention(
    b: Builder,
    h: Value,
    x: Value,
    name: str,
    *,
    heads: int,
    latent: int,
    plain: int,
    rotated: int,
    values: int,
    query: int | None,
    table: int,
    scale: float,
    interleaved: bool,
) -> None:
    """x += attention(h) over a latent (DeepSeek-V2, arXiv 2405.04434, section 2.1), which is all that the cache holds of a token.

    The matrix that makes keys of the latent is applied to the queries, and the one that makes values to what they attend to. So
    each head attends to one key, whose first numbers are its value. plain, rotated: numbers of a key with and without rotary
    embedding. values: of a value. query: those that queries are made of; None: queries are made of h."""
    eps, width, both = 1e-6, latent + rotated, plain + rotated  # these norms have their own eps
    if query is None:
        made = b.linear(h, f"{name}.q_proj", width=heads * both)
        key = b.linear(h, f"{name}.kv_a_proj_with_mqa", width=width)
    else:
        joined = b.linear(h, f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa", width=query + width)
        small, key = joined.split(query, width)
        b.norm(small, f"{name}.q_a_layernorm", eps=eps, out=small)
        made = b.linear(small, f"{name}.q_b_proj", width=heads * both)
    content, _ = key.split(latent, rotated)
    b.norm(content, f"{name}.kv_a_layernorm", eps=eps, out=content)
    b.rope(key, table, width, offset=latent, interleaved=interleaved)
    keys, back = b.source.latent(f"{name}.kv_b_proj", heads, plain)
    asked = b.value(heads * width)
    b.heads(made, keys, heads, step=both, out=asked, out_step=width)
    b.move(made.part(plain, rotated), heads, step=both, out=asked.part(latent, rotated), out_step=width)
    b.rope(asked, table, width, offset=latent, interleaved=interleaved)
    cache = b.store(key, None, 1)
    b.rows()
    attended = b.attend(asked, cache, heads=heads, scale=scale, value_dim=latent)
    made = b.value(heads * values)
    b.heads(attended, back, heads, step=latent, out=made, out_step=values)
    b.linear(made, f"{name}.o_proj", width=x.width, add_to=x)


def mamba2(
    b: Builder,
    h: Value,
    x: Value,
    name: str,
    *,
    heads: int,
    channels: int,
    width: int,
    groups: int,
    activation: str,
    eps: float,
    norm_group: int = 0,
    norm_first: bool = False,
    scale: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """x += factor * the mixer of Mamba 2 (Dao and Gu 2024). channels: of a head. width: of a channel's state. norm_group: numbers
    that its gated norm takes together, 0 for all; norm_first: before the gate. scale: of what the first matrix gives."""
    inner, shared = heads * channels, groups * width
    made = b.linear(h, f"{name}.in_proj", width=2 * inner + 2 * shared + heads)
    if scale is not None:
        b.map(made, "linear", scale=scale, out=made)
    gate, mixed, step = made.split(inner, inner + 2 * shared, heads)
    convolved = b.conv(mixed, f"{name}.conv1d", activation=activation)
    step = b.map(step, "softplus", shift=b.vector(f"{name}.dt_bias", heads))
    decay, through = -b.vector(f"{name}.A_log", heads).exp(), b.vector(f"{name}.D", heads)
    y = b.selective(
        convolved, step, a=decay, through=through, heads=heads, channels=channels, width=width, groups=groups
    )
    normed = b.has(f"{name}.norm")
    if normed and norm_first:
        b.norm(y, f"{name}.norm", eps=eps, group=norm_group, per_group=True, out=y)
    b.gate(gate, y, "silu", out=y)
    if normed and not norm_first:
        b.norm(y, f"{name}.norm", eps=eps, group=norm_group, per_group=True, out=y)
    b.linear(y, f"{name}.out_proj", width=x.width, factor=factor, add_to=x)


def gated_mlp(
    b: Builder,
    h: Value,
    x: Value | None,
    name: str,
    *,
    width: int,
    activation: str,
    factor: float = 1.0,
    joined: bool = False,
) -> Value:
    """x += factor * down(act(gate(h)) * up(h)). width: between them. joined: gate and up are one linear."""
    names = [f"{name}.gate_up_proj"] if joined else [f"{name}.gate_proj", f"{name}.up_proj"]
    middle = b.linear(h, *names, width=width, gate=activation)
    return b.linear(middle, f"{name}.down_proj", width=(h if x is None else x).width, factor=factor, add_to=x)


def gated_expert(b: Builder, h: Value, x: Value, name: str, gate: str, *, width: int, activation: str) -> None:
    """x += sigmoid(gate(h)) * the MLP of this name. It is a mixture of one expert, which is always chosen."""
    routed = b.route(b.linear(h, gate, width=1), k=1, kind="sigmoid_top")
    b.experts(h, routed, name, count=1, width=width, activation=activation, add_to=x)


def mixture(
    b: Builder,
    h: Value,
    x: Value,
    name: str,
    *,
    router: str,
    count: int,
    k: int,
    kind: str,
    width: int,
    activation: str,
    normalised: bool = False,
    factor: float = 1.0,
    limit: float = 0.0,
    alpha: float = 0.0,
    plus: float = 0.0,
    **routing: Any,
) -> None:
    """x += factor * the experts that a router chooses. router: its name. count: of experts. routing: more settings of
    `Builder.route`. The others are those of `Builder.route` and `Builder.experts`."""
    logits = b.linear(h, f"{name}.{router}", width=count)
    routed = b.route(logits, k=k, kind=kind, normalised=normalised, **routing)
    b.experts(
        h,
        routed,
        f"{name}.experts",
        count=count,
        width=width,
        activation=activation,
        add_to=x,
        factor=factor,
        limit=limit,
        alpha=alpha,
        plus=plus,
    )
