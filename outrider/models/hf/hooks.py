"""What takes the place of a model's own parts: outrider's attention, and some of its layers in the place of all.

transformers' modelling code calls the registered attention function. `output_hidden_states` does not give all hidden states: in
place of the output of the last layer it gives that of the final norm. So taps are hooks of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.kernels.cpu import Scoring
from outrider.models import attention
from outrider.models.base import EMBEDDING, check_taps
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.hf import device
from outrider.models.nodes import Nodes

NAME = "outrider"
SURVEY = "outrider_survey"  # the same, while the windows are read from the masks that the model asks for


class ForwardState:
    """The nodes of the forward that runs now, and what the modules of one model know of it."""

    def __init__(self) -> None:
        self.nodes: Nodes | None = None
        self.attended: set[int] = set()  # layers that our attention computed
        self.windows: dict[int, int | None] = {}  # layer -> its window, as the survey found it

    @contextmanager
    def running(self, nodes: Nodes) -> Iterator[None]:
        """A forward over these nodes."""
        self.nodes = nodes
        try:
            yield
        finally:
            self.nodes = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query, key, value [batch, head, node, head_dim] -> [batch, node, head, dim]."""
    call: ForwardState | None = getattr(module, "_outrider_call", None)
    if call is None or call.nodes is None:
        raise RuntimeError(f"{type(module).__name__} ran outside of outrider's forward; use HFModel.forward")
    for name in ("position_bias", "indices", "block_indices"):
        if more.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} attends by {name}, which outrider's attention does not have"
            )
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    if attention_mask is not None and not hasattr(attention_mask, "outrider_window"):
        raise RuntimeError(f"{type(module).__name__} has its own mask")
    if attention_mask is not None:  # the mask carries the window that the model's own attention uses
        call.windows[layer] = attention_mask.outrider_window  # pyright: ignore[reportAttributeAccessIssue]
    call.attended.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, call.windows.get(layer, sliding_window), softcap, s_aux)
    if isinstance(call.nodes.cache, device.DeviceCache):
        device.write(call.nodes, layer, key, value)
        return device.attend(call.nodes, layer, query, scoring), None
    attention.write(call.nodes, layer, *(t.float().numpy() for t in (key, value)))
    scoring = scoring if s_aux is None else replace(scoring, sinks=s_aux.detach().float().numpy())
    out = attention.attend(call.nodes, layer, query.float().numpy(), scoring)
    return torch.from_numpy(out).to(query.dtype), None


def _survey_mask(*, local_size: int | None = None, device: Any = None, **_: Any) -> Tensor:
    """A stand-in for a mask. It records the window that a model names when it asks for the mask of a layer."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.outrider_window = local_size  # pyright: ignore[reportAttributeAccessIssue]
    return mask


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_ATTENTION_FUNCTIONS.register(SURVEY, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SURVEY, _survey_mask)


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
            if isinstance(child, nn.ModuleList) and len(child) == num_layers
            if all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in child)
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
        hidden: dict[int, Tensor] = {}

        def keep_output(tap: int, _: nn.Module, __: Any, out: Any) -> None:
            hidden[tap] = out[0] if isinstance(out, tuple) else out

        def keep_input(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            hidden[EMBEDDING] = args[0] if args else options["hidden_states"]

        with ExitStack() as back:
            if self._part is not None:
                (owner, name), config = self.place(), self._model.config.get_text_config()
                back.callback(setattr, owner, name, self.layers())
                back.callback(setattr, config, "num_hidden_layers", self.num_layers)
                setattr(owner, name, self._part)
                config.num_hidden_layers = len(self._part)  # some models slice their list by this number
            if taps:
                layers = self.layers()
                check_taps(taps, len(layers))
                handles = [layers[t].register_forward_hook(partial(keep_output, t)) for t in set(taps) if t >= 0]
                handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
                for handle in handles:
                    back.enter_context(handle)
            yield hidden
