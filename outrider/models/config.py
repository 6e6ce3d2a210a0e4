"""Configurations of the models that run natively, with the attributes that transformers' own have.

The defaults are a table that `packaging/configs.py` makes. What a configuration derives from its settings is written here. A test
compares each with transformers'.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "data" / "configs.json"
# Text models that have no class of their own: without images, these compute the same.
TEXT_KINDS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}  # old names of kinds of layers
_SCALED = ("llama3", "yarn", "longrope")  # rotary types that know the length of the training texts
# Each so many layers there is one that attends to the whole text; the name of the number in old configurations.
_EVERY: dict[str, tuple[int, str]] = {
    "cohere2": (4, "sliding_window_pattern"),
    "exaone4": (4, "sliding_window_pattern"),
    "gemma2": (2, ""),
    "gemma3_text": (6, "sliding_window_pattern"),
    "gemma4_text": (6, ""),
    "gpt_oss": (2, ""),
    "olmo3": (4, ""),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), (4, "full_attention_interval")),
}
_MIXERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of patterns of Nemotron-H
_OLD_NAMES: dict[str, dict[str, str]] = {
    "nemotron_h": {
        "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand", "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max", "mamba_dt_limit": "time_step_limit", "mamba_dt_init_floor": "time_step_floor",
        "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
    },
    "lfm2": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
}  # fmt: skip


_FORGOTTEN = (
    "model_type",
    "transformers_version",
    "id2label",
    "label2id",
    "attn_implementation",
    "experts_implementation",
)


class Config:
    """The settings of a model as attributes, also by their other names.

    Args:
        kind: the class of transformers that has them.
        settings: by their own names.
        names: other names -> own names.
        derived: values that follow from the settings, and are not written with them.

    A setting that differs by layer raises ValueError; `per_layer_config` has it.
    """

    def __init__(
        self, kind: str, settings: Mapping[str, Any], names: Mapping[str, str], derived: Mapping[str, Any]
    ) -> None:
        self.__dict__.update(settings)
        self.__dict__.update(kind=kind, _names=names, _derived=derived, _name_or_path="")

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        own, given = self.__dict__.get("_names", {}).get(name), self.__dict__.get("_derived", {})
        if own is not None:
            return getattr(self, own)
        if name in given:
            return given[name]
        raise AttributeError(f"the configuration of a {self.__dict__.get('model_type')} has no setting {name}")

    def __getattribute__(self, name: str) -> Any:
        layers = object.__getattribute__(self, "__dict__").get("per_layer_config")
        if layers and name != "per_layer_config" and any(name in changes for changes in layers.values()):
            raise ValueError(f"its {name} differs by layer")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[self._names.get(name, name)] = value

    def update(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def get_text_config(self) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings; `config_of` makes an equal configuration of them."""
        return {n: copy.deepcopy(v) for n, v in self.__dict__.items() if n[0] != "_" and n != "kind"}


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def native_kind(settings: Mapping[str, Any]) -> str | None:
    """The model type of the text model that these settings say, if it runs natively; else None."""
    given, whole = _text(settings)
    kind = given.get("model_type") or (whole or {}).get("text")
    return kind if isinstance(kind, str) and kind in _table()["kinds"] else None


