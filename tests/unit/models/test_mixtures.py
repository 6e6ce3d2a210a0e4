"""Mixtures of experts: a token has the same bits whatever its neighbours are routed to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import tiny
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from outrider.kernels import cpu as native
from outrider.models.hf.experts import NAME, mixtures
from outrider.models.hf.linear import BatchInvariantOps, one_thread
from outrider.models.hf.model import HFModel

CHOSEN = 2  # experts of a token


def companies(draw: random.Random, experts: int, count: int) -> Iterator[list[list[int]]]:
    """The experts of `count` tokens: all the same ones, one expert for all, all experts, and chance."""
    yield [[0, experts - 1]] * count
    yield [[experts - 1, 0]] * count
    yield [[n % experts, (n + 1) % experts] for n in range(count)]
    for _ in range(3):
        yield [draw.sample(range(experts), CHOSEN) for _ in range(count)]


def check_company(module: Any, experts: int, hidden: int, seed: int = 0) -> None:
    """The outputs of some tokens are theirs alone, among any others, at any place."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    experts_of: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[NAME]

    def run(*given: Any) -> Tensor:
        with BatchInvariantOps(), one_thread("cpu"):  # as every forward runs
            return experts_of(*given)

    for count in (2, 7, 33):
        x, weights = torch.randn(count, hidden, generator=noise), torch.rand(count, CHOSEN, generator=noise)
        for routed in companies(draw, experts, count):
            index = torch.tensor(routed)
            together = run(module, x, index, weights)
            for n in draw.sample(range(count), min(count, 4)):
                alone = run(module, x[n : n + 1], index[n : n + 1], weights[n : n + 1])[0]
                assert torch.equal(together[n], alone), f"token {n} of {count} routed as {routed}"


@pytest.mark.parametrize(
    ("name", "weights"), [("mixtral", "float32"), ("gpt_oss", "bfloat16"), ("deepseek_v3", "int8")]
)
def test_any_routing_company(name: str, weights: str) -> None:
    if weights == "int8" and not native.available():
        pytest.skip(str(native.why()))
    model = HFModel(tiny(name), weights=weights)
    found = [*mixtures(model.model)]
    assert found
    up = found[0].packed_up  # pyright: ignore
    check_company(found[0], len(up), up[0].in_features)
