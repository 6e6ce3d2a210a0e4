"""Finds the MTP layer of a checkpoint: the layer that predicts one token further (`models.native.mtp`).

DeepSeek-V3, GLM-4.5 and their like keep it behind their last layer (`model.layers.N`), Qwen3-Next and Qwen3.5 under `mtp`.
transformers leaves it out when it loads the model. Of several such layers the first one is found.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

_Part = TypeVar("_Part")
MTP = "mtp"
"""Where a model has its MTP layer, as a model of one layer with `JOIN` beside it."""
JOIN = ("enorm", "hnorm", "fc")
"""The norms of the embedding and of the state, and W."""
# A checkpoint's name below the layer's prefix -> the name in a model of one layer.
_BEHIND = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "fc",
    "shared_head.norm": "model.norm",
    "shared_head.head": "lm_head",
}
_APART = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "model.norm"}
_UNREAD = ("embed_tokens.weight", "rotary_emb.inv_freq")  # the target's own
_NUMBERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


def layer_in(parts: Mapping[str, _Part], config: Any) -> dict[str, _Part]:
    """The layer's tensors by their names in a model of one layer, which is below `MTP`.

    parts: all tensors of a checkpoint by their names there. Empty if it has none. Warns if it has one that is not known.
    """
    prefix = re.compile(rf"(?:.*\.)?(?:layers\.{config.num_hidden_layers}|mtp)\.(?!layers\.[1-9])(.+)")
    found = {m[1]: part for name, part in parts.items() if (m := prefix.fullmatch(name))}
    if not found or not any(getattr(config, number, 0) for number in _NUMBERS):
        return {}
    names = _APART if any(short.startswith("fc.") for short in found) else _BEHIND
    layer = dict[str, _Part]()
    for short, part in found.items():
        stem, _, kind = short.rpartition(".")
        if stem in names:
            layer[f"{MTP}.{names[stem]}.{kind}"] = part
        elif short not in _UNREAD and (names is _BEHIND or short.startswith("layers.0.")):
            layer[f"{MTP}.model.layers.0.{short.removeprefix('layers.0.')}"] = part
    there = {name.removeprefix(f"{MTP}.").rpartition(".")[0] for name in layer}
    why = [f"it lacks {theirs}" for theirs, ours in names.items() if ours not in {*there, "lm_head"}]
    if getattr(config, "mtp_hidden_states_first", False):
        why = ["it reads the state before the token"]
    if not why:
        return layer
    warnings.warn(
        f"the MTP layer of {config._name_or_path} cannot draft: {why[0]}; outrider knows the layers of DeepSeek-V3, GLM-4.5, "
        f"Qwen3-Next and their like, and this is a {config.model_type}",
        RuntimeWarning,
        stacklevel=4,
    )
    return {}
