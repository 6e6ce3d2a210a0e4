"""Recurrent layers of transformers' models, node by node: linear attention, Mamba and short convolutions.

The modelling code reads one token of many sequences, as in plain decoding. Each node of a tree is such a sequence. So all
matrices of a layer work on all nodes at once, and only the recurrence goes through the tree (`LayerStates.scan`). Two kinds of
calls are answered here: the cache's `update_conv_state`, and the function that moves a state on by one token. A model whose
layers do not make these calls is refused.

On the CPU in float32 our kernels compute the recurrence. Elsewhere the function itself is called, node by node.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from outrider.kernels import cpu as native
from outrider.models.hf.hooks import ForwardState
from outrider.models.hf.states import Advance, LayerStates, NodeChain, State, one_by_one
from outrider.models.nodes import Nodes

_TINY = 1e-6  # transformers' l2norm


class RecurrentStep(NamedTuple):
    """A call, taken apart. inputs: what each node reads, [row, ...] each. finish: outputs [row, ...] -> what the call returns."""

    inputs: list[Tensor]
    advance: Advance
    finish: Callable[[Tensor], Any]


def step_of(kind: str, function: Callable[..., Any], arguments: dict[str, Any]) -> RecurrentStep:
    """kind: of `STEPS`. arguments: by name, without None."""
    return (STEPS[kind](arguments) if native.available() else None) or by_itself(kind, function, arguments)


def windows(chains: Sequence[NodeChain], inputs: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
    """An `Advance`: the last inputs of a convolution, [row, channel, kernel], the newest at the end; they are the state as well.

    inputs: [row, channel, 1].
    """
    new = inputs[0].squeeze(-1)
    kernel = chains[0].start[0].shape[-1]
    parts, rows, places, base = [new], list[int](), list[Tensor](), len(new)
    for start, nodes, _ in chains:  # the inputs before a chain stand behind the new ones
        parts.append(start[0][0, :, 1:].T)
        rows += nodes
        places.append(torch.tensor([*range(base, base + kernel - 1), *nodes]).unfold(0, kernel, 1))
        base += kernel - 1
    last = torch.cat(parts)[torch.cat(places).to(new.device)].transpose(1, 2)
    states, at = list[list[State]](), 0
    for _, nodes, wanted in chains:
        states.append([(last[i : i + 1].clone(),) for i, keep in enumerate(wanted, at) if keep])
        at += len(nodes)
    if rows == [*range(len(new))]:
        return last, states
    out = last.new_zeros(len(new), *last.shape[1:])
    out[rows] = last
    return out, states


def by_itself(kind: str, function: Callable[..., Any], arguments: dict[str, Any]) -> RecurrentStep:
    """The function itself, node by node."""
    rows = [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _NOT_ROWS]

    def selective(state: State, read: list[Tensor]) -> tuple[State, Tensor]:
        after = state[0].clone()
        return (after,), function(**arguments | dict(zip(rows, read, strict=True)) | {"state": after})

    def rule(state: State, read: list[Tensor]) -> tuple[State, Tensor]:
        out, after = function(**arguments | dict(zip(rows, read, strict=True)) | {"initial_state": state[0]})
        return (after,), out

    inputs = [arguments[name] for name in rows]
    if kind == _SELECTIVE:
        return RecurrentStep(inputs, one_by_one(selective), lambda out: out)
    return RecurrentStep(inputs, one_by_one(rule), lambda out: (out, None))


def _delta_rule(given: dict[str, Any]) -> RecurrentStep | None:
    """The gated delta rule. None if it is not that of our kernel."""
    needed, optional = _RULE
    if not _fits(given, needed, optional):
        return None
    q, k, v, g, beta = (given[name][:, 0] for name in needed)
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY) for x in (q.contiguous(), k.contiguous()))
    return RecurrentStep(
        [q / q.shape[-1] ** 0.5, k, v, g.exp(), beta],
        _kernel(lambda read, *chains: native.delta_rule(*read, *chains)),
        lambda out: (out[:, None], None),
    )


def _selective(given: dict[str, Any]) -> RecurrentStep | None:
    """The selective state space of Mamba 1 and 2. None if it is not that of our kernel."""
    needed, optional = _SPACE
    if not _fits(given, needed, optional):
        return None
    x, dt, a, b, c = (given[name] for name in needed)
    if given.get("dt_bias") is not None:
        dt = dt + given["dt_bias"]
    dt = F.softplus(dt) if given.get("dt_softplus") else dt
    a = (a[..., 0] if a.stride(-1) == 0 else a).contiguous()  # Mamba 2 has one for each head
    a = a.reshape(-1, *a.shape[given["A"].dim() - 1 :])
    b, c = (t[:, None] if t.dim() == 2 else t for t in (b, c))
    shape, scale, z = x.shape, given.get("D"), given.get("z")

    def finish(out: Tensor) -> Tensor:
        out = out.view(shape)
        out = out if scale is None else out + x * scale
        return out if z is None else out * F.silu(z)

    return RecurrentStep(
        [x.reshape(len(x), -1), dt.reshape(len(x), -1), b, c],
        _kernel(
            lambda read, *chains: native.selective(read[0], read[1], a.numpy(), read[2], read[3], *chains), flat=True
        ),
        finish,
    )


def _fits(given: dict[str, Any], needed: Sequence[str], known: Sequence[str]) -> bool:
    """Whether these are the arguments that our kernel knows, as float32 on the CPU."""
    if not {*needed} <= given.keys() <= {*needed, *known}:
        return False
    return all(given[name].dtype == torch.float32 and given[name].device.type == "cpu" for name in needed)


def _kernel(scan: Callable[..., tuple[np.ndarray, list[list[np.ndarray | None]]]], flat: bool = False) -> Advance:
    """One of our kernels. flat: it takes the state [channel, width], whatever else its dimensions are."""

    def advance(chains: Sequence[NodeChain], inputs: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
        shape = chains[0].start[0].shape
        starts = [(c.start[0].reshape(-1, shape[-1]) if flat else c.start[0][0]).numpy() for c in chains]
        out, after = scan([t.numpy() for t in inputs], starts, [c.rows for c in chains], [c.wanted for c in chains])
        states = [[(torch.from_numpy(s).view(shape),) for s in each if s is not None] for each in after]
        return torch.from_numpy(out), states

    return advance


# Arguments that a kernel needs, and those that it knows besides.
_RULE = ("query", "key", "value", "g", "beta"), ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_SPACE = ("hidden_states", "dt", "A", "B", "C"), ("state", "D", "dt_bias", "dt_softplus", "z")
_SELECTIVE = "selective_state_update"
_NOT_ROWS = ("state", "initial_state", "A", "D", "dt_bias")  # arguments that are not one row for each node
# Functions of modelling code that move a state on by one token, by the end of their names.
STEPS: dict[str, Callable[[dict[str, Any]], RecurrentStep | None]] = {
    _SELECTIVE: _selective,
    "recurrent_gated_delta_rule": _delta_rule,
}


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
    """

    def __init__(
        self, model: PreTrainedModel, call: ForwardState, careful: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """careful: the context that every forward of the model runs in."""
        self._careful = careful
        self.call, self.scanned = call, set[int]()
        self.layers: dict[int, nn.Module] = {}
        self._parts: dict[int, dict[str, Tensor]] = {}
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
            states = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
            parts = {f"{kind} {i}": part for kind, each in states.items() for i, part in each.items()}
            self._parts[number] = {name: torch.zeros_like(part) for name, part in parts.items() if part is not None}

    @property
    def starts(self) -> dict[Hashable, list[Tensor]]:
        """The states before the first token, as `LayerStates` takes them."""
        return {(number, name): [part] for number, parts in self._parts.items() for name, part in parts.items()}

    def scan(self, key: Hashable, advance: Advance, inputs: Sequence[Tensor]) -> Tensor:
        """Move the states of a layer on by the nodes of the forward that runs now."""

        def same(chains: Sequence[NodeChain], read: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
            if self.call.nodes is not None:
                return advance(chains, read)
            with torch.no_grad(), self._careful():  # a commit asks again, and must get the same bits
                return advance(chains, read)

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
        """Answer a call that would move the states of all rows on by one token: through the tree, chain by chain."""
        step = step_of(kind, function, arguments)
        return step.finish(self.scan((layer, "recurrent 0"), step.advance, step.inputs))


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
        return self.recurrences.scan((layer_idx, f"conv {state_idx}"), windows, [conv_states])

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
