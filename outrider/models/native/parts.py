"""What the layers of families are made of: each part adds the ops of one module, and `decoder` puts them in order.

Args:
    b: The builder.
    c: A configuration.
    name: Of a module, below a layer.
    factor: Of what a part adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from outrider.models.native.builder import Builder
from outrider.models.native.program import NotNative, Value

Part = Callable[[Value, Any, str], Any]
"""x += part(h): (h, x, the name of the layer). If x is None, it returns a value of its own."""
Angles = Callable[[int], int | None]
"""The number of a layer's table of angles; None for a layer that rotates nothing."""


class Sublayer(NamedTuple):
    """A part, with the names of the norms before and after it. Without one before, it reads what the part before it has read."""

    part: Part
    before: str = ""
    after: str = ""


def decoder(
    b: Builder,
    c: Any,
    *sublayers: Sublayer,
    embedding: str = "model.embed_tokens",
    layers: str = "model.layers",
    last: str = "model.norm",
    factor: float = 1.0,
    logits: float = 1.0,
    softcap: float = 0.0,
    **norm: Any,
) -> None:
    """A whole model: an embedding, layers of these sublayers, a norm and a head.

    Args:
        sublayers: of each layer, in order.
        embedding: the name of its module; so of `layers`, and of the norm that is `last`.
        factor: of the embedding.
        logits: a factor of the logits.
        softcap: of the logits; 0: none.
        norm: settings of all norms, see `Builder.norm`.
    """
    x = b.embed(embedding, factor)
    for layer in b.layers(x, c.num_hidden_layers, layers):
        h = x
        for part, before, after in sublayers:
            h = b.norm(x, f"{layer}.{before}", **norm) if before else h
            result = part(h, None if after else x, layer)
            if after:
                b.norm(result, f"{layer}.{after}", **norm, add_to=x)
    b.head(b.norm(x, last, **norm), factor=logits, softcap=softcap)


def by_kind(b: Builder, kinds: Sequence[str], **parts: Part) -> Part:
    """In each layer the part of its kind."""

    def part(h: Value, x: Any, layer: str) -> Any:
        if (kind := kinds[b.layer]) not in parts:
            raise NotNative(f"its layer {b.layer} is a {kind}")
        return parts[kind](h, x, layer)

    return part


def both(first: Part, second: Part) -> Part:
    """Two parts that read the same."""

    def part(h: Value, x: Any, layer: str) -> None:
        first(h, x, layer)
        second(h, x, layer)

    return part


def unused(c: Any, *names: str) -> None:
    """Settings of parts that this model does not have. Read, they do not stand in the way."""
    for name in names:
        with suppress(ValueError):  # it may differ by layer
            getattr(c, name, None)


