"""What the layers of families are made of: each part adds the ops of one module, and adds its result to the residual x."""

from __future__ import annotations

from outrider.models.native.program import Builder, Value


def attention(
    b: Builder,
    h: Value,
    x: Value,
    name: str,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    table: int,
    scale: float,
    eps: float,
    window: int = 0,
    factor: float = 1.0,
) -> None:
    """x += factor * attention(h). dim: of a head. table: of the angles. Norms of queries and keys are used if they are there."""
    width, kv_width = heads * dim, kv_heads * dim
    qkv = b.linear(h, *(f"{name}.{n}_proj" for n in "qkv"), width=width + 2 * kv_width)
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, norm in ((query, f"{name}.q_norm"), (key, f"{name}.k_norm")):
        if b.has(norm):
            b.norm(part, norm, eps=eps, group=dim, out=part)
        b.rope(part, table, dim)
    cache = b.store(key, value, kv_heads)
    b.rows()
    attended = b.attend(query, cache, heads=heads, scale=scale, window=window)
    b.linear(attended, f"{name}.o_proj", width=x.width, factor=factor, add_to=x)


def gated_mlp(b: Builder, h: Value, x: Value, name: str, *, width: int, activation: str, factor: float = 1.0) -> None:
    """x += factor * down(act(gate(h)) * up(h)). width: between them."""
    middle = b.linear(h, f"{name}.gate_proj", f"{name}.up_proj", width=width, gate=activation)
    b.linear(middle, f"{name}.down_proj", width=x.width, factor=factor, add_to=x)
