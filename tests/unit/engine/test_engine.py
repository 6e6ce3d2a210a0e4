"""The engine: every text as if it were alone, whatever the company, the memory and the faults; nothing is leaked."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import pytest
from engines import LONG, TARGET, Gated, engine, mixed, read, run, settled, submit
from helpers import VOCAB, RandomTree, decoder, plain_texts, request, toy_drafters

from outrider.core.outputs import Delta
from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee
from outrider.engine import EngineStopped, QueueFull
from outrider.engine.prefix_cache import BLOCK, PrefixCache
from outrider.engine.queue import FairQueue
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.models.cache import SlotCache
from outrider.testing.toy import ToyModel


@pytest.mark.parametrize("kv_tokens", [None, 420], ids=["room", "short of memory"])
def test_mixed_requests_in_any_order_have_the_texts_of_plain_decoding_one_by_one(kv_tokens: int | None) -> None:
    requests = mixed(24, 1)
    expected = plain_texts(TARGET, requests)
    draw = random.Random(2)
    drafters = [toy_drafters(TARGET, 5)["draft_model"], lambda: RandomTree(VOCAB)]
    eng = engine(
        drafter=drafters[kv_tokens is None](), rows=5, width=3, max_queue=24, kv_tokens=kv_tokens, prefix_bytes=20_000
    )
    jobs = [
        read(
            r,
            method=draw.choice([None, None, "ngram", "suffix", "none"]),
            num_speculative_tokens=draw.choice([None, None, 0, 1, 8]),
        )
        for r in requests
    ]
    order = draw.sample(range(24), 24)
    while order:  # arrivals between steps: whenever some job has progressed
        some = [order.pop() for _ in range(min(len(order), draw.randrange(1, 9)))]
        submit(eng, [jobs[i] for i in some])
        jobs[some[0]].next()
    results = [j.result() for j in jobs]
    assert [r.output for r in results] == expected
    assert [j.tokens for j in jobs] == expected
    assert all(eng.decoder.guarantee is Guarantee.EXACT_TOKENS and r.counts.undrafted is None for r in results)
    off = [r.request.method == "none" or r.request.num_speculative_tokens == 0 for r in results]
    assert [r.counts.method == "none" for r in results] == off
    assert (eng.stats.preemptions > 0) == (kv_tokens is not None)
    assert eng.stats.prefix_hits > 0
    settled(eng)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_drafters_of_both_kinds_share_a_batch_under_every_verifier(verifier: str) -> None:
    requests = [request([1, 2, 3, 1, 2, 3, i % 5 + 1], LONG.with_(max_tokens=24), i) for i in range(8)]
    eng = engine(verifier=verifier)
    results = run(
        eng, [read(r, method=m) for r, m in zip(requests, [None, "ngram", "none", "suffix"] * 2, strict=True)]
    )
    assert all(len(r.output) == 24 and r.counts.undrafted is None for r in results)
    assert all(eng.decoder.guarantee is Guarantee.EXACT_DISTRIBUTION for r in results)
    greedy = [request(r.prompt, r.params.with_(temperature=0)) for r in requests]
    again = run(eng, [read(r, method=m) for r, m in zip(greedy, [None, "ngram", "none", "suffix"] * 2, strict=True)])
    assert [r.output for r in again] == plain_texts(TARGET, greedy)
    settled(eng)


def test_a_prompt_that_starts_like_an_earlier_one_is_not_computed_again() -> None:
    class Counting(ToyModel):
        read = 0

        def forward(self, nodes, **options):
            self.read += nodes.tokens.size if options.get("want") == "none" else 0
            return super().forward(nodes, **options)

    target = Counting(VOCAB, seed=0, max_length=400)
    eng = engine(target)
    draw = random.Random(3)
    first = [draw.randrange(1, VOCAB) for _ in range(203)]
    [one] = run(eng, [read(request(first, LONG.with_(max_tokens=40)))])
    assert (one.counts.cached, target.read) == (0, 202)
    second = [*first, *one.output, 5, 6]  # the next turn of a chat
    [two] = run(eng, [read(request(second, LONG.with_(max_tokens=30), 9))])
    assert two.counts.cached == BLOCK * ((203 + 39) // BLOCK)
    assert target.read == 202 + len(second) - 1 - two.counts.cached
    assert [two.output] == plain_texts(TARGET, [request(second, LONG.with_(max_tokens=30), 9)])
    wanted = request(first, LONG.with_(max_tokens=2, prompt_logprobs=0))
    [three] = run(eng, [read(wanted)])
    assert three.counts.cached == 0  # whoever wants the prompt's log-probabilities must have it read
    assert three.prompt_logprobs is not None
    assert len(three.prompt_logprobs) == 203
    settled(eng)


@pytest.mark.parametrize("trial", range(5))
def test_the_prefix_store_gives_back_what_was_kept_within_its_limit(trial: int) -> None:
    draw = random.Random(trial)
    cache, texts, size = SlotCache(2, 300), list[list[int]](), 3 * BLOCK * 8
    keys, values = cache.layer(0, (1, 1), (1, 1), np.float64)
    store = PrefixCache(size * 12)
    for _ in range(60):
        start = draw.choice(texts)[: draw.randrange(0, 130)] if texts else []
        text = start + [draw.randrange(5) for _ in range(draw.randrange(1, 60))]
        found = store.fetch(cache, 0, text)
        keys, values = cache.layers[0]
        assert found % BLOCK == 0
        assert keys[0, 0, :found, 0].tolist() == text[:found] == values[0, 0, :found, 0].tolist()
        cache.reserve([0], len(text))
        keys, values = cache.layers[0]
        keys[0, 0, : len(text), 0] = values[0, 0, : len(text), 0] = text
        store.keep(cache, 0, text)
        cache.release(0)
        assert store.bytes <= store.limit
        assert store.check() == []
        texts.append(text)
    assert store.hits > 0
    again = texts[-1]
    assert store.fetch(cache, 1, again) == min(len(again) // BLOCK, 12) * BLOCK
    store.clear()
    cache.release(1)
    assert store.bytes == 0 == store.fetch(cache, 1, again)


def test_a_full_queue_says_when_to_come_back() -> None:
    target = Gated()
    eng = engine(target, rows=1, max_queue=2)
    slow = [read(request([1], LONG, i)) for i in range(3)]
    submit(eng, slow[:1])
    slow[0].next()
    submit(eng, slow[1:])
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        submit(eng, [read(request([1], LONG))])
    assert full.value.retry_after >= 1
    eng.cancel([r.sequence for r in slow])
    target.gate.set()
    assert [j.result().finish.finish for j in slow] == ["abort"] * 3
    settled(eng)


def test_an_owner_of_all_slots_gives_one_to_another_who_waits_and_no_text_changes() -> None:
    target = Gated()
    requests = [request([1, 2, n + 1], LONG.with_(max_tokens=30), n) for n in range(5)]
    expected = plain_texts(TARGET, requests)
    eng = engine(target, rows=3, max_queue=8)
    greedy = [read(r, owner="a", client=f"user {n}") for n, r in enumerate(requests[:4])]
    submit(eng, greedy[:1])
    greedy[0].next()
    submit(eng, greedy[1:])
    other = read(requests[4], owner="b", client="last in the line")
    submit(eng, [other])
    target.gate.set()
    results = [job.result() for job in (*greedy, other)]
    assert [r.output for r in results] == expected
    assert eng.stats.preemptions == 1
    assert other.sequence.clock.done < max(job.sequence.clock.done for job in greedy)
    settled(eng)


def test_an_owner_may_not_fill_the_queue() -> None:
    target = Gated()
    eng = engine(target, rows=1, max_queue=4)
    jobs = [read(request([1], LONG, n), owner="a") for n in range(4)]
    submit(eng, jobs[:1])
    jobs[0].next()
    submit(eng, jobs[1:])
    with pytest.raises(QueueFull):
        submit(eng, [read(request([1], LONG), owner="a", client="another user")])
    last = read(request([1], LONG), owner="b")
    submit(eng, [last])
    eng.cancel([job.sequence for job in (*jobs, last)])
    target.gate.set()
    for job in (*jobs, last):
        job.result()
    settled(eng)


def test_cancelled_and_late_jobs_leave_and_disturb_nobody() -> None:
    target = Gated()
    eng = engine(target, rows=2)
    stays, goes = (read(request([1, i], LONG.with_(max_tokens=100), i)) for i in range(2))
    late = read(request([1, 2], LONG.with_(max_tokens=100), 2), deadline=perf_counter() - 1)
    submit(eng, [stays, goes, late])
    goes.next()
    eng.cancel([goes.sequence])
    target.gate.set()
    assert goes.result().finish.finish == "abort"
    assert "deadline" in late.result().finish.reason
    assert [stays.result().output] == plain_texts(TARGET, [stays.request])
    settled(eng)


def test_a_cancelled_text_leaves_the_queue_in_the_next_step() -> None:
    scheduler = Scheduler(decoder(TARGET, rows=1))
    runs, waits = scheduler.add([request([1], LONG), request([2], LONG)])
    scheduler.step()
    assert runs.clock.between is None  # there was one step only
    scheduler.cancel(waits)
    scheduler.step()
    assert not len(scheduler.queue)
    assert waits.finish is not None
    assert waits.finish.finish == "abort"
    assert runs.clock.between is not None


def test_draining_hands_back_partial_text_and_takes_nobody_new() -> None:
    target = Gated()
    eng = engine(target, rows=1)
    running, waiting = read(request([1], LONG)), read(request([2], LONG))
    submit(eng, [running, waiting])
    running.next()
    eng.drain(0)
    target.gate.set()
    partial = running.result()
    assert (partial.finish.finish, partial.finish.reason) == ("abort", "the server is shutting down")
    assert partial.output == plain_texts(TARGET, [running.request])[0][: len(partial.output)] != []
    assert waiting.result().output == []
    with pytest.raises(EngineStopped, match="shutting down"):
        submit(eng, [read(request([1], LONG))])
    settled(eng)


def test_what_cannot_run_is_refused_before_it_waits() -> None:
    eng = engine(kv_tokens=50)
    for bad, words in (
        (read(request([1] * 60, SamplingParams(max_tokens=1))), "length is 50 tokens.*resulted in 60 tokens"),
        (read(request([1], SamplingParams(max_tokens=60))), "max_tokens=49 or less"),
        (read(request([1], SamplingParams()), method="magic"), "no drafter 'magic' here; use one of: none, prediction"),
    ):
        with pytest.raises(ValueError, match=words):
            submit(eng, [read(request([1], SamplingParams())), bad])
    assert not len(eng.scheduler.queue)
    settled(eng)


def test_a_long_prompt_does_not_stop_those_who_write() -> None:
    eng = engine(rows=2, prefill_chunk=16, prefix_bytes=0)
    writer = read(request([1], LONG.with_(max_tokens=300)))
    submit(eng, [writer])
    writer.next()
    reader = read(request([2] * 200, LONG.with_(max_tokens=1)))
    submit(eng, [reader])
    reader.result()
    told = writer.deltas.qsize()
    assert told >= 199 // 16  # a step of the writer after every chunk of the reader
    eng.cancel([writer.sequence])
    writer.result()
    settled(eng)


class WatchedQueue(FairQueue):
    """Counts the sequences that somebody looks at."""

    seen = 0

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in super().__iter__():
            self.seen += 1
            yield sequence


def test_no_step_walks_over_all_that_waits() -> None:
    """Nor does a call walk over all that was asked: 600 requests cost what two calls of 300 cost."""
    scheduler = Scheduler(decoder(TARGET, rows=2))
    scheduler.queue = queue = WatchedQueue(math.inf)
    asked = [request([1, 2], SamplingParams(max_tokens=1), n, deadline=1e18) for n in range(600)]
    looks = 0

    class Mine(list[Sequence]):
        def __iter__(self) -> Iterator[Sequence]:
            nonlocal looks
            for sequence in super().__iter__():
                looks += 1
                yield sequence

    for _ in scheduler.run(Mine(scheduler.add(asked))):
        pass
    assert queue.seen <= 2 * len(asked)
    assert looks <= 2 * len(asked)


def test_a_deadline_in_the_queue_is_kept_and_keeps_nothing_alive() -> None:
    scheduler = Scheduler(decoder(TARGET, rows=1))
    runs, waits, ends = scheduler.add(
        [
            request([1], LONG),
            request([2], LONG, deadline=0.0),
            request([3], SamplingParams(max_tokens=1), deadline=1e18),
        ]
    )
    scheduler.step()
    assert waits.finish is not None
    assert "deadline" in str(waits.finish.reason)
    assert runs.finish is None
    scheduler.finish(runs, "abort", None)
    assert len([*scheduler.run([ends])]) == 1
    gone = weakref.ref(ends)
    del runs, waits, ends
    gc.collect()
    assert gone() is None


def test_a_text_that_comes_too_late_within_a_step_is_not_begun() -> None:
    """It comes after the step has looked for late ones, and before it gives out the free slot."""
    scheduler, late = Scheduler(decoder(TARGET, rows=2)), list[Sequence]()

    def at_the_end(_: Delta) -> None:
        late.extend(scheduler.add([request([2], LONG, deadline=0.0)]))

    (ends,) = scheduler.add([request([1], LONG, deadline=0.0, sink=at_the_end)])
    scheduler.step()
    assert ends.finish is not None
    assert late[0].finish is not None
    assert "deadline" in str(late[0].finish.reason)
    assert not late[0].written
    assert not scheduler.problems()
    assert scheduler.idle
