"""Llama's layers with a mixture of experts: Mixtral, Qwen 2 and 3, OLMoE, Granite, gpt-oss and ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.families.dense import llama_layers
from outrider.models.native.parts import Part, both, by_kind, gated_expert, mixture, mlp, unused
from outrider.models.native.program import NotNative


def qwen_feed(b: Builder, c: Any, **routing: Any) -> Part:
    """Many small experts, from Qwen 2 on beside one with a gate, which all nodes have. Some layers may have an MLP."""
    unused(c, "intermediate_size", "num_local_experts")
    if not (count := getattr(c, "num_experts", 0)):
        return mlp(b, c)
    dense, every = getattr(c, "mlp_only_layers", None) or (), getattr(c, "decoder_sparse_step", 1)
    feed = mixture(b, c, count=count, kind="softmax_top", width=c.moe_intermediate_size, **routing)
    if shared := getattr(c, "shared_expert_intermediate_size", 0):
        feed = both(feed, gated_expert(b, c, "mlp.shared_expert", "mlp.shared_expert_gate", width=shared))
    kinds = ["dense" if i in dense or (i + 1) % every else "sparse" for i in range(c.num_hidden_layers)]
    return by_kind(b, kinds, dense=mlp(b, c), sparse=feed)


@family("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
def qwen_moe(b: Builder, c: Any) -> None:
    unused(c, "qkv_bias")
    llama_layers(b, c, qwen_feed(b, c, normalised=bool(c.norm_topk_prob)))


@family("MixtralForCausalLM")
def mixtral(b: Builder, c: Any) -> None:
    """The softmax of the best experts, which are of the size of an MLP."""
    count, width = c.num_local_experts, c.intermediate_size
    llama_layers(b, c, mixture(b, c, count=count, kind="softmax_top", normalised=True, width=width))


@family("OlmoeForCausalLM")
def olmoe(b: Builder, c: Any) -> None:
    """Norms over all heads of queries and of keys."""
    if c.clip_qkv is not None:
        raise NotNative(f"it clips queries, keys and values at {c.clip_qkv}")
    routing: dict[str, Any] = {"kind": "softmax_top", "normalised": bool(c.norm_topk_prob)}
    llama_layers(b, c, mixture(b, c, count=c.num_experts, width=c.intermediate_size, **routing), whole=True)


def granite_mixture(b: Builder, c: Any) -> Part:
    """The softmax of the best logits alone."""
    count, width = c.num_local_experts, c.intermediate_size
    return mixture(b, c, "block_sparse_moe", router="router", count=count, kind="top_softmax", width=width)


@family("GraniteMoeForCausalLM")
def granite_moe(b: Builder, c: Any) -> None:
    llama_layers(b, c, granite_mixture(b, c))


@family("GptOssForCausalLM")
def gpt_oss(b: Builder, c: Any) -> None:
    """Sinks in the attention, biases in the experts, and a clamped activation."""
    clamp = {"limit": float(c.swiglu_limit), "alpha": float(c.swiglu_alpha), "plus": 1.0}
    more: dict[str, Any] = {
        "kind": "top_softmax",
        "width": c.intermediate_size,
        "activation": "scaled_swish",
        "clamp": clamp,
    }
    feed = mixture(b, c, router="router", count=c.num_local_experts, **more)
    llama_layers(b, c, feed, sinks=True)


@family("Ernie4_5_MoeForCausalLM")
def ernie_moe(b: Builder, c: Any) -> None:
    """Numbers that are added to choose the experts."""
    if c.moe_norm_min > 1e-9:
        raise NotNative(f"it divides the weights of experts by {c.moe_norm_min} at least")
    unused(c, "use_bias", "intermediate_size")
    width, correction = c.moe_intermediate_size, "gate.moe_statics.e_score_correction_bias"
    routing: dict[str, Any] = {"kind": "softmax_top", "normalised": True, "correction": correction}
    feed = mixture(b, c, count=c.moe_num_experts, k=c.moe_k, width=width, **routing)
    if c.moe_num_shared_experts:
        feed = both(feed, mlp(b, c, "mlp.shared_experts", width=width * c.moe_num_shared_experts))
    first, last, every = c.moe_layer_start_index, c.moe_layer_end_index, c.moe_layer_interval
    kinds = ["sparse" if first <= i <= last and not (i + 1) % every else "dense" for i in range(c.num_hidden_layers)]
    llama_layers(b, c, by_kind(b, kinds, dense=mlp(b, c), sparse=feed), interleaved=True)
