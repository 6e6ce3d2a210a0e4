"""Rotary frequencies: a model that is built inside `ExactPowers` has them, rounded from exact numbers."""

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from architectures import FAMILIES, tiny
from exact_powers import ExactPowers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.models.config import config_of
from outrider.models.rotary import frequencies, of_config


@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 1e6), (128, 5e5), (256, 1e4)])
def test_powers_are_rounded_once(dim: int, base: float) -> None:
    exponents = torch.arange(0, dim, 2).float() / dim
    with ExactPowers():
        found = base**exponents
        assert torch.equal(torch.pow(base, exponents), found)
    with localcontext() as context:
        context.prec = 60
        exact = [Decimal(base) ** Decimal(x) for x in exponents.tolist()]
    below, above = (torch.nextafter(found, found.new_tensor(end)).double() for end in (0.0, torch.inf))
    for value, low, own, high in zip(exact, below.tolist(), found.tolist(), above.tolist(), strict=True):
        assert abs(Decimal(own) - value) <= min(abs(Decimal(low) - value), abs(Decimal(high) - value))
    torch.testing.assert_close(found, base**exponents, rtol=3e-7, atol=0)


def test_other_powers_are_torchs_own() -> None:
    for base, exponents in ((2, torch.ones(2, 3)), (2.0, torch.ones(3, dtype=torch.float64)), (-2.0, torch.ones(3))):
        expected = base**exponents
        with ExactPowers():
            assert torch.equal(base**exponents, expected)
    with ExactPowers():
        assert torch.equal(torch.full((3,), 3.0) ** 2, torch.full((3,), 9.0))


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {**LLAMA3, "original_max_position_embeddings": 8192},
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 256},
    YARN,
    {**YARN, "truncate": False, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {**YARN, "factor": None},
    {**YARN, "factor": 1.0, "attention_factor": 1.25, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("dim", "base"), [(128, 1e6), (64, 10000.0), (8, 500000.0)])
def test_a_model_has_the_frequencies(scaling: dict[str, Any], dim: int, base: float) -> None:
    rope = {"rope_theta": base, **scaling}
    config = LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=16384
    )
    with ExactPowers():
        theirs = LlamaRotaryEmbedding(config)
    found, factor = frequencies(rope, dim, 16384)
    assert found.dtype == np.float32
    assert found.tolist() == theirs.inv_freq.tolist()
    assert factor == theirs.attention_scaling
    if rope["rope_type"] != "default":
        with ExactPowers():
            assert ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)[1] == factor


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_has_the_frequencies_of_its_model(name: str) -> None:
    kind, changes = FAMILIES[name]
    with ExactPowers():
        raw = tiny(kind, **changes)
    config, buffers = config_of(raw.config.to_dict()), dict(raw.named_buffers())
    for place, theirs in buffers.items():
        stem, _, leaf = place.rpartition(".")
        if leaf.endswith("inv_freq") and "original" not in leaf:
            layer_type = leaf.removesuffix("inv_freq").removesuffix("_")
            found, factor = of_config(config, layer_type)
            assert found.tolist() == theirs.tolist()
            assert factor == getattr(raw.get_submodule(stem), leaf.replace("inv_freq", "attention_scaling"))
