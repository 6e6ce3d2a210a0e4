"""What fails, fails alone: drafters, models, threads, readers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engines import LONG, TARGET, Gated, engine, read, run, settled, submit
from helpers import VOCAB, plain_texts, request, toy_drafters
from patience import PATIENCE

from outrider.core.outputs import Delta
from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter
from outrider.engine import EngineStopped
from outrider.testing.toy import ToyModel


class Raises(BaseDrafter):
    """Fails for one text and drafts well for the others."""

    def __init__(self, wrapped: Drafter, act: Callable[[DraftContext, Draft], Draft | None]) -> None:
        self.wrapped, self.act = wrapped, act

    def propose(self, batch: DraftContext) -> Draft:
        draft = self.wrapped.propose(batch)
        if any(tokens[0] == 9 for tokens in batch.tokens):
            return self.act(batch, draft)  # type: ignore[return-value]
        return draft

    def release(self, slot: int) -> None:
        self.wrapped.release(slot)


def _raise(batch: DraftContext, draft: Draft) -> Draft:
    raise RuntimeError("/secret/path")


NONSENSE = {
    "raises": _raise,
    "wrong root": lambda batch, draft: Draft((draft.tokens + 1) % VOCAB, draft.parents),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(NONSENSE))
def test_a_drafter_that_fails_loses_the_row_and_not_the_text(kind: str) -> None:
    requests = [request([first, 2, 3], LONG.with_(max_tokens=50), first) for first in (1, 9, 2)]
    eng = engine(drafter=Raises(toy_drafters(TARGET)["self"](), NONSENSE[kind]))
    results = run(eng, [read(r) for r in requests])
    assert [r.output for r in results] == plain_texts(TARGET, requests)
    assert results[0].counts.undrafted is None is results[2].counts.undrafted
    assert results[1].counts.undrafted is not None
    assert "failed" in results[1].counts.undrafted
    assert "secret" not in results[1].counts.undrafted
    assert results[0].counts.method != "none"
    assert results[0].counts.speculative.num_accepted_draft_tokens > 30  # the others are drafted for as before
    assert eng.stats.drafter_failures == 1
    settled(eng)


def test_a_law_that_is_no_law_loses_the_row_too() -> None:
    def spoil(batch: DraftContext, draft: Draft) -> Draft:
        assert draft.probs is not None
        return Draft(draft.tokens, draft.parents, draft.probs * float("nan"), draft.siblings)

    eng = engine(drafter=Raises(toy_drafters(TARGET)["draft_model"](), spoil), verifier="rejection")
    results = run(eng, [read(request([first, 2], LONG.with_(max_tokens=20))) for first in (9, 1)])
    assert [r.counts.undrafted is None for r in results] == [False, True]
    settled(eng)


def broken(how: Callable[[np.ndarray], None]) -> ToyModel:
    """A target that breaks for texts that begin with an 8."""

    class Broken(ToyModel):
        def forward(self, nodes, **options):
            out = super().forward(nodes, **options)
            for b, slot in enumerate(nodes.slots):
                if nodes.cache.layers[0][0][slot, 0, 0, 0] == 8:
                    how(out.logits[b])
            return out

    return Broken(VOCAB, seed=0, max_length=400)


def _oom(logits: np.ndarray) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: /a/path")


@pytest.mark.parametrize(
    ("how", "words"),
    [(lambda x: x.fill(np.nan), "logits are not numbers"), (_oom, "^the server ran out of memory$")],
    ids=["NaN", "out of memory"],
)
@pytest.mark.parametrize("prompt", [[8], [8] * 40], ids=["while decoding", "at admission"])
def test_a_request_that_breaks_the_model_fails_alone(how: Callable, words: str, prompt: list[int]) -> None:
    requests = [
        request([1, 2], LONG.with_(max_tokens=60), 1),
        request(prompt, LONG.with_(max_tokens=300)),
        request([3], LONG.with_(max_tokens=80), 2),
    ]
    eng = engine(broken(how))
    results = run(eng, [read(r) for r in requests])
    assert [results[0].output, results[2].output] == plain_texts(TARGET, [requests[0], requests[2]])
    assert results[1].finish.finish == "error"
    assert results[1].output == []
    assert re.search(words, str(results[1].finish.reason))
    assert eng.alive
    assert eng.problem is None
    settled(eng)


def test_when_the_thread_dies_everybody_is_told() -> None:
    class Deadly(Gated):
        def forward(self, nodes, **options):
            out = super().forward(nodes, **options)
            if self.count > 5:
                raise SystemExit("killed")
            return out

    target = Deadly()
    eng = engine(target, rows=1)
    jobs = [read(request([i + 1], LONG)) for i in range(3)]
    submit(eng, jobs)
    jobs[0].next()
    target.gate.set()
    results = [j.result() for j in jobs]
    assert [r.finish.finish for r in results] == ["error"] * 3
    assert results[0].finish.reason == "the engine has died (SystemExit)"
    eng.close()
    assert not eng.alive
    with pytest.raises(EngineStopped, match="has died"):
        submit(eng, jobs)


def test_a_sink_that_raises_is_a_reader_that_has_gone() -> None:
    eng = engine(rows=1)
    left, done = threading.Event(), read(request([2], LONG.with_(max_tokens=20)))

    def gone(delta: Delta) -> None:
        left.set()
        raise OSError("connection lost")

    lost = read(request([1], LONG))
    lost.request = replace(lost.request, sink=gone)
    submit(eng, [lost, done])
    assert left.wait(PATIENCE)
    assert len(done.result().output) == 20
    settled(eng)
