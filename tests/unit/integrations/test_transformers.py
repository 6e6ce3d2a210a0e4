"""outrider through `model.generate(custom_generate=...)`: the same tokens as without it, or a refusal that says why."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteria
from transformers.generation import logits_process as lp
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import outrider
from outrider.integrations.transformers import CustomGenerate
from outrider.models.builtin.shipped import builtin_folder

VOCAB = 61
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}


def llama(seed: int, hidden: int = 32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama(0)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return llama(1, 16)


@pytest.fixture(scope="module")
def fast(model: PreTrainedModel) -> CustomGenerate:
    return outrider.custom_generate(SUFFIX)


PROMPT = torch.tensor([[5, 9, 5, 9, 7, 5, 9]])
PADDED = torch.tensor([[0, 0, 0, 7, 8, 9], [4, 5, 6, 4, 5, 6], [0, 0, 0, 0, 0, 3]])
MASK = (PADDED != 0).long()


@pytest.mark.parametrize("method", ["suffix", "ngram", "draft_model", "none"])
def test_greedy_rows_equal_generate(model: PreTrainedModel, draft: PreTrainedModel, method: str) -> None:
    config = {"suffix": SUFFIX, "ngram": NGRAM, "draft_model": {"model": draft}, "none": None}[method]
    ours = outrider.custom_generate(config)
    for inputs in ({"inputs": PROMPT}, {"inputs": PADDED, "attention_mask": MASK}):
        want = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        got = model.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=ours)
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    assert ours.last is not None
    assert ours.last.guarantee.value == "exact-tokens"
    assert len(ours.last.metrics) == len(PADDED)


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": [2, 11, 30]},
        {"min_new_tokens": 9, "eos_token_id": list(range(2, 40))},
        {"min_length": 12, "eos_token_id": list(range(2, 40))},
        {"suppress_tokens": [5, 6, 7, 8]},
        {"sequence_bias": [[[12], 3.0], [[40], -2.0]]},
        {"max_length": 17},
        {"num_return_sequences": 1, "renormalize_logits": True},
        {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=44, pad_token_id=3)},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_equal_generate(model: PreTrainedModel, fast: object, settings: dict) -> None:
    settings = (
        {"max_new_tokens": 24, **settings} if not {"max_length", "generation_config"} & set(settings) else settings
    )
    want = model.generate(PADDED, attention_mask=MASK, **settings)
    assert (
        model.generate(PADDED, attention_mask=MASK, **copy.deepcopy(settings), custom_generate=fast).tolist()
        == want.tolist()
    )


def test_bad_words_equal_generate(model: PreTrainedModel, fast: object) -> None:
    """Words that the model wants to write: a token, and a pair."""
    free = model.generate(PADDED, attention_mask=MASK, max_new_tokens=24).tolist()
    words = [[row[9]] for row in free] + [row[6:8] for row in free]
    words = [w for w in words if w != [2]]  # transformers never forbids the end token
    want = model.generate(PADDED, attention_mask=MASK, max_new_tokens=24, bad_words_ids=words).tolist()
    assert want != free
    got = model.generate(PADDED, attention_mask=MASK, max_new_tokens=24, bad_words_ids=words, custom_generate=fast)
    assert got.tolist() == want


def test_repetition_penalty_equals_generate(model: PreTrainedModel, fast: object) -> None:
    """Without padding: transformers counts padding as text, outrider does not."""
    settings = {"repetition_penalty": 1.3, "max_new_tokens": 30}
    assert (
        model.generate(PROMPT, **settings, custom_generate=fast).tolist() == model.generate(PROMPT, **settings).tolist()
    )


def test_sampling_follows_the_warpers(model: PreTrainedModel, fast: object) -> None:
    """Each sampled token is one that transformers' own processors leave possible; seeds decide the text."""
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 4, "top_p": 0.8, "min_p": 0.05, "max_new_tokens": 12}
    torch.manual_seed(3)
    got = model.generate(PROMPT, **settings, num_return_sequences=6, custom_generate=fast)
    torch.manual_seed(3)
    assert model.generate(PROMPT, **settings, num_return_sequences=6, custom_generate=fast).tolist() == got.tolist()
    assert len({tuple(r) for r in got.tolist()}) > 1
    warp = lp.LogitsProcessorList(
        [lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(4), lp.TopPLogitsWarper(0.8), lp.MinPLogitsWarper(0.05)]
    )
    with torch.no_grad():
        logits = model(got).logits
    for row, out in zip(got.tolist(), logits, strict=True):
        for at in range(PROMPT.shape[1], len(row)):
            if 2 in row[PROMPT.shape[1] : at]:
                break
            assert warp(None, out[at - 1 : at].clone())[0, row[at]] > float("-inf")
    one = model.generate(PROMPT, **settings, seed=8, custom_generate=fast)
    assert model.generate(PROMPT, **settings, seed=8, custom_generate=fast).tolist() == one.tolist()
    assert fast.last.seed == 8


