"""Every architecture through the one adapter: transformers' own tokens, with trees and ragged batches, and rows that do
not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from architectures import ARCHITECTURES, NOT_BIT_EQUAL, VOCAB, prompts, tiny
from helpers import decoder, request
from row_checks import NEW, Guided, assert_rows_do_not_depend_on_their_neighbours, one_at_a_time, outputs
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.kernels import cpu as native
from outrider.kernels.vectors import pack_vectors, unpack_vectors
from outrider.models.attention import attend, attend_masked, attend_reference, write
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.cache import KV_CACHE_DTYPES
from outrider.models.hf import hooks
from outrider.models.hf.layers import LayerStack
from outrider.models.hf.model import HFModel, UnsupportedModel
from outrider.models.nodes import Nodes


@dataclass(eq=False)
class Subject:
    raw: PreTrainedModel
    model: HFModel
    texts: list[list[int]]  # prompt and transformers' own greedy continuation


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest) -> Subject:
    raw = tiny(request.param)
    texts = [greedy(raw, prompt) for prompt in prompts(3, 13)]
    return Subject(raw, HFModel(raw), texts)


def greedy(raw: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' own tokens; the test's models must be sure of them, or a difference would mean nothing."""
    out = raw.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3, "a near-tie: choose another seed for this architecture"
    return out.sequences[0].tolist()


def test_greedy_tokens_are_those_of_transformers(subject: Subject) -> None:
    assert outputs(subject.model, subject.texts) == subject.texts


def test_logits_are_those_of_transformers(subject: Subject) -> None:
    ids = torch.tensor(subject.texts[1:])
    with torch.inference_mode():
        expected = subject.raw(ids).logits
    logits = subject.model.forward(Nodes(ids, subject.model.new_cache(1, 64), [0])).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_head_of_some_tokens(subject: Subject) -> None:
    """Its logits are those of the whole head up to rounding, and -inf for every other token."""
    some = torch.arange(0, VOCAB, 3)
    model, nodes = HFModel(subject.raw, head_ids=some), torch.tensor(subject.texts[1:])
    expected = torch.full((*nodes.shape, VOCAB), -torch.inf)
    expected[..., some] = subject.model.forward(Nodes(nodes, subject.model.new_cache(1, 64), [0])).logits[..., some]
    for want in ("all", "last", "none"):
        logits = model.forward(Nodes(nodes, model.new_cache(1, 64), [0]), want=want).logits
        wanted = {"all": expected, "last": expected[:, -1:], "none": expected[:, :0]}[want]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert model.vocab_size == VOCAB == subject.model.vocab_size


def test_greedy_tokens_with_trees(subject: Subject) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    run = decoder(subject.model, Guided(subject.texts), rows=2, budget=Budget(4, 3, 12), end_ids=())
    rows = run.generate([request(t[:-NEW], params) for t in subject.texts])
    assert [row.tokens for row in rows] == subject.texts
    assert max(row.steps for row in rows) < NEW / 2, "the trees were meant to be right now and then"


