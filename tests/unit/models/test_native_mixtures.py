"""Mixtures of experts on the native step: transformers' logits and texts, and a node has the bits that it has alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from architectures import VOCAB, tiny
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.hf.model import HFModel
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

NAMES = (
    "mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1",
    "qwen2_moe", "ernie4_5_moe",
)  # fmt: skip
TEXT = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))
TREE = torch.tensor([[-1, 0, 0, 1, 3, -2, 2]])


def model_of(name: str, **changes: Any) -> Any:
    """With gains and biases that do something."""
    model = tiny(name, **changes)
    torch.manual_seed(0)
    for n, p in model.named_parameters():
        if p.dim() == 1 or n.endswith("_bias"):
            torch.nn.init.normal_(p, 1 if "norm" in n else 0, 0.3)
    for n, p in model.named_buffers():
        if n.endswith("correction_bias"):
            torch.nn.init.normal_(p, 0, 0.3)
    return model


def run(model: Any, tokens: Tensor, tree: Tensor | None = None, **settings: Any) -> Any:
    return model.forward(Nodes(tokens, model.new_cache(len(tokens), 64), [*range(len(tokens))], tree), **settings)


@pytest.mark.parametrize("name", NAMES)
def test_close_to_transformers(name: str) -> None:
    raw = model_of(name)
    assert supports(raw) is None
    taps = (EMBEDDING, 0, 1, FINAL_NORM)
    ours, reference = NativeModel(raw), HFModel(model_of(name), weights="float32")
    for tokens, tree in ((TEXT, None), (TEXT[:, :7], TREE)):
        got, expected = (run(m, tokens, tree, taps=taps) for m in (ours, reference))
        real = slice(None) if tree is None else tree >= -1
        for a, b in ((got.logits[real], expected.logits[real]), (got.features[real], expected.features[real])):
            assert (a - b).abs().max() < 1e-4 * b.abs().max()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_node_has_the_bits_that_it_has_alone(name: str, weights: str) -> None:
    model = NativeModel(model_of(name), weights=weights)
    cache, ones = model.new_cache(1, 64), []
    for i in range(TEXT.shape[1]):
        ones.append(model.forward(Nodes(TEXT[:, i : i + 1], cache, [0])).logits)
        cache.commit([0], [[0]])
    alone = torch.cat(ones, 1)
    assert torch.equal(run(model, TEXT).logits, alone)
    assert torch.equal(run(model, TEXT, want="last").logits[:, -1], alone[:, -1])
    cache = model.new_cache(1, 64)
    for a, b in pairwise((0, 1, 3, 10, 33, 40)):
        assert torch.equal(model.forward(Nodes(TEXT[:, a:b], cache, [0])).logits, alone[:, a:b])
        cache.commit([0], [range(b - a)])
    batch = TEXT[:, :7].repeat(3, 1)
    batch[1] = TEXT[0, 20:27]
    assert torch.equal(run(model, batch).logits[2], alone[0, :7])
    paths = {node: [node] for node in (0, 6)}
    paths |= {1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 1, 3, 4], 6: [0, 2, 6]}
    tree = run(model, TEXT[:, :7], TREE).logits[0]
    for node, path in paths.items():
        assert torch.equal(tree[node], run(model, TEXT[:, path] if node else TEXT[:, :1]).logits[0, -1]), node
    isa, threads = native.isa(), native.num_threads()
    try:
        for other in native.isas():
            for count in (1, 2):
                native.set_num_threads(count)
                if native.use_isa(other):
                    assert torch.equal(run(model, TEXT).logits, alone), (other, count)
    finally:
        native.use_isa(isa)
        native.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("olmoe", {"clip_qkv": 8.0}), ("mixtral", {"hidden_act": "relu"}), ("qwen3_moe", {"num_experts_per_tok": 9})],
)
def test_settings_that_it_does_not_know_are_refused(name: str, changes: dict[str, Any]) -> None:
    assert supports(tiny(name, **changes)) is not None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8"])
def test_the_cache_of_a_latent_holds_nothing_else(dtype: str) -> None:
    """A value is the first numbers of its key, also where the cache keeps fewer bits."""
    raw = model_of("deepseek_v3")
    model, exact = NativeModel(raw, kv_cache_dtype=dtype), run(HFModel(raw, weights="float32"), TEXT).logits
    cache, ones = model.new_cache(1, 64), []
    for i in range(TEXT.shape[1]):
        ones.append(model.forward(Nodes(TEXT[:, i : i + 1], cache, [0])).logits)
        cache.commit([0], [[0]])
    numbers = raw.config.kv_lora_rank + raw.config.qk_rope_head_dim
    assert cache.bytes_per_token == 2 * {"auto": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4}[dtype]
    assert torch.equal(run(model, TEXT).logits, torch.cat(ones, 1))
    tree = run(model, TEXT[:, :7], TREE).logits
    assert torch.equal(tree[0, 6], run(model, TEXT[:, [0, 2, 6]]).logits[0, -1])
    close = {"auto": 1e-5, "bfloat16": 0.01, "int8": 0.03}[dtype]  # fewer bits choose other experts now and then
    assert (torch.cat(ones, 1) - exact).abs().mean() < close * exact.abs().max()


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_yarn_with_a_factor_for_the_scores(name: str, shares: tuple[float, float]) -> None:
    """As the published DeepSeek models have it: shares are mscale and mscale_all_dim."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
    rope |= {"mscale": shares[0], "mscale_all_dim": shares[1], "original_max_position_embeddings": 16}
    raw = model_of(name, rope_parameters=rope)
    assert supports(raw) is None
    got, expected = (run(m, TEXT).logits for m in (NativeModel(raw), HFModel(raw, weights="float32")))
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def test_layers_without_experts() -> None:
    raw = tiny("qwen3_moe", mlp_only_layers=[1])
    assert supports(raw) is None
    got, expected = (run(m, TEXT).logits for m in (NativeModel(raw), HFModel(raw, weights="float32")))
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
