"""Quantised checkpoints: the values of the published formulas, kept packed where a format of the kernels holds them exactly."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_files as made
import torch
from quantised_files import Checkpoint
from torch import nn

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.models import load as loading
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.config import config_of
from outrider.models.hf.skeleton import module_of
from outrider.models.load import load
from outrider.models.native.model import NativeModel
from outrider.models.native.program import NotNative
from outrider.models.nodes import Nodes
from outrider.models.quantised.formats import QuantisedWeight
from outrider.models.quantised.reader import QuantisedTensors

# What each checkpoint is kept as; None: float16.
KINDS: dict[str, tuple[Callable[[Path], Checkpoint], str | None]] = {
    "gptq": (made.gptq, "Q4_0"),
    "gptq v2": (lambda f: made.gptq(f, version="gptq_v2"), "Q4_0"),
    "gptq of 64": (lambda f: made.gptq(f, size=64), "Q4_0"),
    "gptq of a row": (lambda f: made.gptq(f, size=-1), "Q4_0"),
    "gptq with zero points": (lambda f: made.gptq(f, sym=False), "Q5_0"),
    "gptq 8 bits": (lambda f: made.gptq(f, bits=8), "Q8_0"),
    "gptq 3 bits": (lambda f: made.gptq(f, bits=3), "Q4_0"),
    "gptq 2 bits": (lambda f: made.gptq(f, bits=2), "Q4_0"),
    "gptq by activations": (lambda f: made.gptq(f, order=True), None),
    "awq": (made.awq, "Q5_0"),
    "pack-quantized": (made.pack_quantized, "Q4_0"),
    "pack-quantized with zero points": (lambda f: made.pack_quantized(f, sym=False), "Q5_0"),
    "pack-quantized 8 bits": (lambda f: made.pack_quantized(f, bits=8), "Q8_0"),
    "int-quantized": (made.int_quantized, "Q8_0"),
    "fp8 by block": (lambda f: made.fp8(f, (32, 48)), None),
    "fp8 by tensor": (lambda f: made.fp8(f, None), None),
    "bitsandbytes nf4": (lambda f: made.nf4(f, nested=False), None),
    "bitsandbytes nf4, nested": (lambda f: made.nf4(f, nested=True), None),
}


def opened(folder: Path) -> QuantisedTensors:
    return QuantisedTensors("a model", folder, config_of(json.loads((folder / "config.json").read_text())))


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_of_the_formula(kind: str, tmp_path: Path) -> None:
    """Every matrix, bit for bit: blocks to float32, floats to the checkpoint's own dtype."""
    write, form = KINDS[kind]
    stored = write(tmp_path)
    folder = stored.save()
    tensors = opened(folder)
    for name, exact in stored.exact.items():
        matrix = tensors.get(name)
        assert matrix.shape == tensors.shape(name) == tuple(exact.shape)
        if form is None:
            assert isinstance(matrix, np.ndarray)
            assert matrix.dtype == np.float16
            assert np.array_equal(matrix, exact.half()), name
        else:
            assert isinstance(matrix, Blocks)
            assert matrix.format == form
            assert np.array_equal(matrix.dense(), exact), name
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = load(folder, kv_cache_dtype="auto")
    assert any("exact values as float16" in str(w.message) for w in said) == (form is None)
    if native.available():
        assert isinstance(loaded.model, NativeModel)
        assert loaded.weights == ("gguf" if form else "float16")


@pytest.mark.parametrize("kind", ["gptq with zero points", "fp8 by block"])
@pytest.mark.filterwarnings("ignore:.*exact values:RuntimeWarning")
def test_it_runs_as_the_model_of_its_values(kind: str, tmp_path: Path) -> None:
    stored = KINDS[kind][0](tmp_path)
    folder = stored.save()
    loaded = load(folder)
    raw = module_of(opened(folder), loaded.config, "float32").float()
    for name, exact in stored.exact.items():
        module: Any = raw.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(exact)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.inference_mode():
        expected = raw(ids).logits[0]
    logits = torch.from_numpy(loaded.model.forward(Nodes(ids.numpy(), loaded.model.new_cache(1, 64), [0])).logits[0])
    assert torch.cosine_similarity(logits, expected).min() > 0.99


