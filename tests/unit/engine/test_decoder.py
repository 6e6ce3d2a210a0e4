"""Identical text: with match, the tokens equal plain decoding's whatever drafts, how far, in what company."""

from __future__ import annotations

import random

import pytest
from crossed import crossed
from helpers import VOCAB, RandomTree, TargetTree, counts, decoder, plain_texts, request, toy_drafters

from outrider.core.params import SamplingParams
from outrider.core.types import Budget, Guarantee
from outrider.engine.prefix_cache import PrefixCache
from outrider.models.base import Output, Want
from outrider.models.cache import SCRATCH
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Echo, Wrong
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB, seed=0)
PARAMETERS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "sampled": SamplingParams(temperature=1, max_tokens=24),
    "hot": SamplingParams(temperature=2.5, max_tokens=24, ignore_eos=True),
    "top_k": SamplingParams(temperature=1.2, top_k=3, max_tokens=24, ignore_eos=True),
    "top_p": SamplingParams(temperature=1.2, top_p=0.7, max_tokens=24, ignore_eos=True),
    "min_p": SamplingParams(temperature=1.2, min_p=0.2, max_tokens=24, ignore_eos=True),
    "repetition": SamplingParams(temperature=0.7, repetition_penalty=1.5, max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0, presence_penalty=0.8, frequency_penalty=0.6, max_tokens=24, ignore_eos=True
    ),
    "bias": SamplingParams(logit_bias={3: 2.0, 4: -100.0}, max_tokens=24, ignore_eos=True),
    "bad_words": SamplingParams(bad_words=([2], [3, 5], [6, 7, 8]), max_tokens=24, ignore_eos=True),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 5, 9], max_tokens=24, ignore_eos=True),
    "min_tokens": SamplingParams(min_tokens=12, max_tokens=24),
    "stop_ids": SamplingParams(stop_token_ids=[4, 7], max_tokens=24, ignore_eos=True),
    "short": SamplingParams(max_tokens=1),
}


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 9))] for _ in range(n)]


@pytest.mark.parametrize(("name", "drafter"), crossed(PARAMETERS, toy_drafters(TARGET), share=0.1))
def test_text_is_plain_decodings_for_every_drafter_and_parameter(name: str, drafter: str) -> None:
    requests = [request(p, PARAMETERS[name], seed) for seed, p in enumerate(prompts(2))]
    expected = plain_texts(TARGET, requests)
    for budget in (Budget(1), Budget(8), Budget(3, 3, 7)):
        made = toy_drafters(TARGET)[drafter]()
        rows = decoder(TARGET, made, budget=budget).generate(requests)
        assert [r.output for r in rows] == expected, budget


@pytest.mark.parametrize("trial", range(12))
def test_text_does_not_depend_on_company_or_on_when_rows_join(trial: int) -> None:
    draw = random.Random(trial)
    chosen = [draw.choice(list(PARAMETERS.values())) for _ in range(9)]
    requests = [request(p, s, seed) for seed, (p, s) in enumerate(zip(prompts(9, trial), chosen, strict=True))]
    expected = {r.id: t for r, t in zip(requests, plain_texts(TARGET, requests), strict=True)}
    drafter = list(toy_drafters(TARGET).values())[trial % len(toy_drafters(TARGET))]()
    engine, waiting, found = decoder(TARGET, drafter, rows=3), list(requests), dict[int, list[int]]()
    draw.shuffle(waiting)
    while waiting or engine.sequences:
        if waiting and engine.free and draw.random() < 0.4:
            engine.start(waiting.pop())
        engine.step()
        for row in list(engine.sequences.values()):
            if row.finish is not None:
                found[row.id] = row.output
                engine.release(row.slot)
    assert found == expected


def test_echo_is_accepted_and_wrong_is_not() -> None:
    params = PARAMETERS["hot"]
    [text] = plain_texts(TARGET, [request([1], params)])
    steps = [s for s, _ in decoder(TARGET, Echo({(1,): [1, *text]})).steps([request([1], params)]) if s]
    assert len(steps) == 5  # 24 tokens, five a step
    only_five = params.with_(allowed_token_ids=[5, 6], max_tokens=20)
    drafted, accepted = counts([s for s, _ in decoder(TARGET, Wrong(1)).steps([request([1], only_five)]) if s])
    assert accepted == 0 < drafted


