"""From prompts to texts on the built-in pair: the API, identical text, and errors that say what would work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import pytest
from light import Late
from patience import PATIENCE

from outrider import LLM, Delta, SamplingParams
from outrider.core.outputs import SpeculativeMetrics
from outrider.drafters import BaseDrafter

logs = Late("transformers.utils.logging")

PAIR = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
PROMPTS = [
    "def quicksort(xs):\n",
    "import os\nimport sys\n\n\nclass Config:\n",
    "    def __init__(self, name, value):\n        self.name = name\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("builtin:code")


def test_metrics_are_numbers_of_vllms_shape_whatever_was_accepted() -> None:
    """AIPerf 0.13 drops a record with null rates, and one whose histogram has not num_spec_tokens + 1 buckets."""
    none = SpeculativeMetrics.of([0, 0], [0, 0], 4)
    assert (none.mean_acceptance_length, none.draft_acceptance_rate) == (1.0, 0.0)
    assert none.acceptance_histogram == [2, 0, 0, 0, 0]
    assert none.acceptance_histogram_by_draft_length == {0: [2]}
    empty = SpeculativeMetrics.of([], [], 2)
    assert (empty.mean_acceptance_length, empty.draft_acceptance_rate) == (1.0, 0.0)
    assert empty.acceptance_histogram == [0, 0, 0]
    some = SpeculativeMetrics.of([4, 2, 9], [1, 2, 3], 4)  # the last step drafted a tree
    assert some.acceptance_histogram == [0, 1, 1, 1, 0]
    assert (some.num_spec_steps, some.num_draft_tokens, some.num_accepted_draft_tokens) == (3, 15, 6)
    assert (some.mean_acceptance_length, some.draft_acceptance_rate) == (3.0, 0.4)
    assert {k: len(counts) for k, counts in some.acceptance_histogram_by_draft_length.items()} == {2: 3, 4: 5, 9: 10}
    deeper = SpeculativeMetrics.of([3], [3], 2)
    assert (deeper.num_spec_tokens, deeper.acceptance_histogram) == (3, [0, 0, 0, 1])


def test_streamed_pieces_join_to_the_text() -> None:
    llm = LLM("builtin:code", speculative_config={**PAIR, "controller": "fixed"})
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=60, stop=["\n\n\n"])
    deltas = list(llm.stream(PROMPTS[0], params))
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert "".join(d.text for d in deltas) == whole.text
    assert all("".join(t for t, _ in d.pieces) == d.text for d in deltas)
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].output is not None
    assert any(drafted for d in deltas for _, drafted in d.pieces)


def test_a_reader_who_leaves_early_leaves_the_engine_clean() -> None:
    llm = LLM("builtin:code", speculative_config=PAIR, max_num_seqs=2)
    for delta in llm.stream(PROMPTS[0], SamplingParams(max_tokens=60)):
        if delta.text:
            break
    assert len(llm.decoder.free) == 2
    assert not llm.decoder.sequences
    assert llm.generate(PROMPTS, SamplingParams(max_tokens=5))


def test_threads_and_readers_share_a_model(plain: LLM) -> None:
    """Each gets the text that it would get alone, and each stream its last delta, whoever steps."""
    llm = LLM("builtin:code", speculative_config=PAIR, max_num_seqs=2)
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=24)
    want = [out.outputs[0].token_ids for out in plain.generate(PROMPTS, params)]

    def streamed(prompt: str) -> list[int]:
        return joined(list(llm.stream(prompt, params)))

    def joined(deltas: list[Delta]) -> list[int]:
        assert deltas[-1].output is not None
        assert [delta.ended for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        return [token for delta in deltas for token in delta.token_ids]

    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(lambda p=p: llm.generate(p, params)[0].outputs[0].token_ids) for p in PROMPTS * 2]
        parts = [pool.submit(streamed, p) for p in PROMPTS * 2]
        assert [future.result(PATIENCE) for future in whole] == want * 2
        assert [future.result(PATIENCE) for future in parts] == want * 2
    turns = list(zip_longest(*(llm.stream(p, params) for p in PROMPTS[:2])))
    assert [joined([delta for delta in own if delta]) for own in zip(*turns, strict=True)] == want[:2]
    assert llm.scheduler.idle
    assert not llm.scheduler.problems()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, 2, 3], r'\{"prompt_token_ids": \[17, 4\]\}, got 1'),
        ([[1, 2], [3]], r"got \[1, 2\]"),
        (None, "got None"),
        (b"x", "got 120"),
        ("a\ud83d", "half of a surrogate pair"),
        ({"prompt_token_ids": "12"}, "whole numbers.*got '12'"),
        ({"prompt_token_ids": [1.7]}, r"whole numbers.*got \[1.7\]"),
    ],
)
def test_what_is_no_prompt_is_refused_with_one(plain: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain.generate(prompt)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], "messages.0 has no content"),
        ([{"role": "user", "content": 5}], "messages.0.content is a string or a list"),
        ([{"role": "bogus", "content": "x"}], "messages.0.role is one of system, developer, user"),
        ([{"role": "tool", "content": "x"}], "the model's chat template does not take these messages: no tools"),
        ([[]], "there are no messages"),
    ],
)
def test_messages_that_cannot_be_a_prompt(
    plain: LLM, messages: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    )
    monkeypatch.setattr(plain.loaded.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=words):
        plain.generate(messages)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs must be a whole number, got '8'"),
        ({"max_model_len": "8k"}, "max_model_len must be a whole number, got '8k'"),
        ({"controller": "fixed"}, r'speculative_config=\{"controller": "fixed"\}'),
        ({"drafter": BaseDrafter}, r"is a class, and a drafter is an object: drafter=BaseDrafter\(\)"),
        ({"device": "mps"}, "device must be auto, cpu or cuda, got 'mps'"),
        ({"device": None}, "device must be auto, cpu or cuda, got None"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be"),
        ({"model": None}, "a model is a folder.*got None"),
        ({"model": ""}, "a model is a folder.*got ''"),
    ],
)
def test_wrong_arguments_say_what_would_work(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**{"model": "builtin:code", **given})


def test_loading_draws_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    logs.enable_progress_bar()  # the other tests run without, as the command line does
    try:
        LLM("builtin:code")
    finally:
        logs.disable_progress_bar()
    assert capfd.readouterr().err == ""


def test_seeds_n_and_logprobs(plain: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, logprobs=2, prompt_logprobs=1)
    out = plain.generate(PROMPTS[0], params)[0]
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in out.outputs}) > 1
    again = plain.generate(PROMPTS[0], params.with_(n=1, seed=out.outputs[1].seed))[0].outputs[0]
    assert again.token_ids == out.outputs[1].token_ids
    for o in out.outputs:
        assert o.logprobs is not None
        assert len(o.logprobs) == len(o.token_ids)
        assert all(t in entry and 2 <= len(entry) <= 3 for t, entry in zip(o.token_ids, o.logprobs, strict=True))
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    fast = LLM("builtin:code", speculative_config=PAIR).generate(PROMPTS[0], params.with_(n=1, seed=7))[0]
    slow = plain.generate(PROMPTS[0], params.with_(n=1, seed=7))[0]
    assert fast.outputs[0].logprobs == slow.outputs[0].logprobs


def test_prompts_of_every_kind(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = plain.encode(PROMPTS[0])
    assert (
        plain.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
        == plain.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    )
    assert len(plain.generate((p for p in PROMPTS), params)) == len(PROMPTS)
    with pytest.raises(ValueError, match="sampling_params are SamplingParams"):
        plain.generate(PROMPTS[0], {"temperature": 0})  # type: ignore[arg-type]
    two = [params, params.with_(max_tokens=2)]
    assert [len(o.outputs[0].token_ids) for o in plain.generate(PROMPTS[:2], two)] == [4, 2]
    with pytest.raises(ValueError, match="no chat template"):
        plain.generate([{"role": "user", "content": "hi"}], params)
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        plain.generate(PROMPTS[:3], two)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        plain.generate({"ids": [1]}, params)
    with pytest.raises(ValueError, match="empty"):
        plain.generate("", params)
    with pytest.raises(ValueError, match="max_tokens="):
        plain.generate(PROMPTS[0], params.with_(max_tokens=10**6))


def test_a_draft_with_another_vocabulary_is_refused_by_name() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match=r"vocabulary of 50 .* 8192"):
        LLM("builtin:code", speculative_config={"method": "draft_model", "model": other})


def test_full_slots_are_not_preempted() -> None:
    """Every slot holds a text of the whole length: a library's batch is never read twice."""
    llm = LLM("builtin:code", device="cpu", max_num_seqs=3, max_model_len=48)
    prompts = [{"prompt_token_ids": [n + 1] * 8} for n in range(3)]
    seen: list[int] = []
    read = llm.decoder.prefill
    llm.decoder.prefill = lambda sequences, rows: (seen.extend(s.id for s in sequences), read(sequences, rows))[1]  # type: ignore[method-assign]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert len(seen) == 3