def head_dim(c: Any) -> int:
    """Numbers of a head."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def window_of(c: Any, layer: int) -> int:
    """Tokens that the nodes of a layer see; 0: all."""
    types, window = getattr(c, "layer_types", None), getattr(c, "sliding_window", None) or 0
    return window if types is None or types[layer] == "sliding_attention" else 0


def residual_factor(c: Any) -> float:
    """Of what a part adds to the residual."""
    return float(getattr(c, "residual_multiplier", 1.0))


def angles(b: Builder, c: Any) -> Angles:
    """Of models with one table, with one for each type of layers, or with layers that rotate nothing."""
    if "full_attention" in c.rope_parameters:
        tables = {kind: b.rotary(c.rope_parameters[kind], kind) for kind in sorted({*c.layer_types})}
        return lambda layer: tables[c.layer_types[layer]]
    table, rotated = b.rotary(c.rope_parameters), getattr(c, "no_rope_layers", None)
    return lambda layer: table if rotated is None or rotated[layer] else None


def attends(b: Builder, c: Any, tables: Angles | None, name: str = "self_attn", **settings: Any) -> Part:
    """`attention` as the configuration says it. tables: None if it rotates nothing. settings: others of `attention`."""
    dim = head_dim(c)
    defaults = {
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "dim": dim,
        "factor": residual_factor(c),
    }
    settings = {**defaults, "scale": float(getattr(c, "attention_multiplier", dim**-0.5)), **settings}

    def part(h: Value, x: Any, layer: str) -> Value:
        table = None if tables is None else tables(b.layer)
        window = settings["window"] if "window" in settings else window_of(c, b.layer)
        return attention(b, h, x, f"{layer}.{name}", table=table, **{**settings, "window": window})

    return part


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
    queries: int | None = None,
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
    """x += factor * attention(h).

    Args:
        h: what the part reads.
        x: the residual; None: a value of its own is made.
        dim: numbers of a head.
        table: of the angles; None: no rotary embedding.
        queries: their table, if it is another one.
        scale: of the scores.
        window: tokens that a node sees; 0: all.
        softcap: of the scores; 0: none.
        norms: of queries and keys, if they are there. Their settings are those of `Builder.norm`.
        whole: the norms take all heads together.
        interleaved: as in `Builder.rope`.
        joined: queries, keys and values are one linear.
        out: the last matrix.
        sinks: each head has one.
    """
    width, kv_width = heads * dim, kv_heads * dim
    names = [f"{name}.qkv_proj"] if joined else [f"{name}.{n}_proj" for n in "qkv"]
    query, key, value = b.linear(h, *names, width=width + 2 * kv_width).split(width, kv_width, kv_width)
    tables = table if queries is None else queries, table
    for part, norm, turned in zip((query, key), norms, tables, strict=True):
        if b.has(f"{name}.{norm}"):
            group = 0 if whole else dim
            place = f"{name}.{norm}"
            b.norm(part, place, eps=eps, kind=kind, group=group, per_group=per_group, one_added=one_added, out=part)
        if turned is not None:
            b.rope(part, turned, dim, interleaved=interleaved)
    cache = b.store(key, value, kv_heads)
    b.rows()
    sink = f"{name}.sinks" if sinks else None
    attended = b.attend(query, cache, heads=heads, scale=scale, window=window, softcap=softcap, sinks=sink)
    return b.linear(attended, f"{name}.{out}", width=(h if x is None else x).width, factor=factor, add_to=x)


def mamba2(
    b: Builder,
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
    scale: np.ndarray | None = None,
    factor: float = 1.0,
) -> Part:
    """x += factor * the mixer of Mamba 2 (Dao and Gu 2024).

    Args:
        channels: of a head.
        width: of a channel's state.
        groups: that share B and C.
        activation: of the convolution.
        eps: of the gated norm.
        norm_group: numbers that its gated norm takes together; 0: all.
        norm_first: the norm is before the gate.
        scale: of what the first matrix gives.
    """
    inner, shared = heads * channels, groups * width

    def part(h: Value, x: Any, layer: str) -> None:
        module = f"{layer}.{name}"
        joint = b.linear(h, f"{module}.in_proj", width=2 * inner + 2 * shared + heads)
        if scale is not None:
            b.map(joint, "linear", scale=scale, out=joint)
        gate, mixed, step = joint.split(inner, inner + 2 * shared, heads)
        convolved = b.conv(mixed, f"{module}.conv1d", activation=activation)
        step = b.map(step, "softplus", shift=b.vector(f"{module}.dt_bias", heads))
        decay, through = b.decay(f"{module}.A_log", heads), b.vector(f"{module}.D", heads)
        y = b.selective(
            convolved, step, a=decay, through=through, heads=heads, channels=channels, width=width, groups=groups
        )
        normed = b.has(f"{module}.norm")
        if normed and norm_first:
            b.norm(y, f"{module}.norm", eps=eps, group=norm_group, per_group=True, out=y)
        b.gate(gate, y, "silu", out=y)
        if normed and not norm_first:
            b.norm(y, f"{module}.norm", eps=eps, group=norm_group, per_group=True, out=y)
        b.linear(y, f"{module}.out_proj", width=x.width, factor=factor, add_to=x)

    return part


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


def mlp(b: Builder, c: Any, name: str = "mlp", *, width: int = 0, activation: str = "", joined: bool = False) -> Part:
    """`gated_mlp` as the configuration says it, but for a width or an activation that is given."""

    def part(h: Value, x: Any, layer: str) -> Value:
        size, function = width or c.intermediate_size, activation or c.hidden_act
        factor = residual_factor(c)
        return gated_mlp(b, h, x, f"{layer}.{name}", width=size, activation=function, factor=factor, joined=joined)

    return part


def ungated_mlp(b: Builder, c: Any, up: str, down: str, activation: str, *, width: int = 0) -> Part:
    """x += down(act(up(h))). width: between them, if it is not the configuration's."""

    def part(h: Value, x: Any, layer: str) -> None:
        middle = b.linear(h, f"{layer}.{up}", width=width or c.intermediate_size)
        b.gate(middle, None, activation, out=middle)
        b.linear(middle, f"{layer}.{down}", width=x.width, add_to=x)

    return part


