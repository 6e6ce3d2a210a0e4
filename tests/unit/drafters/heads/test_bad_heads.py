"""Heads that cannot be: each error names the folder and both sides, and says what would work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heads import GOLDEN, copied, eagle1_folder, medusa_folder, small_target
from safetensors.numpy import load_file

from outrider import LLM
from outrider.core.types import Array
from outrider.drafters.heads.block import read_block
from outrider.drafters.heads.eagle import read_eagle
from outrider.drafters.heads.medusa import read_medusa
from outrider.models.load import Loaded

TARGET = small_target()
KEY = "eagle_aux_hidden_state_layer_ids"
D2T = load_file(GOLDEN / "eagle3" / "model.safetensors")["d2t"]
READERS: dict[str, Callable[[Path, Loaded], Any]] = {
    "eagle3": read_eagle, "eagle31": read_eagle, "peagle": read_eagle, "dflash": read_block, "dspark": read_block,
    "medusa": read_medusa,
}  # fmt: skip


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


ONE = ones(1)

# (head, what is wrong) -> changed settings, changed tensors, what the error says
BROKEN: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Array | None], str]] = {
    ("eagle3", "a layer less in the settings"): (
        {KEY: [2, 4]}, {}, rf"which is 3 layers .* name 2 layers, so 64\. Write .* as {KEY} in",
    ),
    ("eagle3", "a layer that the target lacks"): ({KEY: [2, 4, 9]}, {}, rf"before layer 9 .* has 8 layers\. Correct {KEY} in"),
    ("eagle3", "another hidden size"): ({"hidden_size": 64}, {}, "32 rows, and config.json says hidden_size 64"),
    ("eagle3", "another head_dim"): ({"head_dim": 16}, {}, r"q_proj.weight is \(32, 64\), and the settings say \(64, 64\)"),
    ("eagle3", "another vocabulary"): ({"vocab_size": 200}, {}, "200 tokens in the vocabulary .* has 128"),
    ("eagle3", "another draft vocabulary"): ({"draft_vocab_size": 40}, {}, "the map has 48 draft tokens, .* 40"),
    ("eagle3", "an index for offsets"): ({}, {"d2t": D2T + np.arange(48), "t2d": None}, "holds token ids"),
    ("eagle3", "a map beyond the vocabulary"): ({}, {"d2t": D2T + 60, "t2d": None}, "they must ascend, from 0 to 127"),
    ("eagle3", "a map that descends"): ({}, {"d2t": D2T[::-1].copy(), "t2d": None}, "they must ascend"),
    ("eagle3", "two maps"): ({}, {"t2d": np.arange(128) < 48}, "d2t and t2d name different tokens"),
    ("eagle3", "no map"): ({}, {"d2t": None, "t2d": None}, "48 draft tokens of 128 and no map"),
    ("eagle3", "a missing tensor"): ({}, {"norm__weight": None}, r"lacks norm\.weight; .* Download it again"),
    ("eagle3", "a tensor left over"): (
        {}, {"layers__1__mlp__up_proj__weight": ONE}, r"holds layers\.1\.mlp.* that no EAGLE-3 head .* Give it",
    ),
    ("eagle3", "norms that the settings deny"): ({"norm_before_fc": True}, {}, "norm_before_fc is True, and the file lacks"),
    ("eagle3", "two layers"): ({"num_hidden_layers": 2}, {}, "the head has 2 layers"),
    ("eagle3", "another rotary embedding"): (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "'dynamic'.*(default|llama3)",
    ),
    ("eagle3", "a method by another name"): ({"speculators_model_type": "newest"}, {}, "'newest', which outrider does not know"),
    ("eagle3", "mtp"): ({"speculators_model_type": "mtp"}, {}, "kind 'mtp', which outrider does not run"),
    ("eagle3", "an output head of all tokens"): ({}, {"lm_head__weight": ones(128, 32)}, "has a row for all 128 tokens"),
    ("peagle", "no mask"): ({"mask_token_id": None}, {}, "mask_token_id is None; it must be a token of the target"),
    ("peagle", "no feature for masks"): ({}, {"mask_hidden": None}, "lacks mask_hidden"),
    ("peagle", "a feature of another width"): ({}, {"mask_hidden": ones(1, 1, 64)}, r"mask_hidden is \(1, 1, 64\)"),
    ("peagle", "a layer less"): ({"num_hidden_layers": 1}, {}, "holds layers.1.* that no P-EAGLE head"),
    ("peagle", "a layer more"): ({"num_hidden_layers": 3}, {}, "lacks layers.2"),
    ("peagle", "another embedding"): ({}, {"embed_tokens__weight": ones(2, 32)}, r"embed_tokens.weight is \(2, 32"),
    ("peagle", "no count of drafts"): ({"speculators_config": {"verifier": {}}}, {}, "names no speculative_tokens"),
    ("dspark", "a mask beyond the vocabulary"): ({"mask_token_id": 128}, {}, "mask_token_id is 128"),
    ("dspark", "a block of one"): ({"block_size": 1}, {}, "block_size is 1"),
    ("dspark", "another width"): ({"target_hidden_size": 48}, {}, "48 numbers in a hidden state .* has 32"),
    ("dspark", "a layer less in the settings"): (
        {"aux_hidden_state_layer_ids": [2, 4]}, {}, r"name 2 layers, so 64\. Write .* aux_hidden_state",
    ),
    ("dspark", "a layer that is not there"): ({"aux_hidden_state_layer_ids": [1, 2, 9]}, {}, "has 8 layers"),
    ("dspark", "sliding layers"): ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "sliding attention"),
    ("dspark", "another Markov head"): ({"markov_head_type": "rnn"}, {}, "kind 'rnn'"),
    ("dspark", "a tensor left over"): ({}, {"what__weight": ONE}, r"holds what\.weight that no block drafter .* Give it"),
    ("dspark", "a missing tensor"): ({}, {"layers__1__mlp__up_proj__weight": None}, "lacks layers.1.mlp.up_proj.weight"),
    ("dspark", "a wrong shape"): ({}, {"norm__weight": ones(31)}, r"norm.weight is \(31,\)"),
    ("dspark", "another number of layers"): ({"num_hidden_layers": 3}, {}, "has 2 layers, and config.json says 3"),
    ("dflash", "a kind that does not run"): (
        {"speculators_model_type": None}, {"lilicorr__slot_embedding": ONE},
        "kind 'lilicorr', which outrider does not run: .* DSpark blocks run",
    ),
    ("medusa", "more heads in the settings"): (
        {"num_heads": 4}, {}, "holds 3 heads of 2 blocks, and config.json says 4 heads of 2",
    ),
    ("medusa", "another vocabulary"): ({"vocab_size": 99}, {}, "99 tokens in the vocabulary, and golden-target has 128"),
    ("medusa", "an output missing"): ({}, {"lm_heads__2__weight": None}, r"output matrices of the heads \[0, 1\]"),
    ("medusa", "a tensor left over"): ({}, {"what__is__this": ONE}, "holds what.is.this"),
    ("medusa", "fewer rows without a map"): ({}, {"lm_heads__0__weight": ones(40, 32)}, "40 rows for 128 tokens"),
    ("medusa", "a map that repeats"): (
        {}, {"token_map": np.arange(40) // 2, "lm_head__weight": ones(40, 32)}, "token_map must hold different tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN, ids=", ".join)
def test_a_bad_head_says_what_is_wrong(case: tuple[str, str], tmp_path: Path) -> None:
    (head, _), (settings, tensors, message) = case, BROKEN[case]
    source = medusa_folder(tmp_path) if head == "medusa" else head
    folder = copied(source, tmp_path / "bad", settings, **tensors)
    with pytest.raises(ValueError, match=f"(?s){message}") as raised:
        READERS[head](folder, TARGET)
    assert str(folder) in str(raised.value) or head == "eagle3"


def test_a_head_of_another_kind() -> None:
    with pytest.raises(ValueError, match="kind 'dspark'"):
        read_medusa(GOLDEN / "dspark", TARGET)


def test_the_tap_convention_of_another_engine(tmp_path: Path) -> None:
    """A folder with SGLang's list alone, whose numbers are those of vLLM: one too high."""
    out = copied("eagle31", tmp_path)
    config = json.loads((out / "config.json").read_text())["transformer_layer_config"]
    config |= {"fc_norm": True, "norm_output": True, "draft_vocab_size": 48, "eagle_config": {KEY: [2, 4, 8]}}
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ValueError, match=rf"before layer 9 .* Correct eagle_config\.{KEY} \(it counts outputs"):
        read_eagle(out, TARGET)


@pytest.mark.parametrize("head", ["eagle3", "dspark", "medusa", "eagle1", "peagle"])
def test_a_head_of_another_target(head: str, tmp_path: Path) -> None:
    """Through the front of the library."""
    makers = {"medusa": medusa_folder, "eagle1": eagle1_folder}
    folder = makers[head](tmp_path) if head in makers else GOLDEN / head
    for size, words in (({"hidden_size": 64}, "32 numbers .* has 64"), ({"vocab_size": 130}, "128 tokens .* has 130")):
        with pytest.raises(ValueError, match=f"with {words}; .* outrider train eagle3 -m golden-target") as raised:
            LLM(small_target(**size), speculative_config={"model": str(folder)}, max_model_len=128)
        assert str(folder) in str(raised.value)
