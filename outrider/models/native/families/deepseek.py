"""DeepSeek-V2 and V3, and what has their mixture: GLM-4.5 and later, and dots.llm1."""

from __future__ import annotations

import math
from typing import Any

from outrider.models.native.families import family
from outrider.models.native.families.llama import decoder
from outrider.models.native.parts import gated_mlp, latent_attention, mixture, unused
from outrider.models.native.program import Builder, NotNative, Value

_MIXTURE = (  # a model may have no layer with experts
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


@family("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
def deepseek(b: Builder, c: Any) -> None:
    """norm, attention over a latent, residual, norm, mixture or MLP, residual. V2 and V3 differ in the router."""
    eps, second = float(c.rms_norm_eps), c.model_type == "deepseek_v2"
    unused(c, "num_key_value_heads", "first_k_dense_replace", "num_mtp_layers", "head_dim", "qk_head_dim", *_MIXTURE)
    kinds = getattr(c, "mlp_layer_types", None)
    x = b.embed()
    table = b.rotary(c.rope_parameters)
    for i, layer in enumerate(b.layers(x, c.num_hidden_layers)):
        h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        latent_attention(
            b,
            h,
            x,
            f"{layer}.self_attn",
            heads=c.num_attention_heads,
            latent=c.kv_lora_rank,
            plain=c.qk_nope_head_dim,
            rotated=c.qk_rope_head_dim,
            values=c.v_head_dim,
            query=c.q_lora_rank,
            table=table,
            scale=_scale(c),
            interleaved=True if second else bool(c.rope_interleave),
        )
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps)
        if i < c.first_k_dense_replace if kinds is None else kinds[i] == "dense":
            gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act)
        else:
            _feed(b, c, h, x, f"{layer}.mlp", second)
    b.head(b.norm(x, "model.norm", eps=eps))


@family("Glm4MoeForCausalLM", "Dots1ForCausalLM")
def glm4_moe(b: Builder, c: Any) -> None:
    """Llama's attention, which may have norms for each head. The first layers have an MLP."""
    unused(c, "use_qk_norm", "num_mtp_layers", *_MIXTURE)  # the weights show the norms

    def feed(h: Value, x: Value, layer: str, factor: float) -> None:
        if b.layer < c.first_k_dense_replace:
            gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation=c.hidden_act)
        else:
            _feed(b, c, h, x, f"{layer}.mlp", False)

    decoder(b, c, feed)


def _scale(c: Any) -> float:
    """Of the scores. YaRN's factor of cosines and sines is not in the numbers without rotary embedding: it is here."""
    given, scale = c.rope_parameters, (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    factor, share = given.get("factor", 1.0), given.get("mscale_all_dim", 0)
    if given.get("rope_type", "default") != "default" and share and factor > 1:
        scale *= (0.1 * share * math.log(factor) + 1.0) ** 2
    return float(scale)


def _feed(b: Builder, c: Any, h: Value, x: Value, name: str, second: bool) -> None:
    """x += the chosen experts, and those that all nodes have. second: the router of V2, which has a softmax. transformers never
    divides its weights by their sum."""
    routing: dict[str, Any] = {"scaling": float(c.routed_scaling_factor)}
    grouped = c.topk_method == "group_limited_greedy" if second else c.n_group > 1
    if grouped:
        routing |= {"groups": c.n_group, "kept_groups": c.topk_group}
    if second:
        if c.topk_method not in ("greedy", "group_limited_greedy"):
            raise NotNative(f"its router is {c.topk_method}")
    else:
        routing |= {
            "normalised": bool(c.norm_topk_prob),
            "correction": f"{name}.gate.e_score_correction_bias",
            "added": 1e-20,
        }
    mixture(
        b, h, x, name, router="gate", count=c.n_routed_experts, k=c.num_experts_per_tok,
        kind="softmax_top" if second else "sigmoid_top", width=c.moe_intermediate_size, activation=c.hidden_act, **routing,
    )  # fmt: skip
    shared = c.moe_intermediate_size * c.n_shared_experts
    gated_mlp(b, h, x, f"{name}.shared_experts", width=shared, activation=c.hidden_act)