def gated_expert(b: Builder, c: Any, name: str, gate: str, *, width: int) -> Part:
    """x += sigmoid(gate(h)) * the MLP of this name. It is a mixture of one expert, which is always chosen."""

    def part(h: Value, x: Any, layer: str) -> None:
        routed = b.route(b.linear(h, f"{layer}.{gate}", width=1), k=1, kind="sigmoid_top")
        b.experts(h, routed, f"{layer}.{name}", count=1, width=width, activation=c.hidden_act, add_to=x)

    return part


def mixture(
    b: Builder,
    c: Any,
    name: str = "mlp",
    *,
    router: str = "gate",
    count: int,
    k: int = 0,
    width: int,
    activation: str = "",
    correction: str | None = None,
    latent: int = 0,
    clamp: Mapping[str, float] = MappingProxyType({}),
    **routing: Any,
) -> Part:
    """x += the experts that a router chooses.

    Args:
        router: the name of its matrix.
        count: of experts.
        k: of those that a node has, if the configuration does not say it.
        width: between the matrices of an expert.
        activation: if it is not the configuration's.
        correction: the name of a parameter, see `Builder.route`.
        latent: numbers that the experts read and give, if they are not the model's.
        clamp: settings of `Builder.experts`.
        routing: settings of `Builder.route`.
    """
    function, chosen, factor = activation or c.hidden_act, k or c.num_experts_per_tok, residual_factor(c)

    def part(h: Value, x: Any, layer: str) -> None:
        module = f"{layer}.{name}"
        added = None if correction is None else f"{module}.{correction}"
        routed = b.route(b.linear(h, f"{module}.{router}", width=count), k=chosen, correction=added, **routing)
        settings = {"count": count, "width": width, "activation": function, "factor": factor, **clamp}
        if not latent:
            b.experts(h, routed, f"{module}.experts", add_to=x, **settings)
            return
        result = b.experts(
            b.linear(h, f"{module}.fc1_latent_proj", width=latent), routed, f"{module}.experts", **settings
        )
        b.linear(result, f"{module}.fc2_latent_proj", width=x.width, add_to=x)

    return part


def sigmoid_routing(c: Any) -> dict[str, Any]:
    """The router of DeepSeek-V3: settings of `mixture`."""
    routing: dict[str, Any] = {"kind": "sigmoid_top", "scaling": float(c.routed_scaling_factor), "added": 1e-20}
    routing |= {"normalised": bool(c.norm_topk_prob), "correction": "gate.e_score_correction_bias"}
    return routing | (groups_of(c) if c.n_group > 1 else {})


def groups_of(c: Any) -> dict[str, int]:
    return {"groups": c.n_group, "kept_groups": c.topk_group}
