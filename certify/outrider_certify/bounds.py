"""Statistics of a certificate: what a count can show, and what it could have shown.

All tests of one part share its error probability: each gets an equal piece (Bonferroni). The few distributions that are needed
are written here, because scipy alone is larger than everything else that a certificate needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

POWER = 0.95  # with which a deviation is said to be found


def chi2_tail(x: float, df: int) -> float:
    """P(X > x) for a chi-square X with `df` degrees of freedom: Q(1/2, x/2) or Q(1, x/2), and Q(a + 1, y) from Q(a, y)."""
    y = x / 2
    if y <= 0:
        return 1.0
    a, tail = (0.5, math.erfc(math.sqrt(y))) if df % 2 else (1.0, math.exp(-y))
    while a < df / 2:
        tail += math.exp(a * math.log(y) - y - math.lgamma(a + 1))
        a += 1
    return min(tail, 1.0)


def noncentral_chi2_tail(x: float, df: int, noncentrality: float) -> float:
    """P(X > x) for a noncentral chi-square X: chi-squares with df + 2j degrees, j drawn from a Poisson distribution."""
    mean, y = noncentrality / 2, x / 2
    weight, tail, total = math.exp(-mean), chi2_tail(x, df), 0.0
    for j in range(int(mean + 12 * math.sqrt(mean) + 24)):
        total += weight * min(tail, 1.0)
        weight *= mean / (j + 1)
        tail += math.exp((df / 2 + j) * math.log(y) - y - math.lgamma(df / 2 + j + 1))  # two degrees of freedom more
    return total


def where_zero(f: Callable[[float], float]) -> float:
    """The x > 0 at which a growing function is 0, to 12 digits, by bisection."""
    low, high = 0.0, 1.0
    while f(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) >= 0 else (middle, high)
    return high


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """The probability of counts as far from what is expected, or farther, if the expectation is right.

    Pearson's chi-square test. Cells that expect fewer than five are joined to one. counts, expected: float64 [cell].
    """
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5 and len(expected) > 1:
            last = int(np.argmin(expected[:-1]))
            counts[last], expected[last] = counts[last] + counts[-1], expected[last] + expected[-1]
            counts, expected = counts[:-1], expected[:-1]
    if len(counts) < 2:
        return 1.0
    return chi2_tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def total_variation_at_most(counts: np.ndarray, expected: np.ndarray, delta: float) -> float:
    """An upper bound of the total variation between the distribution behind the counts and the expected one.

    It holds with probability 1 - delta: the observed distance plus sqrt((k ln 2 + ln 1/delta) / 2n). That is Azuma's inequality
    for each of the 2^k sets of cells. So the tokens may depend on one another, as those of a text do.
    """
    n = counts.sum()
    if n == 0:
        return 1.0
    seen = 0.5 * float(np.abs(counts / n - expected / expected.sum()).sum())
    return min(seen + _half_width(len(counts), delta) / math.sqrt(n), 1.0)


def _half_width(cells: int, delta: float) -> float:
    """The part of the bound that shrinks with n, times sqrt(n)."""
    return math.sqrt((cells * math.log(2) + math.log(1 / delta)) / 2)


def spent(look: int) -> float:
    """The share of an error probability that look number 1, 2, ... may spend. All looks together spend 1 at most."""
    return 1 / (look * (look + 1))


def needed(cells: int, deviation: float, delta: float) -> int:
    """Samples after which a correct subject's bound is expected to be below a deviation."""
    typical = 0.4 * math.sqrt(cells)  # of the observed distance times sqrt(n), for equal cells
    return math.ceil(((typical + _half_width(cells, delta)) / deviation) ** 2)


def smallest_deviation(cells: int, n: float, alpha: float, power: float = POWER) -> float:
    """The smallest total variation that the chi-square test at alpha finds with this power.

    For cells of equal mass, half of them too large and half too small by the same amount: w = 2 TV.
    """
    if n <= 0:
        return 1.0
    df = cells - 1
    limit = where_zero(lambda x: alpha - chi2_tail(x, df))
    noncentrality = where_zero(lambda x: noncentral_chi2_tail(limit, df, x) - power)
    return min(0.5 * math.sqrt(noncentrality / n), 1.0)


def smallest_rate(n: int, confidence: float = 0.99) -> float:
    """The largest error rate of which n trials show none with probability 1 - confidence."""
    return 1.0 if n <= 0 else 1 - (1 - confidence) ** (1 / n)


def share_interval(hits: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = hits / n, z * z / n
    middle, half = share + spread / 2, z * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max((middle - half) / (1 + spread), 0.0), min((middle + half) / (1 + spread), 1.0)


def sign_p_value(only_first: int, only_second: int) -> float:
    """McNemar's exact test: the probability of a split as uneven, if both sides are as good."""
    n, few = only_first + only_second, min(only_first, only_second)
    return min(2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n, 1.0)


def two_sample_p_value(
    first: Sequence[Sequence[object]],
    second: Sequence[Sequence[object]],
    *,
    groups: Sequence[int] | None = None,
    shuffles: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """(squared MMD, p-value) between two samples of texts, with a Hamming kernel (Gao et al. 2410.20247).

    The kernel is the share of positions with equal tokens; a text that has ended equals only another that has. groups: the
    prompt of each pair of texts; only texts of one prompt are compared and exchanged. Both samples are equally long.
    """
    rng = np.random.default_rng(seed)
    groups = [0] * len(first) if groups is None else groups
    total, shuffled = 0.0, np.zeros(shuffles)
    for group in sorted(set(groups)):
        texts = [t for side in (first, second) for t, g in zip(side, groups, strict=True) if g == group]
        n = len(texts) // 2
        if n < 2:
            continue
        longest = max(map(len, texts), default=1) or 1
        names: dict[object, int] = {}
        table = np.array(
            [[names.setdefault(t, len(names) + 1) for t in text] + [0] * (longest - len(text)) for text in texts]
        )
        kernel = (table[:, None, :] == table[None, :, :]).mean(-1)
        np.fill_diagonal(kernel, 0.0)
        sign = np.array([1.0] * n + [-1.0] * n)
        total += float(discrepancies(kernel, sign[None])[0])
        shuffled += discrepancies(kernel, rng.permuted(np.tile(sign, (shuffles, 1)), axis=1))
    return total, float((1 + (shuffled >= total - 1e-12).sum()) / (1 + shuffles))


def discrepancies(kernel: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The squared MMD of each row of signs [splits, texts]: 1 for a text of one sample, -1 for one of the other."""
    n = signs.shape[1] / 2
    all_pairs, signed = kernel.sum(), ((signs @ kernel) * signs).sum(1)
    same, other = (all_pairs + signed) / 2, (all_pairs - signed) / 2
    return same / (n * (n - 1)) - other / (n * n)
