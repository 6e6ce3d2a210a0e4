"""Write outrider/data/configs.json: what transformers' configurations say of the models that run natively.

    python packaging/configs.py

Of each model type its class, the defaults of its settings, their other names, and which tensors depend on a setting; of each type
that also reads images or sound, what its text model is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.models.config import TABLE, TEXT_KINDS
from outrider.models.native.families import family_of

_FORGOTTEN = {"id2label", "label2id", "transformers_version", "text_config", "vision_config"}
_ODD = {"hidden_size": 768, "num_hidden_layers": 3}  # to see where a text model has its settings from
_COMMON = {f.name: f.default for f in dataclasses.fields(PretrainedConfig) if f.name not in _FORGOTTEN}
_MIXERS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SMALL: dict[str, dict[str, Any]] = {  # a layer of each kind
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "granitemoehybrid": _MIXERS,
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"n_routed_experts": 4},
    **{kind: {"first_k_dense_replace": 1} for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe")},
}
_CHECKED = re.compile(
    r".*bias|.*(attn|mixer|mamba|attention)\.[^.]*norm[^.]*\.weight"
)  # tensors that a program can do without
_REMOTE = ("deepseek_ocr", "edgetam")  # these ask the hub for a default


def table() -> dict[str, Any]:
    """What the file holds."""
    natives = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if _is_native(name)}
    kinds = {kind: _row(CONFIG_MAPPING[kind], natives[TEXT_KINDS.get(kind, kind)]) for kind in (*natives, *TEXT_KINDS)}
    wholes = dict(_wholes({*kinds} - {kind for kind in natives if CONFIG_MAPPING[kind].sub_configs}))
    return {
        "transformers": transformers.__version__,
        "common": _COMMON,
        "kinds": {kind: row for kind, row in sorted(kinds.items()) if not CONFIG_MAPPING[kind].sub_configs},
        "wholes": dict(sorted(wholes.items())),
    }


def text(of: dict[str, Any]) -> str:
    """The file's text: a line for each model type."""
    lines = ((json.dumps(name), part) for name, part in of.items())
    return "{" + ",".join(f"\n{name}: {_lines(part)}" for name, part in lines) + "\n}\n"


def _lines(part: Any) -> str:
    rows = part.items() if isinstance(part, dict) and all(isinstance(row, dict) for row in part.values()) else ()
    return (
        "{" + ",".join(f"\n {json.dumps(n)}: {json.dumps(row)}" for n, row in rows) + "}" if rows else json.dumps(part)
    )


def _is_native(name: object) -> bool:
    return isinstance(name, str) and family_of(name) is not None


def _row(kind: type[PretrainedConfig], name: str) -> dict[str, Any]:
    names = {a: b for a, b in kind.attribute_map.items() if not isinstance(getattr(kind, b, None), property)}
    given = {f.name: f.default for f in dataclasses.fields(kind) if f.name not in (*_FORGOTTEN, *_COMMON)}
    given = {n: None if value is dataclasses.MISSING else value for n, value in given.items()}
    theta = kind.default_theta if isinstance(kind.default_theta, float | int) else None
    made: Any = kind()
    if (share := getattr(made, "partial_rotary_factor", None)) is not None:
        given["partial_rotary_factor"] = share
    follows = {"rope_theta": theta, "max_position_embeddings": getattr(made, "max_position_embeddings", None)}
    rotary = getattr(made, "rope_parameters", None) or {}
    rotary = {n: v for n, v in rotary.items() if n != "partial_rotary_factor" and follows.get(n, made) != v}
    row = {
        "class": name,
        "theta": theta,
        "rotary": rotary,
        "names": names,
        "settings": {names.get(n, n): value for n, value in given.items()},
    }
    if kind.model_type in TEXT_KINDS:
        return row
    model = _model(kind, {})
    exact, half = ({*(getattr(model, n) or ())} for n in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"))
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    exact |= {name.rpartition(".")[2] for name in buffers if model.get_buffer(name).dtype == torch.float32}
    return row | {"float32": sorted(exact), "float32_if_float16": sorted(half), "optional": _optional(kind)}


def _optional(kind: type[PretrainedConfig]) -> dict[str, list[str]]:
    """The tensors that a program can do without, by the setting that says whether a model has them; "": it always has them."""
    flags = {f.name: not f.default for f in dataclasses.fields(kind) if isinstance(f.default, bool)}
    usual = _tensors(kind, {})
    when = dict.fromkeys(filter(_CHECKED.fullmatch, usual), "")
    for flag, other in flags.items():
        if flag in _COMMON or flag in ("tie_word_embeddings", "enable_moe_block"):
            continue
        changed = _tensors(kind, {flag: other})
        added = filter(_CHECKED.fullmatch, changed - usual if other else usual - changed)
        when |= dict.fromkeys(added, flag)
    groups = defaultdict[str, list[str]](list)
    for tensor, flag in sorted(when.items()):
        groups[flag].append(tensor)
    return dict(sorted(groups.items()))


def _tensors(kind: type[PretrainedConfig], changes: dict[str, Any]) -> set[str]:
    """The names of a model's tensors; those of layers without what is before their number."""
    return {re.sub(r".*layers\.\d+\.", "", name) for name in _model(kind, changes).state_dict()}


def _model(kind: Any, changes: dict[str, Any]) -> Any:
    layers = {} if kind.model_type == "nemotron_h" else {"num_hidden_layers": 4}
    config = kind(**layers | _SMALL.get(kind.model_type, {}) | changes | {"pad_token_id": None})
    with no_init_weights(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _wholes(texts: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The types whose text model is one of these, and is what its part of the configuration says."""
    for kind in CONFIG_MAPPING:
        if kind.startswith(_REMOTE) or "text_config" not in CONFIG_MAPPING[kind].sub_configs:
            continue
        with suppress(Exception):  # each configuration checks its settings in its own way
            whole = CONFIG_MAPPING[kind]()
            name = whole.get_text_config().model_type
            make: Any = CONFIG_MAPPING[kind]
            part = make(text_config={"model_type": name, **_ODD}).get_text_config()
            usual: Any = CONFIG_MAPPING[name]
            if name not in texts or part.to_dict() != usual(**_ODD).to_dict():
                continue
            flat = make(**_ODD).get_text_config()
            is_flat = flat is not None and all(getattr(flat, n) == value for n, value in _ODD.items())
            yield kind, {"text": name, "flat": is_flat, "tied": bool(getattr(whole, "tie_word_embeddings", False))}


if __name__ == "__main__":
    Path(TABLE).write_text(text(table()), encoding="utf-8")
