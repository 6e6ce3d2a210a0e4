"""With a head, the other verifiers keep the distribution: thousands of texts against plain decoding's exact probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers import Loop, request
from scipy.special import softmax
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import SamplingParams
from outrider.control import Fixed
from outrider.core.sampling import TokenSubset
from outrider.core.types import Array
from outrider.drafters.base import Drafter
from outrider.drafters.heads.eagle import EagleConfig, Pairs, eagle_model, eagle_shapes
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.medusa import MedusaLattice, MedusaWeights
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider_lab.heads.modules import config_for

VOCAB, SAMPLES, FEW, TOKENS = 5, 3000, 400, 3
PROMPT = [1, 4, 2]


def target() -> tuple[NativeModel, LlamaConfig]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    raw = LlamaForCausalLM(config)
    for p in raw.parameters():
        if p.dim() == 2:
            p.data.normal_(0, 0.5)
    return NativeModel(raw), config


MODEL, CONFIG = target()


def eagle(kept: tuple[int, ...]) -> TreeDrafter[Pairs]:
    torch.manual_seed(1)
    config = config_for(EagleConfig, CONFIG, draft_vocab_size=len(kept), taps=(0, 2))
    shapes = eagle_shapes(config) | {"lm_head.weight": (len(kept), 16)}
    drawn = {n: torch.randn(shape) * 0.5 if len(shape) == 2 else torch.ones(shape) for n, shape in shapes.items()}
    head = HeadWeights(config, {n: t.numpy() for n, t in drawn.items()}, np.array(kept))
    return TreeDrafter(Pairs(eagle_model(head, MODEL, 64, "none"), 50, 64))


def medusa(kept: tuple[int, ...]) -> TreeDrafter[MedusaLattice]:
    torch.manual_seed(2)
    blocks = [[((torch.randn(16, 16) * 0.3).numpy(), torch.randn(16).numpy())] for _ in range(2)]
    output, ids = (torch.randn(len(kept), 16) * 0.5).numpy(), None if len(kept) == VOCAB else np.array(kept)
    return TreeDrafter(MedusaLattice(MedusaWeights(blocks, [output], ids, VOCAB), MODEL, "none"))


class FirstOrder(Lattice):
    """Two depths, each with a bias by the token before it, as DSpark and DFlash2 have one."""

    first_order = True

    def __init__(self, kept: tuple[int, ...]) -> None:
        super().__init__(VOCAB, 2, None if len(kept) == VOCAB else TokenSubset(torch.tensor(kept), VOCAB))
        draw = torch.Generator().manual_seed(3)
        self.depths = torch.randn(2, len(kept), generator=draw).numpy()
        self.biases = 2 * torch.randn(2, VOCAB, len(kept), generator=draw).numpy()

    def room(self, slot: int, tokens: list[int]) -> int:
        return 2

    def add(self, slot: int, features: Array, first: int) -> None: ...

    def release(self, slot: int) -> None: ...

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        return np.repeat(self.depths[None, :depth], len(slots), 0)

    def after_token(self, line: int, level: int, token: int, logits: Array, places: Array | None) -> Array:
        bias = self.biases[level, token]
        return logits + (bias if places is None else bias[places])


def first_order(kept: tuple[int, ...]) -> TreeDrafter[FirstOrder]:
    return TreeDrafter(FirstOrder(kept))


def exact() -> dict[tuple[int, ...], float]:
    """The probability of each text of TOKENS tokens."""
    out = {}
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        ids = [*PROMPT, *text]
        logits = MODEL.forward(Nodes(np.array([ids]), MODEL.new_cache(1, 64), [0])).logits[0]
        probs = softmax(logits.astype(np.float64), -1)
        out[text] = math.prod(float(probs[len(PROMPT) - 1 + i, t]) for i, t in enumerate(text))
    return out


ALL, TWO = (0, 1, 2, 3, 4), (1, 3)
CASES = [
    pytest.param(make, verifier, width, kept, samples, marks=() if samples == FEW else pytest.mark.long)
    for samples, cases in (
        (FEW, [(eagle, "rejection", 2, TWO), (first_order, "rejection", 2, ALL)]),
        (
            SAMPLES,
            [
                (make, verifier, width, kept)
                for make in (eagle, medusa, first_order)
                for kept in (ALL, TWO)
                for verifier, width in (("rejection", 1), ("rejection", 2), ("block", 1), ("traversal", 2))
            ],
        ),
    )
    for make, verifier, width, kept in cases
]


@pytest.mark.parametrize(("make", "verifier", "width", "kept", "samples"), CASES)
def test_the_distribution_is_the_targets(
    make: Callable[[tuple[int, ...]], Drafter], verifier: str, width: int, kept: tuple[int, ...], samples: int
) -> None:
    drafter = make(kept)
    loop = Loop(MODEL, drafter, verifier, controller=Fixed(2, width, 4), num_slots=50, max_length=64)
    params = SamplingParams(max_tokens=TOKENS, temperature=1, ignore_eos=True)
    rows = loop.generate([request(PROMPT, params, seed=i) for i in range(samples)])
    seen: dict[tuple[int, ...], int] = {}
    for row in rows:
        seen[tuple(row.output)] = seen.get(tuple(row.output), 0) + 1
    want = {text: p * samples for text, p in EXACT.items()}
    big = [t for t, n in want.items() if n >= 5]
    observed = [*(seen.get(t, 0) for t in big), samples - sum(seen.get(t, 0) for t in big)]
    expected = [*(want[t] for t in big), samples - sum(want[t] for t in big)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    assert chi2.sf(statistic, len(big)) > 1e-4
    assert sum(map(sum, (r.counts.accepted for r in rows))) > 0


EXACT = exact()
