"""What all heads with layers have: a shape in this package's own terms, and how a config.json names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from outrider.models.base import EMBEDDING
from outrider.models.rotary import frequencies

# Rotary types whose frequencies do not depend on the length of the text.
ROTARY = ("default", "linear", "llama3", "yarn")
_LARGEST = 1 << 16
_MAKERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "str": str}


def setting(usual: Any = MISSING, *, like: str = "", key: str = "") -> Any:
    """A field of a head that its config.json says.

    Args:
        usual: Its value if it is not there; without one it is known from elsewhere.
        like: The field that it equals if it is not there.
        key: Its name in the file, if that is another one.
    """
    return field(default=usual, metadata={"like": like, "key": key})


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What all heads with layers have. Other fields than those that `setting` marks are as in transformers 5."""

    hidden_size: int = setting()  # width of the head
    vocab_size: int = setting()  # tokens of the target
    draft_vocab_size: int = setting(like="vocab_size")  # tokens that the head proposes
    taps: tuple[int, ...]  # the target's layers that it reads, as `LanguageModel.forward` numbers them
    intermediate_size: int = setting()
    num_attention_heads: int = setting()
    num_key_value_heads: int = setting(like="num_attention_heads")
    head_dim: int = setting()
    target_hidden_size: int = setting(like="hidden_size")  # width of each feature
    num_layers: int = 1
    max_position_embeddings: int = setting(2048)  # tokens of the longest text that it drafts for
    rms_norm_eps: float = setting(1e-6)
    rope_parameters: dict[str, Any] = field(default_factory=lambda: plain_rope(None))
    hidden_act: str = setting("silu")
    verifier: str | None = None  # name of the target that it was trained for; a hint

    def __post_init__(self) -> None:
        """Raises ValueError for settings that exclude each other or that no head has."""
        if len(set(self.taps)) != len(self.taps) or not self.taps:
            raise ValueError(f"a head reads different layers of its target, at least one; got taps={self.taps}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key heads; the second "
                "must divide the first"
            )
        if not 0 < self.head_dim <= _LARGEST:
            raise ValueError(f"head_dim is {self.head_dim}; a head of attention has 1 to {_LARGEST} numbers")
        self.rotary()  # raises for a kind that no head has
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"the head's activation is {self.hidden_act!r}; heads of this family have 'silu'")

    @property
    def layer_ids(self) -> list[int]:
        """`taps` as SafeAILab, speculators and vLLM count: the hidden state before that layer."""
        return [0 if t == EMBEDDING else t + 1 for t in self.taps]

    def rotary(self) -> tuple[np.ndarray, float]:
        """(float32 [head_dim / 2] frequencies in radians per position, factor of cosine and sine).

        Raises ValueError for a kind whose frequencies depend on the length of the text."""
        rope = self.rope_parameters
        kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        if kind not in ROTARY:
            raise ValueError(f"the head's rotary embedding is {kind!r}; a head can have {', '.join(ROTARY)}")
        turned = self.head_dim if kind == "default" else int(self.head_dim * share)
        return frequencies(rope, turned, self.max_position_embeddings)


FIELDS = tuple(f for f in fields(HeadShape) if f.metadata)
"""What each head's config.json says."""


def fields_of(given: Mapping[str, Any], kind: type[HeadShape], known: dict[str, Any]) -> dict[str, Any]:
    """`known`, and the fields that config.json says. A number of 0 counts as none."""
    for f in fields(kind):
        if f.metadata:
            like, make = f.metadata["like"], _MAKERS[str(f.type)]
            usual = known.get(f.name, known[like] if like else None if f.default is MISSING else f.default)
            value = given.get(f.metadata["key"] or f.name, usual)
            known[f.name] = make(value or usual if make is int else value)
    return known


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the states before layers 2, n // 2 and n - 3, as all trainers of EAGLE-3 choose.

    Fewer than 7 layers make them coincide; then they are spread evenly, up to the last layer. Taps are outputs of layers.
    """
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    return tuple(sorted({0, (num_layers - 1) // 2, num_layers - 2 if num_layers > 3 else num_layers - 1}))


def tap_of(layer_id: int) -> int:
    """The tap for the hidden state before a layer. Id 0 is the embedding."""
    return EMBEDDING if layer_id == 0 else layer_id - 1


def plain_rope(given: Any) -> dict[str, Any]:
    """`rope_parameters` of a configuration as one dictionary. Raises ValueError if kinds of layers have different ones."""
    rope = dict(given or {})
    if rope and all(isinstance(v, dict) for v in rope.values()):  # one for each kind of layer, as Gemma 3 has
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    return {"rope_type": "default", "rope_theta": 10000.0} | rope
