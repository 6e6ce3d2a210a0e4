"""Whether a family's program means what a configuration says: a small model of the same settings gives the same logits both ways.

The small model has the first layers of the real one, random weights, and fewer tokens and experts. So the check depends on the
settings alone. It was made for the settings of `TABLE` (`docs/checked.py`). For others it is made once, and is then remembered in
the user's cache. Where torch and transformers are not installed it is not made. They are imported only to make it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.files import cache_folder, write_whole
from outrider.models.config import Config
from outrider.models.native.families import digest
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

_CLOSE = 1e-3  # of the largest number; rounding is a thousand times smaller, and a wrong setting larger
# Sizes that are made smaller: they say how much there is, not what is done with it.
_SMALLER = {
    "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "sliding_window": 4, "vocab_size_per_layer_input": 64,
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
_HEADS = 8  # of a model whose heads share a latent
_TEXT = 16  # tokens


TABLE = Path(__file__).parents[2] / "data" / "checked.json"


def differs(config: Config, read: Mapping[str, Any]) -> str | None:
    """Why the native step must not run a model that it could run; None if it gives what transformers gives.

    read: the settings that its program was made of.
    """
    seen = _table().get(config.kind, {})
    if all(kind in seen.get(name, ()) for name, kind in kinds_of(read)):
        return None
    small = smaller(config)
    key = hashlib.sha256(f"{digest()}{config.kind}{json.dumps(small.to_dict())}".encode()).hexdigest()[:24]
    file = cache_folder() / "checked" / key
    with suppress(OSError):
        return file.read_text(encoding="utf-8") or None
    if find_spec("torch") is None or find_spec("transformers") is None:
        return None
    reason = _difference(small)
    with suppress(OSError):
        write_whole(file, reason or "")
    return reason


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def kinds_of(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """What settings mean, without how much there is: names, and the values of texts and flags; 0, 1 or "n" for a number."""
    for key, value in settings.items():
        name = within + (key if not str(key).isdecimal() else "*")
        if isinstance(value, Mapping):
            yield from kinds_of(value, f"{name}.")
            continue
        for one in {*value} if isinstance(value, list | tuple) else (value,):
            number = isinstance(one, int | float) and not isinstance(one, bool)
            if not (within and (one is None or one == 1)):
                yield name, "n" if number and one not in (0, 1) else json.dumps(int(one) if number else one)


def smaller(config: Config) -> Config:
    """The configuration of the small model: as many layers as it takes to have one of each kind, and two at least."""
    small, layers = copy.deepcopy(config), config.num_hidden_layers
    if getattr(small, "first_k_dense_replace", 0) > 1:
        small.update({"first_k_dense_replace": 1})
    if getattr(small, "kv_lora_rank", None):
        heads = min(_HEADS, small.num_attention_heads)
        small.update({"num_attention_heads": heads, "num_key_value_heads": heads})
    groups, top = _count(small, "n_group") or 1, _count(small, "topk_group") or 1
    few = groups * max(2, -(-2 * max(_count(small, name) for name in _CHOSEN) // min(top, groups)))
    for name in _EXPERTS:  # in as many groups, twice those that a token has
        if _count(small, name) > few:
            setattr(small, name, few)
    lists = {n: v for n, v in small.to_dict().items() if isinstance(v, list) and len(v) == layers}
    firsts = [v.index(kind) + 1 for v in lists.values() for kind in v]
    count = min(layers, max(2, getattr(small, "first_k_dense_replace", 0) + 1, *firsts, 0))
    if _count(small, "num_kv_shared_layers"):  # as many again, which read keys and values of the first ones
        small.update({"num_kv_shared_layers": min(count, layers - count)})
        count = min(layers, 2 * count)
    small.update({name: values[:count] for name, values in lists.items()})
    small.update({"num_hidden_layers": count, "pad_token_id": None})
    for name, size in _SMALLER.items():
        if isinstance(value := getattr(small, name, None), int) and value > size:
            setattr(small, name, size)
    return small


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def _difference(config: Config) -> str | None:
    """See `differs`, of a small model with random weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from outrider.models.hf import precision

    with torch.random.fork_rng([]), torch.no_grad(), precision.making():
        torch.manual_seed(0)
        try:
            settings = CONFIG_MAPPING[config.model_type].from_dict(config.to_dict())
            settings._attn_implementation = settings._experts_implementation = "eager"
            model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        except Exception:  # each architecture checks its settings in its own way
            return None
        for p in model.parameters():
            p.data = torch.randn_like(p) * p.shape[-1] ** -0.5 if p.dim() > 1 else torch.rand_like(p) + 0.5
        if supports(model) is not None:
            return None
        text = np.arange(2 * _TEXT).reshape(2, _TEXT) * 7 % config.vocab_size
        theirs = model(torch.from_numpy(text)).logits.numpy()
    ours = NativeModel(model, "float32")
    logits = ours.forward(Nodes(text, ours.new_cache(2, _TEXT), [0, 1])).logits
    far = float(np.abs(logits - theirs).max() / np.abs(theirs).max())
    if far <= _CLOSE:
        return None
    return (
        f"the native program of {type(model).__name__} does not compute what transformers does with these settings: logits of a "
        f"small model differ by {far:.1e} of the largest; transformers runs the model, slower and right. Please report it"
    )
