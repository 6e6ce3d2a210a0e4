"""The architectures of GGUF files: how each family of models is stored. A family is a row of `ARCHITECTURES`.

Sources: as in `settings`. The names of the tensors are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from outrider.core.extras import MissingExtra, needs
from outrider.models import config as native
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.gguf import settings as of
from outrider.models.gguf.reader import GGUFFile
from outrider.models.gguf.settings import Settings, always, number, rotary, some

_NO_MODELS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "a projector of images or sound",
    "clip": "a projector of images or sound",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
}


@dataclass(frozen=True)
class Architecture:
    """How a family of models is stored."""

    model_type: str  # transformers' name
    mixture: str | None = None  # that of files with experts
    interleaved: bool = False  # the rows of q and k are in the order of interleaved rotary pairs
    one_added: bool = False  # the norms are stored as w + 1
    biases_by_tensor: bool = False  # a linear has a bias if the file has one for it
    settings: Settings = field(default_factory=dict)  # of this family, beside the common ones
    with_experts: Settings = field(default_factory=dict)  # more of files with experts
    # those of kinds that differ, which may have another `model_type`
    more: Callable[[GGUFFile], dict[str, Any]] = lambda file: {}
    attends: bool = True  # some layers have attention
    # the end of a module's name -> those of the modules that the gguf package knows in its place; of several, the rows
    # follow one another.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined_with_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # others of files with experts
    # of rows or numbers, see `value_heads`.
    order: Callable[[str, Any], np.ndarray | None] = lambda name, config: None


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModel for a file that is no language model, or one of another family."""
    path, name = file.paths[0], file.architecture
    kind = file.metadata.get("general.type", "model")
    for other, what in _NO_MODELS.items():
        if other in (kind, name):
            raise UnsupportedModel(f"{path} is {what}, not a language model; give the file of the model itself")
    if not name:
        raise UnsupportedModel(f"{path} names no architecture (general.architecture), so it is no model for llama.cpp")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path} is a {name}, and outrider reads GGUF files of {', '.join(ARCHITECTURES)}. Others may run from their folder "
            "or hub name, as transformers loads them"
        )
    if not file.tensors:
        raise UnsupportedModel(f"{path} has no tensors, only a vocabulary; give the file of the model itself")
    family = ARCHITECTURES[name]
    if name == "granitehybrid" and file.get("rope.scaling.finetuned"):
        return _BAMBA
    if not file.get("expert_count"):
        return family
    return replace(
        family,
        model_type=family.mixture or family.model_type,
        settings={**family.settings, **family.with_experts},
        joined={**family.joined, **family.joined_with_experts},
    )


def config_of(file: GGUFFile) -> Any:
    """The model's configuration: that of a model that runs natively, or transformers' own.

    Raises ValueError or UnsupportedModel with the reason.
    """
    family = architecture_of(file)
    settings: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
        "hidden_size": number(file, "embedding_length"),
        "num_hidden_layers": number(file, "block_count") - file.get("nextn_predict_layers", 0),
        "max_position_embeddings": number(file, "context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
        "quantization_level": file.quantization_level,
    }
    if family.attends:
        settings |= _attention(file, family)
    if settings["vocab_size"] is None:
        raise ValueError(f"{file.paths[0]} has no token_embd.weight; the file is not a whole model")
    try:
        settings = {"model_type": family.model_type} | settings | of.read(file, family.settings) | family.more(file)
        return native.config_of(settings) if native.native_kind(settings) else _of_transformers(settings)
    except MissingExtra:
        raise
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(f"the configuration in {file.paths[0]} does not fit a {family.model_type}: {error}") from error


def _of_transformers(settings: dict[str, Any]) -> Any:
    with needs("torch", f"a {settings['model_type']}, which has no native program,"):
        from transformers import AutoConfig
    return AutoConfig.for_model(**settings)


def _attention(file: GGUFFile, family: Architecture) -> dict[str, Any]:
    heads, head_dim = number(file, "attention.head_count"), of.head_dim(file)
    if file.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.paths[0]} has values of another length than keys, which outrider does not run")
    return {
        "intermediate_size": number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rotary(file, head_dim, family.interleaved),
    }


