"""`models.config` gives what transformers' configurations give, of every model that runs natively."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from architectures import ARCHITECTURES, DENSE, FAMILIES, MIXTURES, RECURRENT, SHARED_KEYS, tiny
from transformers import CONFIG_MAPPING, PretrainedConfig

from outrider.models.config import TABLE, TEXT_KINDS, config_of, native_kind
from outrider.models.hf.folder import _text

ROOT = Path(__file__).resolve().parents[3]
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))
TOYS = {
    f"{kind}-toy": {"model_type": kind, **changes}
    for toys in (ARCHITECTURES, DENSE, MIXTURES, SHARED_KEYS, RECURRENT)
    for kind, changes in toys.items()
    if native_kind({"model_type": kind})
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36}
_VL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "rope_theta": 1e6}
OLD: dict[str, dict[str, Any]] = {  # as older files on the hub say it
    "llama": {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "torch_dtype": "bfloat16", "num_key_value_heads": None},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": _YARN, "use_sliding_window": True, "max_window_layers": 21},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None, "head_dim": 64, "sliding_window": None, "use_cache": False},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 5},
    "qwen3_moe": {"num_experts": 16, "mlp_only_layers": [1]},
    "deepseek_v3": {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "num_nextn_predict_layers": 2},
    "phi3": {"original_max_position_embeddings": 4096, "rope_scaling": _LONG, "partial_rotary_factor": 0.75},
    "gemma": {"hidden_act": "gelu"},
    "gemma3_text": {"rope_theta": 1e5, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo3": {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "cohere2": {"sliding_window_pattern": 3},
    "exaone4": {"sliding_window_pattern": 2, "rope_scaling": _LLAMA3},
    "qwen3_next": {"full_attention_interval": 3, "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    "stablelm": {"rope_pct": 0.5, "partial_rotary_factor": 0.5},
    "nemotron_h": {"hybrid_override_pattern": "M-M*E", "mamba_n_groups": 4, "num_hidden_layers": 5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_d_head": "auto"},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": "auto"},
    "falcon_h1": {"mamba_d_ssm": None, "mamba_d_head": "auto"},
    "mamba2": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "lfm2": {"full_attn_idxs": [2, 5], "block_ff_dim": 100, "tie_embedding": False},
    "lfm2_moe": {"tie_embedding": False, "layer_types": ["conv"] * 32},
    "smollm3": {"use_sliding_window": True, "sliding_window": 16, "no_rope_layer_interval": 3},
    "gemma4_text": {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "global_head_dim": 64},
    "ernie4_5_moe": {"moe_layer_end_index": 3},
    "qwen2_vl": _VL | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "torch_dtype": "bfloat16"},
    "gemma3": {"text_config": _VL | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "eos_token_id": [1, 106]},
    "llava": {"text_config": {"model_type": "mistral", "torch_dtype": "float16"}, "torch_dtype": "bfloat16"},
}  # fmt: skip
SETTINGS = {kind: {"model_type": kind} for kind in ROWS["kinds"] if kind not in TEXT_KINDS} | TOYS
SETTINGS |= {f"{kind}-old": {"model_type": kind, **changes} for kind, changes in OLD.items()}
for whole, row in ROWS["wholes"].items():
    if hasattr(CONFIG_MAPPING[whole], "tie_word_embeddings"):
        part = {"model_type": row["text"], "hidden_size": 768, "dtype": "bfloat16"}
        SETTINGS[f"{whole}-whole"] = {"model_type": whole, "text_config": part}
FORGOTTEN = ("transformers_version", "id2label", "label2id", "output_attentions")


def values(settings: dict[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(settings))
    return {name: value for name, value in plain.items() if name[0] != "_" and name not in FORGOTTEN}


def same(settings: dict[str, Any], theirs: PretrainedConfig) -> None:
    ours = config_of(json.loads(json.dumps(settings)))
    assert values(ours.to_dict()) == values(theirs.to_dict())
    assert values(config_of(json.loads(json.dumps(theirs.to_dict()))).to_dict()) == values(ours.to_dict())
    for name in {*theirs.attribute_map, "layer_types", "num_hidden_layers", "head_dim", "tie_word_embeddings"}:
        found = [shown(config, name) for config in (ours, theirs)]
        assert found[0] == found[1], name


def shown(config: Any, name: str) -> Any:
    try:
        value = getattr(config, name, "none")
    except Exception:  # transformers has an error of its own for settings that differ by layer
        return "differs by layer"
    return list(value) if isinstance(value, tuple) else value


def text_of(config: Any) -> Any:
    """The text model's configuration, as its own class where it has none of its own."""
    text = config.get_text_config()
    if kind := TEXT_KINDS.get(text.model_type):
        values, names = text.to_dict() | {"model_type": kind}, CONFIG_MAPPING[kind]().to_dict()
        values["rope_parameters"] = {k: v for k, v in values["rope_parameters"].items() if not k.startswith("mrope")}
        plain = CONFIG_MAPPING[kind].from_dict({k: values[k] for k in names if k in values})
        tied = plain.tie_word_embeddings or config.tie_word_embeddings
        plain.update({"dtype": plain.dtype or config.dtype, "tie_word_embeddings": tied})
        return plain
    return _text(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_configuration_is_that_of_transformers(name: str) -> None:
    settings = json.loads(json.dumps(SETTINGS[name]))
    decoded = {n: [0.0, float("inf")] if "__float__" in str(v) else v for n, v in settings.items()}
    same(settings, text_of(CONFIG_MAPPING[settings["model_type"]].from_dict(decoded)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_of_a_family_is_that_of_transformers(name: str) -> None:
    kind, changes = FAMILIES[name]
    config = tiny(kind, **changes).config
    same(json.loads(config.to_json_string()) | {"model_type": kind}, config)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("configs", ROOT / "packaging" / "configs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_fresh() -> None:
    made = script()
    assert TABLE.read_text(encoding="utf-8") == made.text(made.table()), "run: python packaging/configs.py"


def test_settings_have_other_names_and_can_change() -> None:
    config = config_of({"model_type": "qwen3_moe", "num_experts": 8})
    config.num_experts = 4
    config.update({"hidden_size": 64})
    assert (config.num_local_experts, config.num_experts, config.hidden_size) == (4, 4, 64)
    assert config.get_text_config() is config
    with pytest.raises(AttributeError, match="a qwen3_moe has no setting no_such"):
        config.no_such  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "gpt2"}, "'gpt2' has no native program"),
        ({"model_type": ["llama"]}, "has no native program"),
        ({"model_type": "llava", "text_config": {"model_type": "gpt2"}}, "'llava' has no native program"),
        ({"model_type": "llama", "hidden_size": "64"}, "hidden_size is '64', and it must be a int"),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"model_type": "llama", "rope_parameters": [1]}, "rope_parameters are"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    ],
)
def test_what_is_no_configuration(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(settings)
