"""What a draft is expected to gain.

Acceptance is given as *survival*: survival[j - 1] is the probability that the first j draft tokens of a chain are all accepted.
For a tree it is the probability that a token at depth j is accepted. With the same probability alpha for every draft token,
survival[j - 1] = alpha ** j.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.shapes import BY_RANK, Shape


def geometric(alpha: float, depth: int) -> list[float]:
    """Survival if every draft token is accepted with probability alpha. Raises ValueError for alpha outside 0..1."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a probability, got {alpha}")
    return [alpha**j for j in range(1, depth + 1)]


def expected_tokens(survival: Sequence[float]) -> float:
    """Tokens that a step commits on average, the target's own included.

    With `geometric` it is (1 - alpha**(gamma + 1)) / (1 - alpha), Leviathan et al. 2211.17192, equation 1.
    """
    return 1 + sum(survival)


def speedup(survival: Sequence[float], draft: float, verify: float = 1.0) -> float:
    """Tokens per second over those of plain decoding.

    draft: time of the whole draft. verify: time of the target over all nodes. Both are in units of a plain step. With
    `geometric`, verify=1 and draft=gamma * c it is (1 - alpha**(gamma + 1)) / ((1 - alpha) * (gamma * c + 1)), Leviathan et
    al., theorem 3.8.
    """
    return expected_tokens(survival) / (draft + verify)


def expected_accepted(shape: Shape, by_rank: Sequence[float] = BY_RANK) -> float:
    """Expected accepted nodes per step: the sum of the values of the nodes; see `optimal_shape`."""
    value = [1.0]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        value.append(value[parent] * by_rank[rank])
    return sum(value[1:])
