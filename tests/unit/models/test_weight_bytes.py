"""What drafters ask of a model: the bytes that a forward of one token reads, and rows of its embedding and output head."""

from __future__ import annotations

import numpy as np
import pytest
from architectures import tiny
from light import Late

from outrider.models.native.model import NativeModel

hf = Late("outrider.models.hf.model")


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_model_of_transformers_reads_what_the_native_step_reads(weights: str) -> None:
    raw = tiny("llama", hidden_size=64, intermediate_size=96)
    norms = sum(p.nbytes for p in raw.parameters() if p.dim() == 1)
    found, native = hf.HFModel(raw, weights=weights), NativeModel(raw, weights=weights)
    assert found.weight_bytes == pytest.approx(native.weight_bytes + norms, rel=0.02)
    if weights == "auto":
        whole = sum(p.nbytes for p in raw.parameters()) - raw.get_input_embeddings().weight.nbytes
        assert found.weight_bytes == pytest.approx(whole, rel=0.05)
    else:
        assert found.weight_bytes < 0.4 * hf.HFModel(raw).weight_bytes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_token_reads_the_experts_that_it_has(name: str) -> None:
    raw = tiny(name)
    text = raw.config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or text.num_experts
    assert text.num_experts_per_tok < experts
    own = {n: p.nbytes for n, p in raw.named_parameters() if "embed_tokens" not in n}
    mixed = sum(size for n, size in own.items() if ".experts." in n)
    want = sum(own.values()) - mixed + mixed * text.num_experts_per_tok / experts
    assert hf.HFModel(raw).weight_bytes == pytest.approx(want, rel=0.2)  # matrices of 16 rows and less are padded
    assert sum(own.values()) > 1.2 * want


def test_an_embedding_that_is_tied_to_the_output_head_is_read_once() -> None:
    raw = tiny("llama", tie_word_embeddings=True)
    found = hf.HFModel(raw)
    assert raw.get_input_embeddings().weight.nbytes < found.weight_bytes < sum(p.nbytes for p in raw.parameters()) * 1.2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_rows_are_those_of_the_checkpoint(kind: str, weights: str, tied: bool) -> None:
    raw = tiny("llama", tie_word_embeddings=tied)
    table, head = (m.weight.detach().clone() for m in (raw.get_input_embeddings(), raw.get_output_embeddings()))
    model = (NativeModel if kind == "native" else hf.HFModel)(raw, weights=weights)
    tokens = np.array([[3, 69], [0, 3]])
    near = {"float32": 0.0, "bfloat16": 1e-2, "int8": 1e-2}[weights]
    assert np.allclose(model.embedding_rows(tokens), table[tokens], atol=near, rtol=0)
    assert np.allclose(model.head_rows(tokens[0]), head[tokens[0]], atol=near, rtol=0)
    assert model.embedding_rows(np.empty(0, np.int64)).shape == (0, 32)


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_a_head_of_some_tokens_has_no_rows_of_others(kind: str) -> None:
    model = (NativeModel if kind == "native" else hf.HFModel)(tiny("llama"), head_ids=np.array([1, 5]))
    with pytest.raises(ValueError, match="without head_ids"):
        model.head_rows(np.array([2]))