def _text(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The settings of the text model, and the row of a model that also reads images or sound; None for others."""
    whole = _table()["wholes"].get(str(settings.get("model_type")))
    if whole is None:
        return settings, None
    if isinstance(text := settings.get("text_config"), Mapping):
        return text, whole
    flat = {n: value for n, value in settings.items() if n != "model_type"}
    return (flat if whole["flat"] else {"model_type": None}), whole


def config_of(settings: Mapping[str, Any]) -> Config:
    """The configuration of a model that runs natively; of one that also reads images or sound, that of its text model.

    settings: of config.json. Raises ValueError for a `model_type` that is not native, or a setting of another type.
    """
    if (kind := native_kind(settings)) is None:
        raise ValueError(f"model_type {settings.get('model_type')!r} has no native program")
    given, whole = _text(settings)
    config = _made(kind, given)
    if kind in TEXT_KINDS:
        kind, values = TEXT_KINDS[kind], config.to_dict()
        rotary = {n: v for n, v in config.rope_parameters.items() if not n.startswith("mrope")}
        own = _table()["common"] | _table()["kinds"][kind]["settings"]
        config = _made(kind, {n: values[n] for n in own if n in values} | {"rope_parameters": rotary})
    if whole is not None:
        config.dtype = config.dtype or settings.get("dtype") or settings.get("torch_dtype")
        config.tie_word_embeddings |= bool(settings.get("tie_word_embeddings", whole["tied"]))
        if "quantization_config" in settings:
            config.quantization_config = settings["quantization_config"]
    return config


def optional_tensors(config: Any) -> dict[str, bool] | None:
    """The tensors of a model that its program can do without -> whether it has them. Those of a layer have names below it.

    None for a model that has no program."""
    if (row := _table()["kinds"].get(config.model_type)) is None:
        return None
    return {n: not flag or bool(getattr(config, flag)) for flag, names in row["optional"].items() for n in names}


def exact_tensors(config: Any, dtype: str) -> re.Pattern[str]:
    """The names of the tensors that stay float32 in a model of this dtype."""
    row = _table()["kinds"].get(config.model_type, {"float32": []})
    names = row["float32"] + (row.get("float32_if_float16", []) if dtype == "float16" else [])
    return re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in names) or "(?!)")


def _made(kind: str, given: Mapping[str, Any]) -> Config:
    row = _table()["kinds"][kind]
    names, defaults = row["names"], _table()["common"] | row["settings"]
    given = {_OLD_NAMES.get(kind, {}).get(n, n): _number(value) for n, value in given.items()}
    older = given.pop("torch_dtype", None)
    given["dtype"] = given.get("dtype") or older
    given = {n: value for n, value in given.items() if n not in _FORGOTTEN and n[0] != "_"}
    c = copy.deepcopy(defaults)
    for name, value in given.items():
        own = names.get(name, name)
        c[own] = copy.deepcopy(value)
        _check(name, value, defaults.get(own))
    derived = _derive(kind, c)
    for name in ("layer_types", "layers_block_type", "mtp_layers_block_type"):
        if isinstance(c.get(name), list):
            c[name] = [_LAYERS.get(part, part) for part in c[name]]
    layers = c.get("layer_types")
    if isinstance(layers, list) and len(layers) != c.get("num_hidden_layers", len(layers)):
        raise ValueError(f"num_hidden_layers is {c['num_hidden_layers']}, and layer_types names {len(layers)} layers")
    if "rope_parameters" in defaults:
        _turn(kind, c, row["rotary"], row["theta"])
    return Config(row["class"], c | {"model_type": kind}, names, derived)


def _number(value: Any) -> Any:
    """transformers writes numbers such as infinity as objects."""
    if isinstance(value, dict):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: _number(v) for k, v in value.items()}
    return [_number(v) for v in value] if isinstance(value, list | tuple) else value


def _check(name: str, value: Any, usual: Any) -> None:
    """Raise ValueError for a setting of another type than its default."""
    if value is None or usual is None or usual == "auto":
        return
    wanted = {float: (int, float), list: (list, tuple), tuple: (list, tuple)}.get(type(usual), (type(usual),))
    if name.endswith("token_id"):
        wanted = (int, list)
    if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(usual, bool)):
        raise ValueError(f"{name} is {value!r:.80}, and it must be a {type(usual).__name__} such as {usual!r:.80}")


def _derive(kind: str, c: dict[str, Any]) -> dict[str, Any]:
    """Fill in the settings that follow from others. Returns the values that are no settings."""
    if c.get("num_key_value_heads", 0) is None and kind != "nemotron":
        c["num_key_value_heads"] = c["num_attention_heads"]
    if kind == "cohere2" or (c.get("head_dim", 0) is None and kind not in ("mixtral", "glm", "deepseek_v2")):
        c["head_dim"] = c["hidden_size"] // c["num_attention_heads"]
    if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text"):
        c["sliding_window"] = c["sliding_window"] if c["use_sliding_window"] else 0 if kind == "qwen2_moe" else None
    if c.get("mamba_d_head") == "auto":
        inner = c["mamba_expand"] * c["hidden_size"] if c.get("mamba_d_ssm") is None else c["mamba_d_ssm"]
        c["mamba_d_head"] = inner // c["mamba_n_heads"]
    if c.get("mlp_only_layers", 0) is None:
        c["mlp_only_layers"] = []
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        c["qk_head_dim"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    if kind in ("deepseek_v2", "deepseek_v3"):
        c["head_dim"] = c["qk_rope_head_dim"]
    if kind in _MEANT:
        name, stands, meant = _MEANT[kind]
        c[name] = meant(c) if c[name] == stands else c[name]
    if c.get("layer_types") is None and (layers := _kinds(kind, c)) is not None:
        c["layer_types"] = layers
    return _MORE[kind](c) or {} if kind in _MORE else {}


def _kinds(kind: str, c: dict[str, Any]) -> list[str] | None:
    """The kinds of the layers, where no setting says them."""
    layers = range(c.get("num_hidden_layers") or 0)
    if kind in _EVERY:
        usual, name = _EVERY[kind]
        every = c.pop(name, None) or usual if kind != "exaone4" else c[name] if c["sliding_window"] else 1
        other = "linear_attention" if "qwen" in kind else "sliding_attention"
        return [other if (i + 1) % every else "full_attention" for i in layers]
    if kind in ("qwen2", "qwen3", "dots1", "qwen2_vl_text", "qwen2_5_vl_text"):
        first = c["max_window_layers"] if c["sliding_window"] is not None else len(layers)
        return ["sliding_attention" if i >= first else "full_attention" for i in layers]
    if kind == "qwen2_moe":
        windows = c["use_sliding_window"] * c["max_window_layers"]
        return ["sliding_attention" if (i + 1) % 2 and i < windows else "full_attention" for i in layers]
    if kind == "granitemoehybrid":
        return ["linear_attention"] * len(layers)
    return None


def _bamba(c: dict[str, Any]) -> dict[str, Any]:
    c["partial_rotary_factor"] = 0.5
    attending = c["attn_layer_indices"] or ()
    kinds = ["full_attention" if i in attending else "linear_attention" for i in range(c["num_hidden_layers"])]
    return {"layers_block_type": kinds, "layer_types": kinds}


def _falcon_h1(c: dict[str, Any]) -> dict[str, Any]:
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        c[name] = [1.0] * count if c[name] is None else c[name]
    kinds = ["hybrid"] * c["num_hidden_layers"]
    return {"layers_block_type": kinds, "layer_types": kinds}


def _mamba2(c: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": ["linear_attention"] * c["num_hidden_layers"]}


def _nemotron_h(c: dict[str, Any]) -> dict[str, Any]:
    """Old configurations have a letter for each layer."""
    for name, pattern, usual in (
        ("layers_block_type", "hybrid_override_pattern", ["linear_attention", "moe", "full_attention", "mlp"]),
        ("mtp_layers_block_type", "mtp_hybrid_override_pattern", ["full_attention", "moe"]),
    ):
        letters = c.pop(pattern, None)
        if c[name] is None or (letters is not None and name[0] == "m" and c[name] == usual):
            c[name] = usual if letters is None else [_MIXERS[letter] for letter in letters]
    c.pop("num_hidden_layers", None)
    return {"num_hidden_layers": len(c["layers_block_type"])}


def _gemma3(c: dict[str, Any]) -> None:
    if c["use_bidirectional_attention"]:
        c["sliding_window"] = c["sliding_window"] // 2 + 1


def _gemma4(c: dict[str, Any]) -> None:
    """Its layers that see the whole text have heads of another size."""
    if c["use_bidirectional_attention"] == "all":
        c["is_causal"], c["sliding_window"] = False, c["sliding_window"] // 2 + 1
    c["layer_types"][-1:] = ["full_attention"]
    changes = {"head_dim": c.pop("global_head_dim", 512)}
    heads = c.pop("num_global_key_value_heads", None)
    if heads is not None and c["attention_k_eq_v"]:
        changes["num_key_value_heads"] = heads
    full = [i for i, layer in enumerate(c["layer_types"]) if layer == "full_attention"]
    by_layer = c.pop("per_layer_config", dict.fromkeys(full, changes))
    kept = {int(i): {n: v for n, v in each.items() if v != c.get(n)} for i, each in by_layer.items()}
    digits = len(str(max(kept, default=0)))
    c["per_layer_config"] = {f"{i:0{digits}}": each for i, each in kept.items() if each}


def _lfm2(c: dict[str, Any]) -> None:
    layers = range(c["num_hidden_layers"])
    if c["layer_types"] is None:
        c["full_attn_idxs"] = [*layers] if c["full_attn_idxs"] is None else c["full_attn_idxs"]
        c["layer_types"] = ["full_attention" if i in c["full_attn_idxs"] else "conv" for i in layers]


def _smollm3(c: dict[str, Any]) -> None:
    every, layers = c["no_rope_layer_interval"], range(c["num_hidden_layers"])
    if c["no_rope_layers"] is None:
        c["no_rope_layers"] = [int((i + 1) % every != 0) for i in layers]
    if c["layer_types"] is None:
        windows = c["use_sliding_window"] and c["sliding_window"] is not None
        full = [c["no_rope_layers"][i] or not windows for i in layers]
        c["layer_types"] = ["full_attention" if each else "sliding_attention" for each in full]


# By model type: a setting, what may stand there, and what that means.
_MEANT: dict[str, tuple[str, Any, Callable[[dict[str, Any]], Any]]] = {
    "ernie4_5_moe": ("moe_layer_end_index", -1, lambda c: c["num_hidden_layers"] - 1),
    "gemma": ("hidden_act", "gelu", lambda c: "gelu_pytorch_tanh"),  # of the first files
    **dict.fromkeys(("glm", "glm4"), ("eos_token_id", None, lambda c: [151329, 151336, 151338])),
    "glm4_moe_lite": ("mlp_layer_types", None, lambda c: ["dense"] + ["sparse"] * (c["num_hidden_layers"] - 1)),
    "mamba2": ("time_step_rank", "auto", lambda c: math.ceil(c["hidden_size"] / 16)),
}
_MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "lfm2": _lfm2,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "smollm3": _smollm3,
}


def _turn(kind: str, c: dict[str, Any], usual: dict[str, Any], theta: float | None) -> None:
    """Write `rope_parameters` in one form: those of all layers, or of each kind of layers, with all that says how they turn.

    usual: where no setting says them."""
    scaling, said, rotary = c.pop("rope_scaling", None), c.pop("rope_theta", None), c["rope_parameters"]
    if kind == "gemma4_text":
        c["rope_parameters"] = copy.deepcopy(usual) if rotary is None else rotary
        return
    if kind == "ministral3" and rotary is None:
        usual = {**usual, "max_position_embeddings": c["max_position_embeddings"]}
    if "full_attention" in usual:
        thetas = {"full_attention": said, "sliding_attention": c.pop("rope_local_base_freq", None)}
        rotary = dict(rotary or {})
        for name, own in usual.items():
            more = (scaling or {}) if name == "full_attention" else {}
            rotary[name] = {**(rotary.get(name) or {"rope_type": "default"}), **more}
            rotary[name].setdefault("rope_theta", own["rope_theta"] if thetas[name] is None else thetas[name])
    else:
        rotary = scaling or (copy.deepcopy(usual) if rotary is None else rotary)
    if not isinstance(rotary, dict):
        raise ValueError(f"rope_parameters are {rotary!r:.80}, and they must be settings by name")
    if kind == "phi3":
        rotary.setdefault("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    share = c.get("partial_rotary_factor")
    nested = [name for name in rotary if name in (c.get("layer_types") or ())]
    for each in [rotary[name] for name in nested] or [rotary]:
        if not isinstance(each, dict):
            continue
        each.setdefault("rope_theta", said if said is not None else theta)
        if share is not None:
            each.setdefault("partial_rotary_factor", share)
        if each.get("rope_type", each.get("type")) == "mrope":
            each["rope_type"] = "default"
        each.setdefault("rope_type", each.get("type", "default"))
        if kind == "phi3" and each["rope_type"] in ("su", "yarn"):
            each["rope_type"] = "longrope"
        if each["rope_type"] in _SCALED:
            first = c.get("original_max_position_embeddings")
            if first is not None and not nested:
                each["original_max_position_embeddings"] = first
            each.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
    c["rope_parameters"] = rotary
