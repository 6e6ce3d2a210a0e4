"""Heads are written as engines read them, without a loss, and the modules that learn have the numbers of speculators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import EAGLE3, GOLDEN, causal, golden, head_folder, medusa_folder, small_config, small_target
from safetensors.numpy import load_file

from outrider.core.types import Array
from outrider.drafters.heads.block import read_block
from outrider.drafters.heads.config import default_taps
from outrider.drafters.heads.eagle import EagleConfig, read_eagle
from outrider.drafters.heads.files import head_kind, open_head
from outrider.drafters.heads.medusa import MedusaWeights, read_medusa
from outrider_lab.heads.modules import Eagle, config_for
from outrider_lab.heads.writers import write_block, write_eagle, write_medusa

TARGET, SMALL = small_target(), small_config(96)
TABLE = torch.from_numpy(TARGET.model.embedding_rows(np.arange(128)))
KEY = "eagle_aux_hidden_state_layer_ids"
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "before_fc": {"norm_before_fc": True},
    "before_residual": {"norm_before_residual": True},
    "eagle1": {"eagle1": True, "taps": (-1,)},
}


# -- folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["speculators", "flat"])
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle_heads_are_written_without_a_loss(name: str, layout: str, tmp_path: Path) -> None:
    first = read_eagle(GOLDEN / name, TARGET)
    if layout == "flat" and first.config.norm_before_residual:
        with pytest.raises(ValueError, match="SGLang ignores"):
            write_eagle(tmp_path, first, layout)
        return
    whole = Eagle.of(first, TABLE).weights(embedding=True)
    again = read_eagle(write_eagle(tmp_path, whole, layout), TARGET)
    assert again.config == first.config
    assert np.array_equal(again.token_ids, first.token_ids)
    assert {n: t.tolist() for n, t in again.tensors.items()} == {n: t.tolist() for n, t in first.tensors.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    if layout == "speculators":  # byte for byte what speculators wrote
        old, new = (load_file(f / "model.safetensors") for f in (GOLDEN / name, tmp_path))
        assert old.keys() ^ new.keys() <= {"t2d"}
        assert all(np.array_equal(old[n], new[n]) for n in old.keys() & new.keys())
        theirs = json.loads((GOLDEN / name / "config.json").read_text())
        same = (KEY, "norm_before_residual", "fc_norm", "norm_output", "draft_vocab_size")
        assert [config[key] for key in same] == [theirs[key] for key in same]
        return
    assert config[KEY] == [t + 1 for t in first.config.taps]  # vLLM
    assert config["eagle_config"][KEY] == [*first.config.taps]  # SGLang
    assert "target_hidden_size" not in config  # null breaks SGLang
    assert any(n.startswith("midlayer.") for n in load_file(tmp_path / "model.safetensors"))
    del config[KEY]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_eagle(tmp_path, TARGET).config.taps == first.config.taps


def test_heads_that_are_only_read(tmp_path: Path) -> None:
    parallel = read_eagle(GOLDEN / "peagle", TARGET)
    for refused in (lambda: Eagle.of(parallel, TABLE), lambda: write_eagle(tmp_path, parallel)):
        with pytest.raises(ValueError, match="cannot be trained or written"):
            refused()
    with pytest.raises(ValueError, match="EAGLE-1 are read, not written"):
        write_eagle(tmp_path, read_eagle(head_folder("eagle1", tmp_path), TARGET))
    with pytest.raises(ValueError, match="speculators or flat, got 'other'"):
        write_eagle(tmp_path, read_eagle(GOLDEN / "eagle3", TARGET), "other")


@pytest.mark.parametrize("name", ["dflash", "dspark", "dspark-small"])
def test_blocks_are_written_without_a_loss(name: str, tmp_path: Path) -> None:
    folder = head_folder(name, tmp_path)
    first = read_block(folder, TARGET)
    out = write_block(tmp_path / "out", first)
    again = read_block(out, TARGET)
    assert again.config == first.config
    assert np.array_equal(again.token_ids, first.token_ids)
    old, new = (load_file(f / "model.safetensors") for f in (folder, out))
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[n].astype(new[n].dtype), new[n]) for n in old)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (out, folder))
    layers = [one.pop("transformer_layer_config") for one in (ours, theirs)]
    # vLLM reads `sliding_window_non_causal: false` as causal attention in every layer
    differ = {k for k in theirs if ours.get(k) != theirs[k]}
    assert differ <= {"sliding_window_non_causal", "auto_map", "dtype", "transformers_version"}
    unsaid = {k for k in layers[1] if layers[0].get(k) != layers[1][k]}
    assert unsaid <= {"attention_dropout", "initializer_range", "max_window_layers", "use_cache"}


MEDUSA_CASES = [("vllm", "vllm"), ("old", "tgi"), ("shared", "vllm"), ("target", "tgi"), ("vllm", "tgi")]


@pytest.mark.parametrize(("layout", "written"), MEDUSA_CASES)
def test_medusa_heads_are_written_without_a_loss(layout: str, written: str, tmp_path: Path) -> None:
    first = read_medusa(medusa_folder(tmp_path, layout), TARGET)
    if layout == "shared":
        first = replace(first, logit_scale=0.25)
    out = write_medusa(tmp_path / "out", first, written, dtype="float32", verifier="golden-target")
    assert head_kind(out) == "medusa"
    again = read_medusa(out, TARGET)
    assert (again.vocab_size, again.logit_scale) == (first.vocab_size, first.logit_scale)
    for ours, theirs in zip(_numbers(again), _numbers(first), strict=True):
        assert np.array_equal(ours, theirs)
    assert open_head(out).verifier == "golden-target"
    if written == "vllm":  # what vLLM needs to read it as it is
        config = json.loads((out / "config.json").read_text())
        assert config["medusa_fc_bias"] is True
        assert config["original_lm_head"] is (layout == "shared")
        assert config["truncated_vocab_size"] == (40 if layout == "shared" else 128)


def _numbers(head: MedusaWeights) -> list[Array]:
    blocks = [t for one in head.blocks for pair in one for t in pair if t is not None]
    return [*blocks, *head.outputs, *([] if head.token_ids is None else [head.token_ids])]


def test_what_a_layout_cannot_say(tmp_path: Path) -> None:
    shared = read_medusa(medusa_folder(tmp_path, "shared"), TARGET)
    own = replace(shared, outputs=[], token_ids=None)
    for head, layout, words in (
        (shared, "tgi", "layout='vllm'"),
        (own, "vllm", "layout='tgi'"),
        (own, "x", "vllm or tgi, got 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            write_medusa(tmp_path / "out", head, layout)


# -- modules --------------------------------------------------------------------------------------------------------------


def make(name: str) -> Eagle:
    torch.manual_seed(0)
    head = Eagle(config_for(EagleConfig, SMALL, **VARIANTS[name]))
    for p in head.parameters():
        p.data = torch.randn_like(p) * 0.2 if p.dim() == 2 else torch.rand_like(p) + 0.5
    return head


@pytest.mark.parametrize("name", EAGLE3)
@torch.no_grad()
def test_numbers_are_those_of_speculators(name: str) -> None:
    """A draft of four tokens along the text, after the pair of each position."""
    head, want = Eagle.of(read_eagle(GOLDEN / name, TARGET), TABLE).eval(), golden(name)
    tokens, features = (torch.as_tensor(want[n]) for n in ("tokens", "features"))
    for t in range(1, 15):
        y, past = causal(head, tokens[None, 1 : t + 2], head.fuse(features[None, : t + 1]))
        for k in range(4):
            assert np.allclose(head.logits(y[0, -1]), want["logits"][k, t], atol=1e-4, rtol=0), (t, k)
            y, past = causal(head, tokens[None, t + 2 + k : t + 3 + k], head.feedback(y[:, -1:]), past)


@pytest.mark.parametrize("name", VARIANTS)
def test_pairs_read_one_by_one_give_what_they_give_at_once(name: str) -> None:
    """Gradients reach all but the embedding, and a shift of all positions changes nothing."""
    head = make(name)
    tokens, features = torch.randint(96, (2, 7)), torch.randn(2, 7, 32 * len(head.config.taps))
    whole, _ = causal(head, tokens, head.fuse(features))
    assert torch.allclose(whole, causal(head, tokens, head.fuse(features), first=17)[0], atol=1e-5)
    past = None
    for n in range(7):
        y, past = causal(head, tokens[:, n : n + 1], head.fuse(features[:, n : n + 1]), past)
        assert torch.allclose(y[:, 0], whole[:, n], atol=1e-5)
    again, _ = causal(head, torch.randint(96, (2, 1)), head.feedback(y), past)
    head.logits(again).logsumexp(-1).sum().backward()
    assert [n for n, p in head.named_parameters() if p.grad is None] == ["embed_tokens.weight"]


def test_a_new_head_starts_as_fc_and_the_targets_output_head() -> None:
    config, table = config_for(EagleConfig, SMALL, draft_vocab_size=3), torch.randn(96, 32)
    head = Eagle(config, torch.tensor([2, 5, 90])).initialise_(table)
    g = head.fuse(torch.randn(1, 4, 96))
    y, _ = causal(head, torch.randint(96, (1, 4)), g)
    assert torch.equal(y, g)
    assert torch.equal(head.lm_head.weight, table[[2, 5, 90]])
    with pytest.raises(ValueError, match=r"output head is \(95, 32\)"):
        head.initialise_(table, table[1:])
    for ids in ([2, 1, 5], [1, 2], [1, 2, 96]):
        with pytest.raises(ValueError, match="ascending ids below 96"):
            Eagle(config, torch.tensor(ids))


def test_default_taps() -> None:
    assert default_taps(30) == (1, 14, 26)  # before layers 2, 15 and 27
    assert default_taps(6) == (0, 2, 4)
    assert all(len(set(default_taps(n))) == len(default_taps(n)) and max(default_taps(n)) < n for n in range(1, 40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "both true"),
        ({"taps": (1, 1)}, "different layers"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "'dynamic'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"no_such": 1}, "no field 'no_such'"),
    ],
)
def test_settings_that_no_head_has(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_for(EagleConfig, SMALL, **settings)
