"""Recurrent layers of transformers' models, node by node: linear attention, Mamba and short convolutions.

The modelling code reads one token of many sequences, as in plain decoding. Each node of a tree is such a sequence. So all
matrices of a layer work on all nodes at once, and only the recurrence goes through the tree (`LayerStates.scan`). Two kinds of
calls are answered here: the cache's `update_conv_state`, and the function that moves a state on by one token, which is then
called node by node. A model whose layers do not make these calls is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from outrider.models.hf.hooks import ForwardState
from outrider.models.hf.states import LayerStates, Step
from outrider.models.nodes import Nodes

# Functions of modelling code that move a state on by one token, by the end of their names -> what they call the state.
STEPS = {"selective_state_update": "state", "recurrent_gated_delta_rule": "initial_state"}
_NOT_ROWS = (*STEPS.values(), "A", "D", "dt_bias")  # arguments that are not one row for each node


def window(read: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """A `Step` of a convolution: its last inputs, [1, channel, kernel], the newest at the end; they are the output as well."""
    last = torch.cat([state[..., 1:], read[0]], -1)
    return last, last


# Methods of transformers' caches that store a state.
_STORES = {"update_conv_state", "update_recurrent_state"}
# The model and the layer whose forward runs now.
_running: ContextVar[tuple[Recurrences, int] | None] = ContextVar("running", default=None)


def stores_state(module: nn.Module) -> bool:
    """Whether a module's forward stores a state in transformers' cache."""
    return not _STORES.isdisjoint(inspect.unwrap(type(module).forward).__code__.co_names)


def attends(module: nn.Module) -> bool:
    """Whether a module's forward calls attention itself."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


class Recurrences:
    """The recurrent layers of one model.

    layers: their modules, by layer number; empty for a model without. scanned: layers whose states a forward has moved on.
    starts: the states before the first token, once they are known.
    """

    def __init__(
        self, model: PreTrainedModel, call: ForwardState, careful: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """careful: the context that every forward of the model runs in."""
        self._careful = careful
        self.call, self.scanned = call, set[int]()
        self.layers: dict[int, nn.Module] = {}
        self.starts: dict[Hashable, Tensor] = {}
        for module in model.modules():
            if stores_state(module):
                number = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
                self.layers[number] = module
                module.forward = functools.partial(self._forward, number, module.forward)
        for name in {type(module).__module__ for module in self.layers.values()}:
            _answer_steps(sys.modules[name])

    def learn(self, kept: Any) -> None:
        """Take over the shapes of the states from the cache that the model's own forward over one text has left."""
        for number in self.layers:
            layer = kept.layers[number]
            for kind, parts in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                found = {(number, f"{kind} {i}"): part for i, part in parts.items() if part is not None}
                self.starts |= {key: torch.zeros_like(part) for key, part in found.items()}

    def scan(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """Move the states of a layer on by the nodes of the forward that runs now."""

        def same(read: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
            if self.call.nodes is not None:
                return step(read, state)
            with torch.no_grad(), self._careful():  # a commit asks again, and must get the same bits
                return step(read, state)

        assert self.call.nodes is not None
        nodes = self.call.nodes
        states = cast("LayerStates", nodes.cache.states[key])
        return states.scan(nodes.slots, nodes.parent_lists, nodes.count, same, inputs)

    def _forward(self, number: int, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A layer's forward over nodes [batch, node, hidden], as one over [batch * node, 1, hidden]."""
        nodes = self.call.nodes
        if nodes is None:
            return original(*args, **options)
        shape = (len(nodes.slots), nodes.count)

        def flat(value: Any) -> Any:
            rows = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == shape
            return value.reshape(-1, 1, *value.shape[2:]) if rows else value

        self.scanned.add(number)
        token = _running.set((self, number))
        try:
            out = original(*map(flat, args), **{name: flat(value) for name, value in options.items()})
        finally:
            _running.reset(token)
        first = out[0] if isinstance(out, tuple) else out
        first = first.view(*shape, *first.shape[2:])
        return (first, *out[1:]) if isinstance(out, tuple) else first

    def step(self, layer: int, function: Callable[..., Any], arguments: dict[str, Any], kind: str) -> Any:
        """Answer a call that would move the states of all rows on by one token: through the tree, node by node.

        kind: of `STEPS`. arguments: by name, without None."""
        names = [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _NOT_ROWS]
        in_place = STEPS[kind] == "state"

        def step(read: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
            after = state.clone() if in_place else state
            out = function(**arguments | dict(zip(names, read, strict=True)) | {STEPS[kind]: after})
            return (after, out) if in_place else out[::-1]

        out = self.scan((layer, "recurrent 0"), step, [arguments[name] for name in names])
        return out if in_place else (out, None)


class StateView(Cache):
    """Our slot cache for a model with recurrent layers. transformers' modelling code sees one token after known states.

    Attention goes through transformers' interface, and writes keys and values itself.
    """

    def __init__(self, nodes: Nodes, recurrences: Recurrences) -> None:
        self.nodes, self.recurrences = nodes, recurrences
        self.layers = _KnownStates()  # pyright: ignore[reportAttributeAccessIssue]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return self.nodes.span - self.nodes.count

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.nodes.span, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The last inputs of each node's path, [row, channel, kernel], from the new ones, [row, channel, 1]."""
        return self.recurrences.scan((layer_idx, f"conv {state_idx}"), window, [conv_states])

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """Nothing: `Recurrences.step` has kept it."""
        return recurrent_states


class _KnownStates:
    """Stands for the list of layers of transformers' cache. No state can be read from it: each node has its own."""

    record_past = True  # then the modelling code asks `update_conv_state`

    def __getitem__(self, _: int) -> _KnownStates:
        return self

    @property
    def conv_states(self) -> dict[int, None]:
        return dict.fromkeys(range(8))

    recurrent_states = conv_states

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[_KnownStates]:
        return iter(())


def _answer_steps(code: Any) -> None:
    """Let a module of modelling code ask us, while one of our forwards runs a layer, to move states on."""

    def answered(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        # without those that it takes only to pass them by
        names = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if (running := _running.get()) is None:
                return function(*args, **options)
            arguments = {**dict(zip(names, args, strict=False)), **options}
            present = {name: value for name, value in arguments.items() if name in names and value is not None}
            return running[0].step(running[1], function, present, kind)

        run.outrider_answers = True  # pyright: ignore[reportAttributeAccessIssue]
        return run

    for name, function in [*vars(code).items()]:
        kind = next((end for end in STEPS if name.endswith(end)), None)
        if kind is not None and not hasattr(function, "outrider_answers"):
            setattr(code, name, answered(function, kind))
