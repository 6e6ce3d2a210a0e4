"""Bytes that a forward of one token reads, of which costs of drafters follow."""

from __future__ import annotations

import pytest
from architectures import tiny

from outrider.models.hf.model import HFModel
from outrider.models.native.model import NativeModel


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_model_of_transformers_reads_what_the_native_step_reads(weights: str) -> None:
    raw = tiny("llama", hidden_size=64, intermediate_size=96)
    norms = sum(p.nbytes for p in raw.parameters() if p.dim() == 1)
    found, native = HFModel(raw, weights=weights), NativeModel(raw, weights=weights)
    assert found.weight_bytes == pytest.approx(native.weight_bytes + norms, rel=0.02)
    assert found.head_bytes == native.head_bytes > 0
    if weights == "auto":
        whole = sum(p.nbytes for p in raw.parameters()) - raw.get_input_embeddings().weight.nbytes
        assert found.weight_bytes == pytest.approx(whole, rel=0.05)
    else:
        assert found.weight_bytes < 0.4 * HFModel(raw).weight_bytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_token_reads_the_experts_that_it_has(name: str) -> None:
    raw = tiny(name)
    text = raw.config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or text.num_experts
    assert text.num_experts_per_tok < experts
    own = {n: p.nbytes for n, p in raw.named_parameters() if "embed_tokens" not in n}
    mixed = sum(size for n, size in own.items() if ".experts." in n)
    want = sum(own.values()) - mixed + mixed * text.num_experts_per_tok / experts
    assert HFModel(raw).weight_bytes == pytest.approx(want, rel=0.2)  # matrices of 16 rows and less are padded
    assert sum(own.values()) > 1.2 * want


def test_an_embedding_that_is_tied_to_the_output_head_is_read_once() -> None:
    raw = tiny("llama", tie_word_embeddings=True)
    found = HFModel(raw)
    assert found.head_bytes == pytest.approx(raw.get_input_embeddings().weight.nbytes, rel=0.2)
    assert found.head_bytes < found.weight_bytes < sum(p.nbytes for p in raw.parameters()) * 1.2
