"""Gemma 4 (text), also with experts: an input of each layer, and layers that read keys and values of earlier ones."""

from __future__ import annotations

from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.parts import Part, gated_mlp, unused, window_of
from outrider.models.native.program import NotNative, Value


@family("Gemma4ForCausalLM")
def gemma4(b: Builder, c: Any) -> None:
    """norm, attention, norm, residual, norm, MLP, norm, residual, the layer's input, residual, and a factor of all."""
    if c.use_bidirectional_attention == "all":
        raise NotNative("its tokens attend to later ones")
    unused(c, "per_layer_config", "head_dim", "num_key_value_heads", "attention_k_eq_v")  # the weights show them
    unused(c, "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size")
    eps, function = float(c.rms_norm_eps), c.hidden_activation
    attention, first = _attention(b, c, eps), c.num_hidden_layers - c.num_kv_shared_layers
    x = b.embed(factor=c.hidden_size**0.5)
    inputs = _inputs(b, c, x, eps)
    for layer in b.layers(x, c.num_hidden_layers):
        result = attention(b.norm(x, f"{layer}.input_layernorm", eps=eps), x, layer)
        b.norm(result, f"{layer}.post_attention_layernorm", eps=eps, add_to=x)
        width = c.intermediate_size * (2 if c.use_double_wide_mlp and 0 < first <= b.layer else 1)
        h = b.norm(x, f"{layer}.pre_feedforward_layernorm", eps=eps)
        result = gated_mlp(b, h, None, f"{layer}.mlp", width=width, activation=function)
        if c.enable_moe_block:
            result = b.norm(result, f"{layer}.post_feedforward_layernorm_1", eps=eps)
            b.norm(_experts(b, c, x, layer, eps), f"{layer}.post_feedforward_layernorm_2", eps=eps, add_to=result)
        b.norm(result, f"{layer}.post_feedforward_layernorm", eps=eps, add_to=x)
        if inputs:
            h = b.linear(x, f"{layer}.per_layer_input_gate", width=inputs[0].width)
            b.gate(h, inputs[b.layer], function, out=h)
            result = b.linear(h, f"{layer}.per_layer_projection", width=x.width)
            b.norm(result, f"{layer}.post_per_layer_input_norm", eps=eps, add_to=x)
        b.map(x, "linear", scale=b.vector(f"{layer}.layer_scalar", 1).repeat(x.width), out=x)
    b.head(b.norm(x, "model.norm", eps=eps), softcap=c.final_logit_softcapping or 0.0)


def _inputs(b: Builder, c: Any, x: Value, eps: float) -> list[Value]:
    """Of each layer, from the token and from its embedding; none if the model has no such inputs."""
    if not (size := c.hidden_size_per_layer_input):
        return []
    every = b.embed("model.embed_tokens_per_layer", size**0.5)
    projection = b.linear(x, "model.per_layer_model_projection", width=every.width, factor=c.hidden_size**-0.5)
    b.norm(projection, "model.per_layer_projection_norm", eps=eps, group=size, add_to=every)
    return b.map(every, "linear", factor=0.5**0.5, out=every).split(*[size] * c.num_hidden_layers)


def _attention(b: Builder, c: Any, eps: float) -> Part:
    """Norms of queries, keys and values, and no scale. A value may be what its key is made of. The last layers read the keys and
    values of the last one of their kind that has its own."""
    tables = {kind: b.rotary(c.rope_parameters[kind], kind) for kind in sorted({*c.layer_types})}
    heads, last, first = c.num_attention_heads, dict[str, int](), c.num_hidden_layers - c.num_kv_shared_layers

    def part(h: Value, x: Value, layer: str) -> Value:
        name, kind = f"{layer}.self_attn", c.layer_types[b.layer]
        dim = len(b.vector(f"{name}.q_norm.weight"))
        names = ["q_proj", *(f"{n}_proj" for n in "kv" if b.layer < first and b.has(f"{name}.{n}_proj"))]
        joint = b.linear(h, *(f"{name}.{n}" for n in names))
        width = (joint.width - heads * dim) // max(len(names) - 1, 1)
        query, *rest = joint.split(heads * dim, *[width] * (len(names) - 1))
        b.norm(query, f"{name}.q_norm", eps=eps, group=dim, out=query)
        b.rope(query, tables[kind], dim)
        if rest:
            value = b.norm(rest[-1], None, eps=eps, group=dim)
            key = b.norm(rest[0], f"{name}.k_norm", eps=eps, group=dim, out=rest[0])
            b.rope(key, tables[kind], dim)
            last[kind] = b.store(key, value, width // dim)
        b.rows()
        attended = b.attend(query, last[kind], heads=heads, scale=1.0, window=window_of(c, b.layer))
        return b.linear(attended, f"{name}.o_proj", width=x.width)

    return part


def _experts(b: Builder, c: Any, x: Value, layer: str, eps: float) -> Value:
    """The experts of the residual before the MLP. Each has a factor."""
    router, count = f"{layer}.router", c.num_experts
    scale = b.vector(f"{router}.scale", x.width)
    h = b.map(b.norm(x, None, eps=eps), "linear", scale=scale, factor=x.width**-0.5)
    logits = b.linear(h, f"{router}.proj", width=count)
    factors = f"{router}.per_expert_scale"
    routed = b.route(logits, k=c.top_k_experts, kind="softmax_top", normalised=True, factors=factors)
    h, width = b.norm(x, f"{layer}.pre_feedforward_layernorm_2", eps=eps), c.moe_intermediate_size
    return b.experts(h, routed, f"{layer}.experts", count=count, width=width, activation=c.hidden_activation)
