"""Noise is Philox as published, a function of its names alone, and behaves as chance between them."""

import itertools

import numpy as np
import pytest
from scipy import stats

from outrider.core.noise import TOP, Noise, Stream, philox4x32
from outrider.kernels import cpu as native

N = 100_000
ZEROS, ONES = [0] * 4, [0xFFFFFFFF] * 4
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (ZEROS, [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ONES, ONES[:2], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (PI, [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_known_answers(counter, key, words):
    """The vectors of Random123 for philox4x32, 10 rounds. The native noise of these four tokens has its logarithms."""
    result = philox4x32(tuple(np.array([c]) for c in counter), tuple(np.array([k]) for k in key))
    assert [int(w[0]) for w in result] == words
    if native.available():
        (_, position, stream, step), ids = counter, np.arange(4) + 4 * counter[0]
        found = np.empty(4, np.float32)
        native.library().gumbel_at(key[0] | key[1] << 32, stream, step, position, ids.ctypes.data, 4, found.ctypes.data)
        uniform = np.minimum(((np.array(words) + 0.5) * 2.0**-32).astype(np.float32), TOP)
        np.testing.assert_allclose(found, -np.log(-np.log1p(-uniform)), rtol=1e-5, atol=1e-6)


def rows(seeds, steps=None):
    seeds = np.array(seeds)
    return Noise(seeds, np.zeros_like(seeds) if steps is None else np.array(steps))


def at(*positions):
    return np.array(positions)


@pytest.mark.parametrize("few", [0, 64])
def test_the_layout_of_counter_and_key(few, monkeypatch):
    """index // 4, position, stream, step; the seed's low word first. Stored traces and the native kernels rely on it."""
    monkeypatch.setattr("outrider.core.noise.FEW", few)
    seed, step, position = 0x1234567890ABCDEF, 5, 9
    words = rows([seed], [step]).words(Stream.ACCEPT, at(position), 10)[0]
    for group in range(3):
        counter = tuple(np.array([c]) for c in (group, position, Stream.ACCEPT.value, step))
        block = philox4x32(counter, (np.array([0x90ABCDEF]), np.array([0x12345678])))
        got = words[4 * group : 4 * group + 4].tolist()
        assert got == [int(w[0]) for w in block][: len(got)]
    assert words.dtype == np.int64
    assert rows([seed]).uniform(Stream.TOKEN, at(1), 6).dtype == np.float32


def test_the_values_of_streams_are_fixed():
    assert {s.name: s.value for s in Stream} == {"TOKEN": 0, "DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3}


def test_seeds_are_64_bits_negative_ones_included():
    seeds = [0, 1, -1, 2**32, 2**63 - 1, -(2**63)]
    words = rows(seeds).words(Stream.TOKEN, np.zeros(6, np.int64), 4)
    assert len({tuple(w) for w in words.tolist()}) == 6


def test_a_longer_request_begins_with_a_shorter_one():
    noise = rows([3, 4])
    long = noise.uniform(Stream.ACCEPT, at(7, 8), 23)
    for n in range(24):
        assert np.array_equal(noise.uniform(Stream.ACCEPT, at(7, 8), n), long[:, :n])


@pytest.mark.parametrize("kind", ["uniform", "gumbel"])
def test_a_row_is_the_same_in_any_batch(kind):
    """No neighbour effect: alone, in another order, selected, beside other rows at other places."""
    seeds, steps, position = np.array([5, 5, 9, -2]), np.array([0, 3, 1, 2]), at(1, 1, 400, 70_000)
    noise = Noise(seeds, steps)
    together = getattr(noise, kind)(Stream.DRAFT, position, 33)
    for b in range(4):
        alone = getattr(Noise(seeds[b : b + 1], steps[b : b + 1]), kind)(Stream.DRAFT, position[b : b + 1], 33)
        assert np.array_equal(alone[0], together[b])
    order = [2, 0, 3, 1]
    assert np.array_equal(getattr(noise.select(order), kind)(Stream.DRAFT, position[order], 33), together[order])


def test_only_token_ignores_the_step():
    now, later = rows([1, 2], [0, 0]), rows([1, 2], [1, 7])
    for stream in Stream:
        same = np.array_equal(now.words(stream, at(5, 5), 8), later.words(stream, at(5, 5), 8))
        assert same == (stream is Stream.TOKEN)
        same = np.array_equal(now.gumbel(stream, at(5, 5), 8), later.gumbel(stream, at(5, 5), 8))
        assert same == (stream is Stream.TOKEN)


def test_no_two_names_share_a_number():
    """Every stream, position, step and seed of a small grid: all words differ from each other (but TOKEN over steps)."""
    words = []
    for stream, position, step in itertools.product(Stream, range(12), range(6)):
        if stream is Stream.TOKEN and step:
            continue
        words += rows([0, 1, 2, 2**32], [step] * 4).words(stream, np.full((4,), position), 8).reshape(-1, 4).tolist()
    blocks = {tuple(w) for w in words}
    assert len(blocks) == len(words) == (3 * 6 + 1) * 12 * 4 * 2


def pair(first, second):
    """p-value of independence of two vectors of uniforms, on an 8 x 8 grid."""
    table = np.histogram2d(first.ravel(), second.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
    return stats.chisquare(table.ravel()).pvalue


SEEDS = np.arange(N // 4)
HERE = np.full_like(SEEDS, 100)


def numbers(stream=Stream.ACCEPT, position=HERE, step=0, seeds=SEEDS):
    return Noise(seeds, np.full_like(seeds, step)).uniform(stream, position, 4)


@pytest.mark.parametrize(
    "other",
    [
        *[pytest.param(lambda s=s: numbers(s), id=f"stream {s.name}") for s in Stream if s is not Stream.ACCEPT],
        pytest.param(lambda: numbers(position=HERE + 1), id="next position"),
        pytest.param(lambda: numbers(position=HERE + 64), id="later position"),
        pytest.param(lambda: numbers(step=1), id="next step"),
        pytest.param(lambda: numbers(seeds=SEEDS + N), id="other rows"),
        pytest.param(lambda: numbers(seeds=SEEDS + 1), id="next row"),
        pytest.param(lambda: np.roll(numbers(), 1, 1), id="next index"),
        pytest.param(lambda: numbers(position=HERE + 1, step=1), id="next position and step"),
    ],
)
def test_streams_positions_steps_rows_and_indices_are_independent(other):
    assert pair(numbers(), other()) > 1e-3


def test_the_test_of_independence_sees_a_shared_number():
    shared = numbers()
    mixed = np.where(numbers(Stream.DRAFT) < 0.05, shared, numbers(Stream.RESIDUAL))  # one in twenty
    assert pair(shared, mixed) < 1e-6


def test_uniform_is_uniform():
    u = numbers().flatten()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    # one row over many indices too
    assert stats.kstest(rows([11]).uniform(Stream.TOKEN, at(3), N)[0], "uniform").pvalue > 1e-3


def test_uniform_and_gumbel_are_finite_at_both_ends():
    class Fixed(Noise):
        def words(self, stream, position, n):
            return np.array([[0, 1, 0xFFFFFF7F, 0xFFFFFFFE, 0xFFFFFFFF]])

    u = Fixed(np.array([0]), np.array([0])).uniform(Stream.TOKEN, at(0), 5)[0]
    assert 0 < u[0] < u[1] < 1e-9
    assert (u[2:] < 1).all()
    assert u[-1] == TOP
    assert np.isfinite(-np.log(-np.log1p(-u))).all()


def test_gumbel_is_gumbel():
    g = rows(range(8)).gumbel(Stream.TOKEN, np.full((8,), 5), N // 8).flatten().astype(np.float64)
    assert abs(g.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * N)
    assert abs(g.var() - np.pi**2 / 6) < 0.05  # standard error 0.011
    assert abs(stats.skew(g) - 1.13955) < 0.07
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-3


@np.errstate(divide="ignore")
def test_gumbel_draws_from_the_distribution():
    probs = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0])
    token = (np.log(probs) + rows(range(40_000)).gumbel(Stream.TOKEN, np.full((40_000,), 5), 6)).argmax(1)
    counts = np.bincount(token, minlength=6)
    assert counts[5] == 0
    assert stats.chisquare(counts[:5], probs[:5] * 40_000).pvalue > 1e-3


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
@pytest.mark.parametrize("n", [1, 4, 7, 1000])
def test_native_noise_is_the_same_noise(n, monkeypatch):
    """The same words to the bit; the logarithms may differ in their last places."""
    monkeypatch.setattr("outrider.core.noise.FEW", 0)  # words by operations on arrays
    noise, position = rows([7, -3, 2**40], [0, 2, 2**31]), at(1, 70_000, 2**31)
    for stream in Stream:
        words = noise.words(stream, position, n)
        expected = -np.log(-np.log1p(-noise.uniform(stream, position, n).astype(np.float64)))
        for b, key in enumerate(noise.keys(stream, position)):
            assert np.array_equal(native.words(*key, n), words[b])
        np.testing.assert_allclose(noise.gumbel(stream, position, n).astype(np.float64), expected, atol=2e-6, rtol=2e-6)
        some = np.arange(n)[n // 3 :: 2].copy()
        assert np.array_equal(noise.gumbel(stream, position, n, some), noise.gumbel(stream, position, n)[:, some])
