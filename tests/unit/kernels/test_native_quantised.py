"""Linears over ggml's blocks: the weights are ggml's own, the integers exact, and rows have the bits they have alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ggml_blocks import BLOCK_FORMATS, random_blocks, spread
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

EIGHT_BITS = ("Q8_0", "IQ4_NL", "IQ4_XS")  # weights of 8 bits, so activations of 16


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    isa = native.isa()
    yield
    native.use_isa(isa)


def twin(x: Tensor, weights: Tensor, bits: int) -> Tensor:
    """float64: activations rounded in blocks of 32, then a plain product. What the kernel computes, but for float32 sums."""
    top = 127 if bits == 8 else 32767
    blocks = x.view(len(x), -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True)
    q = (blocks * torch.where(peak > 0, top / peak, 0)).round()
    return (q.double() * (peak / top).double()).view(len(x), -1) @ weights.double().T


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(37, 512), (16, 256), (64, 1536)])
def test_weights_are_those_of_ggml(name: str, shape: tuple[int, int]) -> None:
    blocks = random_blocks(name, *shape)
    assert torch.equal(native.Packed([blocks], "float32").dense(), blocks.dense())


@pytest.mark.parametrize(
    "name", [n for n in BLOCK_FORMATS if n not in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]
)
def test_a_last_unit_may_be_half_full(name: str) -> None:
    blocks = random_blocks(name, 20, 96)
    packed, x = native.Packed([blocks], "float32"), spread(5, 96)
    assert torch.equal(packed.dense(), blocks.dense())
    bits = 16 if name in EIGHT_BITS else 8
    assert (packed.linear(x) - twin(x, blocks.dense(), bits)).abs().max() < 1e-5 * x.abs().max()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_products_are_those_of_rounded_activations(name: str) -> None:
    blocks, x = random_blocks(name, 48, 1024), spread(9, 1024)
    x[3, 64:96] = 0
    y = native.Packed([blocks], "float32").linear(x)
    exact = twin(x, blocks.dense(), 16 if name in EIGHT_BITS else 8)
    assert (y - exact).abs().max() < 2e-6 * exact.abs().max() + 1e-6
    true = x.double() @ blocks.dense().double().T
    assert (y - true).norm() / true.norm() < (1e-4 if name in EIGHT_BITS else 2e-2)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_do_not_depend_on_their_number(name: str) -> None:
    packed, x = native.Packed([random_blocks(name, 80, 1280)], "float32"), spread(300, 1280)
    alone = torch.cat([packed.linear(row[None]) for row in x])
    for rows in (*range(1, 26), 31, 40, 64, 95, 96, 97, 128, 192, 193, 300):
        assert torch.equal(packed.linear(x[:rows]), alone[:rows]), rows
        assert torch.equal(packed.linear(x[-rows:]), alone[-rows:]), rows


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_largest_integers_do_not_overflow(name: str, isa: str) -> None:
    """Every bit of the weights set, or none, against the largest activations of either sign: no sum may wrap."""
    if not native.use_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    for fill in (0, 255, 170, 85):
        blocks = random_blocks(name, 16, 512, fill)
        packed = native.Packed([blocks], "float32")
        signs = torch.tensor([[1.0] * 512, [-1.0] * 512, [1.0, -1.0] * 256, [1.0, 1.0, -1.0, -1.0] * 128])
        exact = signs.double() @ blocks.dense().double().T
        assert (packed.linear(signs) - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-4, fill


def test_rows_in_another_order() -> None:
    blocks = random_blocks("Q4_K", 64, 512)
    order = torch.randperm(64)[:40]
    some = Blocks(blocks.data, blocks.format, blocks.columns, order)
    assert some.shape == (40, 512)
    assert torch.equal(native.Packed([some], "float32").dense(), blocks.dense()[order])


@pytest.mark.parametrize("paired", [False, True])
def test_formats_side_by_side(paired: bool) -> None:
    names = ("Q4_K", "Q6_K") if paired else ("Q4_K", "Q8_0", "Q6_K", "Q4_K")
    matrices: list[Tensor | Blocks] = [random_blocks(name, 48, 512) for name in names]
    if not paired:
        matrices.append(torch.randn(21, 512).bfloat16())
    biases = [
        torch.randn(len(m.dense() if isinstance(m, Blocks) else m)) if i % 2 == 0 else None
        for i, m in enumerate(matrices)
    ]
    packed, x = native.Packed(matrices, "bfloat16", biases, paired=paired), spread(30, 512)
    parts = [native.Packed([m], "bfloat16", [b]).linear(x) for m, b in zip(matrices, biases, strict=True)]
    alternating = torch.stack([p[:, :48].unflatten(1, (3, 16)) for p in parts], 2).flatten(1) if paired else None
    expected = torch.cat(parts, 1) if alternating is None else alternating
    assert torch.equal(packed.linear(x), expected)
    assert torch.equal(torch.cat([packed.linear(row[None]) for row in x]), expected)


def test_activations_that_are_not_finite_spoil_only_their_row() -> None:
    packed, x = native.Packed([random_blocks("Q4_K", 32, 512)], "float32"), spread(4, 512)
    clean = packed.linear(x)
    x[1, 7], x[2, 300] = torch.nan, torch.inf
    y = packed.linear(x)
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    tiny = torch.full((1, 512), 1e-38)
    assert (packed.linear(tiny) == 0).all()


def test_matrices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="IQ2_XS"):
        native.Packed([Blocks(torch.zeros(16, 74, dtype=torch.uint8), "IQ2_XS", 256)], "float32")
    with pytest.raises(ValueError, match="multiple of 16 outputs"):
        native.Packed([random_blocks("Q4_K", 20, 256), random_blocks("Q6_K", 16, 256)], "float32")
