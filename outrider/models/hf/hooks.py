"""Puts outrider's attention in place of a model's own: the functions that the modelling code of transformers calls instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.kernels.attention import Scoring
from outrider.kernels.vectors import unpack_vectors
from outrider.models.attention import attend, write
from outrider.models.nodes import Nodes

NAME = "outrider"
SURVEY = "outrider_survey"  # the same, while the windows are read from the masks that the model asks for


class UnsupportedModel(ValueError):
    """The model cannot be run with a cache that keeps single nodes."""


class AttentionRoute(Enum):
    """How our attention takes the place of a model's own."""

    INTERFACE = auto()  # the model asks transformers for a registered function
    METHOD = auto()  # the model has its own method for the scores (GPT-J, GPT-Neo, CodeGen)
    SDPA = auto()  # the model calls torch's attention itself (Falcon)
    MASK = auto()  # none of these: the model's arithmetic over gathered slots. Correct, but not batch invariant


class ForwardState:
    """The nodes of the forward that runs now, and what the modules of one model know of it."""

    def __init__(self) -> None:
        self.nodes: Nodes | None = None
        self.layer = -1  # the last layer whose keys were written
        self.attended: set[int] = set()  # layers that our attention computed
        self.windows: dict[int, int | None] = {}  # layer -> its window, as the survey found it
        self.long: bool | None = None  # whether rotary embeddings have their factors for long texts
        self.factors: Tensor | None = None  # of the queries of the layer that runs now, [batch, 1, node, 1]

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        assert self.nodes is not None
        self.attended.add(layer)
        return attend(self.nodes, layer, query, scoring)


def scaling_of(query: Tensor, given: float | None) -> float:
    """The scaling that a model gives, or the usual one for its head dimension."""
    return query.shape[-1] ** -0.5 if given is None else given


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
    window, chunk = call.windows.get(layer, sliding_window), None
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if "chunked_attention" in kinds and kinds[layer] == "chunked_attention":  # the mask names its length as a window
        window, chunk = None, window
    if call.factors is not None:
        query = query * call.factors
    write(call.nodes, layer, key, value)
    return call.attend(layer, query, Scoring(scaling_of(query, scaling), window, softcap, s_aux, chunk)), None


def _survey_mask(*, local_size: int | None = None, device: Any = None, **_: Any) -> Tensor:
    """A stand-in for a mask. It records the window that a model names when it asks for the mask of a layer."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.outrider_window = local_size  # pyright: ignore[reportAttributeAccessIssue]
    return mask


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_ATTENTION_FUNCTIONS.register(SURVEY, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SURVEY, _survey_mask)


def method(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Takes the place of `_attn` of older modelling code. Called right after the keys were written.

    Returns [batch, head, node, head_dim], as `_attn` does.
    """
    call: ForwardState = module._outrider_call
    window = module.config.window_size if getattr(module, "attention_type", None) == "local" else None
    divisor = getattr(module, "scale_attn", None) or getattr(module, "norm_factor", 1.0)
    return call.attend(call.layer, query, Scoring(1 / float(divisor), window)).transpose(1, 2), None


def give_positions_(model: nn.Module, call: ForwardState) -> None:
    """Let modules that count positions from the length of a cache use those of the nodes.

    Tables of positions (Bart, Pegasus, Marian) are read at the positions of the nodes. The RoBERTa family takes them as an
    argument and counts from its padding token. Llama 4 scales queries by position in layers without rotary embeddings.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale"):
            module.forward = partial(_tuned_by_position, module, call, module.forward)
            continue
        names = inspect.signature(module.forward).parameters
        if "past_key_values_length" not in names:
            continue
        if isinstance(module, nn.Embedding):
            module.forward = partial(_position_rows, module, call, module.forward)
        elif hasattr(type(module), "create_position_ids_from_input_ids"):
            module.register_forward_pre_hook(partial(_positions_after_padding, call), with_kwargs=True)


def _position_rows(
    module: nn.Embedding, call: ForwardState, own: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """[batch, node, hidden]. own: what runs outside of our forward. offset: rows before that of the first position."""
    if call.nodes is None:
        return own(*args, **kwargs)
    return functional.embedding(call.nodes.positions + int(getattr(module, "offset", 0)), module.weight)


def _tuned_by_position(module: Any, call: ForwardState, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Scalable softmax (2501.19399) at the positions of the nodes. The model's own code counts from the length of its cache."""
    if call.nodes is None or module.use_rope:
        return own(*args, **kwargs)
    # double: alike in every order of nodes
    steps = torch.floor((call.nodes.positions.double() + 1) / module.floor_scale)
    call.factors = (torch.log1p(steps) * module.attn_scale + 1).float()[:, None, :, None]
    module.attn_temperature_tuning = False
    try:
        return own(*args, **kwargs)
    finally:
        module.attn_temperature_tuning, call.factors = True, None


def _positions_after_padding(
    call: ForwardState, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if call.nodes is None:
        return args, kwargs
    return args, {**kwargs, "position_ids": call.nodes.positions + int(module.padding_idx) + 1}


class CacheView(Cache):
    """Our slot cache in the form of a transformers cache, for models that do not use the attention interface.

    `update` writes the keys of a step. It returns them unchanged if our attention runs. If the model's own attention runs
    (MASK), it returns all cells of the slots.
    """

    def __init__(self, call: ForwardState, gathered: bool) -> None:
        assert call.nodes is not None
        self.call, self.nodes, self.gathered = call, call.nodes, gathered

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.call.layer = layer_idx
        keys, values = write(self.nodes, layer_idx, key_states, value_states)
        if not self.gathered:
            return key_states, value_states
        self.call.attended.add(layer_idx)
        index, span = self.nodes.index, self.nodes.span
        return tuple(unpack_vectors(t[index, :, :span], key_states.dtype) for t in (keys, values))

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return self.nodes.span - self.nodes.count

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.nodes.span, 0

    @property
    def is_compileable(self) -> bool:
        return False
