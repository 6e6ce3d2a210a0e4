"""The target drafts with part of its layers, in its own cache, and the text stays the same."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from architectures import tiny
from helpers import decoder, plain_texts, request
from light import Late, torch

from outrider import LLM
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.model.self_speculation import TargetCache
from outrider.models.base import LanguageModel
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes
from outrider.testing.contract import context
from outrider.testing.toy import ToyModel

hf = Late("outrider.models.hf.model")


def fused() -> NativeModel:
    model = tiny("llama", num_hidden_layers=4)
    if why := supports(model):
        pytest.skip(why)
    return NativeModel(model)


MODELS = {
    "llama, fused": fused,
    "llama": lambda: hf.HFModel(tiny("llama", num_hidden_layers=4)),
    "gpt2": lambda: hf.HFModel(tiny("gpt2", n_layer=4)),
    "gemma2": lambda: hf.HFModel(
        tiny("gemma2", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_text_is_plain_decodings(name: str) -> None:
    model = MODELS[name]()
    params = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1.0, max_tokens=9, top_k=20)]
    requests = [request([3 + i, 1, 2, 5], p, seed=i) for i, p in enumerate(params)]
    plain = plain_texts(model, requests)
    for layers, budget in (([0, 2], Budget(4)), ([1, 3], Budget(3, 2, 5)), ([0, 1, 2, 3], Budget(3))):
        run = decoder(model, TreeDrafter(TargetCache(model.layer_subset(layers))), budget=budget, rows=2)
        assert [r.output for r in run.generate(requests)] == plain, (layers, budget)


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_are_the_model(name: str) -> None:
    """Every draft token of the whole as a part is right; so committed keys and scratch are read from the right cells."""
    model = MODELS[name]()
    run = decoder(model, TreeDrafter(TargetCache(model.layer_subset(range(4)))), budget=Budget(4), rows=1)
    steps = [s for s, _ in run.steps([request([3, 1, 2], SamplingParams(temperature=1.0, max_tokens=30))]) if s]
    assert all(s.verdict.accepted.tolist() == s.draft.num_draft_tokens.tolist() for s in steps)
    assert len(steps) < 10


def test_a_release_leaves_the_targets_cache() -> None:
    """Also before the first draft. The loop alone releases the target's slots, as for a drafter that failed."""
    model = hf.HFModel(tiny("llama", num_hidden_layers=4))
    cache, drafter = model.new_cache(1, 16), TreeDrafter(TargetCache(model.layer_subset([0, 3])))
    drafter.release(0)
    model.forward(Nodes(np.array([[3, 1, 2]]), cache, [0]), want="none")
    cache.commit([0], [range(3)])
    ask = replace(context([0], [[3, 1, 2, 5]], [Budget(2)], SamplingParams(temperature=0)), cache=cache)
    assert drafter.propose(ask).nodes == 3
    drafter.release(0)
    assert cache.length == [3]


def test_a_part_is_the_model_without_the_others() -> None:
    raw = tiny("llama", num_hidden_layers=4)
    whole = hf.HFModel(raw)
    short = tiny("llama", num_hidden_layers=2)
    kept = [(k, v) for k, v in raw.state_dict().items() if "layers.1." not in k and "layers.2." not in k]
    short.load_state_dict({k.replace("layers.3.", "layers.1."): v for k, v in kept})
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    models: list[LanguageModel] = [whole]
    if supports(raw) is None:
        models.append(NativeModel(raw))
    for model in models:
        skipped = model.layer_subset([0, 3])
        got = skipped.forward(Nodes(ids.numpy(), skipped.new_cache(1, 8), [0])).logits
        with torch.no_grad():
            np.testing.assert_allclose(got[0], short(ids).logits[0], atol=1e-4, rtol=1e-4)
        full = model.forward(Nodes(ids.numpy(), model.new_cache(1, 8), [0])).logits  # and the whole is whole again
        with torch.no_grad():
            np.testing.assert_allclose(full[0], raw(ids).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [[], [4], [-1, 2], [2, 1], [1, 1]])
def test_layers_out_of_range_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"increasing numbers from 0 to 3.*\[0, 2\]"):
        hf.HFModel(tiny("llama", num_hidden_layers=4)).layer_subset(layers)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "layer_skip", "layers": [50]}, "increasing numbers from 0 to 5"),
        ({"method": "layer_skip", "layers": "/no/layers.json"}, "outrider layers -m MODEL --out /no/layers.json"),
        ({"method": "layer_skip"}, "Find them: outrider layers -m builtin:code --out layers.json"),
    ],
)
def test_layers_that_cannot_draft_are_reported_in_words(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        LLM("builtin:code", device="cpu", speculative_config=config)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="ToyModel has no layers"):
        ToyModel().layer_subset([0])
