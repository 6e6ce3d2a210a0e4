"""A model as a plan needs it: what its weights and its keys and values cost to keep, to read and to compute."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.files import read_settings

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class PlannedModel:
    """Sizes of a decoder.

    params: weights. active: weights that one token uses; fewer than `params` in a mixture of experts. bits: of a weight.
    kv_bits: of a key or value. source: where the shape comes from.
    """

    name: str
    params: float
    active: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    bits: int = 16
    kv_bits: int = 16
    source: str = ""

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bits / 8

    @property
    def kv_per_token(self) -> float:
        """Bytes of the keys and values of one token: 2 * layers * kv_heads * head_dim * bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bits / 8

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a pass over so many tokens reads.

        All of them, but for a mixture of experts. There each token reads a share `active / params`, and tokens choose
        independently: params * (1 - (1 - active / params) ** tokens).
        """
        if self.active >= self.params:
            return self.weight_bytes
        return self.weight_bytes * (1 - (1 - self.active / self.params) ** tokens)


_SHAPES = {
    "SmolLM2 135M": (0.135e9, 30, 9, 3, 64, 576),
    "Qwen2.5 0.5B": (0.494e9, 24, 14, 2, 64, 896),
    "Llama 3.2 1B": (1.24e9, 16, 32, 8, 64, 2048),
    "Llama 3.2 3B": (3.21e9, 28, 24, 8, 128, 3072),
    "Llama 3.1 8B": (8.03e9, 32, 32, 8, 128, 4096),
    "Qwen2.5 14B": (14.8e9, 48, 40, 8, 128, 5120),
    "Qwen2.5 32B": (32.5e9, 64, 40, 8, 128, 5120),
    "Llama 3.1 70B": (70.6e9, 80, 64, 8, 128, 8192),
    "Llama 3.1 405B": (406e9, 126, 128, 8, 128, 16384),
}
"""Published shapes: weights, layers, heads, heads of keys and values, their dimension, hidden size (each `config.json`)."""


def weights(text: str) -> float:
    """A number of weights, as in `70B`, `135M` or `7000000000`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().upper())
    count = float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2]] if found else 0.0
    if not count:
        raise ValueError(f"{text!r} is no number of weights; write 70B, 1.5B or 135M")
    return count


def planned(
    params: str, active: str | None = None, weight: str = "bf16", kv: str = "bf16", config: Path | None = None
) -> PlannedModel:
    """A model of so many weights. Its shape is that of `config`, or of the known model nearest in size.

    config: a `config.json` as Hugging Face's. Raises ValueError for values that no model has.
    """
    count = weights(params)
    used = count if active is None else weights(active)
    if used > count:
        raise ValueError(f"a token cannot use {active} of {params} weights; --active-params is the smaller number")
    for option, name in (("--weights", weight), ("--kv-cache", kv)):
        if name not in BITS:
            raise ValueError(f"{option} is one of {', '.join(BITS)}, got {name!r}")
    if config is not None:
        made = _of_config(config, params, count)
    else:
        near = min(_SHAPES, key=lambda name: abs(math.log(_SHAPES[name][0] / count)))
        _, layers, heads, kv_heads, dim, hidden = _SHAPES[near]
        made = PlannedModel(params, count, used, layers, heads, kv_heads, dim, hidden, source=f"the shape of {near}")
    return replace(made, active=used, bits=BITS[weight], kv_bits=BITS[kv])


def _of_config(path: Path, name: str, count: float) -> PlannedModel:
    try:
        whole = read_settings(path)
        found = whole.get("text_config") or whole
        heads, hidden = int(found["num_attention_heads"]), int(found["hidden_size"])
        return PlannedModel(
            name, count, count, int(found["num_hidden_layers"]), heads, int(found.get("num_key_value_heads") or heads),
            int(found.get("head_dim") or hidden // heads), hidden, source=str(path),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no config.json of a decoder ({error!r}); leave out --model-config to take a known shape"
        ) from None
