"""Routers and experts: their torch definition, and a node has the bits that it has alone, on every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from ggml_blocks import random_blocks, spread
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.kernels.cpu.library import ExpertsStruct, RouteStruct
from outrider.kernels.cpu.state import library

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

ROUTERS = {"softmax_top": 0, "top_softmax": 1, "sigmoid_top": 2}
FINISHES = {"relu2": 0, "silu": 2, "gelu_pytorch_tanh": 3, "clamped": 4}
LIMIT, SLOPE, PLUS = 0.5, 1.702, 1.0


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    isa, threads = native.isa(), native.num_threads()
    yield
    native.use_isa(isa)
    native.set_num_threads(threads)


def route(logits: Tensor, k: int, kind: str, **settings: Any) -> Tensor:
    """[row, k numbers, then k weights]."""
    vectors = {name: settings.pop(name).data_ptr() for name in ("correction", "scale") if name in settings}
    out = torch.empty(len(logits), 2 * k)
    library().route(
        RouteStruct(
            logits=logits.data_ptr(),
            out=out.data_ptr(),
            rows=len(logits),
            ldx=logits.shape[1],
            ldo=2 * k,
            experts=logits.shape[1],
            k=k,
            kind=ROUTERS[kind],
            **{"factor": 1.0, **vectors, **settings},
        )
    )
    return out


def route_twin(logits: Tensor, k: int, kind: str, **settings: Any) -> tuple[Tensor, Tensor]:
    """Numbers and float64 weights, as transformers' routers have them."""
    score = logits.double()
    score = score.softmax(-1) if kind == "softmax_top" else score.sigmoid() if kind == "sigmoid_top" else score
    choice = score if (correction := settings.get("correction")) is None else score + correction
    if groups := settings.get("groups", 0):
        each = choice.unflatten(1, (groups, -1))
        worth = each.topk(2, -1)[0].sum(-1) if kind == "sigmoid_top" else each.amax(-1)
        left = torch.zeros_like(worth).scatter_(1, worth.topk(settings["kept"])[1], 1).bool()
        choice = each.masked_fill(~left[..., None], -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :k]
    weights = score.gather(1, ids)
    if kind == "top_softmax":
        weights = weights.softmax(-1)
    if settings.get("normalised"):
        weights = weights / (weights.sum(-1, keepdim=True) + settings.get("added", 0.0))
    scale = settings.get("scale", torch.ones(logits.shape[1]))
    return ids, weights * settings.get("factor", 1.0) * scale[ids]


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize(
    ("experts", "k", "settings"),
    [
        (1, 1, {}),
        (5, 3, {"normalised": 1}),
        (128, 8, {"normalised": 1, "factor": 2.5}),
        (96, 6, {"groups": 8, "kept": 3, "normalised": 1, "added": 1e-6}),
        (33, 4, {"corrected": True, "factor": 0.5}),
        (64, 8, {"corrected": True, "groups": 4, "kept": 2}),
        (16, 3, {"scaled": True, "normalised": 1}),
    ],
)
def test_a_router_is_its_definition(experts: int, k: int, settings: dict[str, Any], kind: str, isa: str) -> None:
    if not native.use_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    settings = {**settings}
    if settings.pop("corrected", False):
        settings["correction"] = torch.randn(experts)
    if settings.pop("scaled", False):
        settings["scale"] = torch.rand(experts) + 0.5
    logits = torch.randn(77, experts) * 3
    got = route(logits, k, kind, **settings)
    ids, weights = route_twin(logits, k, kind, **settings)
    assert torch.equal(got[:, :k].long(), ids)
    assert torch.allclose(got[:, k:].double(), weights, rtol=1e-5, atol=1e-9)
    assert torch.equal(torch.cat([route(row[None], k, kind, **settings) for row in logits]), got)
    assert native.use_isa("portable")
    assert torch.equal(route(logits, k, kind, **settings), got)


