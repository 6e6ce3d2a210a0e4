"""GGUF files: each architecture gives transformers' logits on the values in the file, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import prompts, tiny
from gguf_files import write_gguf
from transformers import PreTrainedModel

from outrider.models.hf.model import HFModel
from outrider.models.load import load
from outrider.models.native_llama import LlamaModel
from outrider.models.nodes import Nodes

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 64,
}  # fmt: skip
_SHAPE = {"hidden_size": 64, "intermediate_size": 96}

# name: (model type, changes of the tiny model)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3-long": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "hidden_size": 32}),
    "granite": ("granite", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-2": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "olmo2": ("olmo2", {}),
}  # fmt: skip
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "granite")


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model.forward(Nodes(torch.tensor([ids]), model.new_cache(1, 64), [0])).logits[0]


def expected(raw: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return raw(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    raw, file = tiny(kind, **_SHAPE | changes), tmp_path / "model.gguf"
    if name == "stablelm-2":  # norms without weights of their own would hide a wrong order
        for n, p in raw.named_parameters():
            if "layernorm.norms" in n:
                p.data.normal_()
    write_gguf(raw, file, "Q8_0")
    loaded = load(file, dtype="float32")
    assert loaded.weights == "float32"
    assert type(loaded.model) is (LlamaModel if name.split("-")[0] in NATIVE else HFModel)
    [ids] = prompts(12)
    torch.testing.assert_close(logits(loaded.model, ids), expected(raw, ids), atol=3e-4, rtol=1e-4)
