"""Hybrids as native programs: they agree with transformers' code, a node has the same bits anywhere, and states are those of
their tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import prompts, tiny
from histories import check_histories
from row_checks import Guided, assert_rows_do_not_depend_on_their_neighbours, outputs

from outrider.core.tree import tree
from outrider.kernels import cpu as native
from outrider.models.base import FINAL_NORM
from outrider.models.hf.model import HFModel
from outrider.models.native import step
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

_FACTORS: dict[str, Any] = {
    "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3], "ssm_in_multiplier": 1.2, "key_multiplier": 0.6, "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.9, 1.4],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", _FACTORS),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "granite": ("granitemoehybrid", {
        "num_local_experts": 0, "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
    }),
    "bamba": ("bamba", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {"linear_num_value_heads": 6}),
    "lfm2_moe": ("lfm2_moe", {}),
    "granite_moe": ("granitemoehybrid", {"residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "mamba2": ("mamba2", {}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 8}),
    "nemotron_h_moe": ("nemotron_h", {"head_dim": 8, "routed_scaling_factor": 2.5}),
    "nemotron_h_latent": ("nemotron_h", {"head_dim": 8, "moe_latent_size": 16, "n_group": 2, "topk_group": 1}),
    "qwen3_5": ("qwen3_5_text", {"linear_num_value_heads": 6}),
}  # fmt: skip


@cache
def pair(name: str) -> tuple[HFModel, NativeModel]:
    kind, changes = MODELS[name]
    raw = tiny(kind, **changes)
    for where, buffer in raw.named_buffers():
        if where.endswith(("correction_bias", "expert_bias")):
            buffer.normal_(0, 0.3)
    return HFModel(raw, weights="float32"), NativeModel(raw, "float32")


@pytest.mark.parametrize("name", MODELS)
def test_it_agrees_with_the_modelling_code(name: str) -> None:
    reference, model = pair(name)
    tokens, parents = tree([[(n, p) for n, p in zip(prompts(9)[0], [-1, 0, 1, 1, 3, 2, 0, 6, 5], strict=True)]])
    taps = (0, FINAL_NORM)
    found, expected = (
        m.forward(Nodes(tokens, m.new_cache(1, 64), [0], parents), taps=taps) for m in (model, reference)
    )
    for ours, theirs in ((found.logits, expected.logits), (found.features, expected.features)):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
    texts = prompts(11, 21)
    assert outputs(model, texts, None, 8) == outputs(reference, texts, None, 8)


@pytest.mark.parametrize("name", MODELS)
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    assert_rows_do_not_depend_on_their_neighbours(pair(name)[1])


@pytest.mark.parametrize("kept", [1, step.KEPT])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_after_any_history_the_state_is_that_of_the_tokens(
    name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "KEPT", kept)
    check_histories(pair(name)[1], 60)


@pytest.mark.long
def test_ten_thousand_histories() -> None:
    for seed in range(100):
        check_histories(pair("falcon_h1")[1], 50, seed)
        check_histories(pair("qwen3_5")[1], 50, seed)


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_5"])
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(name: str) -> None:
    _, model = pair(name)
    [ids] = prompts(30)
    found, own, threads = [], native.isa(), native.num_threads()
    try:
        for isa in native.isas():
            for count in (1, 4):
                native.set_num_threads(count)
                if native.use_isa(isa):
                    found.append(model.forward(Nodes(torch.tensor([ids]), model.new_cache(1, 64), [0])).logits)
    finally:
        native.use_isa(own)
        native.set_num_threads(threads)
    assert len(found) > 2
    assert all(torch.equal(each, found[0]) for each in found)


def test_drafts_keep_the_text() -> None:
    _, model = pair("falcon_h1")
    texts = outputs(model, prompts(15, 25), None, 12)
    assert outputs(model, texts, Guided(texts), 12) == texts


def test_a_path_that_is_none_cannot_be_committed() -> None:
    model = pair("lfm2")[1]
    cache = model.new_cache(1, 64)
    tokens, parents = tree([[(5, -1), (6, 0), (7, 0), (8, 2)]])
    model.forward(Nodes(tokens, cache, [0], parents), want="none")
    with pytest.raises(ValueError, match="no path"):
        cache.commit([0], [[0, 1, 3]])
    with pytest.raises(RuntimeError, match="no forward"):
        cache.commit([0], [[0, 4]])
    more = torch.tensor([[9]])
    with pytest.raises(RuntimeError, match="fewer nodes"):
        model.forward(Nodes(more, cache, [0], torch.tensor([[-1, 0, 1, 2, 3, 4, 5]])))
    with pytest.raises(ValueError, match="another model"):
        model.forward(Nodes(more, pair("bamba")[1].new_cache(1, 64), [0]))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("falcon_h1", {"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
        ("bamba", {"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
        ("nemotron_h_moe", {"mlp_hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_setting_that_a_family_does_not_know_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    kind, own = MODELS[name]
    assert reason in str(supports(tiny(kind, **{**own, **changes})))