def test_of_equal_experts_the_lower_number_is_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6, [-torch.inf, 3.0, -torch.inf, 3.0, 3.0, 3.0]])
    got = route(logits, 4, "top_softmax")[:, :4]
    assert got.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [1, 3, 4, 5]]
    assert route(logits, 6, "top_softmax")[2, :6].tolist() == [1, 3, 4, 5, 0, 2]


def test_scores_that_are_nan_choose_experts_that_exist() -> None:
    logits = torch.full((1, 9), torch.nan)
    for kind in ROUTERS:
        got = route(logits, 4, kind)
        assert sorted(got[0, :4].tolist()) == [0, 1, 2, 3]
        assert got[0, 4:].isnan().all()


class Mixture(NamedTuple):
    """gate and up, or up alone, and down of each expert: packed, and as float32."""

    packed: list[native.Packed]
    gates: list[tuple[Tensor, Tensor]]
    downs: list[Tensor]
    biases: list[tuple[Tensor, Tensor, Tensor]]


def mixture(
    experts: int,
    hidden: int,
    middle: int,
    formats: Sequence[str] = ("float32",),
    biased: bool = False,
    gated: bool = True,
) -> Mixture:
    """formats: of the experts in turn, "a+b" for gate and up in a and down in b."""

    def matrix(kind: str, rows: int, columns: int) -> Tensor | Blocks:
        return torch.randn(rows, columns) / columns**0.5 if kind == "float32" else random_blocks(kind, rows, columns)

    def dense(m: Tensor | Blocks) -> Tensor:
        return m.dense() if isinstance(m, Blocks) else m

    made = Mixture([], [], [], [])
    for e in range(experts):
        of = formats[e % len(formats)].split("+")
        gate, up, down = matrix(of[0], middle, hidden), matrix(of[0], middle, hidden), matrix(of[-1], hidden, middle)
        biases = torch.randn(middle), torch.randn(middle), torch.randn(hidden)
        first, own = ([gate, up], biases[:2]) if gated else ([up], biases[1:2])
        made.packed.append(native.Packed(first, "float32", own if biased else None, paired=gated))
        made.packed.append(native.Packed([down], "float32", biases[2:] if biased else None))
        made.gates.append((dense(gate), dense(up)))
        made.downs.append(dense(down))
        made.biases.append(biases if biased else (torch.zeros(middle), torch.zeros(middle), torch.zeros(hidden)))
    return made


def run(made: Mixture, x: Tensor, routed: Tensor, finish: str, add_to: Tensor | None = None) -> Tensor:
    pointers = (ctypes.c_void_p * len(made.packed))(*(ctypes.addressof(p.struct) for p in made.packed))
    out = torch.full_like(x, torch.nan) if add_to is None else add_to.clone()
    library().experts(
        ExpertsStruct(
            w=ctypes.addressof(pointers),
            x=x.data_ptr(),
            routed=routed.data_ptr(),
            out=out.data_ptr(),
            rows=len(x),
            ldx=x.stride(0),
            ldr=routed.stride(0),
            ldo=out.stride(0),
            experts=len(made.packed) // 2,
            k=routed.shape[1] // 2,
            finish=FINISHES[finish],
            add=int(add_to is not None),
            factor=1.0 if add_to is None else 0.5,
            limit=LIMIT,
            slope=SLOPE,
            plus=PLUS,
        )
    )
    return out


def twin(made: Mixture, x: Tensor, routed: Tensor, finish: str, rounded: bool = False) -> Tensor:
    """float64, one row and one expert after another. rounded: over the packed linears, which round activations."""
    out, k = torch.zeros(x.shape, dtype=torch.float64), routed.shape[1] // 2
    for row in range(len(x)):
        for e, weight in zip(routed[row, :k].long().tolist(), routed[row, k:].double(), strict=True):
            if rounded:
                gate, up = made.packed[2 * e].linear(x[row]).double().view(-1, 2, 16).transpose(0, 1).flatten(1)
            else:
                gate, up = (
                    m.double() @ x[row].double() + b for m, b in zip(made.gates[e], made.biases[e][:2], strict=True)
                )
            if finish == "clamped":
                gate = gate.clamp(max=LIMIT)
                act = gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-LIMIT, LIMIT) + PLUS)
            elif finish == "relu2":
                act = up.relu() ** 2
            elif finish == "silu":
                act = torch.nn.functional.silu(gate) * up
            else:
                act = torch.nn.functional.gelu(gate, approximate="tanh") * up
            down = (
                made.packed[2 * e + 1].linear(act.float())
                if rounded
                else made.downs[e].double() @ act + made.biases[e][2]
            )
            out[row] += weight * down
    return out


