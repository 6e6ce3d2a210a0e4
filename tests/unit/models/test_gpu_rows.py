"""What is copied to a GPU and from it: the rows of a forward, and logits for those who read them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import TargetTree, decoder, request

from outrider.core.params import SamplingParams
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.models.base import LazyArray, Output, Pending, Verification
from outrider.models.cache import SlotCache
from outrider.models.gpu.rows import RowBuffer, Rows
from outrider.testing.toy import ToyModel


class LazyToy(ToyModel):
    """Its logits are far away, and it counts how often they are fetched."""

    reads = 0

    def step(self, cache: SlotCache, slots: list[int], check: Verification, *, taps: tuple[int, ...] = ()) -> Pending:
        (logits, features), judge, _ = super().step(cache, slots, check, taps=taps)

        def read() -> np.ndarray:
            self.reads += 1
            return np.asarray(logits)

        return Pending(Output(cast("Any", LazyArray(read)), features), judge)


@pytest.mark.parametrize(
    ("drafter", "asked", "reads"),
    [
        (lambda toy: None, {}, 0),
        (lambda toy: NgramDrafter(1, 3), {}, 0),
        (lambda toy: TargetTree(toy), {}, 0),
        (lambda toy: None, {"logprobs": 2}, 1),
        (lambda toy: TokenRecyclingDrafter(11, 4), {}, 1),
    ],
)
def test_logits_are_fetched_by_those_who_read_them(drafter: Any, asked: dict[str, Any], reads: int) -> None:
    toy, usual = LazyToy(11), ToyModel(11)
    wanted = request([1, 2, 3], SamplingParams(max_tokens=12, **asked), 5)
    texts = []
    for model in (toy, usual):
        steps = [step for step, _ in decoder(model, drafter(model)).steps([wanted]) if step]
        texts.append([(c.tokens, c.nodes) for step in steps for c in step.commits])
        if model is toy:
            assert reads * (len(steps) - 1) <= toy.reads <= reads * len(steps)  # a last step may ask nothing
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("entries", "nodes", "width"), [(1, 1, 0), (3, 5, 0), (4, 8, 6), (32, 8, 8)])
def test_the_fields_of_rows_are_apart(entries: int, nodes: int, width: int) -> None:
    buffer = RowBuffer("cpu", 256, 64)
    rows, here = buffer.views(entries, nodes, width, 1024)
    fields = [field for field in vars(rows).values() if isinstance(field, torch.Tensor)]
    places = [
        range(t.storage_offset() * t.element_size(), t.storage_offset() * t.element_size() + t.nbytes) for t in fields
    ]
    assert all(place.start % 16 == 0 for place in places)
    assert sum(map(len, places)) == len(set().union(*places))
    assert max(place.stop for place in places) <= 4 * rows.size <= 4 * Rows.room(entries * nodes, width)
    for name, array in here.items():
        array[...] = np.arange(array.size).reshape(array.shape) - 3
        assert not torch.equal(getattr(rows, name), torch.from_numpy(array))
    buffer.send(rows.size)
    assert all(torch.equal(getattr(rows, name), torch.from_numpy(array)) for name, array in here.items())
