"""Recurrent layers of transformers' models, node by node: linear attention, Mamba and short convolutions.

The modelling code reads one token of many sequences, as in plain decoding. Each node of a tree is such a sequence. So all
matrices of a layer work on all nodes at once, and only the recurrence goes through the tree (`LayerStates.scan`). Two kinds of
calls are answered here: the cache's `update_conv_state`, and the function that moves a state on by one token. A layer that
does not make these calls is run node by node as a whole, which reads its weights for every node.

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

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from outrider.kernels import cpu as native
from outrider.models.hf.hooks import CacheView, ForwardState
from outrider.models.states import Advance, LayerStates, NodeChain, State, one_by_one

_TINY = 1e-6  # transformers' l2norm


class RecurrentCall:
    """The arguments of a call, of which some tensors have one row for each node."""

    def __init__(self, args: Any, options: dict[str, Any]) -> None:
        self.args, self.options = list(args), dict(options)
        self._rows = list[int | str]()

    def rows(self, chosen: Callable[[int | str, Tensor], bool]) -> list[Tensor]:
        """The tensors that `chosen` accepts, by position or name and value."""
        arguments = {**dict(enumerate(self.args)), **self.options}
        self._rows = [at for at, value in arguments.items() if isinstance(value, Tensor) and chosen(at, value)]
        return [arguments[at] for at in self._rows]

    def made(self, function: Callable[..., Any], read: Sequence[Tensor], view: Any = None, **states: Tensor) -> Any:
        """Make the call with these rows in place of all. view: in place of the cache. states: in place of arguments."""
        args, options = list(self.args), dict(self.options)
        for at, value in zip(self._rows, read, strict=True):
            if isinstance(at, int):
                args[at] = value
            else:
                options[at] = value
        if view is not None:
            args = [view if isinstance(a, Cache) else a for a in args]
            options = {name: view if isinstance(value, Cache) else value for name, value in options.items()}
        for name, value in states.items():
            if name == "state" and name not in options:
                args[0] = value
            else:
                options[name] = value
        return function(*args, **options)

    def named(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments by name, without None, and without those that the function takes only to pass them by."""
        names = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
        arguments = {**dict(zip(names, self.args, strict=False)), **self.options}
        return {name: value for name, value in arguments.items() if name in names and value is not None}


class RecurrentStep(NamedTuple):
    """A call, taken apart. inputs: what each node reads, [row, ...] each. finish: outputs [row, ...] -> what the call returns."""

    inputs: list[Tensor]
    advance: Advance
    finish: Callable[[Tensor], Any]


def step_of(kind: str, function: Callable[..., Any], call: RecurrentCall) -> RecurrentStep:
    """kind: of `STEPS`."""
    arguments = call.named(function) if native.available() else {}
    return STEPS[kind](arguments) or _by_itself(kind, function, call)


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


def _by_itself(kind: str, function: Callable[..., Any], call: RecurrentCall) -> RecurrentStep:
    """The function itself, node by node."""
    others = _NOT_ROWS.get(kind, ())

    def selective(state: State, read: list[Tensor]) -> tuple[State, Tensor]:
        new = state[0].clone()
        return (new,), call.made(function, read, state=new)

    def rule(state: State, read: list[Tensor]) -> tuple[State, Tensor]:
        out, new = call.made(function, read, initial_state=state[0])
        return (new,), out

    rows = call.rows(lambda at, _: at not in others)
    if kind == _SELECTIVE:
        return RecurrentStep(rows, one_by_one(selective), lambda out: out)
    return RecurrentStep(rows, one_by_one(rule), lambda out: (out, None))


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
        _kernel(lambda read, *chains: native.selective(read[0], read[1], a, read[2], read[3], *chains), flat=True),
        finish,
    )


def _fits(given: dict[str, Any], needed: Sequence[str], known: Sequence[str]) -> bool:
    """Whether these are the arguments that our kernel knows, as float32 on the CPU."""
    if not {*needed} <= given.keys() <= {*needed, *known}:
        return False
    return all(given[name].dtype == torch.float32 and given[name].device.type == "cpu" for name in needed)