def companies(made: Mixture, x: Tensor, routed: Tensor, finish: str, whole: Tensor) -> None:
    """Rows have their bits alone, in any part of the rows, and in any order."""
    assert torch.equal(torch.cat([run(made, x[n : n + 1], routed[n : n + 1], finish) for n in range(len(x))]), whole), (
        "alone"
    )
    cuts = sorted({0, len(x), *torch.randint(0, len(x), (4,)).tolist()})
    assert torch.equal(torch.cat([run(made, x[a:b], routed[a:b], finish) for a, b in pairwise(cuts)]), whole), cuts
    order = torch.randperm(len(x))
    assert torch.equal(run(made, x[order], routed[order], finish), whole[order]), "another order"


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize(
    ("experts", "k", "hidden", "middle", "rows"), [(5, 3, 37, 21, 19), (16, 2, 64, 48, 70), (1, 1, 8, 3, 2)]
)
def test_experts_in_floats(experts: int, k: int, hidden: int, middle: int, rows: int, finish: str) -> None:
    made, x = mixture(experts, hidden, middle, biased=True, gated=finish != "relu2"), torch.randn(rows, hidden)
    routed = route(torch.randn(rows, experts), k, "softmax_top")
    whole, exact = run(made, x, routed, finish), twin(made, x, routed, finish)
    assert (whole - exact).abs().max() < 1e-5 * exact.abs().max()
    companies(made, x, routed, finish, whole)
    before = torch.randn_like(x)
    assert (run(made, x, routed, finish, before) - (before + 0.5 * exact)).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    "formats", [("Q4_K",), ("MXFP4",), ("Q4_K+Q6_K", "Q4_K+Q8_0", "IQ4_NL+float32"), ("float32+Q4_0",)]
)
def test_experts_in_blocks(formats: tuple[str, ...]) -> None:
    made, x = mixture(6, 256, 512, formats, biased=True), spread(40, 256)
    routed = route(torch.randn(40, 6), 3, "top_softmax")
    whole, exact = run(made, x, routed, "clamped"), twin(made, x, routed, "clamped", rounded=True)
    assert (whole - exact).norm() / exact.norm() < 1e-3
    companies(made, x, routed, "clamped", whole)
    for isa in native.isas():
        for threads in (1, 2, 3):
            native.set_num_threads(threads)
            if native.use_isa(isa):
                assert torch.equal(run(made, x, routed, "clamped"), whole), (isa, threads)


def test_an_expert_of_all_rows_and_one_of_none() -> None:
    made, x = mixture(4, 64, 32), torch.randn(130, 64)
    routed = torch.tensor([[2.0, 0.7]]).repeat(130, 1)
    routed[7, 0] = 0
    whole = run(made, x, routed, "silu")
    assert (whole - twin(made, x, routed, "silu")).abs().max() < 1e-5
    companies(made, x, routed, "silu", whole)


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    made, x = mixture(4, 256, 256, ("Q4_K",)), torch.randn(9, 256)
    routed = route(torch.randn(9, 4), 2, "softmax_top")
    clean = run(made, x, routed, "silu")
    x[4, 3] = torch.nan
    spoiled = run(made, x, routed, "silu")
    assert spoiled[4].isnan().all()
    others = [n for n in range(9) if n != 4]
    assert torch.equal(spoiled[others], clean[others])
