"""Every architecture through the one adapter: transformers' own logits and tokens, with trees and ragged batches, and rows that
do not depend on their neighbours.

`test_families.py` compares the native step with this adapter, family by family. Here are those of each kind of code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, prompts, tiny
from helpers import decoder, request
from row_checks import NEW, Guided, assert_rows_do_not_depend_on_their_neighbours, one_at_a_time, outputs
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.kernels import cpu as native
from outrider.kernels.vectors import pack_vectors, unpack_vectors
from outrider.models import attention
from outrider.models.attention import attend_native, attend_reference
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.cache import KV_CACHE_DTYPES
from outrider.models.hf import device
from outrider.models.hf.device import DeviceCache
from outrider.models.hf.hooks import LayerStack
from outrider.models.hf.model import HFModel, UnsupportedModel
from outrider.models.hf.states import LayerStates
from outrider.models.nodes import Nodes

# Plain, with windows and caps, with Conv1D, with positions of their own, with a router that is no linear, with sinks and biases.
KINDS = ("llama", "gemma2", "gpt2", "gpt_neox", "opt", "phimoe", "qwen2_moe", "gpt_oss", "deepseek_v3")
PRECISIONS = [
    ("gemma2", "auto", "int8"),
    *((name, "int8", "auto") for name in ("gpt2", "gpt_oss")),
    ("llama", "int4", "auto"),
    *((name, "bfloat16", "auto") for name in ("llama", "mixtral")),
]


@dataclass(eq=False)
class Subject:
    raw: PreTrainedModel
    model: HFModel
    texts: list[list[int]]  # prompt and transformers' own greedy continuation


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in KINDS else pytest.mark.long) for name in ARCHITECTURES],
)
def subject(request: pytest.FixtureRequest) -> Subject:
    raw = tiny(request.param)
    return Subject(raw, HFModel(raw), [greedy(raw, prompt) for prompt in prompts(3, 13)])


def greedy(raw: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' own tokens; the test's models must be sure of them, or a difference would mean nothing."""
    out = raw.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3, "a near-tie: choose another seed for this architecture"
    return out.sequences[0].tolist()


def masked_cache(model: HFModel, num_slots: int, max_length: int) -> DeviceCache:
    """As devices have it."""
    states = {key: LayerStates(start, num_slots) for key, start in model.recurrences.starts.items()}
    return DeviceCache(num_slots, max_length, model.kv_cache_dtype, states, model.device)


def logits(model: HFModel, ids: torch.Tensor, length: int = 64) -> torch.Tensor:
    return torch.from_numpy(model.forward(Nodes(ids.numpy(), model.new_cache(1, length), [0])).logits[0])