def test_rows_do_not_depend_on_their_neighbours(subject: Subject) -> None:
    if subject.model.model.config.model_type in NOT_BIT_EQUAL:
        assert not subject.model.batch_invariant
        pytest.skip("attends by itself; its tokens are checked above")
    assert subject.model.batch_invariant
    assert_rows_do_not_depend_on_their_neighbours(subject.model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gpt_oss", "falcon"])
def test_rows_without_the_native_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    raw = tiny(name)
    model = HFModel(raw)
    assert_rows_do_not_depend_on_their_neighbours(model)
    texts = [greedy(raw, prompt) for prompt in prompts(3, 13)]
    assert outputs(model, texts, Guided(texts)) == texts


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt_neo"])
def test_the_masked_form_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerators run, run here."""
    monkeypatch.setattr(hooks, "attend", attend_masked)
    raw = tiny(name)
    texts = [greedy(raw, prompt) for prompt in prompts(3, 13)]
    assert outputs(HFModel(raw), texts, Guided(texts)) == texts


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("form", [attend, attend_masked, attend_reference])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gptj", "falcon", *NOT_BIT_EQUAL])
def test_a_packed_cache_is_a_float_cache_of_rounded_vectors(
    name: str, form: Callable[..., torch.Tensor], kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every route and in every form of attention, bit for bit."""
    raw, ids = tiny(name), torch.tensor(prompts(20))
    model, exact = HFModel(raw, kv_cache_dtype=kv_cache_dtype), HFModel(raw)
    monkeypatch.setattr(hooks, "attend", form)
    got = model.forward(Nodes(ids, model.new_cache(1, 64), [0])).logits
    dtype = KV_CACHE_DTYPES[kv_cache_dtype]
    assert dtype is not None

    def rounded(nodes: Nodes, layer: int, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return write(nodes, layer, *(unpack_vectors(pack_vectors(v, dtype)) for v in vectors))

    exactly = exact.forward(Nodes(ids, exact.new_cache(1, 64), [0])).logits
    monkeypatch.setattr(hooks, "write", rounded)
    assert torch.equal(got, exact.forward(Nodes(ids, exact.new_cache(1, 64), [0])).logits)
    assert not torch.equal(got, exactly)


def test_rows_with_many_torch_threads() -> None:
    """Torch cuts elementwise work of more than 32768 elements among its threads."""
    if not native.available():
        pytest.skip("needs the native kernels")
    model = HFModel(tiny("llama", intermediate_size=1090, num_hidden_layers=1))
    ids = torch.randint(0, VOCAB, (1, 61))
    alone = one_at_a_time(model, ids[0].tolist())
    torch.set_num_threads(3)
    try:
        assert torch.equal(model.forward(Nodes(ids, model.new_cache(1, 64), [0])).logits[0], alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "falcon"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, temperature: float) -> None:
    model = HFModel(tiny(name))
    run = decoder(model, ModelDrafter(HFModel(tiny(name)), 2, 128), rows=2, depth=3, end_ids=())
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    rows = run.generate([request(p, params, seed) for seed, p in enumerate(prompts(2, 9))])
    assert [row.steps for row in rows] == [6, 6]


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "mixtral", "gpt_oss"])
def test_bfloat16_weights_are_kept_and_computed_with_in_float32(name: str) -> None:
    raw = tiny(name).bfloat16()
    model = HFModel(raw)
    assert {p.dtype for p in raw.parameters()} == {torch.bfloat16}
    assert_rows_do_not_depend_on_their_neighbours(model)
    ids = torch.tensor(prompts(12))
    with torch.inference_mode():
        expected = raw.float()(ids).logits[0]
    torch.testing.assert_close(
        model.forward(Nodes(ids, model.new_cache(1, 64), [0])).logits[0], expected, atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "weights", "kv_cache_dtype"),
    [
        *((name, "auto", "int8") for name in ("llama", "gemma2", "gpt_oss", "gptj", "falcon")),
        *(
            (name, weights, "auto")
            for name in ("llama", "gpt2", "qwen3_moe", "gpt_oss")
            for weights in ("int8", "int4")
        ),
        *(
            (name, weights, "auto")
            for name in ("mixtral", "deepseek_v3", "glm4_moe")
            for weights in ("bfloat16", "int8")
        ),
    ],
)
def test_rows_in_other_precisions(name: str, weights: str, kv_cache_dtype: str) -> None:
    """The whole model, router included."""
    if weights.startswith("int") and not native.available():
        pytest.skip("needs the native kernels")
    raw, ids = tiny(name), torch.tensor(prompts(12))
    model = HFModel(raw, weights=weights, kv_cache_dtype=kv_cache_dtype)
    assert model.batch_invariant
    assert_rows_do_not_depend_on_their_neighbours(model)
    with torch.inference_mode():
        expected = raw(ids).logits[0]
    ours = model.forward(Nodes(ids, model.new_cache(1, 64), [0])).logits[0]
    assert torch.cosine_similarity(ours, expected).mean() > (0.75 if weights == "int4" else 0.95)


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
    taps = (n - 1, EMBEDDING, 0, FINAL_NORM)
    out = model.forward(Nodes(ids, model.new_cache(1, 64), [0]), taps=taps)
    assert out.features is not None
    for got, expected in zip(out.features.chunk(4, -1), (seen[0], hidden[0], hidden[1], hidden[-1]), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)
    assert model.forward(Nodes(ids, model.new_cache(1, 64), [0])).features is None
    for wrong in (n, -3):
        with pytest.raises(ValueError, match="taps are layers"):
            model.forward(Nodes(ids, model.new_cache(1, 64), [0]), taps=(wrong,))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neo"])
