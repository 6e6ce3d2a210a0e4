"""A model's forward as a program for native code (`kernels/cpu/src/program.hpp`).

A family writes its forward with a `Builder`. Each call adds one op, and returns the value that the op makes. Weights come from a
`WeightSource` by the names of their modules, so a family does not know where they are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from outrider.kernels import cpu as native


class WeightSource(Protocol):
    """Where the weights of a program come from: modules of transformers, a pack, or a GGUF file.

    config: the model's configuration. What is read of it is remembered, for packs.
    """

    config: Any

    def matrix(self, *names: str, paired: bool = False) -> native.Packed:
        """The linears of these names side by side, with their biases. paired: gate and up, see `native.Packed`.

        Raises KeyError for a name that is not there."""
        ...

    def table(self, name: str) -> native.Packed | Tensor:
        """An embedding: packed, or floats [vocab, hidden]."""
        ...

    def tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer as contiguous float32, or None if there is none."""
        ...

    def number(self, name: str, default: Any = None) -> Any:
        """An attribute of a module, such as `model.rotary_emb.attention_scaling`."""
        ...

    def experts(self, name: str) -> list[tuple[native.Packed, native.Packed]]:
        """gate_up (paired) and down of each expert of a mixture, such as `model.layers.0.mlp.experts`."""
        ...


@dataclass(frozen=True)
class Value:
    """Some columns of a register: float32 [node, width]."""

    register: int
    offset: int
    width: int

    def split(self, *widths: int) -> list[Value]:
        """Views of consecutive columns."""
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return [Value(self.register, self.offset + start, width) for start, width in zip(starts, widths, strict=True)]


class Builder:
    """Adds ops to a program.

    x, a, b: values. add_to: the op adds to this value in place of making one. out: the op writes this value.
    names: of modules. Widths are checked: what does not fit raises ValueError with both sizes.
    """

    source: WeightSource
    # The layer that is being built; -1 outside of layers.
    layer: int

    def layers(self, x: Value, name: str = "model.layers") -> Iterator[str]:
        """The names of the layers in turn. After each, x is what a tap of that layer shows."""

    def value(self, width: int) -> Value:
        """A new register."""

    def embed(self, name: str = "model.embed_tokens", factor: float = 1.0) -> Value: ...

    def given(self, width: int, *, when: str = "always", out: Value | None = None) -> Value:
        """What the caller gives to each node. when: "features" or "fed": only if this is given."""

    def norm(
        self,
        x: Value,
        name: str | None,
        *,
        eps: float,
        kind: str = "rms",
        group: int = 0,
        one_added: bool = False,
        gate: Value | None = None,
        add_to: Value | None = None,
        factor: float = 1.0,
        out: Value | None = None,
    ) -> Value:
        """norm(x) * weight + bias. kind: "rms", "layer" or "l2". name: None for no weight. group: numbers normed together,
        such as a head; 0 for all. one_added: the weight is 1 + w. gate: the result is multiplied by silu of it."""

    def linear(
        self,
        x: Value,
        *names: str,
        width: int,
        gate: str | None = None,
        factor: float = 1.0,
        add_to: Value | None = None,
        out: Value | None = None,
    ) -> Value:
        """The linears of these names side by side. width: of the result. gate: of gate and up, "silu" or "gelu_pytorch_tanh"."""

    def heads(self, x: Value, matrices: Sequence[native.Packed], *, out: Value | None = None) -> Value:
        """Head h of the result is matrix h times head h of x."""

    def rotary(self, name: str = "model.rotary_emb", factor: float | None = None) -> int:
        """The number of a table of angles, for `rope`."""

    def rope(self, x: Value, table: int, dim: int, *, offset: int = 0, interleaved: bool = False) -> None:
        """Rotate the heads of x in place. dim: of a head. offset: where the rotated numbers of a head begin."""

    def store(self, key: Value, value: Value, heads: int) -> int:
        """Keys and values into the cache. Returns the number of the cache's layer, for `attend`."""

    def attend(
        self,
        query: Value,
        cache: int,
        *,
        heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> Value: ...

    def gate(
        self,
        a: Value,
        b: Value | None,
        function: str,
        *,
        limit: float = 0.0,
        alpha: float = 0.0,
        plus: float = 0.0,
        add_to: Value | None = None,
        out: Value | None = None,
    ) -> Value:
        """function(a) * (b + plus). One number of a may be for several of b. limit: a is at most this, and b is in +-limit."""

    def map(
        self,
        x: Value,
        function: str,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        factor: float = 1.0,
        cap: float = 0.0,
        out: Value | None = None,
    ) -> Value:
        """function(x * scale + shift) * factor: "linear", "softplus", "exp", "exp_negative", "sigmoid" or "softcap"."""

    def conv(self, x: Value, name: str, *, activation: str | None) -> Value: ...

    def scan(
        self, kind: str, inputs: Sequence[Value], *, heads: int, keys: int, width: int, groups: int = 1
    ) -> Value: ...

    def route(
        self,
        logits: Value,
        *,
        k: int,
        kind: str,
        normalised: bool = False,
        factor: float = 1.0,
        correction: str | None = None,
        groups: int = 0,
        kept_groups: int = 0,
    ) -> Value:
        """The experts of each node. kind: "softmax_top", "top_softmax" or "sigmoid_top"."""

    def experts(
        self,
        x: Value,
        routed: Value,
        name: str,
        *,
        activation: str,
        limit: float = 0.0,
        alpha: float = 0.0,
        plus: float = 0.0,
        factor: float = 1.0,
        add_to: Value | None = None,
    ) -> Value: ...

    def rows(self) -> None:
        """From here on in the last layer only the nodes whose logits are wanted. Call it where no node needs another's values."""

    def head(
        self,
        x: Value,
        name: str = "lm_head",
        *,
        factor: float = 1.0,
        softcap: float = 0.0,
        fed_back: Value | None = None,
    ) -> None:
        """The logits. x: after the final norm, which is what the tap FINAL_NORM shows."""
