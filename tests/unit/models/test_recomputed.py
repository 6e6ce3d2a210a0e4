"""Models that read the whole text for each node: exact over the borders of blocks, said plainly, bounded in memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from row_checks import Guided, assert_rows_do_not_depend_on_their_neighbours, outputs
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.hf import model as hf_model
from outrider.models.hf import recomputed
from outrider.models.hf.model import HFModel, UnsupportedModel
from outrider.models.load import load
from outrider.models.nodes import Nodes

VOCAB = 97


def tiny(kind: str = "openai-gpt", **settings: Any) -> Any:
    """GPT-1, which has no cache."""
    torch.manual_seed(3)
    small = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    raw = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**small, **settings})).eval()
    with torch.no_grad():
        for p in raw.parameters():
            p.add_(torch.randn(p.shape) * 0.2)
    return raw


@pytest.fixture(scope="module")
def raw() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def model(raw: Any) -> HFModel:
    return HFModel(raw)


def test_texts_over_a_border_of_blocks(raw: Any, model: HFModel) -> None:
    assert model.path == "recomputed"
    assert model.batch_invariant
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB, (n,), generator=draw).tolist() for n in (5, 50)]
    texts = [
        raw.generate(torch.tensor([p]), do_sample=False, max_new_tokens=70, use_cache=False)[0].tolist()
        for p in prompts
    ]
    assert outputs(model, texts, new=70) == texts
    assert outputs(model, texts, Guided(texts), new=70) == texts


def test_rows_do_not_depend_on_their_neighbours(model: HFModel) -> None:
    assert_rows_do_not_depend_on_their_neighbours(model)


def test_one_forward_answers_for_a_chain_and_two_at_a_border(model: HFModel) -> None:
    seen = list[int]()
    handle = model.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    cache = model.new_cache(1, 256)
    text = torch.randint(1, VOCAB, (1, 100))
    model.forward(Nodes(text[:, :50], cache, [0]), want="none")
    cache.commit([0], [range(50)])
    assert seen == [], "a prompt is only kept"
    alone = model.forward(Nodes(text[:, 50:], cache, [0])).logits[0]
    assert seen == [128, 64]
    tree = torch.tensor([[-1, 0, 1, 0, 3]])
    model.forward(Nodes(text[:, 50:55], cache, [0], tree))
    assert seen[2:] == [64, 64], "one for each leaf"
    last = model.forward(Nodes(text[:, 50:], cache, [0]), want="last").logits[0]
    assert seen[4:] == [128]
    assert torch.equal(last[0], alone[-1])
    handle.remove()


def test_taps_are_hidden_states() -> None:
    ids = torch.randint(1, VOCAB, (1, 70))
    roformer = HFModel(_bert("roformer"))
    out = roformer.forward(Nodes(ids, roformer.new_cache(1, 128), [0]), taps=(0, EMBEDDING, FINAL_NORM), want="none")
    assert out.features is not None
    with torch.inference_mode():
        hidden = roformer.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(out.features, torch.cat([hidden[1], hidden[0], hidden[-1]], -1), atol=2e-4, rtol=1e-3)


def _bert(kind: str, **settings: Any) -> Any:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    return tiny(kind, **small, is_decoder=True, max_position_embeddings=256, embedding_size=32, **settings)


def test_the_prefix_cache_and_sampling(raw: Any) -> None:
    prompt = list(range(1, 60))
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=5, ignore_eos=True)

    def text(llm: LLM, tokens: list[int]) -> Any:
        return llm.generate([{"prompt_token_ids": tokens}], params)[0].outputs[0].token_ids

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = LLM(raw)
        assert isinstance(plain.loaded.model, HFModel)
        known = [text(plain, [*prompt, last]) for last in (70, 71)]
        drafting = LLM(raw, speculative_config={"method": "suffix"})
        assert [text(drafting, [*prompt, last]) for last in (70, 71)] == known


def test_a_load_says_that_it_is_slow_and_why(raw: Any) -> None:
    with pytest.warns(RuntimeWarning, match="reads the whole text again for each token .* exact and slow"):
        load(tiny(n_positions=200))
    with pytest.raises(ValueError, match="no layer can be left out"):
        HFModel(raw).layer_subset([0])


def test_a_text_that_does_not_fit_in_memory_is_not_begun(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens a layer's scores take 3 x 4 x 256 x 256 x 4 bytes."""
    monkeypatch.setattr(hf_model, "free_memory", lambda _: 2 * 3 * 4 * 4 * 130 * 130)
    model = HFModel(raw)
    assert model.max_length == 128
    assert "Longer texts than 128 tokens" in model.slow


def test_a_cache_of_tokens_is_not_rounded(raw: Any) -> None:
    model, ids = HFModel(raw, kv_cache_dtype="int8"), torch.randint(1, VOCAB, (1, 9))
    exact = HFModel(raw)
    assert model.new_cache(1, 16).bytes_per_token in (0, 8)
    assert torch.equal(
        model.forward(Nodes(ids, model.new_cache(1, 16), [0])).logits,
        exact.forward(Nodes(ids, exact.new_cache(1, 16), [0])).logits,
    )


def test_a_model_that_attends_both_ways_says_so() -> None:
    small = {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 40}
    model = HFModel(tiny("xlnet", **small))
    assert model.path == "recomputed"
    assert "speculation does not make it faster" in model.slow
    with pytest.raises(ValueError, match="no head can read"):
        model.forward(Nodes(torch.tensor([[1, 2]]), model.new_cache(1, 8), [0]), taps=(0,))


@pytest.mark.parametrize("used", [False, True])
def test_rwkv_does_not_scale_its_weights_again(used: bool) -> None:
    """Its first forward halves weights in place, which packed ones and those of the caller must not see."""
    raw, ids = (
        tiny("rwkv", hidden_size=32, num_hidden_layers=3, attention_hidden_size=32, rescale_every=1),
        torch.tensor([[5, 9, 2]]),
    )
    if used:
        raw(ids)
    before = {name: p.clone() for name, p in raw.named_parameters()}
    model = HFModel(raw)
    logits = model.forward(Nodes(ids, model.new_cache(1, 8), [0])).logits
    assert all(torch.equal(p, before[name]) for name, p in raw.named_parameters())
    with torch.inference_mode():
        torch.testing.assert_close(logits, raw(ids).logits, atol=1e-3, rtol=1e-3)


def test_random_hashes_are_refused() -> None:
    small = {"attn_layers": ["local", "lsh"], "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8}
    axial = {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16], "max_position_embeddings": 256}
    with pytest.raises(UnsupportedModel, match="hash_seed and num_buckets"):
        HFModel(tiny("reformer", **small, **axial, is_decoder=True))


def test_planted_a_model_that_is_taken_for_a_causal_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed.WholeText, "_is_causal", lambda *_: True)
    with pytest.raises(UnsupportedModel, match="other logits"):
        HFModel(tiny("xlnet", d_model=32, n_head=4, n_layer=2, d_inner=40))


def test_planted_a_path_through_siblings_is_found(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "_path", lambda parents, node: [*range(node + 1)])
    with pytest.raises(UnsupportedModel, match="other logits"):
        HFModel(raw)
