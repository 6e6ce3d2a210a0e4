"""Families on the native step: the logits, taps and texts of HFModel, and the same bits in any company."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import prompts, tiny
from row_checks import (
    Guided,
    assert_rows_do_not_depend_on_their_neighbours,
    outputs,
)
from transformers import PreTrainedModel

from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.hf.model import HFModel
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

# name: (model type, changes of the tiny model)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "seed_oss", "ernie4_5", "phi3", "gemma", "gemma2",
            "gemma3_text", "olmo2", "olmo3", "exaone4", "glm", "glm4", "cohere", "cohere2", "stablelm",
            "starcoder2", "nemotron", "arcee", "phi", "ministral3",
        )
    },
    "phi3-long": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16}}),
    "phi-norms": ("phi", {"qk_layernorm": True, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}),
    "cohere-norms": ("cohere", {"use_qk_norm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "exaone4-whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gemma4": ("gemma4_text", {"global_head_dim": 16, "use_double_wide_mlp": True, "final_logit_softcapping": 4.0}),
    "gemma4-equal": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0}),
    "gemma4-experts": ("gemma4_text", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3,
        "moe_intermediate_size": 20, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gemma3-odd": ("gemma3_text", {"hidden_size": 36, "head_dim": 10, "final_logit_softcapping": 4.0}),
}  # fmt: skip
# name: settings that its family's file does not name
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_act": "relu"}),
    "gemma3_text": ("gemma3_text", {"use_bidirectional_attention": True}),
    "gemma4_text": ("gemma4_text", {"use_bidirectional_attention": "all"}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
}  # fmt: skip
TAPS = (EMBEDDING, 0, 1, FINAL_NORM)


@cache
def raw_of(name: str) -> PreTrainedModel:
    kind, changes = FAMILIES[name]
    raw = tiny(kind, **changes)
    for where, parameter in raw.named_parameters():
        if "norm" in where:  # all ones would hide a wrong place of a weight
            parameter.data += torch.randn(parameter.shape) * 0.3
    for where, buffer in raw.named_buffers():
        if where.endswith("layer_scalar"):
            buffer += torch.rand(1)
    return raw


@cache
def native_of(name: str) -> NativeModel:
    return NativeModel(raw_of(name), weights="float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_taps_and_texts_of_transformers(name: str) -> None:
    ours, reference, texts = native_of(name), HFModel(raw_of(name), weights="float32"), prompts(30, 18)
    for ids in texts:
        made = [m.forward(Nodes(torch.tensor([ids]), m.new_cache(1, 64), [0]), taps=TAPS) for m in (ours, reference)]
        for mine, right in ((made[0].logits, made[1].logits), (made[0].features, made[1].features)):
            assert mine is not None
            assert right is not None
            torch.testing.assert_close(mine, right, atol=1e-4 * float(right.abs().max()), rtol=0)
    assert outputs(ours, texts) == outputs(reference, texts)
    assert ours.windows == reference.windows


@pytest.mark.parametrize("name", FAMILIES)
def test_a_node_of_a_family_has_the_same_bits_in_any_company(name: str) -> None:
    model = native_of(name)
    assert_rows_do_not_depend_on_their_neighbours(model)
    texts = prompts(30, 18)
    plain = outputs(model, texts)
    assert outputs(model, texts, Guided(plain)) == plain


@pytest.mark.parametrize("length", [16, 17])
def test_the_longest_text_of_a_cache_chooses_the_angles_of_longrope(length: int) -> None:
    """A text of one length has other angles in a cache for longer texts, and the same on both sides of a border."""
    ours, reference, [text] = native_of("phi3-long"), HFModel(raw_of("phi3-long"), weights="float32"), prompts(16)
    made = [m.forward(Nodes(torch.tensor([text]), m.new_cache(1, length), [0])).logits for m in (ours, reference)]
    torch.testing.assert_close(made[0], made[1], atol=1e-4 * float(made[1].abs().max()), rtol=0)
    other = ours.forward(Nodes(torch.tensor([text]), ours.new_cache(1, 33 - length), [0])).logits
    assert float((made[0] - other).abs().max()) > 1e-2
    cache, parts = ours.new_cache(1, length), list[torch.Tensor]()
    for a, b in ((0, 9), (9, 16)):
        parts.append(ours.forward(Nodes(torch.tensor([text[a:b]]), cache, [0])).logits)
        cache.commit([0], [range(b - a)])
    assert torch.equal(torch.cat(parts, 1), made[0])


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_a_family_does_not_know_is_left_to_transformers(name: str) -> None:
    kind, changes = OTHERS[name]
    assert supports(tiny(kind, **changes)) is not None
