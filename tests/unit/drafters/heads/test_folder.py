"""`-d FOLDER` is enough: the method follows from the folder, and what cannot be is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import GOLDEN, copied, small_target
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.cli.tune import candidates
from outrider.config import SpeculativeConfig
from outrider.drafters import DrafterRouter, make_drafter
from outrider.drafters.heads.eagle import EagleDrafter
from outrider.drafters.registry import own_head
from outrider.integrations.engines import exports

TARGET = small_target()
HEAD = str(GOLDEN / "eagle31")


def make(**config: Any) -> Any:
    return make_drafter(SpeculativeConfig.of(config), TARGET, rows=2, max_length=128, device="cpu")


def texts(config: dict[str, Any] | None) -> list[list[int]]:
    llm = LLM(TARGET, speculative_config=config, max_model_len=128)
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0.0, 1.0)]
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params)]


@pytest.mark.parametrize(
    "config",
    [
        {"model": HEAD},
        {"model": HEAD, "tree_width": 3, "tree_nodes": 8},
        {"method": "eagle", "model": HEAD, "quantization": "int8"},
        {"method": "eagle3", "model": HEAD},
        {"method": "auto", "model": HEAD},
        {"method": ["suffix", "eagle"], "model": HEAD},
    ],
    ids=str,
)
def test_a_folder_is_enough(config: dict[str, Any]) -> None:
    assert texts(config) == texts(None)


def test_the_method_is_recognised() -> None:
    assert SpeculativeConfig.of({"model": HEAD}).method == "eagle"
    assert isinstance(make(model=HEAD), EagleDrafter)
    auto = make(method="auto", model=HEAD)
    assert isinstance(auto, DrafterRouter)
    assert list(auto.drafters) == ["prediction", "suffix", "eagle"]
    assert 0 < auto.cost["eagle"] < 0.5
    assert auto.taps == (1, 3, 7)
    assert ("eagle", {"method": "eagle", "model": HEAD}) in candidates(TARGET, HEAD, None, None, False)
    assert "draft_model" not in dict(candidates(TARGET, HEAD, None, None, False))


def test_other_engines_are_named_the_head() -> None:
    found = {e.engine: e for e in exports({"model": HEAD, "num_speculative_tokens": 4})}
    assert f'"method": "eagle3", "num_speculative_tokens": 4, "model": "{HEAD}"' in found["vLLM"].command
    assert "--speculative-algorithm EAGLE3" in found["SGLang"].command


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"method": "eagle", "model": "FOLDER"'):
        SpeculativeConfig.of({"method": "eagle"})
    with pytest.raises(ValueError, match=r'is a trained head, not a draft model: \{"method": "eagle"'):
        make(method="draft_model", model=HEAD)
    with pytest.raises(ValueError, match="there is no folder no/such"):
        make(method="eagle", model="no/such")
    refused = copied("eagle3", tmp_path, {"speculators_model_type": "peagle"})
    with pytest.raises(ValueError, match="kind 'peagle', which outrider does not run"):
        make(model=str(refused))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(1)}, plain / "model.safetensors")
    with pytest.raises(ValueError, match="holds no head that outrider knows"):
        make(method="eagle", model=str(plain))


def test_auto_uses_a_head_where_the_package_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(TARGET, name="builtin:small")
    ask = SpeculativeConfig.of({"method": "auto"})

    def drafters() -> list[str]:
        made = make_drafter(ask, target, rows=1, max_length=64, device="cpu")
        assert isinstance(made, DrafterRouter)
        return list(made.drafters)

    assert "eagle" not in drafters()
    monkeypatch.setattr("outrider.drafters.registry.HEADS", tmp_path)
    copied("eagle31", tmp_path).rename(tmp_path / "small")
    assert "eagle" in drafters()
    assert own_head("builtin:small") == tmp_path / "small"
    assert own_head("builtin:other") is own_head("small") is own_head("builtin:") is None
