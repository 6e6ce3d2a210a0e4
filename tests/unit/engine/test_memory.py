"""Memory is counted before it is taken: what cannot fit is refused at the start, and what fits never grows."""

from __future__ import annotations

import re

import pytest
from engines import LONG, engine, read, run, settled
from helpers import VOCAB, request
from light import torch

from outrider.drafters import ModelDrafter
from outrider.engine.memory import Memory, per_token
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes
from outrider.testing.toy import ToyModel


def models() -> tuple[ToyModel, ModelDrafter]:
    return ToyModel(VOCAB, seed=0, max_length=200), ModelDrafter(ToyModel(VOCAB, seed=1, max_length=200), 3, 200)


def need(target: ToyModel, drafter: ModelDrafter) -> int:
    return (per_token(target) + per_token(drafter.levels.model)) * 3 * (200 + SCRATCH)  # type: ignore[arg-type]


def test_what_fits_is_taken_at_once_and_never_grows() -> None:
    target, drafter = models()
    eng = engine(target, drafter, rows=3, memory_limit=need(target, drafter) + 5000, prefix_bytes=5000)
    taken = eng.stats.kv_bytes
    assert taken == need(target, drafter) == eng.stats.memory_limit - 5000  # type: ignore[operator]
    run(eng, [read(request([1, 2, i + 1] * 20, LONG.with_(max_tokens=130), i)) for i in range(5)])
    assert eng.stats.kv_bytes == taken
    assert 0 < eng.stats.prefix_bytes <= 5000
    settled(eng)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    target, drafter = models()
    bytes_needed = need(target, drafter)
    with pytest.raises(ValueError, match="3 texts of 200 tokens may take") as refused:
        engine(target, drafter, rows=3, memory_limit=bytes_needed // 2, prefix_bytes=0)
    message = str(refused.value)
    assert f"--kv-cache-memory-bytes {bytes_needed} would fit" in message
    assert "--max-num-seqs 1" in message
    length = int(re.search(r"--max-model-len (\d+)", message)[1])  # type: ignore[index]
    for longer in (0, 1):  # the longest that fits, and one more
        own = ToyModel(VOCAB, seed=0, max_length=length + longer)
        memory = Memory(own, SlotCache(3, length + longer), [ModelDrafter(own, 3, length + longer)])
        if longer:
            with pytest.raises(ValueError, match="would fit"):
                memory.bound(bytes_needed // 2, 0)
        else:
            memory.bound(bytes_needed // 2, 0)
    with pytest.raises(ValueError, match=r"or a smaller --prefix-cache") as refused:
        engine(target, drafter, rows=3, memory_limit=bytes_needed, prefix_bytes=bytes_needed * 2)
    assert "--max-model-len" not in str(refused.value)


@pytest.mark.parametrize(("share", "length"), [(2.0, 1000), (1.0, 1000), (0.5, 468), (0.001, 256)])
def test_texts_are_as_long_as_fits_in_the_room(share: float, length: int) -> None:
    """Of each slot one. For a server that did not ask, nothing is shortened."""
    target = ToyModel(VOCAB, seed=0, max_length=1000)
    drafter = ModelDrafter(ToyModel(VOCAB, seed=1, max_length=1000), 3, 1000)
    most = (per_token(target) + per_token(drafter.levels.model)) * 3 * (1000 + SCRATCH)  # type: ignore[arg-type]
    fitted = engine(target, drafter, rows=3, room=int(share * most) + 5000, prefix_bytes=5000)
    assert fitted.decoder.max_length == length
    assert fitted.memory.most <= share * most or length == 256
    fitted.close()
    free = engine(target, drafter, rows=3, prefix_bytes=5000)
    assert free.decoder.max_length == 1000
    free.close()


def test_the_cache_of_a_draft_model_ends_with_its_window() -> None:
    """What it does not take is left for longer texts of the target."""
    target, drafter = ToyModel(VOCAB, seed=0, max_length=10000), ModelDrafter(ToyModel(VOCAB), 3, 100)
    memory, each, own = (
        Memory(target, SlotCache(3, 10000), [drafter]),
        per_token(target),
        per_token(drafter.levels.model),
    )
    assert memory.most == 3 * (each * (10000 + SCRATCH) + own * (100 + SCRATCH))
    room = 3 * (each * (5000 + SCRATCH) + own * (100 + SCRATCH))
    assert [memory.longest(room - less) for less in (0, 1)] == [5000, 4999]


def test_a_machine_without_the_memory_says_so_at_the_start() -> None:
    class Short(ToyModel):
        def forward(self, nodes, **options):
            if nodes.cache.capacity > 100:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            return super().forward(nodes, **options)

    with pytest.raises(ValueError, match="no memory for 3 texts of 200 tokens"):
        engine(Short(VOCAB, seed=0, max_length=200), rows=3, memory_limit=10**9)


def test_the_bytes_of_a_token_are_those_that_a_cache_grows_by() -> None:
    model = ToyModel(VOCAB, seed=0, max_length=300)
    cache = model.new_cache(2, 300)
    model.forward(Nodes(torch.zeros(1, 1, dtype=torch.long), cache, [0]))
    before, capacity = cache.bytes, cache.capacity
    cache.reserve([0], capacity + 1)
    assert (cache.bytes - before) == 2 * per_token(model) * (cache.capacity - capacity) > 0
