"""Write outrider/data/configs.json: what transformers' configurations say of the models that run natively.

    python packaging/configs.py

Of each model type its class, the defaults of its settings and their other names; of each type that also reads images or sound,
what its text model is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.models.config import TABLE, TEXT_KINDS
from outrider.models.native.families import family_of

_FORGOTTEN = {"id2label", "label2id", "transformers_version", "text_config", "vision_config"}
_ODD = {"hidden_size": 768, "num_hidden_layers": 3}  # to see where a text model has its settings from
_COMMON = {f.name: f.default for f in dataclasses.fields(PretrainedConfig) if f.name not in _FORGOTTEN}
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
    return {
        "class": name,
        "theta": theta,
        "names": names,
        "settings": {names.get(n, n): value for n, value in given.items()},
    }


def _wholes(texts: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The types whose text model is one of these, and is what its part of the configuration says."""
    for kind in CONFIG_MAPPING:
        if kind.startswith(_REMOTE) or "text_config" not in CONFIG_MAPPING[kind].sub_configs:
            continue
        with suppress(Exception):  # each configuration checks its settings in its own way
            whole = CONFIG_MAPPING[kind]()
            name = whole.get_text_config().model_type
            part = CONFIG_MAPPING[kind](text_config={"model_type": name, **_ODD}).get_text_config()
            if name not in texts or part.to_dict() != CONFIG_MAPPING[name](**_ODD).to_dict():
                continue
            flat = CONFIG_MAPPING[kind](**_ODD).get_text_config()
            is_flat = flat is not None and all(getattr(flat, n) == value for n, value in _ODD.items())
            yield kind, {"text": name, "flat": is_flat, "tied": bool(getattr(whole, "tie_word_embeddings", False))}


if __name__ == "__main__":
    Path(TABLE).write_text(text(table()), encoding="utf-8")
