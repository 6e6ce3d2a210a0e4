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


def pairs(axes: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which each two values of two axes meet at least once. Each case has one value of each axis.

    A case begins with two values that have not met. Of each other axis it takes the value that meets most new ones.
    """
    draw, names = random.Random(seed), list(axes)
    open_ = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases = list[dict[str, Any]]()
    while open_:
        places = dict(min(open_, key=sorted))
        for name in draw.sample(names, len(names)):
            if name not in places:
                met = places.items()
                gains = [sum(frozenset(((name, i), at)) in open_ for at in met) for i in range(len(axes[name]))]
                places[name] = draw.choice([i for i, gain in enumerate(gains) if gain == max(gains)])
        open_ -= {frozenset(two) for two in itertools.combinations(places.items(), 2)}
        cases.append({name: axes[name][places[name]] for name in names})
    return cases
