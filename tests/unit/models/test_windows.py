"""Sliding windows: trees across the border, far beyond it, and cells that leave the window while a draft is open."""

from __future__ import annotations

import pytest
import torch
from architectures import prompts, tiny
from row_checks import Guided, outputs

from outrider.models.base import Output, Want
from outrider.models.hf.model import HFModel
from outrider.models.nodes import Nodes

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


class _EvictsEarly(HFModel):
    """A planted fault: what the deepest node of a draft no longer sees is overwritten before the commit."""

    window = 7

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        out = super().forward(nodes, taps=taps, want=want)
        for slot, length in zip(nodes.slots, nodes.lengths, strict=True):
            for kept in nodes.cache.layers[0]:
                kept[slot, :, : max(0, length + nodes.total - self.window)] = 0
        return out


def test_a_window_that_is_evicted_before_the_commit_is_found() -> None:
    raw = tiny("phi3", sliding_window=_EvictsEarly.window)
    texts = [raw.generate(torch.tensor([p]), do_sample=False, max_new_tokens=12)[0].tolist() for p in prompts(9, 20)]
    faulty = _EvictsEarly(raw)
    assert outputs(faulty, texts, None, 12) == texts, "plain decoding cannot show it"
    with pytest.raises((AssertionError, RuntimeError)):  # `Guided` knows no other texts, so it stops at one
        assert outputs(faulty, texts, Guided(texts), 12) == texts
