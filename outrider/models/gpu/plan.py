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
from outrider.kernels.gpu import APART, RowTensors, attention, elementwise, linear, norms, rope
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
_GATES = {Finish.SWIGLU: "silu", Finish.GEGLU: "gelu_tanh"}
_FUNCTIONS = {a: a.name.lower() for a in Activation if a not in (Activation.GELU, Activation.RELU, Activation.SWISH)}
_MAPS = {Map.LINEAR_MAP: "identity", Map.SOFTPLUS: "softplus", Map.EXP: "exp", Map.SIGMOID_MAP: "sigmoid"}
_CELLS = 256  # a slot's cells are a multiple of it
_MOST_DIM = 256  # numbers of a head that fit a program of attention


class NotOnGpu(ValueError):
    """A program that has an op without a kernel, and which."""


def why_not(program: Program) -> str | None:
    """The first op that has no kernel; None if all have one. The program may be an outline, without weights."""
    for op in program.ops:
        what = ""
        if op.kind not in _KINDS or {"same", "fresh", "fed"} & {*op.flags} or (op.kind == "head" and op.other):
            what = " ".join((op.kind, *op.flags))
        elif op.kind == "linear" and op.i[0] in _GATES and op.f[0] != 1:
            what = f"a gate times {op.f[0]}"
        elif op.kind == "gate" and op.i[0] not in _FUNCTIONS:
            what = Activation(op.i[0]).name.lower()
        elif op.kind == "map" and (op.i[0] not in _MAPS or op.i[1] != 1):
            what = f"{Map(op.i[0]).name.lower()} of {op.i[1]} heads"
        elif op.kind == "norm" and "add" in op.flags and op.i[0] == Norm.LAYER_NORM:
            what = "a layer norm that is added"
        elif op.kind == "attend" and max(op.i[3:5]) > _MOST_DIM:
            what = f"attention with heads of {max(op.i[3:5])} numbers"
        if what:
            return f"{what}{f' (layer {op.layer})' if op.layer >= 0 else ''} has no kernel"
    return None


class Call:
    """A forward of so many rows: views of the registers, and what a launch is given."""

    rows: RowTensors
    cache: GpuCache
    splits: int
    wanted: int  # rows of logits
    last: Tensor | None  # these rows, unless they are all

    def __init__(self, plan: GpuPlan, count: int) -> None:
        self._plan, self.count, self._values = plan, count, dict[Value, Tensor]()

    def __getitem__(self, value: Value) -> Tensor:
        """[row, width], in float32, or bfloat16 where it is only multiplied."""
        if value not in self._values:
            register = self._plan.registers[self._plan.places[value.register]]
            self._values[value] = register[: self.count, value.offset : value.offset + value.width]
        return self._values[value]

    def parts(self, n: int, k: int) -> Tensor:
        """float32 [part, row, n]: scratch for a product."""
        parts = linear.split(n, k)[0] if self.count <= APART else 1
        return self._plan.scratch[: parts * self.count * n].view(parts, self.count, n)


Launch = Callable[[Call], None]


