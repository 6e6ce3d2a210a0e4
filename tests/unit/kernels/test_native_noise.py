"""Noise and token choice: the integers are Philox's, the floats those of `outrider.core.noise`, the choice argmax's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.kernels import cpu as native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

# counter, key, words: the test vectors of Random123 (kat_vectors, philox4x32 with 10 rounds)
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def from_words(words: Tensor) -> Tensor:
    u = ((words.double() + 0.5) * 2.0**-32).float().clamp_max(1 - 2**-24)
    return -torch.log(-torch.log1p(-u))


def gumbel_at(seed: int, stream: int, step: int, position: int, indices: Tensor) -> Tensor:
    """float32, of the shape of `indices`: `native.gumbel(...)[indices]` without the rest, so far beyond any vocabulary."""
    out = torch.empty(indices.shape)
    place = (position, indices.data_ptr(), indices.numel(), out.data_ptr())
    native.library().gumbel_at(seed & (2**64 - 1), stream, step, *place)
    return out


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    index, position, stream, step = counter
    seed = key[0] | key[1] << 32
    if index == 0:
        assert native.words(seed, stream, step, position, 4).tolist() == list(words)
    found = gumbel_at(seed, stream, step, position, torch.arange(4) + 4 * index)
    assert torch.allclose(found, from_words(torch.tensor(words)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, -1])
@pytest.mark.parametrize("n", [1, 31, 1003])
def test_the_twin_of_noise(seed: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.noise._FEW", 0)  # words by operations on tensors
    stored = seed if seed < 2**63 else seed - 2**64
    noise = Noise(torch.tensor([stored]), torch.tensor([5]))
    for stream, step in ((Stream.TOKEN, 0), (Stream.DRAFT, 5)):
        words = noise.words(stream, torch.tensor([123]), n)[0]
        assert torch.equal(native.words(seed, stream.value, step, 123, n), words)
        gumbel = native.gumbel(seed, stream.value, step, 123, n)
        assert torch.allclose(gumbel, from_words(words), rtol=1e-5, atol=2e-6)
        index = torch.randint(0, n, (3, 5))
        assert torch.equal(gumbel_at(seed, stream.value, step, 123, index), gumbel[index])


def test_extreme_words_stay_finite() -> None:
    g = native.gumbel(3, 0, 0, 0, 2_000_000)
    assert bool(g.isfinite().all())
    assert -2.82 < g.min() < -2.4
    assert 12 < g.max() < 23


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_argmax_of_scores_and_noise(scale: float, temperature: float) -> None:
    torch.manual_seed(0)
    for n in (1, 5, 32, 77, 4099):
        for position in range(8):
            scores = torch.randn(n) * scale
            scores[torch.rand(n) < 0.3] = float("-inf")
            expected = (scores / temperature + native.gumbel(9, 0, 0, position, n)).argmax()
            assert native.argmax_gumbel(scores, 9, 0, 0, position, temperature=temperature) == int(expected)
            assert native.argmax(scores) == int(scores.argmax())


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_scores_of_some_tokens_get_the_noise_of_these_tokens(scale: float, temperature: float) -> None:
    """The choice is that over all tokens, with -inf for those that are left out."""
    torch.manual_seed(0)
    for n in (1, 5, 32, 77, 4099):
        for position in range(8):
            ids = torch.randperm(3 * n)[:n].sort().values
            scores = torch.randn(n) * scale
            whole = torch.full((3 * n,), float("-inf")).index_copy_(0, ids, scores)
            expected = native.argmax_gumbel(whole, 9, 0, 0, position, temperature=temperature)
            found = native.argmax_gumbel(scores, 9, 0, 0, position, temperature=temperature, ids=ids)
            assert int(ids[found]) == expected
    with pytest.raises(ValueError, match=r"ids must be contiguous int64 \[4\]"):
        native.argmax_gumbel(torch.zeros(4), 9, 0, 0, 0, ids=torch.arange(3))


def test_the_lowest_index_wins_a_tie() -> None:
    scores = torch.zeros(1000)
    assert native.argmax(scores) == 0
    scores[[5, 77, 999]] = 3
    assert native.argmax(scores) == 5
    scores[:] = float("-inf")
    assert native.argmax(scores) == native.argmax_gumbel(scores, 1, 0, 0, 0) == 0
    scores[-1] = float("inf")
    assert native.argmax(scores) == native.argmax_gumbel(scores, 1, 0, 0, 0) == 999


@pytest.mark.parametrize("place", [0, 8, 999])
def test_nan_is_reported(place: int) -> None:
    scores = torch.zeros(1000)
    scores[place] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        native.argmax(scores)
    with pytest.raises(ValueError, match="NaN"):
        native.argmax_gumbel(scores, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="float32"):
        native.argmax(scores.double())
