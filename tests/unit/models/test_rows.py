"""The rows of a model's embedding and output head, which heads share: the checkpoint's own, in every precision."""

import pytest
import torch
from architectures import tiny

from outrider.models.hf.model import HFModel
from outrider.models.native.model import NativeModel


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", [NativeModel, HFModel])
def test_rows_are_those_of_the_checkpoint(kind: type, weights: str, tied: bool) -> None:
    raw = tiny("llama", tie_word_embeddings=tied)
    table, head = (m.weight.detach().clone() for m in (raw.get_input_embeddings(), raw.get_output_embeddings()))
    model = kind(raw, weights=weights)
    tokens = torch.tensor([[3, 69], [0, 3]])
    near = {"float32": 0.0, "bfloat16": 1e-2, "int8": 1e-2}[weights]
    assert torch.allclose(model.embedding_rows(tokens), table[tokens], atol=near, rtol=0)
    assert torch.allclose(model.head_rows(tokens[0]), head[tokens[0]], atol=near, rtol=0)
    assert model.embedding_rows(torch.empty(0, dtype=torch.long)).shape == (0, 32)


@pytest.mark.parametrize("kind", [NativeModel, HFModel])
def test_a_head_of_some_tokens_has_no_rows_of_others(kind: type) -> None:
    model = kind(tiny("llama"), head_ids=torch.tensor([1, 5]))
    with pytest.raises(ValueError, match="without head_ids"):
        model.head_rows(torch.tensor([2]))
