"""Heads that speculators wrote are read, from every layout of files."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from heads import GOLDEN, copied, drafter_of, golden, small_target
from light import torch
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from outrider.drafters.heads.eagle import read_eagle
from outrider.drafters.heads.files import head_kind, open_head

TARGET = small_target()


@pytest.mark.parametrize("name", ["peagle", "peagle_qwen3"])
def test_parallel_numbers_are_those_of_speculators(name: str) -> None:
    """The logits of every slot after every position, through the drafter's own calls."""
    want, made = golden(name), drafter_of(GOLDEN / name, TARGET)
    tokens, anchors, compared = want["tokens"].tolist(), want["anchors"].tolist(), 0
    for t in range(1, len(tokens) - 1):
        made.start(0, tokens[: t + 2], 0, want["features"][: t + 1])
        got = made.levels.logits([0], [tokens[: t + 2]], 4)[0]
        for n in (n for n, anchor in enumerate(anchors) if anchor == t):
            assert np.allclose(got[int(want["depths"][n])], want["logits"][n], atol=1e-4, rtol=0), (t, n)
            compared += 1
    assert compared > 50


def test_other_files_and_names(tmp_path: Path) -> None:
    """pytorch_model.bin, an index of parts, the prefix `model.`, SGLang's names of norms, a missing output head."""
    want = read_eagle(GOLDEN / "eagle31", TARGET)
    weights = load_file(GOLDEN / "eagle31" / "model.safetensors")
    names = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    for old, new in names.items():
        weights[f"{new}.weight"] = weights.pop(f"{old}.weight")
    weights = {n if n.startswith("lm_head") else f"model.{n}": t for n, t in weights.items()}

    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(GOLDEN / "eagle31" / "config.json", folder)
    floats = {name: x.astype(np.float32) if x.dtype == bfloat16 else x for name, x in weights.items()}
    torch.save({name: torch.from_numpy(x) for name, x in floats.items()}, folder / "pytorch_model.bin")
    assert head_kind(folder) == "eagle3"
    got = read_eagle(folder, TARGET)
    assert got.config == want.config
    assert all(np.array_equal(got.tensors[n], want.tensors[n]) for n in want.tensors)

    parts = tmp_path / "parts"
    parts.mkdir()
    shutil.copy(GOLDEN / "eagle31" / "config.json", parts)
    halves = [dict(list(weights.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        save_file(half, parts / f"part-{i}.safetensors")
    index = {"weight_map": {n: f"part-{i}.safetensors" for i, half in enumerate(halves) for n in half}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_eagle(parts, TARGET).config == want.config
    (parts / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks part-1\.safetensors"):
        read_eagle(parts, TARGET)

    without = copied("eagle31", tmp_path, lm_head__weight=None)
    shared = read_eagle(without, TARGET).tensors["lm_head.weight"]
    assert np.array_equal(shared, TARGET.model.head_rows(want.token_ids))


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = copied("eagle3", tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        open_head(folder)
    assert not (tmp_path / "ran").exists()


def test_an_embedding_of_its_own_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = read_eagle(GOLDEN / "eagle3", TARGET)
    assert same.own_embedding is None
    folder = copied("eagle3", tmp_path, embed_tokens__weight=np.ones((128, 32), np.float32))
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        own = read_eagle(folder, TARGET)
    assert "an embedding of its own" in caplog.text
    assert own.own_embedding is not None


def test_the_embedding_of_a_parallel_head_is_its_own_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        assert read_eagle(GOLDEN / "peagle", TARGET).own_embedding is not None
        without = copied("peagle", tmp_path, embed_tokens__weight=None)
        assert read_eagle(without, TARGET).own_embedding is None  # engines take the target's
    assert not caplog.records


def test_missing_settings_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copied("eagle3", tmp_path, {"rope_parameters": None, "eagle_aux_hidden_state_layer_ids": None})
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        read = read_eagle(folder, TARGET)
    assert read.config.taps == (1, 3, 4)
    assert read.config.rope_parameters["rope_theta"] == 10000.0
    assert "no rope_theta" in caplog.text
    assert "before layers [2, 4, 5]" in caplog.text


def test_kinds(tmp_path: Path) -> None:
    kinds = {p.name: head_kind(p) for p in GOLDEN.iterdir() if p.is_dir()}
    assert kinds == {n: "eagle3" if n.startswith("e") else n.removesuffix("_qwen3") for n in kinds}
    assert head_kind(tmp_path) is None
    assert head_kind("no/such/folder") is None
    for name, kind in (("eagle31", "eagle3"), ("peagle", "peagle"), ("dflash", "dflash"), ("dspark", "dspark")):
        assert head_kind(copied(name, tmp_path, {"speculators_model_type": None})) == kind  # by its tensors
