"""A program as launches of kernels: the second interpreter of what families build, beside native code.

Neighbours that one kernel can do are one launch: what a linear leaves in parts is summed by the op that reads it. An op that has
no such neighbour is a launch of its own. So a family that is new here is slow before it is fast, and never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.cpu.library import Activation, Finish, Map, Norm
from outrider.kernels.gpu import APART, attention, elementwise, linear, norms, rope
from outrider.models.base import EMBEDDING, Want
from outrider.models.cache import SCRATCH
from outrider.models.gpu.cache import GpuCache
from outrider.models.gpu.rows import Rows
from outrider.models.gpu.weights import DeviceMatrix
from outrider.models.native.program import Op, Program, Value, register_places

MAX_ROWS = 512
"""Of a forward. Longer chains are read in pieces."""
LOGIT_ROWS = 256
"""Whose logits are kept: those of the largest step."""
_KINDS = ("embed", "norm", "linear", "rope", "store", "attend", "gate", "map", "rows", "head")
_FINISHES = {Finish.SWIGLU: "silu", Finish.GEGLU: "gelu_tanh"}
_ACTIVATIONS = {a: a.name.lower() for a in Activation if a not in (Activation.GELU, Activation.RELU, Activation.SWISH)}
_MAPS = {Map.LINEAR_MAP: "identity", Map.SOFTPLUS: "softplus", Map.EXP: "exp", Map.SIGMOID_MAP: "sigmoid"}
_CELLS = 256  # a slot's cells are a multiple
_MOST_DIM = 256  # numbers of a head


class NotOnGpu(ValueError):
    """A program that has ops without a kernel, and which."""


def why_not(program: Program) -> str | None:
    """None if all ops have a kernel, else the first one that has none. The program may be an outline."""
    for op in program.ops:
        reason = None
        if op.kind not in _KINDS:
            reason = f"{op.kind} has no kernel"
        elif {"same", "fresh", "fed"} & {*op.flags}:
            reason = f"{op.kind} with {', '.join(op.flags)} has no kernel"
        elif op.kind == "linear" and op.i[0] in _FINISHES and op.f[0] != 1:
            reason = f"a gate with the factor {op.f[0]} has no kernel"
        elif op.kind == "gate" and op.i[0] not in _ACTIVATIONS:
            reason = f"the activation {Activation(op.i[0]).name.lower()} has no kernel"
        elif op.kind == "map" and (op.i[0] not in _MAPS or op.i[1] != 1):
            reason = f"the function {Map(op.i[0]).name.lower()} of {op.i[1]} heads has no kernel"
        elif op.kind == "norm" and "add" in op.flags and op.i[0] == Norm.LAYER_NORM:
            reason = "a layer norm that is added has no kernel"
        elif op.kind == "attend" and max(op.i[3:5]) > _MOST_DIM:
            reason = f"heads of {max(op.i[3:5])} numbers have no kernel, which takes {_MOST_DIM}"
        elif op.kind == "head" and op.other is not None:
            reason = "a layer that predicts one token further has no kernels"
        if reason:
            return f"{reason} (layer {op.layer})" if op.layer >= 0 else reason
    return None


class Call:
    """A forward of so many rows: views of the registers, and what a launch is given."""

    rows: Rows
    cache: GpuCache
    splits: int
    wanted: int  # rows of logits
    last: Tensor | None  # these rows, unless they are all

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan, self.count, self._values = plan, count, dict[Value, Tensor]()

    def __getitem__(self, value: Value) -> Tensor:
        """float32 [row, width]."""
        if value not in self._values:
            register = self._plan.registers[self._plan.places[value.register]]
            self._values[value] = register[: self.count, value.offset : value.offset + value.width]
        return self._values[value]

    def parts(self, n: int, k: int) -> Tensor:
        """float32 [part, row, n]: scratch for a product."""
        parts = linear.split(n, k)[0] if self.count <= APART else 1
        return self._plan.scratch[: parts * self.count * n].view(parts, self.count, n)


Launch = Callable[[Call], None]


class Plan:
    """A program that is ready to run on a device.

    Args:
        program: over matrices of a `DeviceSource`.
        device: where its weights are.
        max_rows: of a forward.

    Raises NotOnGpu, with the reason, if an op has no kernel.
    """

    def __init__(self, program: Program, device: str, max_rows: int = MAX_ROWS) -> None:
        if reason := why_not(program):
            raise NotOnGpu(f"the GPU path cannot run this model: {reason}")
        self.program, self.device, self.max_rows = program, device, max_rows
        self.logit_rows = min(max_rows, LOGIT_ROWS)  # of which a forward can give all logits
        ops = [op for op in program.ops if op.kind != "rows" or "tap" in op.flags]
        self.places, widths = register_places(ops, program.widths)
        products = [(m.n, m.k) for op in ops if op.kind == "linear" for m in op.matrices]
        sizes = [n * max(linear.split(n, k)[0] * min(APART, max_rows), max_rows) for n, k in products]
        self.registers = [torch.zeros(max_rows, width, device=device) for width in widths]
        self.scratch = torch.zeros(max(sizes), device=device)
        self._hidden = torch.zeros(self.logit_rows, program.hidden, device=device)
        self._logits = torch.zeros(self.logit_rows, program.head.n, device=device)
        self._launches, self._taps, self._needed = list[Launch](), dict[int, tuple[int, Value]](), 0
        self._calls, self._features = dict[int, Call](), dict[int, Tensor]()
        self._angles = dict[int, list[tuple[Tensor, Tensor]]]()
        at = 0
        while at < len(ops):
            at = self._compile(ops, at)

    def new_cache(self, num_slots: int, max_length: int) -> GpuCache:
        """With the angles of its positions, and the workspace of attention."""
        capacity = -(-(max_length + SCRATCH) // _CELLS) * _CELLS
        if max_length not in self._angles:
            self._angles[max_length] = _angles(self.program.for_length(max_length), capacity, self.device)
        attends = [(op.i[1], op.i[4]) for op in self.program.ops if op.kind == "attend"]
        few, splits = min(APART, self.max_rows), attention.splits_of(capacity)
        size = max(attention.workspace_size(few, heads, dim, splits) for heads, dim in attends)
        space = torch.zeros(size, device=self.device)
        return GpuCache(num_slots, max_length, capacity, self.program.cells, self._angles[max_length], space)

    def run(
        self, rows: Rows, cache: GpuCache, taps: Sequence[int] = (), want: Want = "all"
    ) -> tuple[Tensor, Tensor | None]:
        """The logits [wanted, tokens of the head] and the features [row, taps * hidden], which the next run writes anew.

        It reads nothing on the host. It allots memory only when a number of rows, or of taps, is new to it."""
        count, hidden = rows.count, self.program.hidden
        if count not in self._calls:
            self._calls[count] = Call(self, count)
        if len(taps) not in self._features:
            self._features[len(taps)] = torch.zeros(self.max_rows, len(taps) * hidden, device=self.device)
        call, features = self._calls[count], self._features[len(taps)][:count]
        call.rows, call.cache, call.splits = rows, cache, attention.splits_of(rows.length)
        call.last = None if want == "all" else rows.last
        call.wanted = count if call.last is None else len(call.last)
        shown = dict[int, list[int]]()
        for n, tap in enumerate(taps):
            shown.setdefault(self._taps[tap][0], []).append(n)
        end = max(self._needed, *(i + 1 for i in shown)) if want == "none" else len(self._launches)
        for i, launch in enumerate(self._launches[:end]):
            launch(call)
            for n in shown.get(i, ()):
                features[:, n * hidden : (n + 1) * hidden].copy_(call[self._taps[taps[n]][1]])
        return self._logits[: 0 if want == "none" else call.wanted], features if taps else None

    def _compile(self, ops: Sequence[Op], at: int) -> int:
        """Add the launches of the op at this place, and of those after it that go with it. Returns the place of the next one."""
        op = ops[at]
        x, other, out = cast("Value", op.in_), op.other, cast("Value", op.out)
        flags, p, q = {*op.flags}, self._vector(op.p), self._vector(op.q)
        if op.kind == "linear":
            return self._linear(ops, at)
        if op.kind == "norm" and _is_whole(op) and "add" in flags:
            return self._sum(ops, at, None)
        if op.kind == "rows":
            self._taps[op.i[0]] = len(self._launches) - 1, x
        elif op.kind == "embed":
            table, factor = _matrix(op).weight, op.f[0]
            self._launches.append(lambda c: elementwise.embed(c.rows.tokens, table, c[out], factor))
            self._taps.setdefault(EMBEDDING, (0, out))  # a later table is of something else
        elif op.kind == "norm" and _is_whole(op):
            settings = self._norm(op)
            self._launches.append(lambda c: norms.sum_norm(None, None, c[x], c[out], **settings))
        elif op.kind == "norm":
            settings = {**self._norm(op), "group": op.i[1], "per_group": "per_group" in flags, "add": "add" in flags}
            self._launches.append(lambda c: norms.group_norm(c[x], c[out], **settings))
        elif op.kind == "rope":
            table, turned = op.i[0], _turned(op)
            self._launches.append(lambda c: rope.rope(c[x], c.rows.positions, *c.cache.angles[table], **turned))
        elif op.kind == "store":
            layer, value = op.i[0], cast("Value", other)
            self._launches.append(lambda c: rope.store(c[x], c[value], *c.cache.layers[layer], c.rows))
            self._needed = len(self._launches)
        elif op.kind == "attend":
            (layer, heads, _, _, _, window), (scale, cap) = op.i, op.f
            settings = {"heads": heads, "scale": scale, "window": window, "softcap": cap, "sinks": p}

            def launch(c: Call) -> None:
                keys, values = c.cache.layers[layer]
                space = c.cache.workspace if c.count <= APART else None
                attention.attend(c[x], keys, values, c.rows, c[out], space, splits=c.splits, **settings)

            self._launches.append(launch)
        elif op.kind == "gate":
            function = _ACTIVATIONS[Activation(op.i[0])]
            self._launches.append(lambda c: elementwise.gate(c[x], other and c[other], function, c[out]))
        elif op.kind == "map":
            function, settings = _MAPS[Map(op.i[0])], {"scale": p, "shift": q, "factor": op.f[0]}
            self._launches.append(lambda c: elementwise.map_rows(c[x], function, c[out], **settings))
        else:
            self._head(op, _matrix(op))
        return at + 1

    def _linear(self, ops: Sequence[Op], at: int) -> int:
        op, matrix = ops[at], _matrix(ops[at])
        x, out, (weight, bias, n, k) = (
            cast("Value", op.in_), cast("Value", op.out), (matrix.weight, matrix.bias, *matrix.weight.shape)
        )
        finish, parts = Finish(op.i[0]), linear.split(n, k)[0]
        if finish in _FINISHES:
            self._launches.append(lambda c: linear.gated(c[x], weight, bias, c[out], _FINISHES[finish]))
            return at + 1
        stored = self._rope_store(ops, at, matrix)
        alone = parts == 1 and finish == Finish.STORE and _norms_after(ops, at)[:2] == (None, None)
        if stored is None and alone and out.width == self.program.widths[out.register]:
            self._launches.append(lambda c: linear.linear(c[x], weight, c[out][None], bias, factor=op.f[0]))
            return at + 1
        self._launches.append(lambda c: linear.linear(c[x], weight, c.parts(n, k)))
        if stored is None:
            return self._sum(ops, at, matrix)
        launch, end = stored
        self._launches.append(launch)
        self._needed = len(self._launches)
        return end

    def _sum(self, ops: Sequence[Op], at: int, matrix: DeviceMatrix | None) -> int:
        """What a linear has left in parts goes to its value, with the norms after and before that. matrix: None for a norm that
        adds to a value."""
        op = ops[at]
        after, before, end = _norms_after(ops, at)
        stream = cast("Value", (after or op).out)
        settings: dict[str, Any] = {} if before is None else self._norm(before)
        if after is not None:
            kept = self._norm(after)
            settings["post"] = kept["weight"], kept["shift"], kept["eps"]
        settings["add"] = after is not None or op.i[0] == Finish.ADD
        settings["factor"] = 1.0 if matrix is None else op.f[0]
        out = None if before is None else cast("Value", before.out)
        if matrix is None:
            x = cast("Value", op.in_)
            launch: Launch = lambda c: norms.sum_norm(c[x][None], None, c[stream], out and c[out], **settings)  # noqa: E731
        else:
            n, k, bias = matrix.n, matrix.k, matrix.bias
            launch = lambda c: norms.sum_norm(c.parts(n, k), bias, c[stream], out and c[out], **settings)  # noqa: E731
        self._launches.append(launch)
        for tap in (op for op in ops[at:end] if op.kind == "rows"):
            self._taps[tap.i[0]] = len(self._launches) - 1, cast("Value", tap.in_)
        return end

    def _rope_store(self, ops: Sequence[Op], at: int, matrix: DeviceMatrix) -> tuple[Launch, int] | None:
        """The launch that norms and turns the heads that a linear has made, writes the queries, and stores the rest; and the place
        of the op after these. None if the ops are others."""
        op, joint = ops[at], cast("Value", ops[at].out)
        end = next((i for i in range(at + 1, len(ops)) if ops[i].kind not in ("norm", "rope")), at)
        if ops[end].kind != "store" or ops[end + 1].kind != "attend" or ops[end].other is None:
            return None
        (store, attend), between = ops[end : end + 2], ops[at + 1 : end]
        query, key, value = (cast("Value", v) for v in (attend.in_, store.in_, store.other))
        widths = query.width, key.width, value.width
        later = {v for o in ops[end + 1 :] for v in o.values if v.register == joint.register}
        if sum(widths) != joint.width or [query, key, value] != joint.split(*widths) or later != {query}:
            return None
        layer, heads, _, dim, *_ = attend.i
        q_norm, k_norm, q_rope, k_rope = (
            [o for o in between if o.kind == kind and o.in_ == part] for kind in ("norm", "rope") for part in (query, key)
        )
        steps = [[*q_norm, *q_rope], [*k_norm, *k_rope]]
        ordered = all([o for o in between if o.in_ == part] == step for part, step in zip((query, key), steps, strict=True))
        alike = [[(o.kind, o.flags, o.i, o.f, o.p is None) for o in step] for step in steps]
        if not ordered or len(between) != sum(map(len, steps)) or alike[0] != alike[1] or len(q_norm) > 1 or len(q_rope) > 1:
            return None
        if any(o.i != (Norm.RMS_NORM, dim) or o.flags or o.p is None or o.q is not None or o.out != o.in_ for o in q_norm + k_norm):
            return None
        if op.i[0] != Finish.STORE or op.f[0] != 1:
            return None
        settings: dict[str, Any] = {"heads": heads, "norms": None}
        if q_norm:
            settings |= {"norms": (self._vector(q_norm[0].p), self._vector(k_norm[0].p)), "eps": q_norm[0].f[0]}
        if q_rope:
            settings |= {name: n for name, n in _turned(q_rope[0]).items() if name != "dim"}
        table = q_rope[0].i[0] if q_rope else -1  # the last one turns nothing
        n, k, bias = matrix.n, matrix.k, matrix.bias

        def launch(c: Call) -> None:
            rope.rope_store(
                c.parts(n, k), bias, c[query], *c.cache.layers[layer], c.rows, *c.cache.angles[table], **settings
            )

        return launch, end + 1

    def _head(self, op: Op, matrix: DeviceMatrix) -> None:
        x, weight, bias, (factor, softcap) = cast("Value", op.in_), matrix.weight, matrix.bias, op.f

        def launch(c: Call) -> None:
            hidden, logits = c[x], self._logits[: c.wanted]
            if c.last is not None:
                hidden = self._hidden[: c.wanted]
                elementwise.take(c[x], c.last, hidden)
            linear.linear(hidden, weight, logits[None], bias, factor=factor, softcap=softcap)

        self._launches.append(launch)

    def _norm(self, op: Op) -> dict[str, Any]:
        weight, shift = self._vector(op.p), self._vector(op.q)
        return {"weight": weight, "shift": shift, "eps": op.f[0], "layer_norm": op.i[0] == Norm.LAYER_NORM}

    def _vector(self, values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(np.array(values, np.float32)).to(self.device)


def _matrix(op: Op) -> DeviceMatrix:
    return cast("DeviceMatrix", op.matrices[0])


def _turned(op: Op) -> dict[str, Any]:
    return {"dim": op.i[1], "offset": op.i[2], "interleaved": "interleaved" in op.flags}


def _is_whole(op: Op) -> bool:
    """Whether a norm takes all numbers together."""
    return op.i[1] in (0, cast("Value", op.in_).width)


def _norms_after(ops: Sequence[Op], at: int) -> tuple[Op | None, Op | None, int]:
    """Of an op that writes a value: the norm that alone reads this and adds it to a stream, the norm of the stream after that, and
    the place of the op after these. Taps may stand between them. The op may be such a norm itself."""
    op, after, end = ops[at], None, at + 1
    if op.kind == "norm":
        after = op
    elif end < len(ops) and ops[end].kind == "norm" and "add" in ops[end].flags and ops[end].in_ == op.out:
        alone = all(v.register != cast("Value", op.out).register for o in ops[end + 1 :] for v in o.values)
        if alone and _is_whole(ops[end]) and op.i[0] == Finish.STORE:
            after, end = ops[end], end + 1
    stream = (after or op).out
    next_ = next((i for i in range(end, len(ops)) if ops[i].kind != "rows"), end)
    if next_ < len(ops) and ops[next_].kind == "norm" and ops[next_].in_ == stream and _is_whole(ops[next_]):
        before = ops[next_]
        if "add" not in before.flags and before.out != stream:
            return after, before, next_ + 1
    return after, None, end


def _angles(program: Program, length: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Cosines and sines of each table, float32 [position, half], and of one that turns nothing."""
    out = list[tuple[Tensor, Tensor]]()
    for a in program.angles:
        position = np.arange(length)
        turns = (position.astype(np.float32)[:, None] * a.inv_freq).astype(np.float64)
        factor = a.factors[np.minimum(position // a.every, len(a.factors) - 1)][:, None]
        both = (np.cos(turns).astype(np.float32) * factor, np.sin(turns).astype(np.float32) * factor)
        out.append((torch.from_numpy(both[0]).to(device), torch.from_numpy(both[1]).to(device)))
    nothing = torch.zeros(1, 0, device=device)
    return [*out, (nothing, nothing)]
