"""What all heads with layers have: a shape in this package's own terms, and how a config.json names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.models.base import EMBEDDING
from outrider.models.rotary import frequencies

# Rotary types whose frequencies do not depend on the length of the text.
ROTARY = ("default", "linear", "llama3", "yarn")
_LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What all heads with layers have. `FIELDS` says how a config.json names it. Other fields are as in transformers 5."""

    hidden_size: int  # width of the head
    vocab_size: int  # tokens of the target
    draft_vocab_size: int  # tokens that the head proposes
    taps: tuple[int, ...]  # the target's layers that it reads, as `LanguageModel.forward` numbers them
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int  # width of each feature
    num_layers: int = 1
    max_position_embeddings: int = 2048  # tokens of the longest text that it drafts for
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: plain_rope(None))
    hidden_act: str = "silu"
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


class Field(NamedTuple):
    """A field of a head in its config.json."""

    name: str  # of the field
    kind: Callable[[Any], Any]  # makes the value of what is in the file
    default: Any = None  # its value if it is not there, or the name of the field that it then equals
    key: str = ""  # its name in the file, if that is another one


# A field without a default is known from elsewhere, if it is not there.
FIELDS = (
    Field("hidden_size", int),
    Field("vocab_size", int),
    Field("num_attention_heads", int),
    Field("num_key_value_heads", int, "num_attention_heads"),
    Field("head_dim", int),
    Field("intermediate_size", int),
    Field("max_position_embeddings", int, 2048),
    Field("rms_norm_eps", float, 1e-6),
    Field("hidden_act", str, "silu"),
    Field("draft_vocab_size", int, "vocab_size"),
    Field("target_hidden_size", int, "hidden_size"),
)


def fields_of(given: Mapping[str, Any], fields: Sequence[Field], known: dict[str, Any]) -> dict[str, Any]:
    """`known`, and the fields that config.json says. A number of 0 counts as none."""
    for f in fields:
        default = known.get(f.name, known[f.default] if isinstance(f.default, str) and f.kind is int else f.default)
        said = given.get(f.key or f.name, default)
        known[f.name] = f.kind(said or default if f.kind is int else said)
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
