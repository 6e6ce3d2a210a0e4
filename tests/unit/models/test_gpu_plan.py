"""Programs on the kernels of GPUs: the numbers of native code, and the same bits of a node in any company.

Twins in torch take the place of the kernels where only the plan is looked at. Else Triton's interpreter runs the kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import gpu_twins
import interpreted  # before the kernels
import numpy as np
import pytest
import torch
from architectures import FAMILIES, prompts, tiny
from ggml_blocks import random_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from triton.runtime.interpreter import GridExecutor

from outrider.core.tree import tree
from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.gpu import cache as gpu_cache
from outrider.models.gpu import model as gpu_model
from outrider.models.gpu import plan as gpu_plan
from outrider.models.gpu.model import GpuModel
from outrider.models.gpu.plan import NotOnGpu
from outrider.models.gpu.weights import DeviceMatrix, DeviceSource
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.native.model import NativeModel, build
from outrider.models.nodes import Nodes

pytestmark = [
    interpreted.on_cpu,
    pytest.mark.skipif(not native.available(), reason=str(native.why())),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]
KERNELS = ("attention", "elementwise", "linear", "norms", "rope")
REFUSED = ("route", "heads", "conv", "of 2 heads")  # words of the reasons
SPARSE = (
    "moe",
    "mixtral",
    "gpt_oss",
    "deepseek",
    "dots1",
    "experts",
    "bamba",
    "mamba",
    "lfm2",
    "falcon",
    "hybrid",
    "nemotron_h",
    "qwen3_5",
    "next",
)
TAPS = (EMBEDDING, 0, 1, FINAL_NORM)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        monkeypatch.setattr(gpu_plan, name, getattr(gpu_twins, name))
    monkeypatch.setattr(gpu_cache, "attention", gpu_twins.attention)
    monkeypatch.setattr(gpu_model, "linear", gpu_twins.linear)
    monkeypatch.setattr(gpu_plan, "rounded_registers", lambda ops: set())  # their products round nothing


@cache
def raw_of(name: str, **changes: Any) -> PreTrainedModel:
    """In bfloat16, with norms and biases that do something."""
    kind, settings = FAMILIES[name]
    raw = tiny(kind, **settings, **changes)
    for where, parameter in raw.named_parameters():
        if "norm" in where or where.endswith("_bias"):
            parameter.data += torch.randn(parameter.shape) * 0.3
    return raw.to(torch.bfloat16)


def gpu_of(
    name: str, head_ids: np.ndarray | None = None, rows: int = 64, packing: str = "bfloat16", **changes: Any
) -> GpuModel:
    raw = raw_of(name, **changes)
    config = config_for(raw)
    return GpuModel(
        build(config.kind, config, DeviceSource(ModuleTensors(raw), config, "cpu", head_ids, packing)), "cpu", rows
    )


def native_of(name: str, head_ids: np.ndarray | None = None) -> NativeModel:
    return NativeModel(raw_of(name), "bfloat16", head_ids, kv_cache_dtype="bfloat16")


def assert_alike(name: str, most: float, tokens: np.ndarray, parents: np.ndarray | None = None) -> None:
    pair = gpu_of(name), native_of(name)
    slots = [2, 0][: len(tokens)]
    mine, right = (m.forward(Nodes(tokens, m.new_cache(3, 64), slots, parents), taps=TAPS) for m in pair)
    real = slice(None) if parents is None else parents >= -1
    for a, b in zip(mine, right, strict=True):
        assert a is not None
        assert b is not None
        assert np.abs(a[real] - b[real]).max() < most * np.abs(b[real]).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_computes_what_native_code_does(name: str, twins: None) -> None:
    """A text, and a batch of trees with padding. Programs with other ops are refused."""
    if any(word in name for word in SPARSE):
        with pytest.raises(NotOnGpu, match=rf"({'|'.join(REFUSED)}).* has no kernel"):
            gpu_of(name)
        return
    [text, ids] = prompts(30, 9)
    assert_alike(name, 1e-3, np.array([text]))
    grown = [(n, p) for n, p in zip(ids, [-1, 0, 1, 1, 3, 2, 0, 6, 5], strict=True)]
    assert_alike(name, 1e-3, *tree([grown, [(ids[0], -1)]]))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "cohere2"])
def test_kernels_compute_what_native_code_does(name: str) -> None:
    """They round what a product reads to bfloat16, and native code does not."""
    [text] = prompts(9)
    assert_alike(name, 0.03, *tree([[(n, p) for n, p in zip(text, [-1, 0, 1, 1, 3, 2, 0, 6, 5], strict=True)]]))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_products_alone_read_may_be_rounded_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits() -> np.ndarray:
        model = gpu_of(name)
        kinds = [register.dtype for register in model.plan.registers]
        assert (torch.bfloat16 in kinds) == rounds
        return model.forward(Nodes(np.array(prompts(5)), model.new_cache(1, 64), [0])).logits

    rounds = True
    right = logits()
    rounds = False
    monkeypatch.setattr(gpu_plan, "rounded_registers", lambda ops: set())
    assert np.array_equal(logits(), right)


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_few_bits_are_those_of_native_code(packing: str) -> None:
    """Of int4 the head has 8. A tied table is a copy in bfloat16."""
    raw, tokens = raw_of("gemma2"), np.array([prompts(9)[0]])
    mine = gpu_of("gemma2", packing=packing)
    right, rough = (NativeModel(raw, kind, kv_cache_dtype="bfloat16") for kind in (packing, "bfloat16"))
    a, b, c = (m.forward(Nodes(tokens, m.new_cache(1, 64), [0])).logits for m in (mine, right, rough))
    assert np.abs(a - b).max() < 0.03 * np.abs(b).max()
    assert np.abs(a - b).max() < np.abs(b - c).max() or packing == "int8"
    np.testing.assert_allclose(mine.embedding_rows(tokens), right.embedding_rows(tokens), rtol=1 / 256)
    assert np.array_equal(mine.head_rows(tokens), mine.embedding_rows(tokens))
    assert mine.program.head.bytes == right.vocab_size * 128 * (1 + 4 / 32)  # 32 inputs are filled up


@pytest.mark.parametrize(
    ("name", "packing"), [("qwen2", "bfloat16"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16"), ("qwen2", "int4")]
)
def test_a_node_has_the_same_bits_in_any_company(name: str, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in chunks of a prompt, in a tree, beside another text, and after its path was committed. From 5 rows on parts
    are added in a loop, and attention has all splits in one program."""
    monkeypatch.setattr(gpu_plan, "APART", 4)
    monkeypatch.setattr(gpu_plan.linear, "split", lambda n, k: (-(-k // 128), 128))
    model = gpu_of(name, packing=packing, hidden_size=160, intermediate_size=144)
    [text] = prompts(9)
    alone, cache = [], model.new_cache(1, 64)
    for token in text:
        alone.append(model.forward(Nodes(np.array([[token]]), cache, [0])).logits[0, 0])
        cache.commit([0], [[0]])

    cache = model.new_cache(3, 64)
    chunk = model.forward(Nodes(np.array([text[:6]]), cache, [2])).logits[0]
    assert np.array_equal(chunk, alone[:6]), "a chunk"
    cache.commit([2], [range(4)])
    nodes = [(text[4], -1), (text[5] + 1, 0), (text[5], 0), (text[6] + 1, 2), (text[6], 2), (text[7], 4)]
    tokens, parents = tree([nodes, [(token, n - 1) for n, token in enumerate(text[:3])]])
    logits = model.forward(Nodes(tokens, cache, [2, 0], parents)).logits
    assert np.array_equal(logits[0, [0, 2, 4, 5]], alone[4:8]), "a tree"
    assert np.array_equal(logits[1, :3], alone[:3]), "a chain beside it"
    level = model.forward(Nodes(tokens[:1, 5:], cache, [2], parents[:1]), want="last").logits
    assert np.array_equal(level[0, 0], alone[7]), "a node below others in the scratch"
    cache.commit([2, 0], [[0, 2, 4, 5], []])
    assert np.array_equal(model.forward(Nodes(np.array([text[8:]]), cache, [2])).logits[0, 0], alone[8]), (
        "after a commit"
    )


def launches(model: GpuModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a forward of one token."""
    count, run = 0, GridExecutor.__call__

    def counted(self: Any, *args: Any, **settings: Any) -> None:
        nonlocal count
        count += 1
        run(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counted)
        model.forward(Nodes(np.array([[5]]), model.new_cache(1, 64), [0]))
    return count


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_layer_has_nine_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_of(name)
    assert launches(model, monkeypatch) - launches(model.layer_subset([1]), monkeypatch) == 9


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "phi"])
def test_a_run_of_a_known_shape_makes_views_alone(name: str, twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a graph can hold it: no memory is allotted, and nothing is read on the host."""
    model, kept = gpu_of(name), list[Any]()
    cache, run = model.new_cache(2, 64), model.plan.run
    monkeypatch.setattr(model.plan, "run", lambda *call: kept.append(call) or run(*call))
    for parents in (None, np.array([[-1, 0, 0]])):
        model.forward(Nodes(np.array([[5, 6, 7]]), cache, [1], parents), taps=(0, FINAL_NORM))
    for module in KERNELS:  # launches write nothing here, so all that is seen is the plan's own
        for launch in (
            "linear",
            "gated",
            "sum_norm",
            "group_norm",
            "rope",
            "store",
            "rope_store",
            "attend",
            "embed",
            "gate",
            "map_rows",
            "take",
        ):
            if hasattr(getattr(gpu_twins, module), launch):
                monkeypatch.setattr(getattr(gpu_twins, module), launch, lambda *args, **settings: None)
    for call in kept:
        with Seen() as seen:
            run(*call)
        assert seen.names <= {"slice", "view", "select", "unsqueeze", "copy_"}


def test_long_prompts_are_read_in_pieces(twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch of unequal ones few rows are padding."""
    monkeypatch.setattr(gpu_model, "APART", 4)
    monkeypatch.setattr(gpu_model, "_GROUP", 4)
    texts, pair = prompts(30, 3, 17), (gpu_of("gemma2", rows=12), native_of("gemma2"))
    tokens, parents = tree([[(token, n - 1) for n, token in enumerate(text)] for text in texts])
    rows, run = list[int](), pair[0].plan.run
    monkeypatch.setattr(pair[0].plan, "run", lambda r, *call: rows.append(r.count) or run(r, *call))
    for want in ("all", "last"):
        mine, right = (
            m.forward(Nodes(tokens, m.new_cache(3, 64), [2, 0, 1], parents), taps=(0,), want=want) for m in pair
        )
        assert sum(rows) == 32 + 4 + 20
        assert max(rows) == 12
        rows.clear()
        for a, b in zip(mine, right, strict=True):
            assert a is not None
            assert b is not None
            real = parents >= -1 if a.shape[1] > 1 else slice(None)
            np.testing.assert_allclose(a[real], b[real], atol=1e-3 * np.abs(b).max(), rtol=0)
    none = pair[0].forward(Nodes(tokens, pair[0].new_cache(3, 64), [2, 0, 1], parents), taps=(FINAL_NORM,), want="none")
    assert none.logits.shape == (3, 0, 97)
    assert none.features is not None


def test_a_cut_head_and_fewer_layers(twins: None) -> None:
    ids = np.arange(0, 97, 3)
    pair = [m.layer_subset([1]) for m in (gpu_of("llama", ids), native_of("llama", ids))]
    mine, right = (m.forward(Nodes(np.array([[5, 6]]), m.new_cache(1, 64), [0])).logits for m in pair)
    kept = np.isfinite(right)
    assert np.array_equal(np.isfinite(mine), kept)
    np.testing.assert_allclose(mine[kept], right[kept], atol=1e-3)
    with pytest.raises(ValueError, match="keeps some of its tokens only"):
        pair[0].head_rows(ids)


def test_rows_of_the_embedding_and_the_head(twins: None) -> None:
    mine, right = gpu_of("gemma"), native_of("gemma")
    tokens, hidden = np.array([[1, 2], [96, 0]]), np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    assert np.array_equal(mine.embedding_rows(tokens), right.embedding_rows(tokens))
    assert np.array_equal(mine.head_rows(tokens[0]), right.head_rows(tokens[0]))
    np.testing.assert_allclose(mine.output_head(hidden), right.output_head(hidden), atol=1e-4)


def test_a_matrix_goes_to_the_device_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGMLQuantizationType, quants

    monkeypatch.setattr("outrider.models.gpu.weights._PIECE", 3 * 64)
    rows = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    blocks = Blocks(quants.quantize(rows, GGMLQuantizationType.Q8_0), "Q8_0", 64, np.arange(10)[::-1].copy())
    bias = np.arange(10, dtype=np.float32)
    both = DeviceMatrix([blocks, rows], [None, bias], "cpu", paired=True)
    assert both.bytes == 20 * 64 * 2 + 20 * 4
    assert (both.n, both.k) == (32, 64)
    assert torch.equal(both.floats()[:10], torch.from_numpy(blocks.dense()).bfloat16())
    assert torch.equal(both.floats()[10:], torch.from_numpy(rows).bfloat16())
    assert both.bias is not None
    assert both.bias.tolist() == [0] * 10 + [*range(10)]


def test_blocks_of_a_file_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side they have the widest codes among them, and bfloat16 if one has none."""
    monkeypatch.setattr("outrider.models.gpu.weights._PIECE", 4 * 256)
    names = {"Q4_0": 4, "Q4_K": 4, "Q6_K": 8, "Q3_K": 16}
    blocks = {name: random_blocks(name, 10, 256) for name in names}
    turned = replace(blocks["Q4_0"], order=np.arange(10)[::-1].copy())
    for name, bits in names.items():
        both = DeviceMatrix([turned, blocks[name]], [None, None], "cpu", kind="gguf")
        apart = [DeviceMatrix([each], [None], "cpu", kind="gguf") for each in (turned, blocks[name])]
        assert torch.equal(both.floats(), torch.cat([each.floats() for each in apart]))
        assert np.array_equal(both.rows(np.array([3, 12])), both.floats()[[3, 12]].float().numpy())
        assert both.bytes == 20 * 256 * bits // 8 + (
            0 if bits == 16 else 20 * 256 // (16 if name == "Q6_K" else 32) * 4
        )
        assert torch.equal(apart[0].floats(), torch.from_numpy(turned.dense()).bfloat16())
    few = DeviceMatrix([turned, blocks["Q6_K"]], [None, None], "cpu", kind="int4")
    assert few.bytes == 20 * (128 + 32)


def test_what_does_not_fit_is_told(twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_of("llama")
    cache = model.new_cache(2, 64)
    for tokens, slots, parents, text in (
        ([[97]], [0], None, r"token 97 \(entry 0, node 0\) is not in the vocabulary of 97"),
        ([[5, 6]], [0], [[-1, 1]], "node 1 of entry 0 has parent 1"),
        ([[5, 6, 7]], [0], [[-1, -2, 1]], "node 2 of entry 0 has parent 1"),
        ([[5, 6]], [0], [[-1]], "each node a parent"),
        ([[5]], [0, 1], None, "give each slot a line"),
        ([[5] * 300], [0], None, "end at cell 300, and a slot of this cache has 256"),
    ):
        with pytest.raises(ValueError, match=text):
            model.forward(Nodes(np.array(tokens), cache, slots, None if parents is None else np.array(parents)))
    with pytest.raises(IndexError, match="slots are 0 to 1"):
        model.forward(Nodes(np.array([[5]]), cache, [2]))
    with pytest.raises(ValueError, match="new_cache of this one"):
        model.forward(Nodes(np.array([[5]]), native_of("llama").new_cache(1, 64), [0]))
    with pytest.raises(ValueError, match="taps are layers"):
        model.forward(Nodes(np.array([[5]]), cache, [0]), taps=(2,))
    cache.placed[0] = [0, 2]
    with pytest.raises(RuntimeError, match="is not there any more"):
        cache.commit([0], [[0, 1]])
    monkeypatch.setattr(gpu_cache, "free_memory", lambda device: 96 * 128)
    with pytest.raises(MemoryError, match="32 tokens would fit: lower max_model_len"):
        model.new_cache(1, 64)
    with pytest.raises(ValueError, match="a matrix is int8"):
        DeviceMatrix([np.zeros((2, 2), np.int8)], [None], "cpu")


def test_a_cache_of_default_length_fits(twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_of("llama")
    monkeypatch.setattr(gpu_model, "free_memory", lambda device: 1 << 20)
    assert [model.longest(n) for n in (1, 32, 1000)] == [128, (1 << 20) // (2 * 32 * 128) - 64, 1]


def test_blocks_of_a_slot_come_back(twins: None) -> None:
    model = gpu_of("qwen2")
    cache, [text] = model.new_cache(2, 64), prompts(12)
    model.forward(Nodes(np.array([text]), cache, [0]), want="none")
    cache.commit([0], [range(12)])
    cache.restore(1, 12, [], [cache.block(0, 0, 8), cache.block(0, 8, 12)])
    again = model.forward(Nodes(np.array([[5], [5]]), cache, [0, 1])).logits
    assert np.array_equal(again[0], again[1])
    assert cache.bytes == cache.bytes_per_token * 2 * cache.capacity
