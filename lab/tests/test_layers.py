"""The search for layers that draft, and what drafts are expected to gain."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from architectures import tiny
from hypothesis import given
from hypothesis import strategies as st
from light import Late, torch

from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.model.self_speculation import layer_skip_from_setup
from outrider.models.base import LanguageModel
from outrider.models.load import Loaded
from outrider_lab.gain import expected_tokens, geometric, speedup
from outrider_lab.layers import search_layers

hf = Late("outrider.models.hf.model")


@given(alpha=st.floats(0.01, 0.99), gamma=st.integers(0, 20), c=st.floats(0, 1))
def test_what_chains_gain_is_leviathans(alpha: float, gamma: int, c: float) -> None:
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert expected_tokens(geometric(alpha, gamma)) == pytest.approx(tokens)
    assert speedup(geometric(alpha, gamma), gamma * c) == pytest.approx(tokens / (gamma * c + 1))
    with pytest.raises(ValueError, match=r"alpha is a probability, got 1\.5"):
        geometric(1.5, 3)


def test_the_search_leaves_out_the_layer_that_does_nothing(tmp_path: Path) -> None:
    raw = tiny("llama", num_hidden_layers=4)
    with torch.no_grad():
        for module in (raw.model.layers[1], raw.model.layers[2]):  # pyright: ignore
            module.self_attn.o_proj.weight.zero_()
            module.mlp.down_proj.weight.zero_()
    model = hf.HFModel(raw)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8] * 3]

    calls = count()

    def clock(m: LanguageModel, n: int) -> float:  # forwards over more tokens cost a little, layers cost all
        busy = n == 1 and next(calls) % 3 == 2  # another program runs beside every third measurement
        return m.num_layers * (1 + 0.05 * n) * (4 if busy else 1)

    found = search_layers(model, texts, clock=clock)
    assert found.layers == [0, 3]
    assert found.acceptance == 1.0
    assert found.cost == pytest.approx(0.5)
    assert found.gain > 1
    found.save(tmp_path / "layers.json")
    read = {"method": "layer_skip", "layers": str(tmp_path / "layers.json")}
    setup = DrafterSetup(
        SpeculativeConfig.of(read), Loaded(model, "four", None, (), "float32", raw, raw.config), 1, 64, "cpu"
    )
    assert layer_skip_from_setup(setup).levels.model.num_layers == 2
    (tmp_path / "layers.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="contains no layer set"):
        layer_skip_from_setup(setup)
    with pytest.raises(ValueError, match="at least two tokens"):
        search_layers(model, [[1]])