def test_the_callers_model_is_left_alone(name: str) -> None:
    raw = tiny(name).bfloat16()
    raw.set_attn_implementation("sdpa" if name != "gpt_neo" else "eager")
    before = {n: (p.data_ptr(), p.dtype, p.clone()) for n, p in raw.named_parameters()}
    kinds = [type(m) for m in raw.modules()]
    settings = dict(vars(raw.config))
    ids = torch.tensor(prompts(7))
    text = raw.generate(ids, do_sample=False, max_new_tokens=6)
    model = HFModel(raw)
    model.forward(Nodes(ids, model.new_cache(1, 64), [0]))
    assert [type(m) for m in raw.modules()] == kinds
    assert vars(raw.config) == settings
    for n, p in raw.named_parameters():
        pointer, dtype, value = before[n]
        assert (p.data_ptr(), p.dtype) == (pointer, dtype)
        assert torch.equal(p, value)
    assert torch.equal(raw.generate(ids, do_sample=False, max_new_tokens=6), text)
    assert model.model.get_input_embeddings().weight.data_ptr() == raw.get_input_embeddings().weight.data_ptr()


def test_own_takes_the_model_over() -> None:
    raw = tiny("llama")
    model = HFModel(raw, own=True)
    assert model.model is raw
    assert not any(isinstance(m, torch.nn.Linear) for m in raw.modules())


def test_rotary_scales_do_not_depend_on_the_batch() -> None:
    """Phi-3's long factors follow the longest position of a forward in transformers; here, what the cache may hold."""
    n = 4  # half the rotary dimension
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * n, "long_factor": [3.0] * n,
    }  # fmt: skip
    raw = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    model = HFModel(raw)
    ids = torch.tensor(prompts(14))
    with torch.inference_mode():
        short = raw(ids).logits[0]
    torch.testing.assert_close(
        model.forward(Nodes(ids, model.new_cache(1, 16), [0])).logits[0], short, atol=1e-4, rtol=1e-4
    )

    def long(chunks: list[int]) -> torch.Tensor:
        text, cache, at, out = prompts(24)[0], model.new_cache(1, 128), 0, []
        for n in chunks:
            out.append(model.forward(Nodes(torch.tensor([text[at : at + n]]), cache, [0])).logits[0])
            cache.commit([0], [range(n)])
            at += n
        return torch.cat(out)

    assert torch.equal(long([24]), long([1] * 24))
    with torch.inference_mode():
        expected = raw(torch.tensor(prompts(24))).logits[0]
    torch.testing.assert_close(long([24]), expected, atol=1e-4, rtol=1e-4)


def _refused(name: str, auto=AutoModelForCausalLM, **config) -> str:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = auto.from_config(AutoConfig.for_model(name, **{**small, **config}))
    with pytest.raises(UnsupportedModel) as caught:
        HFModel(model)
    return str(caught.value)


def test_refusals_say_why() -> None:
    heads = {"num_key_value_heads": 2, "intermediate_size": 44}
    t5 = {"d_model": 32, "d_ff": 44, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    assert "encoder-decoder" in _refused("t5", AutoModelForSeq2SeqLM, **t5)
    assert "no language-model head" in _refused("llama", AutoModel, **heads)
    assert "by itself" in _refused("bert", intermediate_size=44), "what attends both ways is found out by the check"
