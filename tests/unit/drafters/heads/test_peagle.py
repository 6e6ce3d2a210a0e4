"""P-EAGLE: the numbers of speculators, drafts that depend on the text alone, and folders that cannot be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from heads import GOLDEN, copied, drafter_of, golden, small_target

from outrider.drafters import make_drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.eagle.drafter import MaskedPairs
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.eagle.module import Eagle
from outrider.drafters.heads.files import head_kind
from outrider.drafters.registry import level_cost
from outrider_lab.handover import exports

TARGET = small_target()
NAMES = ("peagle", "peagle_qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_speculators(name: str) -> None:
    """The logits of every slot after every position, through the drafter's own calls."""
    want, made = golden(name), drafter_of(GOLDEN / name, TARGET)
    tokens, found = want["tokens"].tolist(), 0
    for t in range(1, len(tokens) - 1):
        rows = [n for n in range(len(want["anchors"])) if int(want["anchors"][n]) == t]
        made.start(0, tokens[: t + 2], 0, want["features"][: t + 1])
        got = made.levels.logits([0], [tokens[: t + 2]], 4)[0]
        for n in rows:
            assert torch.allclose(got[int(want["depths"][n])], want["logits"][n], atol=1e-4, rtol=0), (t, n)
            found += 1
    assert found > 50


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_enough(name: str) -> None:
    config = SpeculativeConfig.of({"model": str(GOLDEN / name)})
    assert config.method == "peagle"
    made = make_drafter(config, TARGET, num_slots=2, max_length=128, device="cpu")
    assert isinstance(made.levels, MaskedPairs)
    found = {e.engine: e for e in exports({"model": str(GOLDEN / name)})}
    assert '"method": "eagle3"' in found["vLLM"].command
    assert '"parallel_drafting": true' in found["vLLM"].command
    assert not found["SGLang"].command
    assert 0 < level_cost("peagle", made, TARGET.model) * 4 < 1  # of the small target, all four tokens


def test_its_embedding_is_its_own_without_a_word(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        assert read_eagle(GOLDEN / "peagle", TARGET).own_embedding is not None
        without = copied("peagle", tmp_path, embed_tokens__weight=None)
        assert read_eagle(without, TARGET).own_embedding is None  # engines take the target's
    assert not caplog.records


def test_kinds(tmp_path: Path) -> None:
    flat = copied("peagle", tmp_path, {"speculators_model_type": None})
    assert head_kind(flat) == "peagle"  # by its tensors
    with pytest.raises(ValueError, match="cannot be trained or written"):
        Eagle.of(read_eagle(GOLDEN / "peagle", TARGET), torch.zeros(128, 32))
