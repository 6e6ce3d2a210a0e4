"""The promise on real weights, with the built-in pair: every drafter, every precision, not one token that differs.

Each drafter has float32 here, and each precision some drafters; under `long`, all pairs and 19,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from crossed import crossed
from helpers import Loop, counts

from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import ModelDrafter, NgramDrafter, NoDraft, SuffixDrafter
from outrider.drafters.base import Drafter
from outrider.engine.request import Request, Sequence
from outrider.kernels import cpu as native
from outrider.models.load import Loaded, load
from outrider.testing.stubs import Noisy, Wrong

ROWS, TOKENS, LENGTH = 8, 60, 340
STARTS = [
    "def quicksort(xs):\n",
    "import os\nimport sys\n\n\nclass Config:\n",
    "    def __init__(self, name, value):\n        self.name = name\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    '"""Utilities for reading files."""\n\nfrom pathlib import Path\n',
    "x = [1, 2, 3]\n",
    "class Node:\n    def __init__(self, left, right):\n",
    "# " + "a long comment, so that rows differ in length " * 6 + "\n",
]


@cache
def target(precision: str) -> Loaded:
    """precision: of the weights, and after a comma that of keys and values."""
    weights, _, cells = precision.partition(", ")
    kind = {"quantization": weights} if weights in ("int8", "int4") else {"dtype": weights}
    return load("builtin:code", **kind, kv_cache_dtype=cells or "auto")


def requests(loaded: Loaded) -> list[Sequence]:
    """Half greedy, half sampled, side by side in the batches."""
    out = []
    for i, start in enumerate(STARTS):
        params = SamplingParams(temperature=i % 2, max_tokens=TOKENS, ignore_eos=True)
        out.append(Request(i, loaded.tokenizer(start)["input_ids"], params, seed=i))  # type: ignore[misc]
    return out


@cache
def expected(weights: str) -> list[list[int]]:
    """Plain decoding, one sequence at a time."""
    loaded = target(weights)
    engine = Loop(loaded.model, NoDraft(), num_slots=1, max_length=LENGTH)
    return [row.output for row in engine.generate(requests(loaded))]


def self_draft(weights: str) -> Drafter:
    return ModelDrafter(target(weights).model, ROWS, LENGTH)


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "none, in a batch": lambda weights: NoDraft(),
    "draft_model": lambda weights: ModelDrafter(load("builtin:code-draft").model, ROWS, LENGTH),
    "quantized_self": lambda weights: self_draft("int4"),
    "self": self_draft,
    "ngram": lambda weights: NgramDrafter(),
    "suffix": lambda weights: SuffixDrafter(),
    "wrong": lambda weights: Wrong(),
    "noisy": lambda weights: Noisy(self_draft(weights), 0.8, 8192),
}


@pytest.mark.skipif(not native.available(), reason="bit-identical rows need the native kernels")
@pytest.mark.parametrize(
    ("weights", "name"),
    [
        *crossed(["float32"], DRAFTERS, share=1.0),
        *crossed(["bfloat16", "int8", "bfloat16, int8", "float32, bfloat16"], DRAFTERS, share=0.0),
    ],
)
def test_no_token_differs(weights: str, name: str) -> None:
    loaded = target(weights)
    engine = Loop(loaded.model, DRAFTERS[name](weights), controller=Fixed(5), num_slots=ROWS, max_length=LENGTH)
    rows, steps = {}, []
    for step, moved in engine.steps(requests(loaded)):
        steps += [step] if step else []
        rows.update({row.id: row.output for row in moved if row.finish is not None})
    assert [rows[i] for i in range(len(STARTS))] == expected(weights)
    drafted, accepted = counts(steps)
    if name == "self":
        assert drafted == accepted > 300
    if name in ("draft_model", "noisy", "quantized_self"):
        assert 0 < accepted < drafted
