"""Heads in the engine: memory that is counted before it is taken, and requests that each choose their own drafter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from engines import read, run
from heads import GOLDEN, small_target
from helpers import plain_texts, request

from outrider import LLM, SamplingParams
from outrider.drafters.heads.block.drafter import BlockLattice
from outrider.drafters.heads.block.files import read_block
from outrider.drafters.heads.eagle.drafter import Pairs, eagle_model
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine import Engine
from outrider.engine.memory import Memory, per_token
from outrider.models.cache import SCRATCH

TARGET = small_target()
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]


def eagle(damaged: bool = False) -> TreeDrafter[Pairs]:
    head = read_eagle(GOLDEN / "eagle31", TARGET)
    if damaged:
        head.tensors["lm_head.weight"] = torch.full_like(head.tensors["lm_head.weight"], torch.nan)
    return TreeDrafter(Pairs(eagle_model(head, TARGET.model, 160), 3, 160))


def block(damaged: bool = False) -> TreeDrafter[BlockLattice]:
    made = TreeDrafter(BlockLattice(read_block(GOLDEN / "dspark", TARGET), TARGET.model, 3, 160))
    if damaged:
        made.levels.model.logits = lambda z: torch.full((*z.shape[:-1], 128), torch.nan)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("make", [eagle, block])
def test_memory_is_counted_and_taken_at_once(
    make: Callable[[], TreeDrafter[Pairs] | TreeDrafter[BlockLattice]],
) -> None:
    drafter, cache = make(), TARGET.model.new_cache(3, 160)
    each = per_token(TARGET.model) + per_token(drafter.levels.model)  # type: ignore[arg-type]
    memory = Memory(TARGET.model, cache, [drafter])
    with pytest.raises(ValueError, match="would fit"):
        memory.bound(10_000, 0)
    memory.bound(each * 3 * (160 + SCRATCH), 0)
    assert memory.bytes == each * 3 * (160 + SCRATCH)
    assert drafter.levels.cache.length == [0, 0, 0]


def test_other_rows_without_a_head() -> None:
    """Some requests of a batch draft with the head, others with another method or with none."""
    llm = LLM(
        TARGET,
        speculative_config={"model": str(GOLDEN / "eagle31"), "controller": "fixed"},
        max_num_seqs=3,
        max_model_len=160,
        any_method=True,
    )
    with closing(Engine(llm.runtime, prefill_chunk=16)) as engine:
        params = SamplingParams(max_tokens=30, seed=5, temperature=1, ignore_eos=True)
        asked = [request(PROMPT[:n], params, seed=n) for n in (1, 40, 50, 59)]
        methods = (None, "none", "suffix", None)
        texts = run(engine, [read(s, method=method) for s, method in zip(asked, methods, strict=True)])
        assert engine.roster.failures == 0
    assert [t.output for t in texts] == plain_texts(TARGET.model, asked)
    assert sum(texts[3].counts.drafted) > 0
    assert sum(texts[1].counts.drafted) == 0


@pytest.mark.parametrize("make", [eagle, block])
def test_a_damaged_head_changes_no_text(make: Callable[..., TreeDrafter[Pairs] | TreeDrafter[BlockLattice]]) -> None:
    """Weights that give NaN draft nothing."""
    made = make(damaged=True)
    llm = LLM(TARGET, drafter=made, max_num_seqs=3, max_model_len=160)
    got = llm.generate([{"prompt_token_ids": PROMPT[:9]}], SamplingParams(max_tokens=8, temperature=1, seed=1))
    want = LLM(TARGET, max_model_len=160).generate(
        [{"prompt_token_ids": PROMPT[:9]}], SamplingParams(max_tokens=8, temperature=1, seed=1)
    )
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids
