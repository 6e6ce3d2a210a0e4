"""The kernels of `outrider.kernels.gpu` in plain torch: what each computes, in any order of sums, and without rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu() ** 2,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "exp": torch.exp,
}


def _normed(x: Tensor, weight: Tensor | None, shift: Tensor | None, eps: float, layer_norm: bool = False) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if layer_norm else x
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if shift is None else x + shift


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, offset: int, interleaved: bool) -> Tensor:
    """x: [row, head, dim]. cosine, sine: [row, half]."""
    x, half, (cosine, sine) = x.clone(), cosine.shape[1], (cosine[:, None], sine[:, None])
    first = slice(offset, offset + 2 * half, 2) if interleaved else slice(offset, offset + half)
    second = slice(offset + 1, offset + 2 * half, 2) if interleaved else slice(offset + half, offset + 2 * half)
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return x


class linear:  # noqa: N801
    @staticmethod
    def split(n: int, k: int) -> tuple[int, int]:
        size = 16 if k > 16 else k
        return -(-k // size), size

    @staticmethod
    def linear(
        x: Tensor, weight: Tensor, out: Tensor, bias: Any = None, *, factor: float = 1.0, softcap: float = 0.0
    ) -> None:
        x, (parts, size) = x.double(), linear.split(*weight.shape)
        if len(out) == parts and parts > 1:
            assert bias is None
            assert factor == 1
            for i, part in enumerate(out):
                part.copy_(x[:, i * size : (i + 1) * size] @ weight[:, i * size : (i + 1) * size].double().T)
            return
        y = factor * (x @ weight.double().T + (0 if bias is None else bias))
        out[0].copy_(softcap * torch.tanh(y / softcap) if softcap else y)

    @staticmethod
    def gated(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, function: str) -> None:
        y = x.double() @ weight.double().T + (0 if bias is None else bias)
        out.copy_(_FUNCTIONS[function](y[:, : out.shape[1]]) * y[:, out.shape[1] :])


class norms:  # noqa: N801
    @staticmethod
    def sum_norm(
        parts: Any, bias: Any, stream: Any, out: Any, *, weight: Any = None, shift: Any = None, eps: float = 0.0,
        layer_norm: bool = False, factor: float = 1.0, post: Any = None, add: bool = True,
    ) -> None:  # fmt: skip
        x = stream
        if parts is not None:
            x = factor * (parts.sum(0) + (0 if bias is None else bias))
            x = x if post is None else _normed(x, post[0], post[1], post[2], layer_norm)
            x = stream + x if add and stream is not None else x
            if stream is not None:
                stream.copy_(x)
        if out is not None:
            out.copy_(_normed(x, weight, shift, eps, layer_norm))

    @staticmethod
    def group_norm(
        x: Tensor, out: Tensor, weight: Any = None, shift: Any = None, *, group: int, eps: float, layer_norm: bool = False,
        per_group: bool = False, add: bool = False,
    ) -> None:  # fmt: skip
        shape = len(x), -1, group
        weight, shift = (v if v is None or not per_group else v.view(-1, group) for v in (weight, shift))
        y = _normed(x.reshape(shape), weight, shift, eps, layer_norm).reshape(x.shape)
        out.copy_(out + y if add else y)


class rope:  # noqa: N801
    @staticmethod
    def rope(
        x: Tensor,
        positions: Tensor,
        cosines: Tensor,
        sines: Tensor,
        *,
        dim: int,
        offset: int = 0,
        interleaved: bool = False,
    ) -> None:
        at = positions.clamp_min(0).long()
        x.copy_(_turned(x.reshape(len(x), -1, dim), cosines[at], sines[at], offset, interleaved).reshape(x.shape))

    @staticmethod
    def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, rows: Any) -> None:
        for row in (rows.positions >= 0).nonzero()[:, 0].tolist():
            slot, cell = int(rows.slots[row // (len(key) // len(rows.slots))]), int(rows.cells[row])
            for cells, new in ((keys, key), (values, value)):
                cells[slot, :, cell] = new[row].reshape(cells.shape[1], -1).bfloat16()

    @staticmethod
    def rope_store(
        parts: Tensor, bias: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Any, cosines: Tensor, sines: Tensor, *,
        heads: int, norms: Any = None, eps: float = 0.0, **turned: Any,
    ) -> None:  # fmt: skip
        (_, kv_heads, _, dim), x = keys.shape, parts.sum(0) + (0 if bias is None else bias)
        q, k, v = x.split([heads * dim, kv_heads * dim, kv_heads * values.shape[3]], 1)
        for part, weight in zip((q, k), norms or (None, None), strict=True):
            if weight is not None:
                part.copy_(_normed(part.reshape(len(x), -1, dim), weight, None, eps).reshape(part.shape))
            if cosines.shape[1]:
                rope.rope(part, rows.positions, cosines, sines, dim=dim, **turned)
        query.copy_(q)
        rope.store(k, v, keys, values, rows)


class attention:  # noqa: N801
    SPLIT = 256

    @staticmethod
    def splits_of(length: int) -> int:
        return -(-length // attention.SPLIT)

    @staticmethod
    def workspace_size(rows: int, heads: int, value_dim: int, splits: int) -> int:
        return rows * heads * splits * (value_dim + 2)

    @staticmethod
    def attend(
        query: Tensor, keys: Tensor, values: Tensor, rows: Any, out: Tensor, workspace: Tensor | None, *, heads: int,
        scale: float, splits: int, window: int = 0, softcap: float = 0.0, sinks: Any = None,
    ) -> None:  # fmt: skip
        dim, each, nodes = keys.shape[3], heads // keys.shape[1], len(query) // len(rows.slots)
        assert workspace is None or len(workspace) >= attention.workspace_size(
            len(query), heads, values.shape[3], splits
        )
        for row, position in enumerate(rows.positions.tolist()):
            if position < 0:
                continue
            slot, start = (int(t[row // nodes]) for t in (rows.slots, rows.starts))
            assert position < splits * attention.SPLIT
            seen = [*range(position + 1)]
            if rows.paths is not None:
                seen = [*range(start), *(start + n for n in rows.paths[row, : position + 1 - start].tolist())]
            seen = seen[-window:] if window else seen
            k, v = (t[slot, :, seen].float().repeat_interleave(each, 0) for t in (keys, values))
            scores = (k @ query[row].view(heads, dim, 1))[..., 0] * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            sink = scores[:, :0] if sinks is None else sinks[:, None]
            weights = torch.cat([scores, sink], 1).softmax(1)[:, : len(seen)]
            out[row] = (weights[:, None] @ v).reshape(-1)

    @staticmethod
    def move(cells: Tensor, rows: Any, path: Tensor, accepted: Tensor) -> None:
        for slot, start, last, nodes in zip(
            *(t.tolist() for t in (rows.slots, rows.starts, accepted, path)), strict=True
        ):
            for to, node in enumerate(nodes[: last + 1]):
                cells[:, slot, :, start + to] = cells[:, slot, :, start + node]


class elementwise:  # noqa: N801
    @staticmethod
    def embed(tokens: Tensor, table: Tensor, out: Tensor, factor: float = 1.0) -> None:
        out.copy_(table[tokens].float() * factor)

    @staticmethod
    def gate(a: Tensor, b: Tensor | None, function: str, out: Tensor) -> None:
        out.copy_(_FUNCTIONS[function](a) * (1 if b is None else b))

    @staticmethod
    def map_rows(
        x: Tensor, function: str, out: Tensor, *, scale: Any = None, shift: Any = None, factor: float = 1.0
    ) -> None:
        x = x if scale is None else x * scale
        out.copy_(_FUNCTIONS[function](x if shift is None else x + shift) * factor)

    @staticmethod
    def take(x: Tensor, index: Tensor, out: Tensor) -> None:
        out.copy_(x[index])