class Columns(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.prompt: torch.Tensor | None = None
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is None:
            self.prompt = value
        else:
            self.columns.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_gets_what_transformers_gives_it(model: PreTrainedModel, fast: object) -> None:
    seen = []
    for way in ({}, {"custom_generate": fast}):
        streamer = Columns()
        model.generate(
            PADDED, attention_mask=MASK, max_new_tokens=20, eos_token_id=[2, 11, 30], streamer=streamer, **way
        )
        assert streamer.ended == 1
        assert streamer.prompt is not None
        seen.append(streamer.columns)
    assert seen[0] == seen[1]


def test_stop_strings_end_where_transformers_ends_them() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:code-draft"))
    model = LlamaForCausalLM.from_pretrained(builtin_folder("builtin:code-draft"))
    ours = outrider.custom_generate(SUFFIX, tokenizer=tokenizer)
    inputs = tokenizer(["def push(self, item):\n", "class Stack:\n    def"], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 40, "stop_strings": ["self", "return"], "do_sample": False}
    want = model.generate(**inputs, **settings, tokenizer=tokenizer)
    assert model.generate(**inputs, **settings, custom_generate=ours).tolist() == want.tolist()
    with pytest.raises(ValueError, match=r"custom_generate\(\.\.\., tokenizer=tokenizer\)"):
        model.generate(**inputs, **settings, custom_generate=outrider.custom_generate(SUFFIX))


def test_return_dict(model: PreTrainedModel, fast: object) -> None:
    out = model.generate(PROMPT, max_new_tokens=5, return_dict_in_generate=True, custom_generate=fast)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences.tolist() == model.generate(PROMPT, max_new_tokens=5).tolist()


def test_the_users_model_stays_as_it_was(draft: PreTrainedModel) -> None:
    model = llama(4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modules, settings = [type(m) for m in model.modules()], dict(vars(model.config))
    model.train()
    model.generate(PROMPT, max_new_tokens=6, custom_generate=outrider.custom_generate({"model": draft}))
    assert all(m.training for m in model.modules())
    model.eval()
    assert [type(m) for m in model.modules()] == modules
    assert vars(model.config) == settings
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_engine_is_made_once_for_the_weights_and_goes_with_the_model() -> None:
    model, ours = llama(5), outrider.custom_generate(SUFFIX)
    model.generate(PROMPT, max_new_tokens=4, custom_generate=ours)
    first = ours.engine(model)
    model.generate(PADDED, attention_mask=MASK, max_new_tokens=4, custom_generate=ours)
    assert ours.engine(model) is first
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    want = model.generate(PROMPT, max_new_tokens=20)
    assert model.generate(PROMPT, max_new_tokens=20, custom_generate=ours).tolist() == want.tolist()
    assert ours.engine(model) is not first
    gone = weakref.ref(ours.engine(model))
    del first, model, p
    gc.collect()
    assert gone() is None


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Ones(lp.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 3}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"logits_processor": lp.LogitsProcessorList([Ones()])}, "Ones"),
        ({"stopping_criteria": [Never()]}, "Never"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
        ({"forced_eos_token_id": 2}, "ForcedEOS"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4]}, "PrefixConstrained"),
        ({"sequence_bias": [[[3, 4], 2.0]]}, "single tokens"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, "padding_side"),
        ({"position_ids": torch.arange(3, 10)[None]}, "position_ids"),
        ({"temperature": 0.5, "logits_processor": [lp.TemperatureLogitsWarper(0.5)], "top_k": 3}, None),
    ],
    ids=lambda s: next(iter(s)) if isinstance(s, dict) else None,
)
def test_what_cannot_be_honoured_is_refused(
    model: PreTrainedModel, fast: object, settings: dict, message: str | None
) -> None:
    settings = {"max_new_tokens": 4, "custom_generate": fast, **settings}
    if message is None:  # a warper does not matter when nothing is sampled
        assert model.generate(PROMPT, **settings).shape == (1, PROMPT.shape[1] + 4)
        return
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, **settings)


def test_assistant_model_is_refused(model: PreTrainedModel, draft: PreTrainedModel, fast: object) -> None:
    with pytest.raises(ValueError, match="give the draft model to outrider"):
        model.generate(PROMPT, max_new_tokens=4, assistant_model=draft, custom_generate=fast)


def test_misspelt_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        outrider.custom_generate({"method": "suffix", "num_speculative_token": 3})
    with pytest.raises(TypeError, match="max_seqs"):
        outrider.custom_generate(SUFFIX, max_seqs=3)
