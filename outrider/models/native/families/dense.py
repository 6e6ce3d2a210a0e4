"""Models whose layers are attention and an MLP: Llama, Gemma, GLM, OLMo, Cohere, StarCoder, Phi, and what has their layers."""

from __future__ import annotations

from typing import Any

from outrider.models.native.builder import Builder
from outrider.models.native.families import family
from outrider.models.native.parts import (
    Part,
    Sublayer,
    angles,
    attends,
    decoder,
    mlp,
    ungated_mlp,
    unused,
    window_of,
)
from outrider.models.native.program import NotNative


def llama_layers(b: Builder, c: Any, feed: Part | None = None, **settings: Any) -> None:
    """norm, attention, residual, norm, gated MLP, residual, with Granite's four factors. feed: in the place of the MLP. settings:
    of `attention`."""
    eps = float(c.rms_norm_eps)
    unused(c, "attention_out_bias", "no_rope_layer_interval", "use_bias")
    first = Sublayer(attends(b, c, angles(b, c), eps=eps, **settings), "input_layernorm")
    second = Sublayer(feed or mlp(b, c), "post_attention_layernorm")
    factor, divisor = float(getattr(c, "embedding_multiplier", 1.0)), float(getattr(c, "logits_scaling", 1.0))
    decoder(b, c, first, second, factor=factor, logits=1.0 / divisor, eps=eps)