def test_other_precisions_of_a_quantised_model(tmp_path: Path) -> None:
    stored = made.awq(tmp_path)
    folder = stored.save()
    if native.available():
        assert load(folder, quantization="int8").weights == "int8"
    assert load(folder, dtype="float32").weights == "float32"


def test_a_matrix_that_was_left_in_floats(tmp_path: Path) -> None:
    """Mixed modules: the tensors tell, not the settings."""
    stored = made.gptq(tmp_path)
    kept = "model.layers.1.mlp.down_proj.weight"
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del stored.tensors[kept.removesuffix("weight") + suffix]
    stored.tensors[kept] = torch.randn(made.SIZE, 128).half()
    load(stored.save())


FIRST, LAST = "model.layers.0.self_attn.q_proj.", "model.layers.1.mlp.up_proj."
Writer = Callable[[Path], Checkpoint]
BY_BLOCK: Writer = lambda f: made.fp8(f, (32, 48))  # noqa: E731
# The checkpoint, the tensor that it loses or that gets this shape, and what the error says.
BROKEN: list[tuple[Writer, str, tuple[int, ...] | None, str]] = [
    *[(made.gptq, LAST + suffix, None, rf"lacks {LAST}{suffix}") for suffix in ("qweight", "qzeros", "scales")],
    (made.gptq, f"{FIRST}scales", (3, 64), ""),
    (made.gptq, f"{FIRST}qzeros", (2, 9), ""),
    (made.awq, f"{FIRST}qzeros", (2, 7), ""),
    (made.pack_quantized, f"{FIRST}weight_scale", (64, 3), ""),
    (made.pack_quantized, f"{FIRST}weight_packed", (64, 7), ""),
    (made.int_quantized, f"{FIRST}weight_scale", (63, 1), ""),
    (BY_BLOCK, f"{FIRST}weight_scale_inv", (3, 2), ""),
    # A plain reading of numbers without a scale would be silently wrong.
    (lambda f: made.fp8(f, None), f"{LAST}weight_scale_inv", None, f"tensor {LAST}weight .* F8_E4M3"),
    (made.mxfp4, "model.layers.0.mlp.experts.down_proj_scales", None, "experts.down_proj"),
    (made.mxfp4, "model.layers.0.mlp.experts.down_proj_blocks", None, "experts.down_proj"),
]


@pytest.mark.parametrize(("write", "name", "shape", "what"), BROKEN)
def test_a_tensor_that_does_not_fit_is_named(
    write: Writer, name: str, shape: tuple[int, ...] | None, what: str, tmp_path: Path
) -> None:
    stored = write(tmp_path)
    old = stored.tensors.pop(name)
    if shape is not None:
        stored.tensors[name] = torch.ones(shape, dtype=old.dtype)
    with pytest.raises((ValueError, UnsupportedModel), match=what or name.replace(".", r"\.")):
        load(stored.save())


@pytest.mark.parametrize(
    ("write", "settings", "what"),
    [
        (made.gptq, {"bits": 8}, r"down_proj\.scales .* quantization_config"),
        (made.gptq, {"group_size": 64}, r"down_proj\.scales .* quantization_config"),
        (made.gptq, {"group_size": "many"}, "\"group_size\" .* whole number, got 'many'"),
        (made.gptq, {"bits": None}, "does not say"),
        (made.gptq, {"quant_method": "awq"}, r"g_idx of .* I32"),
        (made.gptq, None, r"down_proj\.\w+, so its weights are quantised, and config.json has no quantization_config"),
        (made.awq, {"group_size": 64}, r"down_proj\.scales has 4 groups, and 128 inputs in groups of 64 have 2"),
        (made.awq, {"quant_method": "fp8"}, r"no \*\.weight_scale_inv or \*\.weight_scale"),
        (made.pack_quantized, {"num_bits": 8}, "weight_packed has shape"),
        (made.pack_quantized, {"group_size": 64}, "groups of 64 have 2"),
        (BY_BLOCK, {"weight_block_size": [64, 64]}, r"weight_scale_inv .* blocks of \[64, 64\]"),
        (BY_BLOCK, {"weight_block_size": [32]}, r"two numbers as \[128, 128\], got \[32\]"),
    ],
)
def test_settings_that_are_not_those_of_the_weights(
    write: Writer, settings: dict[str, Any] | None, what: str, tmp_path: Path
) -> None:
    stored = write(tmp_path)
    if settings is None:
        del stored.config["quantization_config"]
    else:
        config = stored.config["quantization_config"]
        (config if write != made.pack_quantized else config["config_groups"]["group_0"]["weights"]).update(settings)
    with pytest.raises((ValueError, UnsupportedModel), match=what):
        load(stored.save())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        # The values may be right, but nobody knows. The user does.
        *[
            ({"quant_method": method, "bits": 4}, r"no tensor is: .* delete quantization_config")
            for method in ("gptq", "awq", "compressed-tensors", "bitsandbytes", "mxfp4")
        ],
        ({"quant_method": "aqlm"}, "aqlm, which outrider does not read. It reads gptq, awq"),
        ({"quant_method": "awq", "version": "gemv"}, "layout gemv"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "in 8 bits"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], what: str, tmp_path: Path) -> None:
    stored = Checkpoint(tmp_path, settings)
    with pytest.raises((ValueError, UnsupportedModel), match=what):
        load(stored.save())


