"""The same code on a CUDA device, by both of its paths. Skipped where there is none.

pytest -m gpu tests/system/test_gpu.py        alone: other files of the suite make Triton interpret
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import KnownTree, RandomTree, decoder, noise, plain_texts, request
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.noise import Stream
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDraft
from outrider.models.base import LanguageModel
from outrider.models.hf.model import HFModel
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.native.model import build
from outrider.models.nodes import Nodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE, VOCAB, LENGTH = "cuda", 97, 320
# (rows of a matrix, columns): those of a layer of 1.5B, of its head, and of a layer of 8B
MATRICES = [
    (2048, 1536),
    (1536, 1536),
    (17920, 1536),
    (1536, 8960),
    (151936, 1536),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
]
ROWS = 512
TEXTS, TOKENS = 1000, 16  # texts, and the tokens of each
LONG = 2500  # tokens of a long text
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
# two layers of 1.5B
WIDE = {"vocab_size": 4096, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}


def llama(seed: int, sizes: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=LONG + 100, **sizes)
    return LlamaForCausalLM(config).eval()


def theirs(seed: int) -> HFModel:
    """By the modelling code of transformers."""
    return HFModel(llama(seed, TINY).to(DEVICE), own=True)


def ours(seed: int, sizes: dict[str, Any] = TINY) -> LanguageModel:
    """By our own kernels."""
    from outrider.models.gpu.model import GpuModel
    from outrider.models.gpu.weights import DeviceSource

    module = llama(seed, sizes).bfloat16()
    config = config_for(module)
    return GpuModel(build(config.kind, config, DeviceSource(ModuleTensors(module), config, DEVICE)), DEVICE)


PATHS = {"theirs": theirs, "ours": ours}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["draft_model", "ngram", "tree", "batch"])
@pytest.mark.parametrize("path", PATHS)
def test_a_differing_token_is_a_near_tie(path: str, name: str, temperature: float) -> None:
    """Ours differ nowhere."""
    target = PATHS[path](0)
    drafters: dict[str, Drafter] = {
        "draft_model": ModelDrafter(PATHS[path](1), 4, LENGTH),
        "ngram": NgramDrafter(1, 3),
        "tree": RandomTree(VOCAB),
        "batch": NoDraft(),
    }
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    asked = [request([1 + i, 2, 3], params, i) for i in range(4)]
    expected = plain_texts(target, asked)
    rows = decoder(target, drafters[name], budget=Budget(4, 2, 6)).generate(asked)
    if target.batch_invariant:
        assert [row.output for row in rows] == expected
    for one, row, plain in zip(asked, rows, expected, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(row.output, plain, strict=True)) if a != b), None)
        if at is None:
            continue
        text = [*one.prompt, *plain[:at]]
        cache = target.new_cache(1, LENGTH)
        logits = target.forward(Nodes(np.array([text]), cache, [0]), want="last").logits[0, 0]
        if temperature:  # the noise that met the logits there
            logits = logits + noise([one.seed]).gumbel(Stream.TOKEN, np.array([len(text)]), VOCAB)[0]
        assert abs(float(logits[row.output[at]] - logits[plain[at]])) < 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_trees_and_chunks_give_the_logits_of_one_pass(path: str) -> None:
    target = PATHS[path](2)
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 40))
    whole = target.forward(Nodes(ids, target.new_cache(1, 128), [0])).logits
    cache = target.new_cache(1, 128)
    parts = []
    for part in np.split(ids, range(7, 40, 7), 1):
        parts.append(target.forward(Nodes(part, cache, [0])).logits)
        cache.commit([0], [range(part.shape[1])])
    if target.batch_invariant:
        assert np.array_equal(np.concatenate(parts, 1), whole)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_rows_of_a_product_have_their_bits_in_any_company(n: int, k: int) -> None:
    from outrider.kernels.gpu import APART, linear

    def product(x: torch.Tensor) -> torch.Tensor:
        parts = linear.split(n, k)[0] if len(x) <= APART else 1
        out = torch.full((parts, len(x), n), float("nan"), device=DEVICE)
        linear.linear(x, weight, out)
        total = out[0]
        for part in out[1:]:
            total = total + part
        return total

    draw = torch.Generator(DEVICE).manual_seed(n + k)
    x = torch.randn(ROWS, k, generator=draw, device=DEVICE)
    weight = torch.randn(n, k, generator=draw, device=DEVICE).bfloat16()
    whole, compared = product(x), 0
    for count in (1, 2, 7, 16, 17, 32, 33, 64, 65, 200):
        for first in range(0, ROWS - count + 1, max(count, ROWS // 32)):
            assert torch.equal(product(x[first : first + count]), whole[first : first + count]), (count, first)
            compared += count
    assert compared > 5 * ROWS


def test_nodes_of_a_long_text_have_their_bits_in_any_company() -> None:
    """In chunks, one at a time, and in a tree."""
    target, draw = ours(3, WIDE), np.random.default_rng(0)
    ids = draw.integers(0, target.vocab_size, LONG).tolist()
    whole = target.forward(Nodes(np.array([ids]), target.new_cache(1, LONG), [0])).logits[0]
    cache = target.new_cache(2, LONG)
    while (at := cache.length[1]) < LONG:
        part = ids[at : at + int(draw.choice([1, 1, 2, 5, 16, 33, 64, 65, 300]))]
        side = [(ids[at] + 1 + n) % target.vocab_size for n in range(len(part))]
        tokens = [part[0], *(t for pair in zip(side, part[1:], strict=False) for t in pair)]
        parents = [-1, *(max(2 * n, 0) for n in range(len(part) - 1) for _ in range(2))]
        path = [0, *range(2, len(tokens), 2)]
        if draw.random() < 0.5 and len(part) <= 33:
            logits = target.forward(Nodes(np.array([tokens]), cache, [1], np.array([parents]))).logits[0][path]
        else:
            logits, path = target.forward(Nodes(np.array([part]), cache, [1])).logits[0], [*range(len(part))]
        assert np.array_equal(logits, whole[at : at + len(part)]), at
        cache.commit([1], [path])


def test_many_texts_are_those_of_plain_decoding() -> None:
    target, drafters = ours(4, WIDE), ("known", "random", "ngram", "none")
    for turn in range(TEXTS // 8):
        asked = [
            request(
                [1 + turn, 2 + i, 3, 2 + i],
                SamplingParams(temperature=i % 2, max_tokens=TOKENS, ignore_eos=True),
                8 * turn + i,
            )
            for i in range(8)
        ]
        plain = plain_texts(target, asked)
        drafter: Drafter = {
            "known": lambda asked=asked: KnownTree(target, asked),
            "random": lambda: RandomTree(target.vocab_size),
            "ngram": lambda: NgramDrafter(1, 3),
            "none": NoDraft,
        }[drafters[turn % 4]]()
        run = decoder(target, drafter, rows=1 + turn % 8, budget=Budget(1 + turn % 5, 2, 8))
        assert [text.output for text in run.generate(asked)] == plain
