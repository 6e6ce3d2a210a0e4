"""Models with mixers of Mamba 2: Mamba 2 alone, Nemotron-H, Falcon-H1, Granite 4 and Bamba."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.models.native import parts
from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.families.mixtures import granite_mixture
from outrider.models.native.parts import (
    Part,
    Sublayer,
    angles,
    attends,
    both,
    by_kind,
    decoder,
    mlp,
    residual_factor,
    unused,
)
from outrider.models.native.program import NotNative, Value

_FEEDS = (  # a model may have no layer of a kind
    "intermediate_size n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size "
    "num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor"
)


@family("Mamba2ForCausalLM")
def mamba2(b: Builder, c: Any) -> None:
    """norm, mixer, residual."""
    eps, sizes = float(c.layer_norm_epsilon), {"heads": c.num_heads, "channels": c.head_dim, "width": c.state_size}
    mixer = parts.mamba2(b, "mixer", groups=c.n_groups, activation=c.hidden_act, eps=eps, **sizes)
    names: dict[str, Any] = {"embedding": "backbone.embeddings", "layers": "backbone.layers", "last": "backbone.norm_f"}
    decoder(b, c, Sublayer(mixer, "norm"), eps=eps, **names)


@family("NemotronHForCausalLM")
def nemotron_h(b: Builder, c: Any) -> None:
    """norm, one of three, residual. It has no rotary embedding."""
    eps = float(c.layer_norm_epsilon)
    mixer = parts.mamba2(
        b,
        "mixer",
        heads=c.mamba_num_heads,
        channels=c.mamba_head_dim,
        width=c.ssm_state_size,
        groups=c.n_groups,
        activation=c.mamba_hidden_act,
        eps=eps,
        norm_group=c.mamba_num_heads * c.mamba_head_dim // c.n_groups,
    )
    unused(c, *_FEEDS.split())
    kinds = _mixers(mixer, attends(b, c, None, "mixer", window=0))
    kinds["mlp"] = parts.ungated_mlp(b, c, "mixer.up_proj", "mixer.down_proj", c.mlp_hidden_act)
    experts = {"count": c.n_routed_experts, "width": c.moe_intermediate_size, "activation": c.mlp_hidden_act}
    feed = parts.mixture(b, c, "mixer", latent=c.moe_latent_size or 0, **experts, **parts.sigmoid_routing(c))
    shared = ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", c.mlp_hidden_act)
    kinds["moe"] = both(feed, parts.ungated_mlp(b, c, *shared, width=c.moe_shared_expert_intermediate_size))
    part = Sublayer(by_kind(b, c.layers_block_type, **kinds), "norm")
    decoder(b, c, part, embedding="model.embeddings", last="model.norm_f", eps=eps)


def _mixers(mixer: Part, attention: Part) -> dict[str, Part]:
    """By the names of kinds that transformers has had for them."""
    return {"mamba": mixer, "linear_attention": mixer, "attention": attention, "full_attention": attention}


def _mixer(b: Builder, c: Any, **settings: Any) -> Part:
    """The mixer of Falcon-H1, Granite 4 and Bamba."""
    return parts.mamba2(
        b,
        "mamba",
        heads=c.mamba_n_heads,
        channels=c.mamba_d_head,
        width=c.mamba_d_state,
        groups=c.mamba_n_groups,
        activation=c.hidden_act,
        eps=float(c.rms_norm_eps),
        **settings,
    )


@family("FalconH1ForCausalLM")
def falcon_h1(b: Builder, c: Any) -> None:
    """A mixer beside attention in each layer, with factors from muP."""
    unused(c, "mamba_d_ssm", "mamba_rms_norm", "mamba_conv_bias")  # the weights show them
    if c.attention_bias or c.mlp_bias or c.projectors_bias or c.mamba_proj_bias:
        raise NotNative("its factors and biases would not commute")
    inner, shared = c.mamba_n_heads * c.mamba_d_head, c.mamba_n_groups * c.mamba_d_state
    sizes = [inner, inner, shared, shared, c.mamba_n_heads]
    scale = (np.array(c.ssm_multipliers, np.float32) * np.float32(c.ssm_in_multiplier)).repeat(sizes)
    into, through = c.attention_in_multiplier, float(c.attention_out_multiplier * c.attention_in_multiplier)
    mixer = _mixer(
        b,
        c,
        norm_group=inner // c.mamba_n_groups,
        norm_first=bool(c.mamba_norm_before_gate),
        scale=None if (scale == 1).all() else scale,
        factor=float(c.ssm_out_multiplier),
    )
    scores = float(parts.head_dim(c) ** -0.5 * c.key_multiplier * into**2)
    attention = attends(b, c, angles(b, c), scale=scores, factor=through)

    def feed(h: Value, x: Any, layer: str) -> None:
        name, (first, last) = f"{layer}.feed_forward", map(float, c.mlp_multipliers)
        gate = b.linear(h, f"{name}.gate_proj", width=c.intermediate_size, factor=first)
        up = b.linear(h, f"{name}.up_proj", width=c.intermediate_size)
        b.gate(gate, up, c.hidden_act, out=up)
        b.linear(up, f"{name}.down_proj", width=x.width, factor=last, add_to=x)

    factors: dict[str, Any] = {"factor": float(c.embedding_multiplier), "logits": float(c.lm_head_multiplier)}
    first, second = Sublayer(both(mixer, attention), "input_layernorm"), Sublayer(feed, "pre_ff_layernorm")
    decoder(b, c, first, second, last="model.final_layernorm", eps=float(c.rms_norm_eps), **factors)


@family("GraniteMoeHybridForCausalLM")
def granite_hybrid(b: Builder, c: Any) -> None:
    """norm, mixer or attention, residual, norm, gated MLP beside a mixture, residual; each residual has a factor."""
    unused(c, "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
    factor, width = residual_factor(c), c.shared_intermediate_size
    mixer, rotates = _mixer(b, c, factor=factor), c.position_embedding_type == "rope"
    attention = attends(b, c, angles(b, c) if rotates else None)

    def shared(h: Value, x: Any, layer: str) -> None:
        gate, up = b.linear(h, f"{layer}.shared_mlp.input_linear", width=2 * width).split(width, width)
        b.gate(gate, up, c.hidden_act, out=up)
        b.linear(up, f"{layer}.shared_mlp.output_linear", width=x.width, factor=factor, add_to=x)

    first = Sublayer(by_kind(b, c.layer_types, **_mixers(mixer, attention)), "input_layernorm")
    feed = both(granite_mixture(b, c), shared) if c.num_local_experts else shared
    factors: dict[str, Any] = {"factor": float(c.embedding_multiplier), "logits": 1.0 / float(c.logits_scaling)}
    decoder(b, c, first, Sublayer(feed, "post_attention_layernorm"), eps=float(c.rms_norm_eps), **factors)


@family("BambaForCausalLM")
def bamba(b: Builder, c: Any) -> None:
    """norm, mixer or attention, residual, norm, gated MLP, residual."""
    attending = c.attn_layer_indices or ()
    kinds = ["attention" if i in attending else "mamba" for i in range(c.num_hidden_layers)]
    part = by_kind(b, kinds, mamba=_mixer(b, c), attention=attends(b, c, angles(b, c)))
    first, second = Sublayer(part, "input_layernorm"), Sublayer(mlp(b, c, "feed_forward"), "pre_ff_layernorm")
    decoder(b, c, first, second, last="model.final_layernorm", eps=float(c.rms_norm_eps))
