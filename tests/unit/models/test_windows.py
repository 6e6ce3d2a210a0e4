"""Sliding windows: trees across the border and far beyond it."""

from __future__ import annotations

import pytest
import torch
from architectures import prompts, tiny
from row_checks import Guided, outputs

from outrider.models.hf.model import HFModel

# Windows of 6 and 7 tokens. phi3 is the class of Phi-4.
WINDOWED: dict[str, dict[str, int]] = {
    "phi3": {"sliding_window": 7},
    "gemma3_text": {},
    "gpt_oss": {},
    "gemma2": {},
    "mistral": {},
}


@pytest.mark.parametrize(
    ("name", "new"),
    [("phi3", 40), ("gpt_oss", 40), *(pytest.param(name, 300, marks=pytest.mark.long) for name in WINDOWED)],
)
def test_texts_beyond_the_window(name: str, new: int) -> None:
    """The prompt is longer than the window, and the last tokens are `new` beyond it. Texts are those of `generate`."""
    raw = tiny(name, max_position_embeddings=512, **WINDOWED[name])
    options = {"do_sample": False, "max_new_tokens": new}
    texts = [raw.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts(9, 20)]
    model = HFModel(raw)
    assert outputs(model, texts, None, new) == texts
    assert outputs(model, texts, Guided(texts), new) == texts
