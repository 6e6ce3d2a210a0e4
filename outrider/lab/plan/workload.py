"""What is asked of a fleet: requests per second, and the lengths of prompts and answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Tokens of a text: the same for all, equally likely from `low` to `high`, or geometric with mean `low`.

    kind: fixed, uniform or geometric.
    """

    kind: str
    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2 if self.kind == "uniform" else float(self.low)

    @property
    def most(self) -> int:
        """A length that almost no text exceeds: of a geometric one, the 99th percentile."""
        return round(4.6 * self.low) if self.kind == "geometric" else self.high

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Lengths of so many texts: int64 [count]."""
        if self.kind == "uniform":
            return rng.integers(self.low, self.high + 1, count)
        if self.kind == "geometric":
            return rng.geometric(1 / self.low, count)
        return np.full(count, self.low)

    @classmethod
    def of(cls, text: str, option: str) -> Lengths:
        """`300`, `100-500`, or `~300` for a geometric length with this mean. Raises ValueError. option: for the message."""
        found = re.fullmatch(r"(~?)(\d+)(?:-(\d+))?", text.strip())
        low, high = (int(found[2]), int(found[3] or found[2])) if found else (0, 0)
        if not found or low < 1 or high < low or (found[1] and found[3]):
            raise ValueError(
                f"{option} is a number of tokens (300), a range (100-500), or ~300 for very different lengths with this "
                f"mean; got {text!r}"
            )
        return cls("geometric" if found[1] else "uniform" if found[3] else "fixed", low, high)

    def __str__(self) -> str:
        return {"fixed": f"{self.low}", "uniform": f"{self.low}-{self.high}", "geometric": f"~{self.low}"}[self.kind]


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, and its tokens."""

    at: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Demand:
    """Requests of independent users: Poisson arrivals. qps: requests per second. Raises ValueError for no requests."""

    qps: float
    prompt: Lengths
    output: Lengths

    def __post_init__(self) -> None:
        if not self.qps > 0 or self.qps == float("inf"):
            raise ValueError(f"--qps is requests per second, more than 0, got {self.qps:g}")

    def arrivals(self, count: int, seed: int, share: float = 1.0) -> Iterator[Arrival]:
        """The first requests. share: of the requests per second."""
        rng = np.random.default_rng([seed, 0])
        times = rng.exponential(1 / (self.qps * share), count).cumsum()
        prompts, outputs = self.prompt.draw(rng, count), self.output.draw(rng, count)
        for at, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            yield Arrival(at, prompt, output)