@family("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
@family("SmolLM3ForCausalLM", "SeedOssForCausalLM")
def llama(b: Builder, c: Any) -> None:
    llama_layers(b, c)


@family("Ministral3ForCausalLM")
def ministral(b: Builder, c: Any) -> None:
    """Its queries grow with their positions, in steps of the length of the first training."""
    rope, table = c.rope_parameters, b.rotary(c.rope_parameters)
    every = int(rope["original_max_position_embeddings"])
    queries = b.grown(table, float(rope["llama_4_scaling_beta"]), every, c.max_position_embeddings)
    llama_layers(b, c, queries=queries)


@family("Ernie4_5ForCausalLM")
def ernie(b: Builder, c: Any) -> None:
    """The numbers of a rotary pair are neighbours."""
    llama_layers(b, c, interleaved=True)


@family("Phi3ForCausalLM")
def phi3(b: Builder, c: Any) -> None:
    """Phi-3 and 4: queries, keys and values are one linear; gate and up, too. LongRoPE has other angles where a cache may hold
    longer texts than the first training did."""
    unused(c, "original_max_position_embeddings", "embd_pdrop", "resid_pdrop")
    llama_layers(b, c, mlp(b, c, joined=True), joined=True)


@family("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
def gemma(b: Builder, c: Any) -> None:
    """Norms with 1 + weight, and an embedding that is scaled. From Gemma 2 on there are norms on both sides of each part."""
    norm: dict[str, Any] = {"eps": float(c.rms_norm_eps), "one_added": True}
    sandwich, names = hasattr(c, "query_pre_attn_scalar"), ("", "post_attention_layernorm", "")
    if sandwich:
        names = "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    scale = float(getattr(c, "query_pre_attn_scalar", c.head_dim)) ** -0.5
    cap = getattr(c, "attn_logit_softcapping", None) or 0.0
    first = Sublayer(attends(b, c, angles(b, c), scale=scale, softcap=cap, **norm), "input_layernorm", names[0])
    second = Sublayer(mlp(b, c, activation=c.hidden_activation if sandwich else c.hidden_act), *names[1:])
    cap = getattr(c, "final_logit_softcapping", None) or 0.0
    decoder(b, c, first, second, factor=c.hidden_size**0.5, softcap=cap, **norm)


@family("GlmForCausalLM", "Glm4ForCausalLM")
def glm(b: Builder, c: Any) -> None:
    """Rotary pairs of neighbours over half a head. The models of 2025 norm both sides of each part."""
    both_sides = b.has("model.layers.0.post_self_attn_layernorm")
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if both_sides else ("", "")
    first = Sublayer(attends(b, c, angles(b, c), interleaved=True), "input_layernorm", after[0])
    second = Sublayer(mlp(b, c, joined=True), "post_attention_layernorm", after[1])
    decoder(b, c, first, second, eps=float(c.rms_norm_eps))


@family("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM")
def olmo(b: Builder, c: Any) -> None:
    """Norms after each part, and none before. OLMo norms all queries and all keys together, EXAONE each head of them.

    EXAONE rotates only the layers that have a window, if some have one."""
    eps, exaone, tables = float(c.rms_norm_eps), hasattr(c, "sliding_window_pattern"), angles(b, c)
    unused(c, "sliding_window_pattern")

    def rotated(layer: int) -> int | None:
        return None if exaone and c.sliding_window and not window_of(c, layer) else tables(layer)

    first = Sublayer(attends(b, c, rotated, eps=eps, whole=not exaone), after="post_attention_layernorm")
    decoder(b, c, first, Sublayer(mlp(b, c), after="post_feedforward_layernorm"), eps=eps)


@family("CohereForCausalLM", "Cohere2ForCausalLM", "StableLmForCausalLM")
def cohere(b: Builder, c: Any) -> None:
    """Command R and R7B, and StableLM: layer norms, and one norm for attention and MLP side by side. StableLM may have another
    norm for the MLP. R7B rotates only the layers that have a window."""
    norm, tables = {"eps": float(c.layer_norm_eps), "kind": "layer"}, angles(b, c)
    stable, second = hasattr(c, "use_parallel_residual"), "post_attention_layernorm"
    unused(c, "use_parallel_residual", "use_qk_norm", "use_qkv_bias")
    if getattr(c, "qk_layernorm", False):
        raise NotNative("it has a norm for each head")

    def rotated(layer: int) -> int | None:
        return None if hasattr(c, "layer_types") and not window_of(c, layer) else tables(layer)

    first = Sublayer(attends(b, c, rotated, per_group=True, interleaved=not stable, **norm), "input_layernorm")
    feed = Sublayer(mlp(b, c), second if b.has(f"model.layers.0.{second}") else "")
    decoder(b, c, first, feed, logits=float(getattr(c, "logit_scale", 1.0)), **norm)


@family("Starcoder2ForCausalLM", "NemotronForCausalLM", "ArceeForCausalLM")
def ungated(b: Builder, c: Any) -> None:
    """An MLP without a gate. Nemotron's layer norms have 1 + weight."""
    epsilon = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "arcee": "rms_norm_eps"}[c.model_type]
    up, down = ("mlp.c_fc", "mlp.c_proj") if epsilon == "norm_epsilon" else ("mlp.up_proj", "mlp.down_proj")
    unused(c, "use_bias")
    first = Sublayer(attends(b, c, angles(b, c)), "input_layernorm")
    second = Sublayer(ungated_mlp(b, c, up, down, c.hidden_act), "post_attention_layernorm")
    kind, one_added = "rms" if epsilon == "rms_norm_eps" else "layer", epsilon == "norm_eps"
    decoder(b, c, first, second, eps=float(getattr(c, epsilon)), kind=kind, one_added=one_added)


@family("PhiForCausalLM")
def phi(b: Builder, c: Any) -> None:
    """Phi-1 and Phi-2: attention and an MLP without a gate side by side, layer norms, and biases everywhere."""
    norm, names = {"eps": float(c.layer_norm_eps), "kind": "layer"}, ("q_layernorm", "k_layernorm")
    unused(c, "embd_pdrop", "qk_layernorm", "resid_pdrop")  # the weights show the norms
    first = Sublayer(attends(b, c, angles(b, c), norms=names, out="dense", **norm), "input_layernorm")
    second = Sublayer(ungated_mlp(b, c, "mlp.fc1", "mlp.fc2", c.hidden_act))
    decoder(b, c, first, second, last="model.final_layernorm", **norm)
