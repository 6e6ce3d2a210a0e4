"""P-EAGLE: the numbers of speculators, drafts that depend on the text alone, and folders that cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import GOLDEN, copied, golden, small_target
from torch import Tensor

from outrider.drafters import make_drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.eagle.drafter import MaskedPairs
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.eagle.module import Eagle
from outrider.drafters.heads.files import head_kind
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.registry import level_cost
from outrider.models.nodes import Nodes
from outrider_lab.handover import exports

TARGET = small_target()
NAMES = ("peagle", "peagle_qwen3")
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]


def drafter(name: str, rows: int = 3, folder: Path | None = None) -> TreeDrafter[MaskedPairs]:
    return TreeDrafter(MaskedPairs(read_eagle(folder or GOLDEN / name, TARGET), TARGET.model, rows, 256, "none"))


def features(tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    cache = TARGET.model.new_cache(1, len(tokens))
    out = TARGET.model.forward(Nodes(torch.tensor([tokens]), cache, [0]), taps=taps, want="none").features
    assert out is not None
    return out[0]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_speculators(name: str) -> None:
    """The logits of every slot after every position, through the drafter's own calls."""
    want, made = golden(name), drafter(name)
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
def test_rows_of_a_batch_are_those_alone(name: str) -> None:
    """Rows of different lengths, some with features that wait."""
    lengths = (3, 31, 12)
    both, alone = drafter(name), [drafter(name) for _ in lengths]
    for slot, (n, single) in enumerate(zip(lengths, alone, strict=True)):
        own = features(PROMPT[: n - 1], both.taps)
        for made, place in ((both, slot), (single, 0)):
            made.start(place, PROMPT[:n], 0, own[: n - 2])
            made.levels.add(place, own[n - 2 :], n - 2)
    texts = [PROMPT[:n] for n in lengths]
    together = both.levels.logits([0, 1, 2], texts, 4)
    for text, single, logits in zip(texts, alone, together, strict=True):
        assert torch.allclose(single.levels.logits([0], [text], 4)[0], logits, atol=1e-5)


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


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no mask": ({"mask_token_id": None}, {}, "mask_token_id is None; it must be a token of the target"),
    "a mask beyond the vocabulary": ({"mask_token_id": 128}, {}, "mask_token_id is 128"),
    "no feature for masks": ({}, {"mask_hidden": None}, "lacks mask_hidden"),
    "a feature of another width": ({}, {"mask_hidden": torch.ones(1, 1, 64)}, r"mask_hidden is \(1, 1, 64\)"),
    "a layer less": ({"num_hidden_layers": 1}, {}, "holds layers.1.* that no P-EAGLE head"),
    "a layer more": ({"num_hidden_layers": 3}, {}, "lacks layers.2"),
    "an embedding of another shape": (
        {},
        {"embed_tokens__weight": torch.ones(2, 32)},
        r"embed_tokens.weight is \(2, 32",
    ),
    "sliding layers": ({"layer_types": ["sliding_attention"] * 2}, {}, "layers of sliding attention"),
    "no count of drafts": ({"speculators_config": {"verifier": {}}}, {}, "names no speculative_tokens"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_bad_head_says_what_is_wrong(what: str, tmp_path: Path) -> None:
    settings, tensors, message = BROKEN[what]
    folder = copied("peagle", tmp_path, settings, **tensors)
    with pytest.raises(ValueError, match=message):
        read_eagle(folder, TARGET)


def test_kinds(tmp_path: Path) -> None:
    flat = copied("peagle", tmp_path, {"speculators_model_type": None})
    assert head_kind(flat) == "peagle"  # by its tensors
    with pytest.raises(ValueError, match="cannot be trained or written"):
        Eagle.of(read_eagle(GOLDEN / "peagle", TARGET), torch.zeros(128, 32))