def own(raw: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return raw(ids).logits[0]


def test_logits_and_tokens_are_those_of_transformers_with_trees_and_in_any_company(subject: Subject) -> None:
    ids = torch.tensor(subject.texts[1:])
    torch.testing.assert_close(logits(subject.model, ids), own(subject.raw, ids), atol=1e-4, rtol=1e-4)
    assert outputs(subject.model, subject.texts) == subject.texts
    assert outputs(subject.model, subject.texts, Guided(subject.texts)) == subject.texts
    assert subject.model.batch_invariant
    assert_rows_do_not_depend_on_their_neighbours(subject.model)


def test_a_head_of_some_tokens(subject: Subject) -> None:
    """Its logits are those of the whole head up to rounding, and -inf for every other token."""
    some = np.arange(0, VOCAB, 3)
    model, nodes = HFModel(subject.raw, head_ids=some), torch.tensor(subject.texts[1:])
    expected = torch.full((*nodes.shape, VOCAB), -torch.inf)
    expected[..., some] = logits(subject.model, nodes)[..., some]
    for want, wanted in (("all", expected), ("last", expected[:, -1:]), ("none", expected[:, :0])):
        found = torch.from_numpy(model.forward(Nodes(nodes.numpy(), model.new_cache(1, 64), [0]), want=want).logits)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert model.vocab_size == VOCAB == subject.model.vocab_size


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_without_the_native_kernels_and_in_the_masked_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs without a compiler, and what accelerators run, run here."""
    raw = tiny(name)
    texts = [greedy(raw, prompt) for prompt in prompts(3, 13)]
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        model = HFModel(raw)
        assert_rows_do_not_depend_on_their_neighbours(model)
        assert outputs(model, texts, Guided(texts)) == texts
    monkeypatch.setattr(HFModel, "new_cache", masked_cache)
    assert outputs(HFModel(raw), texts, Guided(texts)) == texts


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("form", [attend_native, None, attend_reference], ids=["native", "masked", "reference"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_packed_cache_is_a_float_cache_of_rounded_vectors(
    name: str, form: Callable[..., np.ndarray] | None, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form of attention, bit for bit."""
    raw, ids, dtype = tiny(name), torch.tensor(prompts(20)), KV_CACHE_DTYPES[kv_cache_dtype]
    if form is None:
        monkeypatch.setattr(HFModel, "new_cache", masked_cache)
    model, exact = HFModel(raw, kv_cache_dtype=kv_cache_dtype), HFModel(raw)
    monkeypatch.setattr(attention, "attend", form)
    found, exactly = logits(model, ids), logits(exact, ids)
    assert dtype is not None

    where, write = (device, device.write) if form is None else (attention, attention.write)

    def rounded(nodes: Nodes, layer: int, *vectors: Any) -> None:
        numbers = (unpack_vectors(pack_vectors(np.asarray(v), dtype)) for v in vectors)
        write(nodes, layer, *(torch.from_numpy(v) if form is None else v for v in numbers))

    monkeypatch.setattr(where, "write", rounded)
    assert torch.equal(found, logits(exact, ids))
    assert not torch.equal(found, exactly)


def test_rows_with_many_torch_threads() -> None:
    """Torch cuts elementwise work of more than 32768 elements among its threads."""
    if not native.available():
        pytest.skip("needs the native kernels")
    model = HFModel(tiny("llama", intermediate_size=1090, num_hidden_layers=1))
    ids = torch.randint(0, VOCAB, (1, 61))
    alone = one_at_a_time(model, ids[0].tolist())
    torch.set_num_threads(3)
    try:
        assert np.array_equal(logits(model, ids), alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float) -> None:
    model = HFModel(tiny("qwen3_moe"))
    run = decoder(model, ModelDrafter(HFModel(tiny("qwen3_moe")), 2, 128), rows=2, depth=3, end_ids=())
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    rows = run.generate([request(p, params, seed) for seed, p in enumerate(prompts(2, 9))])
    assert [row.steps for row in rows] == [6, 6]


@pytest.mark.parametrize(("name", "weights", "kv_cache_dtype"), PRECISIONS)
def test_rows_in_other_precisions(name: str, weights: str, kv_cache_dtype: str) -> None:
    """The whole model, router included. bfloat16 weights are kept, and computed with in float32."""
    if weights.startswith("int") and not native.available():
        pytest.skip("needs the native kernels")
    raw, ids = tiny(name), torch.tensor(prompts(12))
    raw = raw.bfloat16() if weights == "bfloat16" else raw
    model = HFModel(raw, weights=weights, kv_cache_dtype=kv_cache_dtype)
    assert model.batch_invariant
    assert_rows_do_not_depend_on_their_neighbours(model)
    assert {p.dtype for p in raw.parameters()} == {torch.bfloat16 if weights == "bfloat16" else torch.float32}
    expected, found = own(raw.float(), ids), logits(model, ids)
    if weights == "bfloat16":
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert torch.cosine_similarity(found, expected).mean() > (0.75 if weights == "int4" else 0.95)


def test_taps_are_hidden_states(subject: Subject) -> None:
    """Layer i is `hidden_states[i + 1]` of transformers, but the last layer is taken before the final norm."""
    model, raw, ids = subject.model, subject.raw, torch.tensor(prompts(9))
    n = model.num_layers
    seen: list[torch.Tensor] = []
    last = LayerStack(raw, n).layers()[-1]
    hook = last.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        hidden = raw(ids, output_hidden_states=True).hidden_states
    hook.remove()
    nodes = Nodes(ids.numpy(), model.new_cache(1, 64), [0])
    out = model.forward(nodes, taps=(n - 1, EMBEDDING, 0, FINAL_NORM))
    assert out.features is not None
    for got, expected in zip(np.split(out.features, 4, -1), (seen[0], hidden[0], hidden[1], hidden[-1]), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-3)
    for wrong in (n, -3):
        with pytest.raises(ValueError, match="taps are layers"):
            model.forward(nodes, taps=(wrong,))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_callers_model_is_left_alone_unless_it_is_given_away(name: str) -> None:
    raw = tiny(name).bfloat16()
    raw.set_attn_implementation("sdpa")
    before = {n: (p.data_ptr(), p.dtype, p.clone()) for n, p in raw.named_parameters()}
    kinds, settings, ids = [type(m) for m in raw.modules()], dict(vars(raw.config)), torch.tensor(prompts(7))
    text = raw.generate(ids, do_sample=False, max_new_tokens=6)
    model = HFModel(raw)
    logits(model, ids)
    assert [type(m) for m in raw.modules()] == kinds
    assert vars(raw.config) == settings
    for n, p in raw.named_parameters():
        pointer, dtype, value = before[n]
        assert (p.data_ptr(), p.dtype) == (pointer, dtype)
        assert torch.equal(p, value)
    assert torch.equal(raw.generate(ids, do_sample=False, max_new_tokens=6), text)
    assert model.model.get_input_embeddings().weight.data_ptr() == raw.get_input_embeddings().weight.data_ptr()
    assert HFModel(raw, own=True).model is raw
    assert not any(isinstance(m, torch.nn.Linear) for m in raw.modules())


def test_rotary_scales_do_not_depend_on_the_batch() -> None:
    """Phi-3's long factors follow the longest position of a forward in transformers; here, what the cache may hold."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
    }  # fmt: skip
    raw = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    model, short, long = HFModel(raw), torch.tensor(prompts(14)), torch.tensor(prompts(24))
    torch.testing.assert_close(logits(model, short, 16), own(raw, short), atol=1e-4, rtol=1e-4)
    whole, cache, pieces = logits(model, long, 128), model.new_cache(1, 128), list[np.ndarray]()
    for token in long[0].tolist():
        pieces.append(model.forward(Nodes(np.array([[token]]), cache, [0])).logits[0, 0])
        cache.commit([0], [[0]])
    assert np.array_equal(whole, np.stack(pieces))
    torch.testing.assert_close(whole, own(raw, long), atol=1e-4, rtol=1e-4)


_HEADS = {"num_key_value_heads": 2, "intermediate_size": 44}
_T5 = {"d_model": 32, "d_ff": 44, "num_layers": 1, "num_heads": 4, "d_kv": 8}
_GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
_FALCON = {"alibi": False, "new_decoder_architecture": False}
_OWN = "outrider's attention cannot take the place of its own|it gives other logits"


@pytest.mark.parametrize(
    ("name", "auto", "config", "why"),
    [
        ("t5", AutoModelForSeq2SeqLM, _T5, "encoder-decoder"),
        ("llama", AutoModel, _HEADS, "no language-model head"),
        ("bert", AutoModelForCausalLM, {"intermediate_size": 44}, "it gives other logits than by itself"),
        ("gptj", AutoModelForCausalLM, _GPTJ, _OWN),
        ("falcon", AutoModelForCausalLM, _FALCON, _OWN),
    ],
)
def test_refusals_say_why(name: str, auto: type, config: dict[str, object], why: str) -> None:
    """What attends both ways, or by its own code, is found out by the check."""
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = auto.from_config(AutoConfig.for_model(name, **{**small, **config}))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match=why):
        HFModel(model)
