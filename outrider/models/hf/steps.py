"""Calls of transformers' modelling code that move states on by one token, answered for all nodes of a tree.

On the CPU in float32 our kernels compute the recurrence. Elsewhere the function itself is called, node by node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import Cache

from outrider.kernels import cpu as native
from outrider.models.states import Advance, NodeChain, State, one_by_one

_TINY = 1e-6  # transformers' l2norm


class RecurrentCall:
    """The arguments of a call, of which some tensors have one row for each node."""

    def __init__(self, args: Any, options: dict[str, Any]) -> None:
        self.args, self.options = list(args), dict(options)
        self._rows = list[int | str]()

    def rows(self, chosen: Callable[[int | str, Tensor], bool]) -> list[Tensor]:
        """The tensors that `chosen` accepts, by position or name and value."""
        given = {**dict(enumerate(self.args)), **self.options}
        self._rows = [at for at, value in given.items() if isinstance(value, Tensor) and chosen(at, value)]
        return [given[at] for at in self._rows]

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
        given = {**dict(zip(names, self.args, strict=False)), **self.options}
        return {name: value for name, value in given.items() if name in names and value is not None}


class RecurrentStep(NamedTuple):
    """A call, taken apart. inputs: what each node reads, [row, ...] each. finish: outputs [row, ...] -> what the call returns."""

    inputs: list[Tensor]
    advance: Advance
    finish: Callable[[Tensor], Any]


def step_of(kind: str, function: Callable[..., Any], call: RecurrentCall) -> RecurrentStep:
    """kind: of `STEPS`."""
    given = call.named(function) if native.available() else {}
    return STEPS[kind](given) or _by_itself(kind, function, call)


def windows(chains: Sequence[NodeChain], inputs: Sequence[Tensor]) -> tuple[Tensor, list[list[State]]]:
    """An `Advance`: the last inputs of a convolution, [row, channel, kernel], the newest at the end; they are the state as well.

    inputs: [row, channel, 1].
    """
    new = inputs[0].squeeze(-1)
    kernel = chains[0].start[0].shape[-1]
    parts, rows, places, base = [new], list[int](), list[Tensor](), len(new)
    for start, own, _ in chains:  # the inputs before a chain stand behind the new ones
        parts.append(start[0][0, :, 1:].T)
        rows += own
        places.append(torch.tensor([*range(base, base + kernel - 1), *own]).unfold(0, kernel, 1))
        base += kernel - 1
    found = torch.cat(parts)[torch.cat(places).to(new.device)].transpose(1, 2)
    states, at = list[list[State]](), 0
    for _, own, wanted in chains:
        states.append([(found[i : i + 1].clone(),) for i, keep in enumerate(wanted, at) if keep])
        at += len(own)
    if rows == [*range(len(new))]:
        return found, states
    out = found.new_zeros(len(new), *found.shape[1:])
    out[rows] = found
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
    needed, known = _RULE
    if not _fits(given, needed, known):
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
    needed, known = _SPACE
    if not _fits(given, needed, known):
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
        out, found = scan(inputs, starts, [c.rows for c in chains], [c.wanted for c in chains])
        return out, [[(state.view(shape),) for state in each if state is not None] for each in found]

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
