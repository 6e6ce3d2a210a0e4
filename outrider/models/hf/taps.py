"""Hidden states of a transformers model, recorded by hooks while it runs.

`output_hidden_states` of transformers does not give them all: in place of the output of the last layer it gives that of
the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.models.base import EMBEDDING, check_taps


class LayerStack:
    """Where a transformers model keeps its layers: the one list of `num_layers` modules that all hold an attention."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        self.num_layers = num_layers
        self._model = model
        self._places = [
            (owner, name)
            for owner in model.modules()
            for name, child in owner.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and all(_attends(m) for m in child)
        ]

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
        """The layers that the model runs now: fewer while a layer subset runs."""
        owner, name = self.place()
        found = owner.get_submodule(name)
        assert isinstance(found, nn.ModuleList)
        return found


def _attends(layer: nn.Module) -> bool:
    return any(hasattr(m, "layer_idx") or hasattr(m, "_attn") for m in layer.modules())


@contextmanager
def recorded(stack: LayerStack, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Run the model within this context; the dict then holds the hidden state [batch, node, hidden] of each tap.

    All taps but FINAL_NORM, which is the last of the `hidden_states` that transformers returns. Raises ValueError for a
    tap that the model does not have.
    """
    found: dict[int, Tensor] = {}
    if not taps:
        yield found
        return
    layers = stack.layers()
    check_taps(taps, len(layers))

    def keep_output(tap: int) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            found[tap] = out[0] if isinstance(out, tuple) else out

        return hook

    def keep_input(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found[EMBEDDING] = args[0] if args else options["hidden_states"]

    handles = [layers[t].register_forward_hook(keep_output(t)) for t in set(taps) if t >= 0]
    if EMBEDDING in taps:
        handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