def tensor_names(file: GGUFFile) -> TensorNameMap:
    """transformers' names -> the names in the file."""
    kind = next(n for n, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    return get_tensor_name_map(kind, number(file, "block_count"))


def value_heads(name: str, config: Any) -> np.ndarray | None:
    """int64: number i along the heads of values in transformers is number order[i] in a file of Qwen 3.5.

    The file has the first value head of each key head, then the second of each. transformers has the value heads of the first
    key head, then those of the next. None for a tensor without such heads.
    """
    keys, values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    part = name.split(".", 2)[-1]
    heads = np.arange(values).reshape(values // keys, keys).T.reshape(-1)
    if part in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return heads
    numbers = (heads[:, None] * width + np.arange(width)).reshape(-1)
    if part in ("attn_gate.weight", "ssm_out.weight"):
        return numbers
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([np.arange(first), first + numbers])
    return None


def by_group(name: str, config: Any) -> np.ndarray | None:
    """int64: row i of a matrix of Qwen3-Next is row order[i] of two matrices of its file, one below the other.

    The file has the queries of all key heads, then all keys, values and gates. transformers has those of the first key head, then
    those of the next."""
    if not name.endswith("attn_qkv.weight"):
        return None
    groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    parts = np.split(np.arange(2 * groups * (keys + values)), groups * np.cumsum([keys, keys, values]))
    return np.concatenate([part.reshape(groups, -1) for part in parts], 1).reshape(-1)


# With the name of Granite 4. It rotates half a head, yet the converter puts the rows of the whole head in the order of pairs.
_BAMBA = Architecture("bamba", interleaved=True, attends=False, settings=of.BAMBA)
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "mixtral", interleaved=True, biases_by_tensor=True, settings=of.LLAMA, with_experts=of.LOCAL
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "mistral3": Architecture("ministral3", interleaved=True, more=of.mistral3),
    "gemma": Architecture("gemma", one_added=True, settings=of.GEMMA),
    "gemma2": Architecture("gemma2", one_added=True, settings=of.GEMMA2),
    "gemma3": Architecture("gemma3_text", one_added=True, settings=of.GEMMA3),
    "gemma4": Architecture("gemma4_text", attends=False, settings=of.GEMMA, more=of.gemma4),
    "phi3": Architecture("phi3", settings=of.PHI3),
    "qwen3moe": Architecture("qwen3_moe", settings=of.ALL_SPARSE),
    "olmoe": Architecture("olmoe", settings=of.EXPERTS | of.CLIPPED | {"norm_topk_prob": always(False)}),
    "deepseek2": Architecture("deepseek_v3", attends=False, settings=of.ROUTED, more=of.deepseek2),
    "glm4moe": Architecture("glm4_moe", settings=of.ROUTED | {"attention_bias": of.BIAS, "use_qk_norm": of.QK_NORM}),
    "dots1": Architecture("dots1", settings=of.ROUTED | dict.fromkeys(("sliding_window", "layer_types"), always(None))),
    "gpt-oss": Architecture("gpt_oss", settings=of.GPT_OSS),
    "granitemoe": Architecture(
        "granitemoe",
        interleaved=True,
        biases_by_tensor=True,
        settings=of.GRANITE | of.LOCAL,
        joined={"block_sparse_moe.router": ("block_sparse_moe.router.layer",)},
    ),
    "granite": Architecture("granite", interleaved=True, biases_by_tensor=True, settings=of.GRANITE),
    "stablelm": Architecture("stablelm", settings=of.STABLELM),
    "olmo2": Architecture("olmo2", more=of.olmo2),
    "olmo": Architecture("olmo", interleaved=True, settings=of.CLIPPED),
    "smollm3": Architecture(
        "smollm3",
        interleaved=True,
        settings=of.LLAMA | {"no_rope_layers": always(None), "use_sliding_window": always(False)},
    ),
    "glm4": Architecture("glm4", settings=of.GLM4),
    "command-r": Architecture("cohere", settings=of.COHERE),
    "cohere2": Architecture("cohere2", settings=of.COHERE | of.WINDOWS),
    "starcoder2": Architecture("starcoder2", settings=of.STARCODER2),
    "internlm2": Architecture("llama", interleaved=True, biases_by_tensor=True, settings=of.LLAMA),
    "exaone4": Architecture("exaone4", more=of.exaone4),
    "ernie4_5": Architecture("ernie4_5", settings={"use_bias": some(".bias")}),
    "seed_oss": Architecture("seed_oss", settings=of.GLM4),
    "arcee": Architecture("arcee", interleaved=True, biases_by_tensor=True, settings=of.LLAMA),
    "phi2": Architecture("phi", settings=of.LAYER_NORMS),
    "nemotron": Architecture("nemotron", one_added=True, settings=of.LAYER_NORMS),
    "falcon-h1": Architecture("falcon_h1", settings=of.FALCON_H1),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        interleaved=True,
        settings=of.GRANITE_HYBRID,
        joined={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
            "block_sparse_moe.router": ("block_sparse_moe.router.layer",),
        },
        joined_with_experts={
            "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
        },
    ),
    "lfm2": Architecture("lfm2", settings=of.LFM2),
    "mamba2": Architecture("mamba2", attends=False, settings=of.MAMBA2),
    "nemotron_h": Architecture("nemotron_h", settings=of.NEMOTRON_H),
    "nemotron_h_moe": Architecture("nemotron_h", settings=of.NEMOTRON_H_MOE),
    "qwen2moe": Architecture("qwen2_moe", settings=of.QWEN2_MOE),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", settings=of.ERNIE_EXPERTS | {"use_bias": some("attn_q.bias", "ffn_up.bias")}
    ),
    "lfm2moe": Architecture("lfm2_moe", settings=of.LFM2_MOE),
    "qwen35": Architecture("qwen3_5_text", one_added=True, settings=of.QWEN35, order=value_heads),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", one_added=True, settings=of.QWEN35 | of.EXPERTS | of.WIDTH | of.SHARED, order=value_heads
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        one_added=True,
        settings=of.QWEN35 | of.ALL_SPARSE | of.SHARED,
        joined={"linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")},
        order=by_group,
    ),
}
