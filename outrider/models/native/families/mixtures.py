"""Llama's layers with a mixture of experts: Mixtral, Qwen 2 and 3, OLMoE, Granite, gpt-oss and ERNIE 4.5."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.families.llama import decoder
from outrider.models.native.parts import gated_expert, gated_mlp, mixture, unused
from outrider.models.native.program import Builder, NotNative, Value


@family("MixtralForCausalLM")
def mixtral(b: Builder, c: Any) -> None:
    """The softmax of the best experts, which are of the size of an MLP."""

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        mixture(
            b, h, x, f"{layer}.mlp", router="gate", count=c.num_local_experts, k=c.num_experts_per_tok, kind="softmax_top",
            normalised=True, width=c.intermediate_size, activation=c.hidden_act, factor=factor,
        )  # fmt: skip

    decoder(b, c, feed)


@family("Qwen3MoeForCausalLM")
def qwen3_moe(b: Builder, c: Any) -> None:
    """Many small experts. Some layers may have an MLP."""

    dense, every, width = c.mlp_only_layers, c.decoder_sparse_step, c.intermediate_size

    def feed(h: Value, x: Value, layer: str, factor: float) -> object:
        if b.layer in dense or (b.layer + 1) % every:
            return gated_mlp(b, h, x, f"{layer}.mlp", width=width, activation=c.hidden_act, factor=factor)
        return mixture(
            b, h, x, f"{layer}.mlp", router="gate", count=c.num_local_experts, k=c.num_experts_per_tok, kind="softmax_top",
            normalised=bool(c.norm_topk_prob), width=c.moe_intermediate_size, activation=c.hidden_act, factor=factor,
        )  # fmt: skip

    decoder(b, c, feed)


@family("OlmoeForCausalLM")
def olmoe(b: Builder, c: Any) -> None:
    """Norms over all heads of queries and of keys."""
    if c.clip_qkv is not None:
        raise NotNative(f"it clips queries, keys and values at {c.clip_qkv}")

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        mixture(
            b, h, x, f"{layer}.mlp", router="gate", count=c.num_experts, k=c.num_experts_per_tok, kind="softmax_top",
            normalised=bool(c.norm_topk_prob), width=c.intermediate_size, activation=c.hidden_act, factor=factor,
        )  # fmt: skip

    decoder(b, c, feed, whole=True)


@family("GraniteMoeForCausalLM")
def granite_moe(b: Builder, c: Any) -> None:
    """The softmax of the best logits alone."""

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        mixture(
            b, h, x, f"{layer}.block_sparse_moe", router="router", count=c.num_local_experts, k=c.num_experts_per_tok,
            kind="top_softmax", width=c.intermediate_size, activation=c.hidden_act, factor=factor,
        )  # fmt: skip

    decoder(b, c, feed)


@family("GptOssForCausalLM")
def gpt_oss(b: Builder, c: Any) -> None:
    """Sinks in the attention, biases in the experts, and a clamped activation."""
    alpha, limit = float(c.swiglu_alpha), float(c.swiglu_limit)

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        mixture(
            b, h, x, f"{layer}.mlp", router="router", count=c.num_local_experts, k=c.num_experts_per_tok, kind="top_softmax",
            width=c.intermediate_size, activation="scaled_swish", factor=factor, limit=limit, alpha=alpha, plus=1.0,
        )  # fmt: skip

    decoder(b, c, feed, sinks=True)


@family("Qwen2MoeForCausalLM")
def qwen2_moe(b: Builder, c: Any) -> None:
    """Beside the chosen experts one with a gate, which all nodes have."""
    dense, every, shared = c.mlp_only_layers or (), c.decoder_sparse_step, c.shared_expert_intermediate_size
    unused(c, "qkv_bias", "intermediate_size")

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        name = f"{layer}.mlp"
        if b.layer in dense or (b.layer + 1) % every:
            gated_mlp(b, h, x, name, width=c.intermediate_size, activation=c.hidden_act)
            return
        mixture(
            b, h, x, name, router="gate", count=c.num_experts, k=c.num_experts_per_tok, kind="softmax_top",
            normalised=bool(c.norm_topk_prob), width=c.moe_intermediate_size, activation=c.hidden_act,
        )  # fmt: skip
        gated_expert(
            b, h, x, f"{name}.shared_expert", f"{name}.shared_expert_gate", width=shared, activation=c.hidden_act
        )

    decoder(b, c, feed)


@family("Ernie4_5_MoeForCausalLM")
def ernie_moe(b: Builder, c: Any) -> None:
    """Numbers that are added to choose the experts."""
    if c.moe_norm_min > 1e-9:
        raise NotNative(f"it divides the weights of experts by {c.moe_norm_min} at least")
    unused(c, "use_bias", "intermediate_size")

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        name, i = f"{layer}.mlp", b.layer
        if (i + 1) % c.moe_layer_interval or not c.moe_layer_start_index <= i <= c.moe_layer_end_index:
            gated_mlp(b, h, x, name, width=c.intermediate_size, activation=c.hidden_act)
            return
        mixture(
            b, h, x, name, router="gate", count=c.moe_num_experts, k=c.moe_k, kind="softmax_top", normalised=True,
            width=c.moe_intermediate_size, activation=c.hidden_act,
            correction=f"{name}.gate.moe_statics.e_score_correction_bias",
        )  # fmt: skip
        if c.moe_num_shared_experts:
            shared = c.moe_intermediate_size * c.moe_num_shared_experts
            gated_mlp(b, h, x, f"{name}.shared_experts", width=shared, activation=c.hidden_act)

    decoder(b, c, feed, interleaved=True)
