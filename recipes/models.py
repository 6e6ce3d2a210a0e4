"""The two architectures, and how a folder of weights is written so that no reader ever sees half of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from recipes.tokenizer import VOCABULARY

SHAPES = {
    "target": {"hidden_size": 320, "num_hidden_layers": 6, "intermediate_size": 896, "num_attention_heads": 10,
               "num_key_value_heads": 2},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 320, "num_attention_heads": 4,
              "num_key_value_heads": 1},
}  # fmt: skip
FOLDERS = {"target": "code", "draft": "code-draft"}


def build(role: str, seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """A fresh model. The last matrix of every branch starts at zero, so that a block starts as the identity."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[role],
        vocab_size=vocabulary,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def export(model: LlamaForCausalLM, tokenizer: Path, folder: Path, card: str | None = None) -> None:
    """Write beside the folder, then rename: whoever loads gets the old pair or the new one, never a mixture.

    The weights are stored in bfloat16, in half the bytes. The configuration says float32, so a loader widens them.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(fresh)
    model.config.dtype = torch.float32
    model.config.save_pretrained(fresh)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(fresh)
    if card is not None:
        (fresh / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    for path in fresh.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone, and a package is read by others
    stale = folder.with_name(folder.name + ".old")
    shutil.rmtree(stale, ignore_errors=True)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)
