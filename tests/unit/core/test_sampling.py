"""The distribution at a node: equal to transformers' own processors, the same in any batch, and with the node's own history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import noise
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from outrider.core.noise import Stream
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState, truncate
from outrider.core.types import Draft
from outrider.kernels.probabilities import softmax
from outrider.verify import match

V = 50


def history(params: SamplingParams, tokens: list[int], prompt: int, ends: tuple[int, ...] = ()) -> SequenceState:
    return SequenceState(params, ends, tuple(tuple(w) for w in params.bad_words), tokens, prompt)  # type: ignore[arg-type]


def distribution(
    params: SamplingParams, logits: np.ndarray, tokens: list[int], extra: list[int] | None = None, **options
) -> np.ndarray:
    prompt = options.pop("prompt", len(tokens))
    warp = LogitsWarper([history(params, tokens, prompt, **options)])
    return softmax(warp.scores(logits[None], [extra or []]))[0]


def theirs(processors: list, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    scores = LogitsProcessorList(processors)(torch.tensor([tokens]), torch.tensor(logits[None]))
    return scores.softmax(-1)[0].numpy()


def draws(n: int) -> list[np.ndarray]:
    return [*3 * np.random.default_rng(n).standard_normal((n, V), np.float32)]


@pytest.mark.parametrize(
    ("ours", "hfs"),
    [
        (SamplingParams(temperature=0.6), lambda: [hf.TemperatureLogitsWarper(0.6)]),
        (SamplingParams(top_k=7), lambda: [hf.TopKLogitsWarper(7)]),
        (SamplingParams(top_p=0.8), lambda: [hf.TopPLogitsWarper(0.8)]),
        (SamplingParams(min_p=0.1), lambda: [hf.MinPLogitsWarper(0.1)]),
        (
            SamplingParams(temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
            lambda: [
                hf.TemperatureLogitsWarper(1.7), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.05)
            ],
        ),
        (SamplingParams(repetition_penalty=1.4), lambda: [hf.RepetitionPenaltyLogitsProcessor(1.4)]),
        (SamplingParams(bad_words=([3], [7, 8], [1, 2, 9])), lambda: [hf.NoBadWordsLogitsProcessor([[3], [7, 8], [1, 2, 9]], 0)]),
        (SamplingParams(logit_bias={4: 2.5, 9: -3}), lambda: [hf.SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -3.0})]),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all filters", "repetition", "bad words", "bias"],
)  # fmt: skip
def test_distribution_equals_transformers_processors(ours: SamplingParams, hfs) -> None:
    for i, logits in enumerate(draws(12)):
        for tokens in ([1, 2], [5, 7], [i % V, 1, 2]):
            # the same text, with the last token still a draft token
            ahead = tokens[-1:] if i % 2 and len(tokens) > 2 else []
            got = distribution(ours, logits, tokens[: len(tokens) - len(ahead)], ahead)
            np.testing.assert_allclose(got, theirs(hfs(), logits, tokens), atol=1e-6, rtol=1e-5)


def test_penalties_count_the_output_and_the_draft_tokens_before_the_node() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits = draws(1)[0]
    got = distribution(params, logits, [1, 2, 2, 3], [3, 4], prompt=1)
    expected = logits.copy()
    for token, count in {2: 2, 3: 2, 4: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    np.testing.assert_allclose(got, softmax(expected), rtol=1e-6)


def test_min_tokens_forbids_every_end_until_then() -> None:
    params = SamplingParams(min_tokens=3)
    for drafted, allowed in (([], False), ([7], False), ([7, 7], True)):
        got = distribution(params, draws(1)[0], [1, 2, 4], drafted, prompt=2, ends=(5, 6))
        assert bool(got[[5, 6]].sum() > 0) == allowed


def test_allowed_tokens_and_greedy_mass() -> None:
    got = distribution(SamplingParams(allowed_token_ids=[2, 9]), draws(1)[0], [1])
    assert got.nonzero()[0].tolist() == [2, 9]
    tie = np.zeros(V, np.float32)
    tie[[4, 30]] = 1.0
    assert distribution(SamplingParams(temperature=0), tie, [1]).argmax() == 4
    assert distribution(SamplingParams(temperature=0), tie, [1])[4] == 1


@given(st.integers(1, 400), st.floats(0.01, 1.0), st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_top_p_keeps_the_shortest_run_that_reaches_its_mass(size: int, top_p: float, seed: int, ties: bool) -> None:
    scores = np.random.default_rng(seed).standard_normal(size, np.float32)
    scores = (scores * 2).round() if ties else scores
    kept = np.isfinite(truncate(scores, SamplingParams(top_p=top_p)))
    p = np.exp(scores.astype(np.float64))
    p /= p.sum()
    assert p[kept].sum() >= top_p - 1e-5
    smallest = p[kept].min()
    assert p[kept].sum() - smallest <= top_p + 1e-5
    assert not (p[~kept] > smallest + 1e-9).any()


def test_a_row_is_the_same_in_any_batch() -> None:
    every = [
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(top_p=0.5), SamplingParams(repetition_penalty=2.0), SamplingParams(temperature=0, presence_penalty=1),
    ]  # fmt: skip
    logits = np.stack(draws(len(every)))
    rows = [history(p, [1, 2, 3], 2) for p in every]
    seeds, at = list(range(len(every))), np.full((len(every),), 3)
    together = LogitsWarper(rows).scores(logits, [[]] * len(every))
    tokens = LogitsWarper(rows).draw(logits, [[]] * len(every), noise(seeds), Stream.TOKEN, at)
    for i, row in enumerate(rows):
        assert np.array_equal(LogitsWarper([row]).scores(logits[i : i + 1], [[]])[0], together[i])
        alone = LogitsWarper([row]).draw(logits[i : i + 1], [[]], noise([i]), Stream.TOKEN, at[:1])
        assert alone[0] == tokens[i] == (together[i] + noise([i]).gumbel(Stream.TOKEN, at[:1], V)[0]).argmax()


@pytest.mark.parametrize("temperature", [9.9e-7, 1e-38, 1e-40, 5e-324])
def test_a_temperature_that_no_float_can_divide_by_is_greedy(temperature: float) -> None:
    params, logits = SamplingParams(temperature=temperature), 30 * draws(1)[0]
    assert params.greedy
    warp = LogitsWarper([history(params, [0], 1)])
    best = int(logits.argmax())
    key = (1, Stream.TOKEN.value, 2, 3)
    assert warp.draw_row(0, logits, (), key) == best
    assert warp.draw(logits[None], [[]], noise([1]), Stream.TOKEN, np.array([3])).tolist() == [best]
    assert int(distribution(params, logits, [0]).argmax()) == best
    assert not SamplingParams(temperature=1e-6).greedy
    assert distribution(SamplingParams(temperature=1e-6), logits, [0])[best] == 1


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_logits_that_are_not_numbers_are_no_token(
    params: SamplingParams, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = draws(1)[0]
    logits[7] = wrong
    warp = LogitsWarper([history(params, [0], 1)])
    for _ in ("kernels", "numpy"):
        assert warp.draw_row(0, logits, (), (1, Stream.TOKEN.value, 2, 3)) == -1
        assert warp.draw(logits[None], [[]], noise([1]), Stream.TOKEN, np.array([3])).tolist() == [-1]
        monkeypatch.setattr("outrider.core.sampling.cpu.available", lambda: False)


def test_no_distribution_gives_no_token() -> None:
    good = draws(1)[0]
    for bad in (np.full(V, np.nan, np.float32), np.append(good[:-1], np.float32(np.nan))):
        for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3)):
            rows = [history(params, [1], 1), history(params, [1], 1)]
            got = LogitsWarper(rows).draw(
                np.stack([bad, good]), [[], []], noise([0, 0]), Stream.TOKEN, np.array([1, 1])
            )
            assert got[0] == -1
            assert got[1] >= 0
    nothing = SamplingParams(allowed_token_ids=[3], bad_words=([3],))
    got = LogitsWarper([history(nothing, [1], 1)]).draw(good[None], [[]], noise([0]), Stream.TOKEN, np.array([1]))
    assert got[0] == -1


def test_distributions_see_the_ancestors_of_their_node_and_nothing_else() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    draft = Draft(np.array([[1, 5, 6, 7, 8]]), np.array([[-1, 0, 0, 2, 1]]))
    logits = np.stack(draws(5))[None]
    distributions = LogitsDistribution(logits, draft, LogitsWarper([history(params, [1], 0)]))
    for node, path in enumerate(([], [5], [6], [6, 7], [5, 8])):
        expected = softmax(LogitsWarper([history(params, [1], 0)]).scores(logits[:, node], [path]))
        assert np.array_equal(distributions.probs(np.array([node])), expected)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"temperature": -1}, "temperature must be from 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"min_tokens": 9, "max_tokens": 3}, "raise max_tokens"),
        ({"n": 0}, "n must be"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"stop": [3]}, "use stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, or None, got 1.5"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"n": "2"}, "n must be a whole number, got '2'"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias must be token ids with .* \{17: -2.0\}"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"bad_words": "foo"}, "bad_words must be a list, got 'foo'"),
        ({"bad_words": [5]}, "bad_words must be strings or lists"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop": 5}, "use stop_token_ids"),
        ({"prediction": 5}, "prediction must be a text or token ids"),
    ],
)
def test_bad_parameters_say_what_would_work(bad: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**bad)


@pytest.mark.parametrize("ids", [["3"], [1.0], [torch.tensor(3)], [5], [-1]], ids=repr)
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_what_is_no_token_id_is_refused(name: str, ids: Any) -> None:
    """A text would not stop at it, in silence."""
    with pytest.raises(ValueError, match=f"{name} holds .*outside the vocabulary of 5 tokens"):
        SamplingParams(**{name: ids}).check_vocab(5)


def test_lists_may_be_arrays_or_none() -> None:
    SamplingParams(stop_token_ids=np.array([1, 4]), allowed_token_ids=np.array([0, 2])).check_vocab(5)
    assert SamplingParams(stop_token_ids=None, bad_words=None) == SamplingParams()


@pytest.mark.parametrize("trial", range(8))
def test_match_takes_the_children_that_a_draw_at_their_parent_gives(trial: int) -> None:
    every = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(frequency_penalty=1),
    ]
    generator = np.random.default_rng(trial)
    logits = 2 * generator.standard_normal((4, 9, 5), np.float32)
    parents = np.array([[-1, *(int(generator.integers(n)) for n in range(1, 9))]] * 4)
    parents[2, 6:] = -2
    draft = Draft(generator.integers(0, 5, (4, 9)), parents)
    histories, seeds = [history(p, [1, 2], 1) for p in every], [trial, 1, 2, 3]
    distributions = LogitsDistribution(logits, draft, LogitsWarper(histories))
    verdict = match(distributions, draft, noise(seeds), np.array([2, 2, 2, 2]))
    for b, (path, token) in enumerate(verdict.host):
        after, tokens = path[1:], draft.tokens[b, path[1:]].tolist()
        for n, (node, chosen) in enumerate(zip(path, [*tokens, token], strict=True)):
            at, one = np.array([2 + n]), LogitsWarper([histories[b]])
            drawn = one.draw(logits[b, node][None], [tokens[:n]], noise(seeds[b : b + 1]), Stream.TOKEN, at)
            assert drawn.tolist() == [chosen]
            children = [k for k in range(9) if (draft.tokens[b, k], parents[b, k]) == (chosen, node)]
            assert children[:1] == after[n : n + 1]