def _kernel(scan: Callable[..., tuple[Tensor, list[list[Tensor | None]]]], flat: bool = False) -> Advance:
    """One of our kernels. flat: it takes the state [channel, width], whatever else its dimensions are."""

    def advance(chains: Sequence[NodeChain], inputs: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
        shape = chains[0].start[0].shape
        starts = [c.start[0].reshape(-1, shape[-1]) if flat else c.start[0][0] for c in chains]
        out, after = scan(inputs, starts, [c.rows for c in chains], [c.wanted for c in chains])
        return out, [[(state.view(shape),) for state in each if state is not None] for each in after]

    return advance


# Arguments that a kernel needs, and those that it knows besides.
_RULE = ("query", "key", "value", "g", "beta"), ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_SPACE = ("hidden_states", "dt", "A", "B", "C"), ("state", "D", "dt_bias", "dt_softplus", "z")
_SELECTIVE = "selective_state_update"
# Of the functions whose states go node by node: which inputs are not one row for each node, by position and by name.
_NOT_ROWS: dict[str, set[int | str]] = {_SELECTIVE: {0, 3, 6, "state", "A", "D", "dt_bias"}}
# Functions of modelling code that move a state on by one token, by the end of their names.
STEPS: dict[str, Callable[[dict[str, Any]], RecurrentStep | None]] = {
    _SELECTIVE: _selective,
    "recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
}


# Methods of transformers' caches that store a state.
_STORES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
# The model and the layer whose forward runs now.
_running: ContextVar[tuple[Recurrences, int] | None] = ContextVar("running", default=None)


def stores_state(module: nn.Module) -> bool:
    """Whether a module's forward stores a state in transformers' cache, or in itself as those of RecurrentGemma do."""
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    return bool(names & _STORES) or {"conv1d_state", "rg_lru"} <= names


def attends(module: nn.Module) -> bool:
    """Whether a module's forward calls attention itself."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


class Recurrences:
    """The recurrent layers of one model.

    layers: their modules, by layer number; empty for a model without. by_node: whole layers go node by node. scanned: layers
    whose states a forward has moved on.
    """

    def __init__(
        self, model: PreTrainedModel, call: ForwardState, careful: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """careful: the context that every forward of the model runs in."""
        self._careful = careful
        self.call, self.by_node, self.scanned = call, False, set[int]()
        self.layers: dict[int, nn.Module] = {}
        self._parts: dict[int, dict[str, Tensor]] = {}
        for name, module in model.named_modules():
            if stores_state(module):
                number = getattr(module, "layer_idx", None)  # RecurrentGemma has it in the name only
                number = next(int(n) for n in name.split(".") if n.isdecimal()) if number is None else int(number)
                self.layers[number] = module
                module.forward = functools.partial(self._forward, number, module, module.forward)
        for name in {type(module).__module__ for module in self.layers.values()}:
            _answer_steps(sys.modules[name])

    def learn(self, kept: Any) -> None:
        """Take over the shapes of the states from the cache that the model's own forward over one text has left."""
        for number, module in self.layers.items():
            parts = _parts(kept, number, module)
            self._parts[number] = {name: torch.zeros_like(part) for name, part in parts.items()}

    @property
    def starts(self) -> dict[Hashable, list[Tensor]]:
        """The states before the first token, as `LayerStates` takes them."""
        if self.by_node:
            return {number: list(parts.values()) for number, parts in self._parts.items()}
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

    def _forward(self, number: int, module: nn.Module, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A layer's forward over nodes [batch, node, hidden], as one over [batch * node, 1, hidden]."""
        nodes = self.call.nodes
        if nodes is None:
            return original(*args, **options)
        shape = (len(nodes.slots), nodes.count)

        def flat(value: Any) -> Any:
            rows = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == shape
            return value.reshape(-1, 1, *value.shape[2:]) if rows else value

        call = RecurrentCall(map(flat, args), {name: flat(value) for name, value in options.items()})
        self.scanned.add(number)
        if self.by_node:
            out = self._node_by_node(number, module, original, call)
        else:
            token = _running.set((self, number))
            try:
                out = original(*call.args, **call.options)
            finally:
                _running.reset(token)
        first = out[0] if isinstance(out, tuple) else out
        first = first.view(*shape, *first.shape[2:])
        return (first, *out[1:]) if isinstance(out, tuple) else first

    def _node_by_node(self, number: int, module: nn.Module, original: Callable[..., Any], call: RecurrentCall) -> Any:
        """The definition: the whole layer over one node, and the state after its parent in the cache."""
        more = list[Any]()
        if "use_cache" in call.options:
            call.options["use_cache"] = True
        assert self.call.nodes is not None
        one = (len(self.call.nodes.slots) * self.call.nodes.count, 1)
        rows = call.rows(lambda at, value: value.shape[:2] == one)

        def step(state: State, read: list[Tensor]) -> tuple[State, Tensor]:
            parts = dict(zip(self._parts[number], (part.clone() for part in state), strict=True))
            view = _OneNode(number, module, parts)
            out = call.made(original, read, view)
            more[:] = out[1:] if isinstance(out, tuple) else ["no tuple"]
            return tuple(_parts(view, number, module).values()), out[0] if isinstance(out, tuple) else out

        out = self.scan(number, one_by_one(step), rows)
        return out if more == ["no tuple"] else (out, *more)

    def step(self, layer: int, function: Callable[..., Any], call: RecurrentCall, kind: str) -> Any:
        """Answer a call that would move the states of all rows on by one token: through the tree, chain by chain."""
        step = step_of(kind, function, call)
        return step.finish(self.scan((layer, "recurrent 0"), step.advance, step.inputs))


class StateView(CacheView):
    """Our slot cache for a model with recurrent layers. transformers' modelling code sees one token after known states.

    passive: attention goes through transformers' interface, and writes keys and values itself.
    """

    def __init__(self, call: ForwardState, recurrences: Recurrences, *, gathered: bool, passive: bool) -> None:
        super().__init__(call, gathered)
        self.recurrences, self.passive = recurrences, passive
        self.layers = _KnownStates()  # pyright: ignore[reportAttributeAccessIssue]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **options: Any) -> Any:
        if self.passive:
            return key_states, value_states
        return super().update(key_states, value_states, layer_idx, *more, **options)

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


class _OneNode(Cache):
    """transformers' cache of one recurrent layer, with the state after one node."""

    def __init__(self, number: int, module: nn.Module, parts: dict[str, Tensor]) -> None:
        layer = LinearAttentionLayer(1 + max(int(name.split()[1]) for name in parts))
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        super().__init__(layers=[layer] * (number + 1))  # pyright: ignore[reportArgumentType]
        self.linear_cache: dict[int, Tensor] = {}
        for name, part in parts.items():
            kind, i = name.split()
            if kind == "conv":
                layer.lazy_initialization(conv_states=part, state_idx=int(i))
                layer.conv_states[int(i)] = part
            elif kind == "recurrent":
                layer.lazy_initialization(recurrent_states=part, state_idx=int(i))
                layer.recurrent_states[int(i)] = part
            elif kind == "linear":
                self.linear_cache[number] = part
            else:
                holder, _, attribute = kind.rpartition(".")
                setattr(module.get_submodule(holder), attribute, part)

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        return self.linear_cache[layer_idx]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.linear_cache[layer_idx] = linear_cache


def _parts(kept: Any, number: int, module: nn.Module) -> dict[str, Tensor]:
    """The parts of a layer's state in a cache of transformers, by name. RecurrentGemma keeps them in its modules."""
    if hasattr(module, "conv1d_state"):
        return {"conv1d_state 0": module.conv1d_state, "rg_lru.recurrent_states 0": module.rg_lru.recurrent_states}  # pyright: ignore
    if hasattr(kept, "linear_cache"):
        linear = (
            kept.linear_cache[number] if number in range(len(kept.linear_cache)) or number in kept.linear_cache else []
        )
        if isinstance(linear, Tensor):
            return {"linear 0": linear}
    layer = kept.layers[number]
    parts = {f"conv {i}": part for i, part in layer.conv_states.items()}
    parts |= {f"recurrent {i}": part for i, part in layer.recurrent_states.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _answer_steps(code: Any) -> None:
    """Let a module of modelling code ask us, while one of our forwards runs a layer, to move states on."""

    def answered(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if (running := _running.get()) is None:
                return function(*args, **options)
            return running[0].step(running[1], function, RecurrentCall(args, options), kind)

        run.outrider_answers = True  # pyright: ignore[reportAttributeAccessIssue]
        return run

    for name, function in [*vars(code).items()]:
        kind = next((end for end in STEPS if name.endswith(end)), None)
        if kind is not None and not hasattr(function, "outrider_answers"):
            setattr(code, name, answered(function, kind))