def test_accepted_paths_through_trees_leave_the_cache_as_if_decoded_one_by_one() -> None:
    for drafter in (TargetTree(TARGET), RandomTree()):
        engine = decoder(TARGET, drafter, budget=Budget(3, 3, 9))
        rows = [engine.start(request(p, PARAMETERS["hot"], s)) for s, p in enumerate(prompts(3, 2))]
        for _ in range(10):
            engine.step()
            for row in rows:
                if row in engine.waiting:
                    continue
                held = engine.cache.layers[0][0][row.slot, 0, : engine.cache.length[row.slot], 0].tolist()
                assert held == row.tokens[:-1]


def test_end_tokens_inside_an_accepted_run_end_the_text_there() -> None:
    class Long(Echo):
        """Drafts past the end."""

    params = SamplingParams(max_tokens=24)
    for seed in range(30):
        [text] = plain_texts(TARGET, [request([1], params, seed)])
        far = Long({(1,): [1, *text, *[3] * 9]})
        row = decoder(TARGET, far, 8).generate([request([1], params, seed)])[0]
        assert row.output == text
        assert (row.finish.finish == "stop") == (text[-1] == 0)  # type: ignore[union-attr]


def test_bad_requests_say_what_would_work() -> None:
    engine = decoder(TARGET, max_length=50)
    for bad, words in (
        (request([], SamplingParams()), "empty"),
        (request([1, 99], SamplingParams()), "99 is outside the vocabulary of 11"),
        (request([1] * 20, SamplingParams(max_tokens=31)), "max_tokens=30 or less"),
        (request([1] * 60, SamplingParams()), "60 tokens"),
        (request([1], SamplingParams(logit_bias={44: 1.0})), "logit_bias holds"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.start(bad)
    assert len(engine.free) == 4


def test_the_guarantee_says_what_the_models_arithmetic_allows() -> None:
    uneven = ToyModel(VOCAB)
    uneven.batch_invariant = False
    assert decoder(TARGET, Wrong()).guarantee is Guarantee.EXACT_TOKENS
    assert decoder(TARGET, Wrong(), verifier="block").guarantee is Guarantee.EXACT_DISTRIBUTION
    assert decoder(uneven, Wrong()).guarantee is Guarantee.EXACT_DISTRIBUTION


class Counted(ToyModel):
    """Notes the rows of each forward of prompts."""

    skips_padding = True

    def __init__(self) -> None:
        super().__init__(VOCAB, seed=0)
        self.rows: list[list[int]] = []

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        if want == "none":
            self.rows.append([sum(parent > -2 for parent in parents) for parents in nodes.parent_lists])
        return super().forward(nodes, taps=taps, want=want)


def test_short_prompts_share_a_forward_and_texts_stay() -> None:
    """As many as have room. The first is served first, a chunk of it at least."""
    model, draw = Counted(), random.Random(3)
    lengths = [20, 3, 9, 1, 14, 2, 7, 30]
    requests = [request([draw.randrange(1, VOCAB) for _ in range(n)], SamplingParams(max_tokens=4), n) for n in lengths]
    run = decoder(model, rows=8)
    run.chunk = 16
    assert [s.output for s in run.generate(requests)] == plain_texts(TARGET, requests)
    assert model.rows == [[16], [3, 2, 8, 3], [10, 1, 5], [1, 15], [14]]


def test_a_model_that_computes_padding_gets_no_more_rows_than_a_chunk() -> None:
    model = Counted()
    model.skips_padding = False
    run = decoder(model, rows=8)
    run.chunk = 16
    requests = [request([1 + n % 3] * (2 + n), SamplingParams(max_tokens=2), n) for n in range(8)]
    assert [s.output for s in run.generate(requests)] == plain_texts(TARGET, requests)
    assert all(len(rows) * max(rows) <= 16 for rows in model.rows)
    assert len(model.rows) < len(requests)


def test_prompts_that_begin_alike_are_read_once() -> None:
    model, common = Counted(), [1 + n % (VOCAB - 1) for n in range(40)]
    requests = [request([*common, n + 1], SamplingParams(max_tokens=2), n) for n in range(6)]
    run = decoder(model, rows=6, prefixes=PrefixCache(1 << 20))
    assert [s.output for s in run.generate(requests)] == plain_texts(TARGET, requests)
    assert model.rows == [[40], [8] * 5]  # blocks of 16 tokens


def test_prompts_read_together_need_no_more_cells_than_one() -> None:
    model = Counted()
    run = decoder(model, rows=2, max_length=300)
    run.generate([request([1] * 298, SamplingParams(max_tokens=1)), request([2] * 200, SamplingParams(max_tokens=1))])
    assert model.rows == [[256], [41], [199]]
    assert run.cache.capacity <= 300 + SCRATCH
