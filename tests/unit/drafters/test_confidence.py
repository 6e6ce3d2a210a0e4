"""The chances that a draft model states: learned, and obeyed alike by both ways to draft a chain."""

from __future__ import annotations

import random
from math import exp

import numpy as np
import pytest
from helpers import VOCAB, decoder, request

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import ModelDrafter
from outrider.drafters.base import DraftContext
from outrider.drafters.model.confidence import LogitError
from outrider.models.load import load
from outrider.testing.contract import context
from outrider.testing.toy import ToyModel


@pytest.mark.parametrize("true", [0.4, 1.0])
def test_the_scale_of_the_errors_is_learned(true: float) -> None:
    """Margins of all sizes, and outcomes that another scale gives: after 600 tokens the stated chances are that scale's."""
    rng, error = random.Random(0), LogitError()
    for _ in range(600):
        margin = rng.uniform(0.0, 3.0)
        error.observe([1 / (1 + exp(-margin / error.scale))], [rng.random() < 1 / (1 + exp(-margin / true))])
    assert error.scale == true


def test_certain_and_impossible_tokens_are_no_error() -> None:
    error = LogitError()
    error.observe([1.0, 0.0, 1.0], [True, False, False])
    assert error.log_chances(np.array([[0.0, -np.inf]], np.float32), [0.0]).tolist() == [[0.0, -np.inf]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ways_to_draft_a_chain_end_it_at_the_same_token(temperature: float) -> None:
    """In one native call, and level by level. Their drafts, confidences and what they learn are the same."""
    draft = load("builtin:code-draft")
    native, levels = (ModelDrafter(draft.model, 1, 256) for _ in range(2))
    levels.levels.has_draft_chains = False
    text, lengths = draft.tokenizer.encode("def read(path):\n    with open(path) as file:\n        return"), set[int]()
    for n in range(4, len(text)):
        drafts = []
        for drafter in (native, levels):
            ask = context([0], [text[:n]], [Budget(6, min_probability=0.4)], SamplingParams(temperature=temperature))
            drafts.append(drafter.propose(ask))
            drafter.release(0)
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
        assert drafts[0].confidence is not None
        assert drafts[1].confidence is not None
        assert np.allclose(drafts[0].confidence, drafts[1].confidence, atol=2e-3)
        lengths.add(drafts[0].nodes - 1)
    assert len(lengths) > 2
    assert min(lengths) < 3


def test_trees_end_at_unlikely_nodes() -> None:
    def nodes(least: float) -> int:
        drafter = ModelDrafter(ToyModel(VOCAB, error=0.5), 1, 64)
        ask: DraftContext = context([0], [[1, 2, 3]], [Budget(5, 2, 9, least)], SamplingParams())
        return drafter.propose(ask).nodes

    assert nodes(0.9) < nodes(0.3) < nodes(0.0)


def test_a_drafter_learns_from_what_was_accepted() -> None:
    """A draft that is far from its target learns a large error, an exact copy a small one."""
    scales = {}
    for far in (0.0, 2.0):
        drafter = ModelDrafter(ToyModel(VOCAB, error=far), 1, 600)
        loop = decoder(ToyModel(VOCAB), drafter, budget=Budget(3, min_probability=0.01))
        loop.generate([request([1, 2, 3], SamplingParams(max_tokens=300, ignore_eos=True))])
        scales[far] = drafter.error.scale
    assert scales[0.0] < 0.75 < scales[2.0]
