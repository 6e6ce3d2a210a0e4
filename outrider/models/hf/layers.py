"""The list of layers of a transformers model: some of it in the place of all, and the hidden states between them.

`output_hidden_states` of transformers does not give all hidden states: in place of the output of the last layer it gives that of
the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.models.base import EMBEDDING, check_taps


class LayerStack:
    """Where a transformers model keeps its layers: the one list of `num_layers` modules that all hold an attention.

    Or some of these layers: they read and write their part of the model's cache. The whole model commits keys and values at every
    layer, and its next forward writes over the scratch of a part. So a model can draft for itself without a second cache.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int, chosen: Sequence[int] | None = None) -> None:
        """chosen: the layers of a part. Then it raises ValueError if the model's layers cannot be found."""
        self.num_layers = num_layers
        self._model = model
        self._places = [
            (owner, name)
            for owner in model.modules()
            for name, child in owner.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and all(_attends(m) for m in child)
        ]
        self._part = None if chosen is None else nn.ModuleList([self.layers()[i] for i in chosen])

    def place(self) -> tuple[nn.Module, str]:
        """The module that holds the list, and the list's name in it. Raises ValueError if there is not one list."""
        if len(self._places) != 1:
            raise ValueError(
                f"{type(self._model).__name__} keeps its {self.num_layers} layers in {len(self._places)} lists, not in one; "
                "no layer can be left out or tapped. Methods that need neither work, for example "
                '{"method": "quantized_self"} or {"method": "suffix"}'
            )
        return self._places[0]

    def layers(self) -> nn.ModuleList:
        """The layers that the model runs now: fewer while a part runs. Raises ValueError as `place`."""
        owner, name = self.place()
        modules = owner.get_submodule(name)
        assert isinstance(modules, nn.ModuleList)
        return modules

    @contextmanager
    def run(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Run the model within this context; the dict then holds the hidden state [batch, node, hidden] of each tap.

        All taps but FINAL_NORM, which is the last of the `hidden_states` that transformers returns. Taps of a part count its
        layers. Raises ValueError for a tap that the model does not have.
        """
        if self._part is None:
            with self._recorded(taps) as hidden:
                yield hidden
            return
        (owner, name), whole, config = self.place(), self.layers(), self._model.config.get_text_config()
        setattr(owner, name, self._part)
        config.num_hidden_layers = len(self._part)  # some models slice their list by this number
        try:
            with self._recorded(taps) as hidden:
                yield hidden
        finally:
            setattr(owner, name, whole)
            config.num_hidden_layers = self.num_layers

    @contextmanager
    def _recorded(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        hidden: dict[int, Tensor] = {}
        if not taps:
            yield hidden
            return
        layers = self.layers()
        check_taps(taps, len(layers))

        def keep_output(tap: int) -> Any:
            def hook(_: nn.Module, __: Any, out: Any) -> None:
                hidden[tap] = out[0] if isinstance(out, tuple) else out

            return hook

        def keep_input(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            hidden[EMBEDDING] = args[0] if args else options["hidden_states"]

        handles = [layers[t].register_forward_hook(keep_output(t)) for t in set(taps) if t >= 0]
        if EMBEDDING in taps:
            handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield hidden
        finally:
            for handle in handles:
                handle.remove()


def _attends(layer: nn.Module) -> bool:
    return any(hasattr(m, "layer_idx") or hasattr(m, "_attn") for m in layer.modules())