class GpuPlan:
    """A program that is ready to run on a device.

    Args:
        program: over matrices of a `DeviceSource`.
        device: where its weights are.
        max_rows: of a forward.

    `turn` counts what the device was told: a run writes its logits and features over those of the one before it.

    Raises NotOnGpu, with the reason, if an op has no kernel.
    """

    turn = 0

    def __init__(self, program: Program, device: str, max_rows: int = MAX_ROWS) -> None:
        if reason := why_not(program):
            raise NotOnGpu(f"the GPU path cannot run this model: {reason}")
        self.program, self.device, self.max_rows = program, device, max_rows
        self.logit_rows = min(max_rows, LOGIT_ROWS)  # of which a forward can give all logits
        ops = [op for op in program.ops if op.kind != "rows" or "tap" in op.flags]
        rounded = rounded_registers(ops)
        kinds = [(w, torch.bfloat16 if r in rounded else torch.float32) for r, w in enumerate(program.widths)]
        self.places, kinds = register_places(ops, kinds)
        products = [(m.n, m.k) for op in ops if op.kind == "linear" for m in op.matrices]
        sizes = [n * max(linear.split(n, k)[0] * min(APART, max_rows), max_rows) for n, k in products]
        self.registers = [torch.zeros(max_rows, width, dtype=kind, device=device) for width, kind in kinds]
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
        call.rows, call.cache, call.splits = cast("RowTensors", rows), cache, attention.splits_of(rows.length)
        call.last = None if want == "all" else rows.last
        call.wanted = count if call.last is None else len(call.last)
        shown = dict[int, list[int]]()
        for n, tap in enumerate(taps):
            shown.setdefault(self._taps[tap][0], []).append(n)
        end = max([self._needed, *(i + 1 for i in shown)]) if want == "none" else len(self._launches)
        for i, launch in enumerate(self._launches[:end]):
            launch(call)
            for n in shown.get(i, ()):
                features[:, n * hidden : (n + 1) * hidden].copy_(call[self._taps[taps[n]][1]])
        return self._logits[: 0 if want == "none" else call.wanted], features if taps else None

    def _compile(self, ops: Sequence[Op], at: int) -> int:
        """Add the launches of the op at this place, and of those after it that go with it. Returns the place of the next one."""
        op, add = ops[at], self._launches.append
        x, other, out, flags = cast("Value", op.in_), op.other, cast("Value", op.out), {*op.flags}
        if op.kind == "linear":
            return self._linear(ops, at)
        if op.kind == "norm" and _is_whole(op) and "add" in flags:
            return self._sum(ops, at, lambda c: (c[x][None], None))
        if op.kind == "rows":
            self._taps[op.i[0]] = len(self._launches) - 1, x
        elif op.kind == "embed":
            table, factor = _matrix(op).floats(), op.f[0]
            add(lambda c: elementwise.embed(c.rows.tokens, table, c[out], factor))
            self._taps.setdefault(EMBEDDING, (0, out))  # a later table is of something else
        elif op.kind == "norm" and _is_whole(op):
            settings = self._norm(op)
            add(lambda c: norms.sum_norm(None, None, c[x], c[out], **settings))
        elif op.kind == "norm":
            settings = {**self._norm(op), "group": op.i[1], "per_group": "per_group" in flags, "add": "add" in flags}
            add(lambda c: norms.group_norm(c[x], c[out], **settings))
        elif op.kind == "rope":
            table, settings = op.i[0], {"dim": op.i[1], **_turned(op)}
            add(lambda c: rope.rope(c[x], c.rows.positions, *c.cache.angles[table], **settings))
        elif op.kind == "store":
            layer, value = op.i[0], cast("Value", other)
            add(lambda c: rope.store(c[x], c[value], *c.cache.layers[layer], c.rows))
            self._needed = len(self._launches)
        elif op.kind == "attend":
            (layer, heads, _, _, width, window), (scale, cap), sinks = op.i, op.f, self._vector(op.p)
            settings = {"heads": heads, "scale": scale, "window": window, "softcap": cap, "sinks": sinks}

            def attend(c: Call) -> None:
                (keys, values), space = c.cache.layers[layer], c.cache.workspace
                # Without room each program of a tree reads all positions for one row; one of a chain has several.
                apart = c.count <= APART or c.rows.paths is not None
                if not apart or attention.workspace_size(c.count, heads, width, c.splits) > space.numel():
                    space = None
                attention.attend(c[x], keys, values, c.rows, c[out], space, splits=c.splits, **settings)

            add(attend)
        elif op.kind == "gate":
            function = _FUNCTIONS[Activation(op.i[0])]
            add(lambda c: elementwise.gate(c[x], None if other is None else c[other], function, c[out]))
        elif op.kind == "map":
            function = _MAPS[Map(op.i[0])]
            settings = {"scale": self._vector(op.p), "shift": self._vector(op.q), "factor": op.f[0]}
            add(lambda c: elementwise.map_rows(c[x], function, c[out], **settings))
        else:
            matrix, (factor, softcap) = _matrix(op), op.f

            def head(c: Call) -> None:
                hidden, logits = c[x], self._logits[: c.wanted]
                if c.last is not None:
                    hidden = self._hidden[: c.wanted]
                    elementwise.take(c[x], c.last, hidden)
                linear.linear(hidden, matrix.weight, logits[None], matrix.bias, factor=factor, softcap=softcap)

            add(head)
        return at + 1

    def _linear(self, ops: Sequence[Op], at: int) -> int:
        """A product, and what reads its parts."""
        op, add, (weight, bias) = ops[at], self._launches.append, (_matrix(ops[at]).weight, _matrix(ops[at]).bias)
        x, out, (n, k), finish = cast("Value", op.in_), cast("Value", op.out), weight.shape, Finish(op.i[0])
        if finish in _GATES:
            add(lambda c: linear.gated(c[x], weight, bias, c[out], _GATES[finish]))
            return at + 1
        end = self._stores(ops, at)
        alone = finish == Finish.STORE and end == at and _norms_after(ops, at)[:2] == (None, None)
        if alone and linear.split(n, k)[0] == 1:
            add(lambda c: linear.linear(c[x], weight, c[out][None], bias, factor=op.f[0]))
            return at + 1
        add(lambda c: linear.linear(c[x], weight, c.parts(n, k)))
        if end == at:
            return self._sum(ops, at, lambda c: (c.parts(n, k), bias))
        query, store, step = cast("Value", ops[end].in_), ops[end - 1], ops[at + 1 : end - 1]
        (layer, heads, *_), turned = ops[end].i, [o for o in step if o.kind == "rope"]
        table = turned[0].i[0] if turned else -1  # the last one turns nothing
        settings: dict[str, Any] = {"heads": heads, **(_turned(turned[0]) if turned else {})}
        if normed := {o.in_: o for o in step if o.kind == "norm"}:
            weights = [self._vector(normed[part].p) for part in (query, store.in_)]
            settings |= {"norms": weights, "eps": normed[query].f[0]}

        def rope_store(c: Call) -> None:
            angles, cells = c.cache.angles[table], c.cache.layers[layer]
            rope.rope_store(c.parts(n, k), bias, c[query], *cells, c.rows, *angles, **settings)

        add(rope_store)
        self._needed = len(self._launches)
        return end

    def _stores(self, ops: Sequence[Op], at: int) -> int:
        """The place of the attention that reads the queries of a linear. One launch can norm and turn its heads, and store keys
        and values. If none can, the place of the linear."""
        op, joint = ops[at], cast("Value", ops[at].out)
        end = next((i for i in range(at + 1, len(ops)) if ops[i].kind not in ("norm", "rope")), at)
        (store, attend), between = ops[end : end + 2], ops[at + 1 : end]
        parts = attend.in_, store.in_, store.other
        if (store.kind, attend.kind, op.i, op.f) != ("store", "attend", (Finish.STORE,), (1.0,)) or None in parts:
            return at
        query, key, value = (cast("Value", part) for part in parts)
        later = {v for o in ops[end + 1 :] for v in o.values if v.register == joint.register}
        whole = sum(cast("Value", part).width for part in parts) == joint.width
        if not whole or [*parts] != joint.split(query.width, key.width, value.width) or later != {query}:
            return at
        steps = [[o for o in between if o.in_ == part and o.out in (None, part)] for part in (query, key)]
        alike = [[(o.kind, o.flags, o.i, o.f) for o in step] for step in steps]
        known = [o.kind for o in steps[0]] in ([], ["norm"], ["rope"], ["norm", "rope"])
        if alike[0] != alike[1] or len(between) != 2 * len(steps[0]) or not known:
            return at
        norms_known = all(o.i == (Norm.RMS_NORM, attend.i[3]) and not o.flags for o in between if o.kind == "norm")
        plain = all(o.p is not None and o.q is None for o in between if o.kind == "norm")
        return end + 1 if norms_known and plain else at

    def _sum(self, ops: Sequence[Op], at: int, parts: Callable[[Call], tuple[Tensor, Tensor | None]]) -> int:
        """Parts and their bias go to a value, with the norms after and before that."""
        op = ops[at]
        after, before, end = _norms_after(ops, at)
        stream, out = cast("Value", (after or op).out), None if before is None else cast("Value", before.out)
        settings = {} if before is None else self._norm(before)
        if after is not None:
            norm = self._norm(after)
            settings["post"] = norm["weight"], norm["shift"], norm["eps"]
        settings["add"] = after is not None or op.i[0] == Finish.ADD
        settings["factor"] = op.f[0] if op.kind == "linear" else 1.0
        self._launches.append(
            lambda c: norms.sum_norm(*parts(c), c[stream], None if out is None else c[out], **settings)
        )
        for tap in (o for o in ops[at:end] if o.kind == "rows"):
            self._taps[tap.i[0]] = len(self._launches) - 1, cast("Value", tap.in_)
        return end

    def _norm(self, op: Op) -> dict[str, Any]:
        weight, shift = self._vector(op.p), self._vector(op.q)
        return {"weight": weight, "shift": shift, "eps": op.f[0], "layer_norm": op.i[0] == Norm.LAYER_NORM}

    def _vector(self, values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(np.array(values, np.float32)).to(self.device)


def rounded_registers(ops: Sequence[Op]) -> set[int]:
    """Registers that only products read, and these round what they read. So they may be kept in bfloat16.

    Each program of a product reads all of its rows. With eight rows and more these bytes count beside those of its weights."""
    others = set[int]()
    for op in ops:
        gated, whole = op.kind == "linear" and op.i[0] in _GATES, op.kind == "norm" and _is_whole(op)
        writes = gated or op.kind == "attend" or (whole and "add" not in op.flags)
        for value, fits in ((op.in_, op.kind in ("linear", "head")), (op.other, False), (op.out, writes)):
            others |= set() if value is None or fits else {value.register}
    return {value.register for op in ops for value in op.values} - others


def _matrix(op: Op) -> DeviceMatrix:
    return cast("DeviceMatrix", op.matrices[0])


def _turned(op: Op) -> dict[str, Any]:
    return {"offset": op.i[2], "interleaved": "interleaved" in op.flags}


def _is_whole(op: Op) -> bool:
    """Whether a norm takes all numbers together."""
    return op.i[1] in (0, cast("Value", op.in_).width)


def _norms_after(ops: Sequence[Op], at: int) -> tuple[Op | None, Op | None, int]:
    """Of an op that writes a value: the norm that alone reads it and adds it to a stream, the norm of that stream, and the place
    of the op after these. Taps may stand between them. The op may be such a norm itself."""
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
        alike = after is None or after.i[0] == before.i[0]  # a launch has one kind of norms
        if alike and "add" not in before.flags and before.out != stream:
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
