"""What the layers of families are made of: each part adds the ops of one module, and adds its result to the residual x."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.models.native.program import Builder, Value


def unused(c: Any, *names: str) -> None:
    """Settings of parts that this model does not have. Read, they do not stand in the way."""
    for name in names:
        getattr(c, name, None)


def attention(
    b: Builder,
    h: Value,
    x: Value,
    name: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    table: int | None,
    scale: float,
    eps: float,
    window: int = 0,
    factor: float = 1.0,
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    out: str = "o_proj",
) -> None:
    """x += factor * attention(h). dim: of a head. table: of the angles; None: no rotary embedding. norms: of queries and keys, if
    they are there. out: the last matrix."""
    width, kv_width = heads * dim, kv_heads * dim
    qkv = b.linear(h, *(f"{name}.{n}_proj" for n in "qkv"), width=width + 2 * kv_width)
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, norm in zip((query, key), norms, strict=True):
        if b.has(f"{name}.{norm}"):
            b.norm(part, f"{name}.{norm}", eps=eps, group=dim, out=part)
        if table is not None:
            b.rope(part, table, dim)
    cache = b.store(key, value, kv_heads)
    b.rows()
    attended = b.attend(query, cache, heads=heads, scale=scale, window=window)
    b.linear(attended, f"{name}.{out}", width=x.width, factor=factor, add_to=x)


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


def gated_mlp(b: Builder, h: Value, x: Value, name: str, *, width: int, activation: str, factor: float = 1.0) -> None:
    """x += factor * down(act(gate(h)) * up(h)). width: between them."""
    middle = b.linear(h, f"{name}.gate_proj", f"{name}.up_proj", width=width, gate=activation)
    b.linear(middle, f"{name}.down_proj", width=x.width, factor=factor, add_to=x)
