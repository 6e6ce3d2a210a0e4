"""Folders of safetensors by the names of modules: the tensors that transformers would load, without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from architectures import FAMILIES, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.models.config import config_of
from outrider.models.hf.skeleton import module_of
from outrider.models.safetensors import FolderTensors
from outrider.models.tensors import MissingTensor


def opened(folder: Path, dtype: str = "auto") -> FolderTensors:
    return FolderTensors("a model", folder, config_of(json.loads((folder / "config.json").read_text())), dtype)


def array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def same(found: Any, wanted: torch.Tensor) -> None:
    assert found.dtype == array(wanted).dtype
    assert found.shape == tuple(wanted.shape)
    assert np.array_equal(found.astype(np.float32), array(wanted).astype(np.float32))


def check(tensors: FolderTensors, model: Any) -> None:
    """Each parameter and buffer of a model of transformers."""
    modules = dict(model.named_modules())
    for name, wanted in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".experts"):
            module, experts = modules[owner], tensors.experts(owner)
            if not leaf.endswith("proj"):
                continue
            assert experts.shape[0] == len(list(experts)) == len(wanted)
            assert experts.gated == module.has_gate
            for i, expert in enumerate(experts):
                rows = wanted[i].T if module.is_transposed else wanted[i]
                parts, biases = expert.up, expert.up_biases
                assert biases is None or module.has_bias
                if leaf == "down_proj":
                    parts, biases = (expert.down,), None if expert.down_bias is None else (expert.down_bias,)
                else:
                    assert experts.shape[1:] == expert.up[0].shape
                halves = (rows[::2], rows[1::2]) if module.is_transposed else rows.chunk(2)
                for part, right in zip(parts, (rows,) if len(parts) == 1 else halves, strict=True):
                    same(part, right)
                if biases is not None:
                    bias = getattr(module, f"{leaf}_bias")[i]
                    for part, right in zip(
                        biases, (bias,) if len(biases) == 1 else (bias[::2], bias[1::2]), strict=True
                    ):
                        same(part, right)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            assert tensors.has(name)
            assert tensors.shape(name) == tuple(wanted.shape)
            same(tensors.get(name), wanted)
    for name, module in modules.items():
        if isinstance(module, torch.nn.Linear) and module.bias is None:
            assert not tensors.has(f"{name}.bias")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_has_the_tensors_of_its_model(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[name]
    model: Any = tiny(kind, **changes).bfloat16()
    model.save_pretrained(tmp_path)
    tensors, theirs = opened(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    check(tensors, theirs)
    assert {*tensors.parts} <= tensors.asked
    made = module_of(opened(tmp_path), tensors.config, "bfloat16").state_dict()
    assert made.keys() == theirs.state_dict().keys()
    assert all(torch.equal(made[n], t) and made[n].dtype == t.dtype for n, t in theirs.state_dict().items())
    for dtype in ("float32", "float16"):
        check(opened(tmp_path, dtype), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    model.float().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check(opened(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))
    assert opened(tmp_path).precision == "bfloat16"


def test_tensors_that_the_model_does_not_have_are_not_read(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    save_file(load_file(file) | {name: torch.ones(32)}, file, {"format": "pt"})
    assert not opened(tmp_path).has(name)


def test_a_tensor_that_is_in_no_file(tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.q_proj."
    kept = {n: t for n, t in load_file(file).items() if not n.startswith(name)}
    save_file(kept, file, {"format": "pt"})
    tensors, said = opened(tmp_path), rf"incomplete: {name}\w+ of a Qwen2ForCausalLM is in no file"
    with pytest.raises(MissingTensor, match=said):
        tensors.shape(f"{name}weight")
    with pytest.raises(ValueError, match=said):
        tensors.has(f"{name}bias")
    save_file({f"{n}.qweight": t for n, t in kept.items()}, file, {"format": "pt"})
    with pytest.raises(KeyError, match=r"its weights are quantised, and config.json has no quantization_config"):
        opened(tmp_path).get(f"{name}weight")


def test_a_model_without_its_head(tmp_path: Path) -> None:
    model: Any = tiny("qwen3", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    check(opened(tmp_path), model)


def test_a_second_copy_of_the_weights_is_not_read(tmp_path: Path) -> None:
    """Some repositories have the same weights under the names of their authors, too."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(3, 3)}, tmp_path / "consolidated.safetensors")
    tensors = opened(tmp_path)
    assert "layers.0.attention.wq.weight" not in tensors
    check(tensors, model)
