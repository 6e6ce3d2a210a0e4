"""The same code on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from helpers import RandomTree, decoder, plain_texts, request
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDraft
from outrider.models.hf.model import HFModel
from outrider.models.nodes import Nodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCAB = 97


def model(seed: int, dtype: torch.dtype = torch.float32) -> HFModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return HFModel(LlamaForCausalLM(config).to("cuda", dtype).eval(), own=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["draft_model", "ngram", "tree", "batch"])
def test_a_differing_token_is_a_near_tie(name: str, temperature: float) -> None:
    target = model(0)
    drafters: dict[str, Drafter] = {
        "draft_model": ModelDrafter(model(1), 4, 320),
        "ngram": NgramDrafter(1, 3),
        "tree": RandomTree(VOCAB),
        "batch": NoDraft(),
    }
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    asked = [request([1 + i, 2, 3], params, i) for i in range(4)]
    expected = plain_texts(target, asked)
    rows = decoder(target, drafters[name], budget=Budget(4, 2, 6)).generate(asked)
    for one, row, plain in zip(asked, rows, expected, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(row.output, plain, strict=True)) if a != b), None)
        if at is None:
            continue
        text = [*one.prompt, *plain[:at]]
        cache = target.new_cache(1, 320)
        logits = target.forward(Nodes(torch.tensor([text]), cache, [0]), want="last").logits[0, 0]
        if temperature:  # the noise that met the logits there
            from helpers import noise

            from outrider.core.noise import Stream

            logits = logits.cpu() + noise([one.seed]).gumbel(Stream.TOKEN, torch.tensor([len(text)]), VOCAB)[0]
        assert abs(float(logits[row.output[at]] - logits[plain[at]])) < 1e-3


def test_trees_and_chunks_give_the_logits_of_one_pass() -> None:
    target = model(2)
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    whole = target.forward(Nodes(ids, target.new_cache(1, 128), [0])).logits
    cache = target.new_cache(1, 128)
    parts = []
    for part in ids.split(7, dim=1):
        parts.append(target.forward(Nodes(part, cache, [0])).logits)
        cache.commit([0], [range(part.shape[1])])
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-3, rtol=1e-3)
