"""DeepSeek-V2 and V3, and what has their mixture: GLM-4.5 and later, and dots.llm1."""

from __future__ import annotations

import math
from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.families.dense import llama_layers
from outrider.models.native.parts import (
    Part,
    Sublayer,
    both,
    by_kind,
    decoder,
    groups_of,
    mixture,
    mlp,
    sigmoid_routing,
    unused,
)
from outrider.models.native.program import NotNative, Value

_MIXTURE = (  # a model may have no layer with experts
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


@family("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
def deepseek(b: Builder, c: Any) -> None:
    """norm, attention over a latent, residual, norm, mixture or MLP, residual. V2 and V3 differ in the router."""
    second = c.model_type == "deepseek_v2"
    unused(c, "num_key_value_heads", "head_dim", "qk_head_dim")
    attention = _latent_attention(b, c, True if second else bool(c.rope_interleave))
    feed = Sublayer(_feed(b, c, second), "post_attention_layernorm")
    decoder(b, c, Sublayer(attention, "input_layernorm"), feed, eps=float(c.rms_norm_eps))


@family("Glm4MoeForCausalLM", "Dots1ForCausalLM")
def glm4_moe(b: Builder, c: Any) -> None:
    """Llama's attention, which may have norms for each head."""
    unused(c, "use_qk_norm")  # the weights show the norms
    llama_layers(b, c, _feed(b, c, False))


def _latent_attention(b: Builder, c: Any, interleaved: bool) -> Part:
    """x += attention(h) over a latent (DeepSeek-V2, arXiv 2405.04434, section 2.1), which is all that the cache holds of a token.

    The matrix that makes keys of the latent is applied to the queries, and the one that makes values to what they attend to. So
    each head attends to one key, whose first numbers are its value."""
    heads, latent, values, query = c.num_attention_heads, c.kv_lora_rank, c.v_head_dim, c.q_lora_rank
    plain, rotated = c.qk_nope_head_dim, c.qk_rope_head_dim  # numbers of a key without and with rotary embedding
    eps, width, both_parts = 1e-6, latent + rotated, plain + rotated  # these norms have their own eps
    table, scale = b.rotary(c.rope_parameters), _scale(c)

    def part(h: Value, x: Any, layer: str) -> None:
        name = f"{layer}.self_attn"
        if query is None:
            result = b.linear(h, f"{name}.q_proj", width=heads * both_parts)
            key = b.linear(h, f"{name}.kv_a_proj_with_mqa", width=width)
        else:
            joined = b.linear(h, f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa", width=query + width)
            small, key = joined.split(query, width)
            b.norm(small, f"{name}.q_a_layernorm", eps=eps, out=small)
            result = b.linear(small, f"{name}.q_b_proj", width=heads * both_parts)
        content, _ = key.split(latent, rotated)
        b.norm(content, f"{name}.kv_a_layernorm", eps=eps, out=content)
        b.rope(key, table, width, offset=latent, interleaved=interleaved)
        keys, back = b.source.latent(f"{name}.kv_b_proj", heads, plain)
        asked = b.value(heads * width)
        b.heads(result, keys, heads, step=both_parts, out=asked, out_step=width)
        turned = asked.part(latent, rotated)
        b.move(result.part(plain, rotated), heads, step=both_parts, out=turned, out_step=width)
        b.rope(asked, table, width, offset=latent, interleaved=interleaved)
        cache = b.store(key, None, 1)
        b.rows()
        attended = b.attend(asked, cache, heads=heads, scale=scale, value_dim=latent)
        result = b.value(heads * values)
        b.heads(attended, back, heads, step=latent, out=result, out_step=values)
        b.linear(result, f"{name}.o_proj", width=x.width, add_to=x)

    return part


def _scale(c: Any) -> float:
    """Of the scores. YaRN's factor of cosines and sines is not in the numbers without rotary embedding: it is here."""
    rope, scale = c.rope_parameters, (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    factor, share = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") != "default" and share and factor > 1:
        scale *= (0.1 * share * math.log(factor) + 1.0) ** 2
    return float(scale)


def _feed(b: Builder, c: Any, second: bool) -> Part:
    """In the first layers an MLP, then the chosen experts, and those that all nodes have. second: the router of V2, which has a
    softmax. transformers never divides its weights by their sum."""
    unused(c, "num_mtp_layers", "first_k_dense_replace", *_MIXTURE)
    kinds = getattr(c, "mlp_layer_types", None)
    if kinds is None:
        kinds = ["dense" if i < c.first_k_dense_replace else "sparse" for i in range(c.num_hidden_layers)]
    if "sparse" not in kinds:
        return mlp(b, c)
    routing = sigmoid_routing(c)
    if second:
        if c.topk_method not in ("greedy", "group_limited_greedy"):
            raise NotNative(f"its router is {c.topk_method}")
        routing = {"kind": "softmax_top", "scaling": float(c.routed_scaling_factor)}
        routing |= groups_of(c) if c.topk_method == "group_limited_greedy" else {}
    width = c.moe_intermediate_size
    feed = both(
        mixture(b, c, count=c.n_routed_experts, width=width, **routing),
        mlp(b, c, "mlp.shared_experts", width=width * c.n_shared_experts),
    )
    return by_kind(b, kinds, dense=mlp(b, c), sparse=feed)
