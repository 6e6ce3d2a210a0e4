"""Llama's layers with a mixture of experts: Mixtral, Qwen 3, OLMoE and Granite."""

from __future__ import annotations

from typing import Any

from outrider.models.native.families import family
from outrider.models.native.families.llama import decoder
from outrider.models.native.parts import gated_mlp, mixture
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
