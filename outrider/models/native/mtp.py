"""The program of an MTP layer, which predicts one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2).

It reads W [norm(embedding of a token); norm(state of the model before it)]. Then come a layer of the model's own kind, a norm and
an output head. So it is what the family builds for a model of one layer, with another beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.models.mtp import JOIN
from outrider.models.native.builder import Builder
from outrider.models.native.program import Value

# Settings that differ from those of the whole model, where it has them.
_CHANGED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
}
# Classes whose layer reads again the state before the last norm, as vLLM runs them.
BEFORE_NORM = ("Glm4MoeForCausalLM",)


def changes(config: Any) -> dict[str, Any]:
    """The settings of a configuration that are others for its MTP layer."""
    return {name: value for name, value in _CHANGED.items() if getattr(config, name, None) is not None}


class OneLayer:
    """The configuration of a model of one layer: the MTP layer."""

    def __init__(self, config: Any) -> None:
        self._config, self._changes = config, changes(config)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return self._changes.get(name, value)


@dataclass
class MtpBuilder(Builder):
    """Builds the program of a model of one layer over pairs. before_norm: what it feeds back is the state before the last norm.

    The two norms are of the kind of the layer's first one."""

    before_norm: bool = False
    _pair: tuple[Value, Value, Value] | None = None
    _before: Value | None = None

    def embed(self, name: str = "model.embed_tokens", factor: float = 1.0, out: Value | None = None) -> Value:
        token = super().embed(name, factor, out)
        x = self.value(token.width)
        self._pair = token, self.given(token.width), x
        return x

    def norm(self, x: Value, name: str | None, **settings: Any) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._pair is not None:
            (token, state, joined), self._pair = self._pair, None
            pair = self.value(2 * x.width)
            first, second = pair.split(x.width, x.width)
            super().norm(token, JOIN[0], **settings, out=first)
            super().norm(state, JOIN[1], **settings, out=second)
            self.linear(pair, JOIN[2], width=x.width, out=joined)
        self._before = x
        return super().norm(x, name, **settings)

    def head(self, x: Value, name: str = "lm_head", **settings: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().head(x, name, **settings, fed_back=self._before if self.before_norm else x)
