"""Every kernel over rows: its float64 twin, and a row that has the same bits alone, in any order, on any threads and processor.

`test_witness.py` compares the bits of all of them on all instruction sets of this machine and on emulated ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ggml_blocks import BLOCK_FORMATS, random_blocks, spread
from torch import Tensor
from torch.nn import functional

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.kernels.cpu.library import ExpertsStruct, Finish, Router, RouteStruct
from outrider.models.hf.arrays import as_array

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

SHAPES = ((37, 100), (1, 7), (513, 331), (80, 2100))
EIGHT_BITS = ("Q8_0", "IQ4_NL", "IQ4_XS")  # weights of 8 bits, so activations of 16
HALF_UNITS = [n for n in BLOCK_FORMATS if n not in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]
LIMIT, SLOPE, PLUS = 0.5, 1.702, 1.0  # of CLAMPED
CUTS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 25, 31, 64, 95, 96, 97, 193)


class Case(NamedTuple):
    """A function of rows. run: int64 [n], the rows that it is called with -> [n, ...]. twin: float64, of all rows in order.

    close: how far they may differ, of the largest number of the twin.
    """

    rows: int
    run: Callable[[Tensor], Tensor]
    twin: Callable[[], Tensor]
    close: float


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    isa, threads = native.isa(), native.num_threads()
    yield
    native.use_isa(isa)
    native.set_num_threads(threads)


def dense(m: Tensor | Blocks | native.Packed) -> Tensor:
    return m if isinstance(m, Tensor) else torch.from_numpy(m.dense())


def pack(
    weights: Sequence[Tensor | Blocks], kind: str, biases: Sequence[Tensor | None] | None = None, paired: bool = False
) -> native.Packed:
    arrays = [w if isinstance(w, Blocks) else as_array(w) for w in weights]
    return native.Packed(arrays, kind, biases and [None if b is None else b.numpy() for b in biases], paired=paired)


def times(packed: native.Packed, x: Tensor) -> Tensor:
    return torch.from_numpy(packed.linear(x.numpy()))


def rounded(x: Tensor, bits: int) -> Tensor:
    """float64: activations rounded in blocks of 32, as quantised weights meet them."""
    top = 127 if bits == 8 else 32767
    blocks = functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True)
    q = (blocks * torch.where(peak > 0, top / peak, 0)).round()
    return (q.double() * (peak / top).double()).view(len(x), -1)[:, : x.shape[1]]


def linear(kind: str, n: int, k: int, rows: int = 64) -> Case:
    bias, x = torch.randn(n), torch.randn(rows, k)
    packed = pack([torch.randn(n, k) * 0.05], kind, [bias])
    close = {"int8": 1e-4, "int4": 2e-2}.get(kind, 1e-5)
    return Case(rows, lambda r: times(packed, x[r]), lambda: x.double() @ dense(packed).double().T + bias, close)


def blocks(name: str, n: int, k: int, rows: int) -> Case:
    matrix, x = random_blocks(name, n, k), spread(rows, k)
    x[0, :32] = 0
    packed, bits = pack([matrix], "float32"), 16 if name in EIGHT_BITS else 8
    # one of 384,000 activations may lie so near to a half that float32 rounds it to the other side: a unit of 32,767
    close = 3e-6 if bits == 8 else 1e-5
    return Case(rows, lambda r: times(packed, x[r]), lambda: rounded(x, bits) @ dense(matrix).double().T, close)


def side_by_side(formats: Sequence[str], paired: bool) -> Case:
    """Matrices in several formats, of which every second one has a bias."""
    matrices = [torch.randn(21, 512).bfloat16() if f == "bfloat16" else random_blocks(f, 48, 512) for f in formats]
    biases = [None if i % 2 else torch.randn(m.shape[0]) for i, m in enumerate(matrices)]
    packed, x = pack(matrices, "bfloat16", biases, paired=paired), spread(30, 512)

    def twin() -> Tensor:
        parts = [times(pack([m], "bfloat16", [b]), x) for m, b in zip(matrices, biases, strict=True)]
        alternate = torch.stack([p[:, :48].unflatten(1, (3, 16)) for p in parts], 2).flatten(1) if paired else None
        return (torch.cat(parts, 1) if alternate is None else alternate).double()

    return Case(30, lambda r: times(packed, x[r]), twin, 0)


def route(logits: Tensor, k: int, kind: str, **settings: Any) -> Tensor:
    """[row, k numbers, then k weights]."""
    vectors = {name: settings.pop(name).data_ptr() for name in ("correction", "scale") if name in settings}
    out, (rows, experts) = torch.empty(len(logits), 2 * k), logits.shape
    job: dict[str, Any] = {"rows": rows, "ldx": experts, "ldo": 2 * k, "experts": experts, "k": k, "kind": Router[kind]}
    job |= {"logits": logits.data_ptr(), "out": out.data_ptr(), "factor": 1.0, **vectors, **settings}
    native.library().route(RouteStruct(**job))
    return out


def route_twin(logits: Tensor, k: int, kind: str, **settings: Any) -> Tensor:
    """As transformers' routers have it."""
    score = logits.double()
    score = score.softmax(-1) if kind == "SOFTMAX_TOP" else score.sigmoid() if kind == "SIGMOID_TOP" else score
    choice = score if (correction := settings.get("correction")) is None else score + correction
    if groups := settings.get("groups", 0):
        each = choice.unflatten(1, (groups, -1))
        worth = each.topk(2, -1)[0].sum(-1) if kind == "SIGMOID_TOP" else each.amax(-1)
        left = torch.zeros_like(worth).scatter_(1, worth.topk(settings["kept"])[1], 1).bool()
        choice = each.masked_fill(~left[..., None], -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :k]
    weights = score.gather(1, ids)
    weights = weights.softmax(-1) if kind == "TOP_SOFTMAX" else weights
    if settings.get("normalised"):
        weights = weights / (weights.sum(-1, keepdim=True) + settings.get("added", 0.0))
    scale = settings.get("scale", torch.ones(logits.shape[1]))
    return torch.cat([ids, weights * settings.get("factor", 1.0) * scale[ids]], 1)


