"""Models with recurrent layers: the state of a slot is that of its committed tokens, whatever was drafted, and where."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from architectures import RECURRENT, VOCAB, prompts, tiny
from helpers import decoder, plain_texts, request
from histories import check_histories
from row_checks import Guided, assert_rows_do_not_depend_on_their_neighbours, outputs
from transformers import PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.core.tree import tree
from outrider.core.types import Budget
from outrider.drafters.base import Drafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.model.self_speculation import TargetCache
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.scheduler import HEADROOM, Scheduler
from outrider.kernels import cpu as native
from outrider.models.hf import recurrent, states
from outrider.models.hf.model import HFModel, UnsupportedModel
from outrider.models.hf.states import KEPT
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Noisy, Wrong
from tests.support.tiny_models import tiny_config, tiny_model, whole_config

# One of each kind: linear attention, Mamba 2 beside attention in one layer, Mamba alone, convolutions.
KINDS = ["qwen3_5_text", "falcon_h1", "mamba", "lfm2"]


def families(*short: str) -> list[object]:
    """All families, of which the ordinary tests run these."""
    return [*short, *(pytest.param(name, marks=pytest.mark.long) for name in RECURRENT if name not in short)]


@cache
def model_of(name: str) -> tuple[PreTrainedModel, HFModel]:
    raw = tiny(name)
    return raw, HFModel(raw)


@pytest.mark.parametrize("name", families(*KINDS))
def test_tokens_are_those_of_transformers(name: str) -> None:
    raw, model = model_of(name)
    assert model.batch_invariant
    options = {"do_sample": False, "max_new_tokens": 12}
    texts = [raw.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts(3, 13)]
    assert outputs(model, texts, None, 12) == texts
    assert outputs(model, texts, Guided(texts), 12) == texts


@pytest.mark.parametrize("name", families("qwen3_5_text", "lfm2"))
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    assert_rows_do_not_depend_on_their_neighbours(model_of(name)[1])


@pytest.mark.parametrize("kept", [1, KEPT])
@pytest.mark.parametrize("name", families("falcon_h1"))
def test_after_any_history_the_state_is_that_of_the_tokens(
    name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "KEPT", kept)
    check_histories(model_of(name)[1], 10)


def test_a_window_that_is_one_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(read: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last, _ = window(read, state)
        return last, last.roll(1, -1)

    window = recurrent.window
    monkeypatch.setattr(recurrent, "window", late)
    with pytest.raises(UnsupportedModel, match="it gives other logits than by itself"):
        HFModel(tiny("lfm2"))


@pytest.mark.parametrize("name", ["zamba", "zamba2", "kimi_linear", "minimax", "recurrent_gemma"])
def test_layers_whose_code_has_no_step_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel):
        HFModel(tiny_model(tiny_config(whole_config(name))))


@pytest.mark.parametrize("kind", [HFModel, NativeModel])
def test_a_path_that_is_none_cannot_be_committed(kind: type[HFModel | NativeModel]) -> None:
    if kind is NativeModel and not native.available():
        pytest.skip(str(native.why()))
    model = kind(tiny("lfm2"))
    cache = model.new_cache(1, 64)
    tokens, parents = tree([[(5, -1), (6, 0), (7, 0), (8, 2)]])
    model.forward(Nodes(tokens, cache, [0], parents), want="none")
    with pytest.raises(ValueError, match="no path"):
        cache.commit([0], [[0, 1, 3]])
    with pytest.raises(RuntimeError, match="no forward"):
        cache.commit([0], [[0, 4]])


@pytest.mark.parametrize("name", families("mamba"))
def test_drafters_that_are_always_right_or_always_wrong(name: str) -> None:
    """The right one is the same model as a draft model: a recurrent model drafts, too."""
    model = model_of(name)[1]
    requests = [request(p, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True), 5) for p in prompts(2, 9)]
    expected = plain_texts(model, requests, end_ids=())
    drafters: list[Drafter] = [ModelDrafter(model, 2, 128), Wrong(1)]
    for drafter, budget, count in zip(drafters, (Budget(4), Budget(4)), (4, 20), strict=True):
        run = decoder(model, drafter, rows=2, budget=budget, end_ids=()).generate(requests)
        assert [r.output for r in run] == expected
        assert max(r.steps for r in run) == count or count == 20
    run = decoder(model, ModelDrafter(model, 2, 128), rows=2, budget=Budget(4, 3, 12), end_ids=()).generate(requests)
    assert [r.output for r in run] == expected


def test_prefixes_chunks_and_preemption() -> None:
    """A prefix is found again where its state was kept: at the end of a text, and where two prompts were seen to part."""
    model = model_of("qwen3_5_text")[1]
    start, params = prompts(70)[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [request([*start, 5 + n, 6], params) for n in range(3)]
    expected = plain_texts(model, requests, end_ids=())
    requests.append(request([*requests[0].prompt, *expected[0], 7], params))  # the next turn
    expected += plain_texts(model, requests[3:], end_ids=())
    prefixes = PrefixCache(1 << 26)
    one = decoder(model, ModelDrafter(model, 1, 256), rows=1, end_ids=(), prefixes=prefixes)
    one.chunk = 24
    scheduler = Scheduler(one, raises=True)
    run = [scheduler.generate([r])[0] for r in requests]
    assert [r.output for r in run] == expected
    assert [r.counts.cached for r in run] == [0, 48, 64, 83]
    assert not prefixes.check()
    two = decoder(model, ModelDrafter(model, 4, 256), rows=4, end_ids=())
    run = Scheduler(two, kv_limit=72 * 2 + 2 * HEADROOM + 4, raises=True).generate(requests)
    assert [r.output for r in run] == expected
    assert sum(r.counts.preemptions for r in run) > 0


@pytest.mark.parametrize(("short", "long"), [(10, 26), (3, 35), (16, 26), (26, 32)])
def test_a_text_is_found_whole_after_its_beginning_was_kept(short: int, long: int) -> None:
    """An end of 10 tokens is no end of a text of 26, though both leave 10 tokens beside whole blocks."""
    model, prefixes = model_of("lfm2")[1], PrefixCache(1 << 26)
    cache, tokens = model.new_cache(1, 256), np.random.default_rng(0).integers(0, VOCAB, long)
    for begin, end in ((0, short), (short, long)):
        model.forward(Nodes(tokens[None, begin:end], cache, [0]), want="none")
        cache.commit([0], [range(end - begin)])
        prefixes.keep(cache, 0, tokens[:end].tolist())
    cache.release(0)
    assert prefixes.fetch(cache, 0, tokens.tolist()) == long
    assert not prefixes.check()


def test_memory_is_bounded() -> None:
    model = model_of("qwen3_5_text")[1]
    cache = model.new_cache(2, 256)
    for count in (200, 40):
        model.forward(Nodes(np.random.default_rng(0).integers(0, VOCAB, (2, count)), cache, [0, 1]), want="none")
        states = cache.bytes - cache.bytes_per_token * 2 * cache.capacity
        assert 2 * cache.bytes_per_slot == states
        cache.commit([0, 1], [range(count)] * 2)
        assert (1 + KEPT) * (cache.bytes - cache.bytes_per_token * 2 * cache.capacity) == states


def test_layers_can_be_skipped() -> None:
    model = model_of("qwen3_5_text")[1]
    requests = [request(p, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)) for p in prompts(2, 9)]
    for layers in ([0], [1]):
        run = decoder(model, TreeDrafter(TargetCache(model.layer_subset(layers))), rows=2, end_ids=()).generate(
            requests
        )
        assert [r.output for r in run] == plain_texts(model, requests, end_ids=())


def test_layers_that_share_keys() -> None:
    """Trees beyond the window; and a layer that others need cannot be left out."""
    raw = tiny("gemma4_text")
    model = HFModel(raw)
    texts = [raw.generate(torch.tensor([p]), do_sample=False, max_new_tokens=10)[0].tolist() for p in prompts(3, 13)]
    assert outputs(model, texts, Guided(texts)) == texts
    with pytest.raises(ValueError, match=r"does not run with layers \[0, 1\] alone"):
        model.layer_subset([0, 1])
    assert outputs(model, texts, Guided(texts)) == texts


@pytest.mark.long
@pytest.mark.parametrize("name", RECURRENT)
def test_long_texts(name: str) -> None:
    """300 tokens by trees, beyond windows, chunks and kernels; 2,000 for one family. Each is transformers' choice, or a near-tie.

    Chance draws the drafts: the drafter is right at some nodes, wrong at others."""
    count = 2000 if name == "falcon_h1" else 300
    raw, model = tiny(name, max_position_embeddings=2100), HFModel(tiny(name, max_position_embeddings=2100))
    requests = [request(p, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)) for p in prompts(2, 40)]
    drafter = Noisy(ModelDrafter(model, 2, 2100), 0.6, VOCAB)
    texts = [r.tokens for r in decoder(model, drafter, rows=2, max_length=2100, end_ids=()).generate(requests)]
    for start, text in zip((2, 40), texts, strict=True):
        with torch.inference_mode():
            logits = raw(torch.tensor([text[:-1]])).logits[0, start - 1 :].float()
        chosen = logits.gather(1, torch.tensor(text[start:])[:, None])[:, 0]
        assert len(text) == start + count
        assert float((logits.max(-1).values - chosen).max()) < 0.02 * float(logits.abs().max())
