"""Rotary frequencies: a model that is built inside `ExactPowers` has them, rounded from exact numbers."""

from decimal import Decimal, localcontext

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.models.rotary import ExactPowers, power


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


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_a_model_has_the_frequencies(scaling: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters={"rope_theta": 1e6, **scaling})
    with ExactPowers():
        found = LlamaRotaryEmbedding(config).inv_freq
    exact = 1.0 / power(1e6, torch.arange(0, 128, 2).float() / 128)
    assert torch.equal(found, exact / scaling.get("factor", 1.0))  # pyright: ignore
