"""The step of a native model, which is one call, against its twin: a forward, and `match` in Python on its logits."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import noise
from hypothesis import given
from hypothesis import strategies as st
from plain import VOCAB, write_checkpoint
from safetensors.numpy import load_file, save_file

from outrider.core import sampling
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.tree import tree
from outrider.core.types import Draft
from outrider.kernels import cpu
from outrider.models.base import LanguageModel, Verification
from outrider.models.load import load
from outrider.models.nodes import Nodes
from outrider.verify import VERIFIERS

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why()))

# What native code draws by, crossed with what only the host knows of.
DRAWN = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.0, 0.7, 3.0), (0, 3), (1.0, 0.6), (0.0, 0.2))
]
BY_HOST = [
    {},
    {"repetition_penalty": 1.5},
    {"logit_bias": {3: 4.0, 5: -100.0}},
    {"allowed_token_ids": [2, 3, 5, 7, 11]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    odd = {
        "hidden_size": 100,
        "intermediate_size": 77,
        "num_hidden_layers": 3,
        "head_dim": 20,
        "tie_word_embeddings": True,
    }
    return load(write_checkpoint(tmp_path_factory.mktemp("odd"), max_position_embeddings=512, **odd)).model


def test_a_step_decides_what_its_twin_does(model: LanguageModel) -> None:
    """Chains, trees and padding. The drafts hold what the target draws up to some level: paths of all lengths are walked."""
    random, lengths = np.random.default_rng(0), set[int]()
    for case, (drawn, more) in enumerate(itertools.product(DRAWN, BY_HOST)):
        params = [SamplingParams(**drawn, **more), SamplingParams(temperature=0.9), SamplingParams()]
        texts = [random.integers(0, VOCAB, 6).tolist() for _ in params]
        warp = LogitsWarper([SequenceState(p, (), (), text, 4) for p, text in zip(params, texts, strict=True)])
        cache, slots, seeds = model.new_cache(3, 64), [0, 1, 2], noise([case, case + 1, 2**63 - 1 - case])
        model.forward(Nodes(np.array([text[:-1] for text in texts]), cache, slots), want="none")
        cache.commit(slots, [range(5)] * 3)
        drafts = [[(text[-1], -1)] for text in texts]
        for level in range(4):  # a child that is right, and one that is not
            check = _check(drafts, warp, seeds)
            paths = LanguageModel.step(model, cache, slots, check).result().host
            for b, (path, token) in enumerate(paths):
                if token >= 0 and random.random() < 0.6:
                    drafts[b] += [((token + 1) % VOCAB, path[-1])] * (level % 2) + [(token, path[-1])]
        check = _check(drafts, warp, seeds)
        ours, twin = (step(cache, slots, check, taps=(0,)) for step in (model.step, partial(LanguageModel.step, model)))
        verdict, expected = ours.result(), twin.result()
        assert verdict.host == expected.host, (drawn, more)
        for name in ("path", "accepted", "token"):
            np.testing.assert_array_equal(getattr(verdict, name), getattr(expected, name))
        for one, other in zip(ours.output, twin.output, strict=True):
            np.testing.assert_array_equal(one, other)
        lengths |= {len(path) for path, _ in verdict.host}
    assert lengths == {1, 2, 3, 4, 5}


def _check(drafts: list[list[tuple[int, int]]], warp: LogitsWarper, seeds: sampling.Noise) -> Verification:
    tokens, parents = tree(drafts)
    return Verification(VERIFIERS["match"], Draft(tokens, parents), warp, seeds, [6, 6, 6])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_damaged_row_draws_nothing(broken: float, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, max_position_embeddings=64) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][1] = broken
    save_file(tensors, file)
    damaged = load(tmp_path).model
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.5), SamplingParams(top_k=2, min_p=0.1)):
        warp = LogitsWarper([SequenceState(params, (), (), [1], 1)])
        check = Verification(VERIFIERS["match"], Draft(*tree([[(1, -1)]])), warp, noise([3]), [1])
        step = damaged.step(damaged.new_cache(1, 16), [0], check)
        assert not np.isfinite(step.output.logits).all()
        assert step.result().host == [([0], -1)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, SamplingParams]:
    size = draw(st.sampled_from([1, 5, 33, 300, 5000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = random.standard_normal(size, np.float32) * np.float32(draw(st.sampled_from([0.01, 1.0, 5.0])))
    if draw(st.booleans()):
        scores = np.round(scores * 2) / 2  # ties
    if draw(st.booleans()):
        scores[random.random(size) < 0.5] = -np.inf
        scores[random.integers(size)] = 0.0
    kinds = {"top_k": [0, 1, 3, 50, 400], "top_p": [1.0, 0.999999, 0.9, 0.5, 0.1], "min_p": [0.0, 0.05, 0.5]}
    return scores, SamplingParams(**{name: draw(st.sampled_from(values)) for name, values in kinds.items()})


@given(rows())
def test_native_truncation_is_that_of_numpy(case: tuple[np.ndarray, SamplingParams]) -> None:
    scores, params = case
    before = scores.copy()
    np.testing.assert_array_equal(sampling.truncate(scores, params), sampling._truncated(scores, params))
    np.testing.assert_array_equal(scores, before)
