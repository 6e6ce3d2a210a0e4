"""What a head reads of a long text: the newest features before a draft, and never more than its cache holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from heads import GOLDEN, small_target
from helpers import Loop, configured, plain_texts, request
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.types import Budget
from outrider.drafters.heads import features
from outrider.drafters.heads.features import FeatureCache
from outrider.engine.scheduler import Scheduler
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes
from outrider.testing import contract
from outrider.testing.contract import context

TARGET, NEWEST, KINDS = small_target(), features.NEWEST, ["eagle31", "peagle", "dspark"]
PROMPT = [(5 * n * n + 3) % 127 for n in range(130)]
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def newest(whole_texts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "NEWEST", NEWEST)


def made(name: str, max_length: int = 256) -> Any:
    return configured({"model": str(GOLDEN / name)}, TARGET, 2, max_length)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [1, 2, NEWEST, 40, 130])
def test_nothing_is_read_before_the_first_token_and_little_after_it(name: str, length: int) -> None:
    config = {"model": str(GOLDEN / name), "controller": "fixed", "num_speculative_tokens": 2}
    llm = LLM(TARGET, speculative_config=config, max_num_seqs=1, max_model_len=256)
    reader: Any = next(iter(llm.drafters.values()))
    llm.decoder.chunk = 50
    asked = request(PROMPT[:length], GREEDY)
    scheduler, held, drafted = Scheduler(llm.decoder, llm.runtime.roster), list[int](), list[int]()
    for step, _ in scheduler.run(sequences := scheduler.add([asked])):
        if step is not None:
            held.append(reader.levels.cache.length[0])
            drafted.append(step.draft.nodes - 1)
    if length > 64:
        assert held[0] == drafted[0] == 0, "the first token waits for no draft"
    assert drafted[1] == 2
    assert held[1] <= NEWEST + 3
    assert [sequences[0].output] == plain_texts(TARGET.model, [asked])


@pytest.mark.parametrize("name", KINDS)
def test_a_head_drafts_behind_any_text(name: str) -> None:
    """Its cache is full many times. What it holds then is what a new head with the newest features holds."""
    reader = made(name, 50)
    loop = Loop(TARGET.model, reader, controller=Fixed(4), num_slots=2, max_length=256)
    asked = [request(PROMPT[:n], GREEDY, seed=n) for n in (130, 40, 3)]
    rows = loop.generate(asked)
    assert [row.output for row in rows] == plain_texts(TARGET.model, asked, end_ids=())
    for row in rows:
        assert all(drafted == 4 for drafted in row.counts.drafted[2:-4])
    assert reader.levels.cache.capacity < 50 + 64 + 32
    assert not reader.levels.features.waiting


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_depends_on_the_newest_features_alone(name: str) -> None:
    """However they came, and whatever was read before."""
    reader, other = made(name), made(name)
    nodes = Nodes(np.array([PROMPT[:-1]]), TARGET.model.new_cache(1, 130), [0])
    out = TARGET.model.forward(nodes, taps=reader.taps).features
    assert out is not None
    reader.start(0, PROMPT[:30], 0, out[0, :29])
    reader.propose(context([0], [PROMPT[:30]], [Budget(3)], contract.GREEDY))
    for n in range(29, 129):  # steps without drafts
        reader.start(0, PROMPT[: n + 2], n, out[0, n : n + 1])
        assert len(reader.levels.features.waiting[0]) <= NEWEST
    other.start(0, PROMPT, 129 - NEWEST, out[0, -NEWEST:])
    drafts = [one.propose(context([0], [PROMPT], [Budget(3)], contract.GREEDY)).host for one in (reader, other)]
    assert drafts[0] == drafts[1]
    assert len(drafts[0][0]) == 4


@pytest.mark.parametrize("name", KINDS)
def test_features_behind_a_gap_start_over(name: str) -> None:
    """As after a prefix that the prefix cache held: what is before the gap does not belong to them."""
    held, some = made(name).levels.features, np.zeros((9, 96), np.float32)
    held.add(0, some, 0)
    held.add(0, some, 20)
    assert (len(held.waiting[0]), held.cache.length[0]) == (9, 0)
    assert held.room(0, [1] * 30) > 0 == held.room(0, [1] * 29)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60))
def test_the_newest_features_stay(sizes: list[int], count: int) -> None:
    every = np.arange(float(sum(sizes)))[:, None]
    held = FeatureCache(SlotCache(1, 500), pairs=True)
    for part in np.split(every, np.cumsum(sizes)[:-1]):
        held.add(0, part, int(part[0, 0]))
    newest = every[-min(NEWEST, len(every)) :]
    assert held.newest(0).tolist() == newest.tolist()
    assert held.pair_tokens(0, range(len(every) + 1)) == (newest[:, 0] + 1).tolist()
    count = min(count, len(newest))
    held.keep(0, count)
    assert [row.tolist() for row in held.waiting[0]] == newest[len(newest) - count :].tolist()
