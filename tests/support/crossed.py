"""Crosses of parameters: the corners and a seeded sample in each run, and the rest under the mark `long`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest


def crossed(*axes: Iterable[Any], share: float = 0.2) -> list[Any]:
    """Each case of a cross, for `parametrize`. Those outside of `kept` are marked `long`."""
    every = [list(axis) for axis in axes]
    few = kept([len(axis) for axis in every], share)
    cases = itertools.product(*(range(len(axis)) for axis in every))
    return [
        pytest.param(
            *(axis[n] for axis, n in zip(every, case, strict=True)), marks=() if case in few else pytest.mark.long
        )
        for case in cases
    ]


def kept(sizes: list[int], share: float) -> set[tuple[int, ...]]:
    """Places in a cross: the corners, each value of each axis at least once in a random case, and a random share of all.

    sizes: of the axes. The draw is the same in each run.
    """
    draw = random.Random(str(sizes))
    every = [*itertools.product(*map(range, sizes))]
    found = {*itertools.product(*({0, size - 1} for size in sizes))}
    for axis, size in enumerate(sizes):
        for value in range(size):
            if not any(case[axis] == value for case in found):
                found.add(draw.choice([case for case in every if case[axis] == value]))
    return found | {*draw.sample(every, round(share * len(every)))}
