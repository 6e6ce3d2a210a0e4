"""What users give by mistake, through the front of the library: each error names both sides and what would work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import copied, eagle1_folder, medusa_folder, small_target

from outrider import LLM
from outrider.models.load import Loaded

TARGET = small_target()
WIDER, LARGER = small_target(hidden_size=64), small_target(vocab_size=130)
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]
KEY = "eagle_aux_hidden_state_layer_ids"


def given(name: str, **settings: Any) -> Callable[[Path], Path]:
    return lambda into: copied(name, into, settings)


def with_tensors(name: str, **tensors: torch.Tensor | None) -> Callable[[Path], Path]:
    return lambda into: copied(name, into, None, **tensors)


def flat(into: Path) -> Path:
    """A folder with SGLang's list alone, whose numbers are those of vLLM: one too high."""
    out = copied("eagle31", into)
    config = json.loads((out / "config.json").read_text())
    config = config["transformer_layer_config"] | {"fc_norm": True, "norm_output": True, "draft_vocab_size": 48}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {KEY: [2, 4, 8]}}
    (out / "config.json").write_text(json.dumps(config))
    return out


# name -> (the target, the folder, other settings, what the error says)
BAD: dict[str, tuple[Loaded, Callable[[Path], Path], dict[str, Any], str]] = {
    "eagle3 of another target": (
        WIDER, given("eagle3"), {}, r"with 32 numbers .* golden-target has 64; .* outrider train eagle3 -m golden-target",
    ),
    "dspark of another target": (WIDER, given("dspark"), {}, r"with 32 numbers .* has 64; .* outrider train"),
    "medusa of another target": (WIDER, medusa_folder, {}, r"with 32 numbers .* has 64; .* outrider train"),
    "eagle1 of another target": (WIDER, eagle1_folder, {}, r"with 32 numbers .* has 64; .* outrider train"),
    "eagle3 of another vocabulary": (LARGER, given("eagle3"), {}, r"with 128 tokens .* has 130; .* outrider train"),
    "peagle of another vocabulary": (LARGER, given("peagle"), {}, r"with 128 tokens .* has 130; .* outrider train"),
    "a layer that is not there": (
        TARGET, given("eagle31", **{KEY: [2, 4, 9]}), {}, rf"before layer 9 .* has 8 layers\. Correct {KEY} in",
    ),
    "fewer layers than trained on": (
        TARGET, given("eagle31", **{KEY: [2, 4]}), {}, rf"which is 3 layers .* name 2 layers, so 64\. Write .* as {KEY} in",
    ),
    "fewer layers of a block": (
        TARGET, given("dspark", aux_hidden_state_layer_ids=[2, 4]), {}, r"name 2 layers, so 64\. Write .* aux_hidden_state",
    ),
    "the tap convention of another engine": (
        TARGET, flat, {}, rf"before layer 9 .* has 8 layers\. Correct eagle_config\.{KEY} \(it counts outputs",
    ),
    "a rotary embedding of another kind": (
        TARGET,
        given("eagle31", rope_parameters={"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}),
        {},
        r"'dynamic'.*(default|llama3)",
    ),
    "a missing tensor": (
        TARGET, with_tensors("eagle31", norm__weight=None), {}, r"lacks norm\.weight; .* Download it again",
    ),
    "a missing tensor of a block": (
        TARGET, with_tensors("dflash", hidden_norm__weight=None), {}, r"lacks hidden_norm\.weight; .* Download it again",
    ),
    "a kind that does not run": (
        TARGET,
        lambda into: copied(
            "dflash", into, {"speculators_model_type": None}, lilicorr__slot_embedding=torch.ones(2)
        ),
        {},
        r"of the kind 'lilicorr', which outrider does not run: .* DSpark blocks run",
    ),
    "a tensor left over": (
        TARGET,
        with_tensors("eagle31", layers__1__mlp__up_proj__weight=torch.ones(2)),
        {},
        r"holds layers\.1\.mlp\.up_proj\.weight that no EAGLE-3 head .* Give it the config\.json",
    ),
    "a tensor left over in a block": (
        TARGET, with_tensors("dspark", what__weight=torch.ones(2)), {}, r"holds what\.weight that no block drafter .* Give it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_says_what_would_work(what: str, tmp_path: Path) -> None:
    target, folder, options, message = BAD[what]
    made = folder(tmp_path)
    with pytest.raises(ValueError, match=f"(?s){message}") as raised:
        LLM(target, speculative_config={"model": str(made), **options}, max_model_len=128)
    assert "tree" in what or str(made) in str(raised.value)
