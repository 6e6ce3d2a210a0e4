"""Folders of models that also read images: the text model is read from them, and it writes what the whole model writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised_files as made
import torch
import transformers
from architectures import VOCAB, prompts
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from outrider.kernels import cpu as native
from outrider.models.checkpoint import text_names
from outrider.models.load import load
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 5,
    "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN = {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 1, 1]}
# A type of model: its class, more settings of its text model, and of the part that reads images.
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"sliding_window": 6}, VISION),
    "gemma4": ("Gemma4ForConditionalGeneration", {"sliding_window": 6, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0}, None),
    "mistral3": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": 6}, VISION | {"head_dim": 16}),
    "llava": ("LlavaForConditionalGeneration", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "smolvlm": ("SmolVLMForConditionalGeneration", {"model_type": "llama"}, VISION),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": MROPE}, QWEN),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN | {"deepstack_visual_indexes": []}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {"rope_parameters": MROPE, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"]}, QWEN),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        VISION | {"model_type": "siglip2_vision_model", "num_patches": 16}),
}  # fmt: skip


def whole(kind: str) -> Any:
    """A model with both parts, of random numbers."""
    name, text, vision = WHOLE[kind]
    config = CONFIG_MAPPING[kind](text_config=TEXT | text, vision_config=vision, pad_token_id=0)
    torch.manual_seed(1)
    model = getattr(transformers, name)(config).float().eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) / 10 + (p.dim() == 1)
    return model


def logits(loaded: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(loaded.model.forward(Nodes(ids.numpy(), loaded.model.new_cache(1, 64), [0])).logits[0])


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize("kind", WHOLE)
def test_the_text_model_is_read(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = whole(kind), torch.tensor(prompts(30))[:1]
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0]
    before = len(caplog.records)
    loaded = load(tmp_path)
    assert isinstance(loaded.model, NativeModel)
    assert (loaded.end_ids, loaded.source) == ((5,), tmp_path)
    torch.testing.assert_close(logits(loaded, ids), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert not caplog.records[before:]


def test_a_quantised_text_model_is_read(tmp_path: Path) -> None:
    made.awq(tmp_path).save()
    expected = logits(load(tmp_path), ids := torch.tensor(prompts(20))[:1])
    file, text = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{name}": t for name, t in load_file(file).items()}
    save_file(tensors | {"vision_tower.patch.weight": torch.ones(3, 3)}, file, {"format": "pt"})
    settings = {"quantization_config": text.pop("quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text} | settings))
    assert torch.equal(logits(load(tmp_path), ids), expected)


def test_names_of_the_text_model() -> None:
    names = ["language_model.lm_head.weight", "language_model.model.norm.weight", "vision_tower.norm.weight"]
    assert text_names(names) == {"lm_head.weight": names[0], "model.norm.weight": names[1]}
    names = ["lm_head.weight", "model.language_model.norm.weight", "model.visual.norm.weight"]
    assert text_names(names) == {"lm_head.weight": names[0], "model.norm.weight": names[1]}
    names = ["lm_head.weight", "model.norm.weight", "mtp.norm.weight"]
    assert text_names(names) == {name: name for name in names} == text_names([*names, "visual.norm.weight"])
