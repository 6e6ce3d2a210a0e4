"""Write outrider/data/checked.json: the settings of native models whose logits were compared with those of transformers.

    python -m docs.checked

Each class has its tiny model of the tests. One setting after another gets another value; where there is a native program, a small
model of it is compared (`outrider.models.hf.checked`). The file has the kinds of values that agreed.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from outrider.models.config import Config, config_of
from outrider.models.hf.checked import TABLE, _difference, kinds_of, smaller
from outrider.models.hf.skeleton import skeleton_of
from outrider.models.hf.tensors import ModuleTensors
from outrider.models.native.model import outlined
from tests.support.architectures import FAMILIES, tiny

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_ROTARIES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "llama3", "factor": 8.0, **_LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
        "truncate": False,
    },
    {"partial_rotary_factor": 0.5},
)
_WINDOWS = ("full_attention", "sliding_attention")


def changes(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings that a program is made of, one of them another: its flag, its number, its angles, its kinds of layers."""
    yield {}
    for name, value in settings.items():
        if isinstance(value, bool):
            yield {name: not value}
        elif name == "rope_parameters" and isinstance(value, dict):
            for other in _ROTARIES:
                whole = value.get("full_attention")
                changed = {**value, "full_attention": whole | other} if isinstance(whole, dict) else value | other
                yield {name: changed}
        elif name == "layer_types" and isinstance(value, list) and {*value} <= {*_WINDOWS}:
            yield from ({name: [kind] * len(value)} for kind in _WINDOWS)
        elif value is None or isinstance(value, int | float):
            yield from ({name: other} for other in (None, 0, 1, 2, 0.5) if other != value)


def agrees(settings: dict[str, Any]) -> dict[str, Any] | None:
    """What the program of these settings is made of. None if there is none, or if it does not compute what transformers does."""
    try:
        config = config_of(settings)
        read = outlined(config, ModuleTensors(skeleton_of(config))).facts["config"]
        return read if _difference(smaller(config)) is None else None
    except Exception:  # each architecture checks its settings in its own way
        return None


def table() -> dict[str, dict[str, list[str]]]:
    """What the file holds."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, (kind, own) in FAMILIES.items():
        config: Config = config_of(tiny(kind, **own).config.to_dict())
        first, count = agrees(config.to_dict()), 0
        if first is None:
            raise ValueError(f"{name} does not agree")
        for changed in changes(first):
            read = agrees(config.to_dict() | changed)
            count += read is not None
            for setting, value in kinds_of(read or {}):
                seen[config.kind][setting].add(value)
        print(name, count, flush=True)
    return {
        kind: {name: sorted(values) for name, values in sorted(settings.items())}
        for kind, settings in sorted(seen.items())
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = (f'"{kind}": {json.dumps(settings)}' for kind, settings in table().items())
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
