"""Every kind of head, in one table: the contract, texts that do not change, other verifiers, and an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossed import crossed
from engines import read, run
from heads import KINDS, PROMPT, drafter_of, head_folder, small_target
from helpers import Loop, plain_texts, request

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine import Engine
from outrider.engine.memory import Memory, per_token
from outrider.models.cache import SCRATCH
from outrider.testing.contract import check_drafter

TARGET = small_target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: head_folder(kind, tmp_path_factory.mktemp("head")) for kind in KINDS}


@pytest.fixture
def make(kind: str, folders: dict[str, Path]) -> Callable[[], TreeDrafter[Any]]:
    """Of the test's parameter `kind`."""
    return lambda: drafter_of(folders[kind], TARGET)


# -- the contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract(kind: str, make: Callable[[], TreeDrafter[Any]]) -> None:
    """Whether draws have the distribution that is declared is asked of one of each shape of lattice."""
    draws = kind in ("eagle31", "peagle", "medusa-vllm", "dspark")
    check_drafter(make, 128, draws=draws, feature_size=32 * len(make().taps))


# -- texts ----------------------------------------------------------------------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "hot": {"temperature": 1.4},
    "filtered": {"temperature": 1, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "frequency": {"temperature": 0, "frequency_penalty": 1.0},
    "bias": {"temperature": 1, "logit_bias": {3: 4.0, 50: -9.0}},
    "allowed": {"temperature": 1, "allowed_token_ids": [*range(5, 40)]},
    "min_tokens": {"temperature": 1, "min_tokens": 6, "stop_token_ids": [*range(30)]},
}


def requests(params: dict[str, Any]) -> list:
    lengths = enumerate((1, 2, 40, 9))
    return [request(PROMPT[i : i + n], SamplingParams(max_tokens=14, seed=i, **params), i) for i, n in lengths]


@pytest.mark.parametrize(("kind", "params"), crossed(KINDS, PARAMS, share=0.0))
def test_no_text_changes(params: str, make: Callable[[], TreeDrafter[Any]]) -> None:
    asked = requests(PARAMS[params])
    for width, nodes in ((1, None), (3, 9)):
        loop = Loop(TARGET.model, make(), controller=Fixed(4, width, nodes), num_slots=3, max_length=128)
        loop.chunk = 7
        rows = loop.generate(asked)
        assert [r.output for r in rows] == plain_texts(TARGET.model, asked, end_ids=())
        assert sum(map(sum, (r.counts.drafted for r in rows))) > 20 or params == "min_tokens"


@pytest.mark.parametrize(("kind", "verifier"), crossed(KINDS, ["rejection", "block", "traversal"], share=0.0))
def test_other_verifiers_run(verifier: str, make: Callable[[], TreeDrafter[Any]]) -> None:
    for width in (1, 1 if verifier == "block" else 2):
        loop = Loop(TARGET.model, make(), verifier, controller=Fixed(3, width), num_slots=3, max_length=128)
        rows = loop.generate(requests({"temperature": 1, "ignore_eos": True}))
        assert all(len(r.output) == 14 for r in rows)
        assert sum(map(sum, (r.counts.drafted for r in rows))) > 20 * width


class EveryThird:
    """A grammar whose next tokens depend on the token before them: one in three is forbidden."""

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> np.ndarray:
        last = extra[-1] if extra else tokens[-1]
        return (np.arange(128) + last) % 3 != 0

    def legal_prefix(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> int:
        legal = (self.allowed(tokens, start, extra[:n])[token] for n, token in enumerate(extra))
        return len(list(itertools.takewhile(bool, legal)))

    def forced_tokens(self, tokens: Sequence[int], start: int) -> list[int]:
        return []


@pytest.mark.parametrize(("kind", "width"), crossed(KINDS, [1, 3], share=0.0))
def test_an_engine_changes_no_text(kind: str, width: int, folders: dict[str, Path]) -> None:
    """Greedy and sampled texts: preempted, with stored prefixes, chunked prompts, a grammar, and two without the head."""
    config = {"model": str(folders[kind]), "controller": "fixed", "num_speculative_tokens": 3}
    config |= {"tree_width": 3, "tree_nodes": 7} if width > 1 else {}
    llm = LLM(TARGET, speculative_config=config, max_num_seqs=3, max_model_len=160, any_method=True)
    with closing(Engine(llm.runtime, kv_tokens=200, prefill_chunk=16)) as eng:
        asked = [
            request(PROMPT[:n], SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True), seed=n)
            for n, t in ((48, 1.0), (59, 0.0), (50, 0.7), (55, 1.0), (1, 1.0))
        ]
        asked[2] = replace(asked[2], mask=EveryThird())
        asked[3:] = [replace(one, method=method) for one, method in zip(asked[3:], ("none", "suffix"), strict=True)]
        texts = run(eng, [read(s) for s in asked])
        assert eng.scheduler.preemptions > 0
        assert eng.stats.prefix_hits > 0
        assert eng.roster.failures == 0
    assert [t.output for t in texts] == plain_texts(TARGET.model, asked, end_ids=())  # as the engine has them
    assert all(sum(texts[n].counts.drafted) > 10 for n in (0, 1, 2))
    assert sum(texts[3].counts.drafted) == 0
    assert all((a + b) % 3 for a, b in zip([PROMPT[49], *texts[2].output], texts[2].output, strict=False))


# -- memory and damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle31", "peagle", "dspark"])
def test_memory_is_counted_and_taken_at_once(make: Callable[[], TreeDrafter[Any]]) -> None:
    drafter, cache = make(), TARGET.model.new_cache(4, 256)
    each = per_token(TARGET.model) + per_token(drafter.levels.model)
    memory = Memory(TARGET.model, cache, [drafter])
    with pytest.raises(ValueError, match="would fit"):
        memory.bound(10_000, 0)
    memory.bound(each * 4 * (256 + SCRATCH), 0)
    assert memory.bytes == each * 4 * (256 + SCRATCH)
    assert drafter.levels.cache.length == [0] * 4


@pytest.mark.parametrize("kind", ["eagle31", "medusa-vllm", "dspark"])
def test_a_damaged_head_changes_no_text(make: Callable[[], TreeDrafter[Any]]) -> None:
    """Logits that are NaN draft nothing."""
    made = make()
    opens = made.levels.open
    made.levels.open = lambda *at: [part._replace(logits=part.logits * np.nan) for part in opens(*at)]
    asked = [request(PROMPT[:9], SamplingParams(max_tokens=8, temperature=1), 1)]
    loop = Loop(TARGET.model, made, controller=Fixed(3, 2), num_slots=1, max_length=160)
    rows = loop.generate(asked)
    assert [row.output for row in rows] == plain_texts(TARGET.model, asked, end_ids=())
    assert not sum(rows[0].counts.drafted)