def router(kind: str, experts: int, k: int, **settings: Any) -> Case:
    for name in {"correction", "scale"} & settings.keys():
        settings[name] = torch.randn(experts) if name == "correction" else torch.rand(experts) + 0.5
    logits = torch.randn(77, experts) * 3

    def even(out: Tensor) -> Tensor:
        """Numbers of experts, of the size of weights."""
        return torch.cat([out[:, :k] / experts, out[:, k:]], 1)

    run, twin = partial(route, **settings), partial(route_twin, logits, k, kind, **settings)
    return Case(77, lambda r: even(run(logits[r], k, kind)), lambda: even(twin()), 1e-6)


class Mixture:
    """Experts, packed and as float32. formats: of the experts in turn, "a+b" for gate and up in a and down in b."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        middle: int,
        finish: str,
        formats: Sequence[str] = ("float32",),
        biased: bool = True,
    ) -> None:
        self.finish, self.packed, self.matrices = finish, list[native.Packed](), list[tuple[Tensor, ...]]()
        for e in range(experts):
            of = formats[e % len(formats)].split("+")
            parts = [
                self._matrix(*p) for p in ((of[0], middle, hidden), (of[0], middle, hidden), (of[-1], hidden, middle))
            ]
            biases = [torch.randn(n) * biased for n in (middle, middle, hidden)]
            first = slice(1 if finish == "STORE" else 0, 2)  # without a gate
            given = biases if biased else [None] * 3
            self.packed.append(pack(parts[first], "float32", given[first], paired=finish != "STORE"))
            self.packed.append(pack(parts[2:], "float32", given[2:]))
            self.matrices.append((*map(dense, parts), *biases))

    @staticmethod
    def _matrix(kind: str, rows: int, columns: int) -> Tensor | Blocks:
        return torch.randn(rows, columns) / columns**0.5 if kind == "float32" else random_blocks(kind, rows, columns)

    def run(self, x: Tensor, routed: Tensor, add_to: Tensor | None = None) -> Tensor:
        pointers = (ctypes.c_void_p * len(self.packed))(*(ctypes.addressof(p.struct) for p in self.packed))
        out = torch.full_like(x, torch.nan) if add_to is None else add_to.clone()
        job: dict[str, Any] = {"w": ctypes.addressof(pointers), "x": x.data_ptr(), "routed": routed.data_ptr()}
        job |= {
            "out": out.data_ptr(),
            "rows": len(x),
            "ldx": x.stride(0),
            "ldr": routed.stride(0),
            "ldo": out.stride(0),
        }
        job |= {"experts": len(self.packed) // 2, "k": routed.shape[1] // 2, "finish": Finish[self.finish]}
        job |= {"add": add_to is not None, "factor": 1.0 if add_to is None else 0.5}
        native.library().experts(ExpertsStruct(**job, limit=LIMIT, slope=SLOPE, plus=PLUS))
        return out

    def twin(self, x: Tensor, routed: Tensor, exact: bool = True) -> Tensor:
        """One row and one expert after another. exact: the activations are not rounded, as the packed linears round them."""
        out, k = torch.zeros(x.shape, dtype=torch.float64), routed.shape[1] // 2
        for row in range(len(x)):
            for e, weight in zip(routed[row, :k].long().tolist(), routed[row, k:].double(), strict=True):
                gate, up, down, *biases = (t.double() for t in self.matrices[e])
                if exact:
                    first, second = gate @ x[row].double() + biases[0], up @ x[row].double() + biases[1]
                else:
                    both = times(self.packed[2 * e], x[row]).double()
                    first, second = both.view(-1, 2, 16).transpose(0, 1).flatten(1)
                middle = self._activated(first, second)
                out[row] += weight * (
                    down @ middle + biases[2] if exact else times(self.packed[2 * e + 1], middle.float())
                )
        return out

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.finish == "CLAMPED":
            gate = gate.clamp(max=LIMIT)
            return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-LIMIT, LIMIT) + PLUS)
        if self.finish == "STORE":
            return up.relu() ** 2
        return (functional.silu(gate) if self.finish == "SWIGLU" else functional.gelu(gate, approximate="tanh")) * up


def experts(finish: str, count: int, k: int, hidden: int, middle: int, rows: int) -> Case:
    mixture, x = Mixture(count, hidden, middle, finish), torch.randn(rows, hidden)
    routed = route(torch.randn(rows, count), k, "SOFTMAX_TOP")
    return Case(rows, lambda r: mixture.run(x[r], routed[r]), lambda: mixture.twin(x, routed), 1e-5)


def expert_blocks(*formats: str) -> Case:
    mixture, x = Mixture(6, 256, 512, "CLAMPED", formats), spread(40, 256)
    routed = route(torch.randn(40, 6), 3, "TOP_SOFTMAX")
    return Case(40, lambda r: mixture.run(x[r], routed[r]), lambda: mixture.twin(x, routed, exact=False), 3e-3)


def one_for_nearly_all() -> Case:
    mixture, x, routed = (
        Mixture(4, 64, 32, "SWIGLU", biased=False),
        torch.randn(130, 64),
        torch.tensor([[2.0, 0.7]]).repeat(130, 1),
    )
    routed[7, 0] = 0
    return Case(130, lambda r: mixture.run(x[r], routed[r]), lambda: mixture.twin(x, routed), 1e-5)


ROUTERS: dict[str, dict[str, Any]] = {
    "one": {"experts": 1, "k": 1},
    "few": {"experts": 5, "k": 3, "normalised": 1},
    "many": {"experts": 128, "k": 8, "normalised": 1, "factor": 2.5},
    "groups": {"experts": 96, "k": 6, "groups": 8, "kept": 3, "normalised": 1, "added": 1e-6},
    "corrected": {"experts": 33, "k": 4, "correction": True, "factor": 0.5},
    "corrected groups": {"experts": 64, "k": 8, "correction": True, "groups": 4, "kept": 2},
    "scaled": {"experts": 16, "k": 3, "scale": True, "normalised": 1},
}
BLOCKS = ((80, 768, 100), (37, 512, 9))  # outputs, inputs, rows
FINISHES = ("STORE", "SWIGLU", "GEGLU", "CLAMPED")
MIXTURES = ((5, 3, 37, 21, 19), (16, 2, 64, 48, 70), (1, 1, 8, 3, 2))  # experts, k, hidden, middle, rows
CASES: dict[str, Callable[[], Case]] = {
    **{f"{kind} {n} x {k}": partial(linear, kind, n, k) for kind in native.KINDS for n, k in SHAPES},
    **{f"{name} {n} x {k}": partial(blocks, name, n, k, rows) for name in BLOCK_FORMATS for n, k, rows in BLOCKS},
    **{f"{name}, half a unit": partial(blocks, name, 20, 96, 5) for name in HALF_UNITS},
    "formats in a row": partial(side_by_side, ("Q4_K", "Q8_0", "Q6_K", "Q4_K", "bfloat16"), False),
    "formats in pairs": partial(side_by_side, ("Q4_K", "Q6_K"), True),
    **{f"{kind} of {name}": partial(router, kind, **r) for kind in Router.__members__ for name, r in ROUTERS.items()},
    **{f"{finish} experts {m}": partial(experts, finish, *m) for finish in FINISHES for m in MIXTURES},
    "experts Q4_K": partial(expert_blocks, "Q4_K"),
    "experts MXFP4": partial(expert_blocks, "MXFP4"),
    "experts of three kinds": partial(expert_blocks, "Q4_K+Q6_K", "Q4_K+Q8_0", "IQ4_NL+float32"),
    "experts of floats and blocks": partial(expert_blocks, "float32+Q4_0"),
    "an expert of all rows but one": one_for_nearly_all,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_twin_and_have_the_same_bits_in_any_company(name: str) -> None:
    case = CASES[name]()
    every = torch.arange(case.rows)
    whole, exact = case.run(every), case.twin()
    finite = exact.isfinite()
    assert torch.equal(whole.double()[~finite], exact[~finite])
    assert (whole - exact)[finite].abs().max() <= case.close * exact[finite].abs().max().clamp_min(1e-3)
    assert torch.equal(torch.cat([case.run(every[i : i + 1]) for i in every]), whole), "alone"
    for count in (n for n in CUTS if n < case.rows):
        assert torch.equal(case.run(every[:count]), whole[:count]), f"the first {count}"
        assert torch.equal(case.run(every[-count:]), whole[-count:]), f"the last {count}"
    order = torch.randperm(case.rows)
    assert torch.equal(case.run(order), whole[order]), "another order"
    for isa in native.isas():
        for threads in (1, 3):
            native.set_num_threads(threads)
            if native.use_isa(isa):
                assert torch.equal(case.run(every), whole), (isa, threads)


@pytest.mark.parametrize("kind", native.KINDS)
def test_a_matrix_is_rounded_to_the_nearest(kind: str) -> None:
    for n, k in SHAPES:
        w = torch.randn(n, k)
        held = dense(pack([w], kind))
        if hasattr(torch, kind) and kind.endswith(("16", "32")):
            assert torch.equal(held, w.to(getattr(torch, kind)).float())
        else:
            groups, error = (functional.pad(t, (0, -k % 32)).view(n, -1, 32).abs().amax(-1) for t in (w, held - w))
            assert (error <= groups * (0.2 if kind == "int4" else 0.501 / 127 * 1.001)).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_weights_in_blocks_are_those_of_ggml(name: str) -> None:
    """In any order, and with every bit set, or none, against the largest activations of either sign: no sum may wrap."""
    for shape in ((37, 512), (64, 768)):
        matrix, order = random_blocks(name, *shape), torch.randperm(shape[0])[: shape[0] // 2]
        assert torch.equal(dense(pack([matrix], "float32")), dense(matrix))
        some = Blocks(matrix.data, matrix.format, matrix.columns, order.numpy())
        assert some.shape == (len(order), shape[1])
        assert torch.equal(dense(pack([some], "float32")), dense(matrix)[order])
    signs = torch.tensor([[1.0] * 512, [-1.0] * 512, [1.0, -1.0] * 256, [1.0, 1.0, -1.0, -1.0] * 128])
    for fill in (0, 255, 170, 85):
        matrix = random_blocks(name, 16, 512, fill)
        exact = signs.double() @ dense(matrix).double().T
        for isa in native.isas():
            if native.use_isa(isa):
                y = times(pack([matrix], "float32"), signs)
                assert (y - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-4, (fill, isa)


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    packed, x = pack([random_blocks("Q4_K", 32, 512)], "float32"), spread(9, 512)
    mixture, routed = Mixture(4, 512, 256, "SWIGLU", ("Q4_K",)), route(torch.randn(9, 4), 2, "SOFTMAX_TOP")
    clean, others = (times(packed, x), mixture.run(x, routed)), [n for n in range(9) if n not in (1, 2)]
    x[1, 7], x[2, 300] = torch.nan, torch.inf
    for before, after in zip(clean, (times(packed, x), mixture.run(x, routed)), strict=True):
        assert after[[1, 2]].isnan().all()
        assert torch.equal(after[others], before[others])
    assert (packed.linear(np.full((1, 512), 1e-38)) == 0).all()


def test_of_equal_experts_the_lower_number_is_first_and_nan_chooses_some_that_exist() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6, [-torch.inf, 3.0, -torch.inf, 3.0, 3.0, 3.0]])
    got = route(logits, 4, "TOP_SOFTMAX")[:, :4]
    assert got.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [1, 3, 4, 5]]
    assert route(logits, 6, "TOP_SOFTMAX")[2, :6].tolist() == [1, 3, 4, 5, 0, 2]
    for kind in Router.__members__:
        got = route(torch.full((1, 9), torch.nan), 4, kind)
        assert sorted(got[0, :4].tolist()) == [0, 1, 2, 3]
        assert got[0, 4:].isnan().all()


@pytest.mark.parametrize("finish", ["STORE", "SWIGLU"])
def test_experts_may_be_added_to_what_is_there(finish: str) -> None:
    mixture, x, before = Mixture(5, 37, 21, finish), torch.randn(19, 37), torch.randn(19, 37)
    routed = route(torch.randn(19, 5), 3, "SOFTMAX_TOP")
    exact = mixture.twin(x, routed)
    assert (mixture.run(x, routed, before) - (before + 0.5 * exact)).abs().max() < 1e-5 * exact.abs().max()