def test_scales_that_no_block_format_has_are_not_rounded() -> None:
    values, group, scales = np.ones((2, 32), np.int8), np.zeros(32, np.int64), np.array([[0.125], [0.25]], np.float32)
    assert QuantisedWeight(values, np.array([[0.1], [0.2]], np.float32), group).blocks() is None
    assert QuantisedWeight(values, scales, group).blocks() is not None
    assert QuantisedWeight(values[:, :31], scales, group[:31]).blocks() is None


def refuse(*_: object) -> None:
    """Nothing runs natively."""
    raise NotNative("a test")


def none(*given: Any) -> Any:
    raise NotNative("a test")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_that_are_stored_one_by_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of the same values in float32, up to the rounding of activations."""
    sizes: dict[str, Any] = {"moe_intermediate_size": made.SIZE, "head_dim": 16} if name == "qwen3_moe" else {}
    stored = made.gptq(tmp_path, name=name, **sizes)
    _assert_the_same_function(stored)
    monkeypatch.setattr(loading, "outlined", none)
    _assert_the_same_function(stored)


def test_experts_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = made.mxfp4(tmp_path)
    _assert_the_same_function(stored)
    tensors = opened(stored.folder)
    for name, exact in stored.exact.items():
        for expert, right in zip(tensors.experts(name.rpartition(".")[0]), exact.mT.numpy(), strict=True):
            pair = (expert.up, (right[::2], right[1::2])) if "gate_up" in name else ((expert.down,), (right,))
            for matrix, wanted in zip(*pair, strict=True):
                assert isinstance(matrix, Blocks)
                assert matrix.format == "MXFP4"
                assert np.array_equal(matrix.dense(), wanted)
    monkeypatch.setattr(loading, "outlined", none)
    _assert_the_same_function(stored)


def test_values_of_mxfp4_with_other_scales_are_no_mxfp4() -> None:
    values, group = np.array([[0, 1, 2, 3, 4, 6, 8, -12] * 4], np.int8), np.zeros(32, np.int64)
    scales = np.array([[2.0**-128], [2.0**120], [0.75], [0.0]], np.float32)
    kept = [QuantisedWeight(values, scale[None], group).blocks() for scale in scales]
    assert [None if b is None else b.format for b in kept] == ["MXFP4", "MXFP4", "Q5_0", "Q5_0"]
    for scale, blocks in zip(scales[:2], kept[:2], strict=True):
        assert blocks is not None
        assert np.array_equal(blocks.dense(), values * scale)
    other = QuantisedWeight(values + 1, np.array([[0.5]], np.float32), group).blocks()
    assert other is not None
    assert other.format == "Q5_0"


def _assert_the_same_function(stored: Checkpoint) -> None:
    """The logits are those of the dense model with the values of the formula."""
    loaded = load(stored.save())
    plain = Checkpoint(stored.folder / "plain", {}, stored.config["model_type"], **stored.changes)
    for name, exact in stored.exact.items():
        plain.tensors[name] = exact
    del plain.config["quantization_config"]
    reference = load(plain.save(), dtype="float32")
    ids = np.array([[5, 6, 7, 8, 9, 10]])
    pair = [m.model.forward(Nodes(ids, m.model.new_cache(1, 64), [0])).logits[0] for m in (loaded, reference)]
    assert torch.cosine_similarity(*map(torch.from_numpy, pair)).min() > 0.99
