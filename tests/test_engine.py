"""The engine: every text as if it were alone, whatever the company, the memory and the faults; nothing is leaked."""

from __future__ import annotations

import queue
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from helpers import VOCAB, RandomTree, plain_texts, request, toy_drafters

from outrider.decode import Decoder, Request
from outrider.drafters.base import BaseDrafter, Batch, Drafter
from outrider.engine import Engine, EngineStopped, Job, QueueFull, Result, Update
from outrider.engine.jobs import FairQueue
from outrider.engine.prefix import BLOCK, PrefixStore
from outrider.models.cache import SlotCache
from outrider.models.toy import ToyModel
from outrider.params import SamplingParams
from outrider.tree import chain
from outrider.tune import Fixed
from outrider.types import Budget, Draft, Guarantee

TARGET = ToyModel(VOCAB, seed=0, max_length=400)
LONG = SamplingParams(max_tokens=380, ignore_eos=True)


@dataclass
class Reader:
    """Collects what a job is told."""

    updates: queue.Queue = field(default_factory=queue.Queue)
    tokens: list[int] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def __call__(self, update: Update) -> None:
        self.updates.put(update)

    def next(self) -> Update:
        update = self.updates.get(timeout=30)
        self.tokens += update.token_ids
        if update.result is not None:
            self.results.append(update.result)
        return update

    def result(self) -> Result:
        while not self.results:
            self.next()
        assert self.updates.empty(), "an update after the result"
        return self.results[0]


def engine(target=TARGET, drafter: Drafter | None = None, *, rows: int = 4, depth: int = 4, **options) -> Engine:
    drafter = drafter or toy_drafters(target, rows)["draft_model"]()
    decoder = Decoder(target, drafter, options.pop("verifier", "match"), Fixed(depth), rows=rows, end_ids=(0,))
    config = SimpleNamespace(methods=["mine"], budget=Budget(depth))
    return Engine(SimpleNamespace(decoder=decoder, config=config, drafter=drafter), **options)  # type: ignore[arg-type]


class Gated(ToyModel):
    """Stops before its sixth forward until the gate is opened: a job that is surely still running."""

    def __init__(self) -> None:
        super().__init__(VOCAB, seed=0, max_length=400)
        self.gate, self.count = threading.Event(), 0

    def forward(self, tokens, cache, rows, **options):
        self.count += 1
        if self.count > 5:
            assert self.gate.wait(30)
        return super().forward(tokens, cache, rows, **options)


def job(asked: Request, **options) -> Job:
    return Job(asked, Reader(), **options)


def run(eng: Engine, jobs: list[Job]) -> list[Result]:
    eng.submit(jobs)
    return [j.sink.result() for j in jobs]  # type: ignore[attr-defined]


def settled(eng: Engine) -> None:
    """Stop the engine; nothing may be left in its tables."""
    eng.close()
    assert eng.integrity() == []
    assert not eng.decoder.rows
    assert not eng.running
    assert sum(eng.decoder.cache.length) == 0


def mixed(count: int, seed: int) -> list[Request]:
    """Requests of every kind: parameters, lengths, seeds."""
    draw = random.Random(seed)
    out = []
    for number in range(count):
        params = SamplingParams(
            temperature=draw.choice([0, 0.7, 1, 2]),
            top_k=draw.choice([0, 0, 3]),
            top_p=draw.choice([1, 0.8]),
            min_p=draw.choice([0, 0.1]),
            repetition_penalty=draw.choice([1, 1.3]),
            frequency_penalty=draw.choice([0, 0.5]),
            logit_bias=draw.choice([None, {3: 1.5}]),
            min_tokens=draw.choice([0, 5]),
            stop_token_ids=draw.choice([(), (4,)]),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, None, 1]),
            max_tokens=draw.randrange(5, 60),
        )
        start = [1, 2, 3] * 20 if draw.random() < 0.4 else []
        prompt = start + [draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 100))]
        out.append(request(prompt, params, number))
    return out


@pytest.mark.parametrize("kv_tokens", [None, 420], ids=["room", "short of memory"])
def test_64_mixed_requests_in_any_order_have_the_texts_of_plain_decoding_one_by_one(kv_tokens: int | None) -> None:
    requests = mixed(64, 1)
    expected = plain_texts(TARGET, requests)
    draw = random.Random(2)
    drafters = [toy_drafters(TARGET, 5)["draft_model"], lambda: RandomTree(VOCAB)]
    eng = engine(drafter=drafters[kv_tokens is None](), rows=5, max_queue=64, kv_tokens=kv_tokens, prefix_bytes=20_000)
    jobs = [
        job(r, method=draw.choice([None, None, "ngram", "suffix", "none"]), depth=draw.choice([None, None, 0, 1, 8]))
        for r in requests
    ]
    order = draw.sample(range(64), 64)
    while order:  # arrivals between steps: whenever some job has progressed
        some = [order.pop() for _ in range(min(len(order), draw.randrange(1, 9)))]
        eng.submit([jobs[i] for i in some])
        jobs[some[0]].sink.next()  # type: ignore[attr-defined]
    results = [j.sink.result() for j in jobs]  # type: ignore[attr-defined]
    assert [r.output.token_ids for r in results] == expected
    assert [j.sink.tokens for j in jobs] == expected  # type: ignore[attr-defined]
    assert all(r.output.guarantee is Guarantee.EXACT_TOKENS and r.undrafted is None for r in results)
    assert all(
        (r.speculative is None) == (j.method == "none" or j.depth == 0) for j, r in zip(jobs, results, strict=True)
    )
    assert (eng.stats.preemptions > 0) == (kv_tokens is not None)
    assert eng.stats.prefix_hits > 0
    settled(eng)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_drafters_of_both_kinds_share_a_batch_under_every_verifier(verifier: str) -> None:
    requests = [request([1, 2, 3, 1, 2, 3, i % 5 + 1], LONG.with_(max_tokens=40), i) for i in range(8)]
    eng = engine(verifier=verifier)
    results = run(eng, [job(r, method=m) for r, m in zip(requests, [None, "ngram", "none", "suffix"] * 2, strict=True)])
    assert all(len(r.output.token_ids) == 40 and r.undrafted is None for r in results)
    assert all(r.output.guarantee is Guarantee.EXACT_DISTRIBUTION for r in results)
    greedy = [request(r.prompt, r.params.with_(temperature=0)) for r in requests]
    again = run(eng, [job(r, method=m) for r, m in zip(greedy, [None, "ngram", "none", "suffix"] * 2, strict=True)])
    assert [r.output.token_ids for r in again] == plain_texts(TARGET, greedy)
    settled(eng)


def test_a_prompt_that_starts_like_an_earlier_one_is_not_computed_again() -> None:
    class Counting(ToyModel):
        read = 0

        def forward(self, tokens, cache, rows, **options):
            self.read += tokens.numel() if options.get("want") == "none" else 0
            return super().forward(tokens, cache, rows, **options)

    target = Counting(VOCAB, seed=0, max_length=400)
    eng = engine(target)
    draw = random.Random(3)
    first = [draw.randrange(1, VOCAB) for _ in range(203)]
    [one] = run(eng, [job(request(first, LONG.with_(max_tokens=40)))])
    assert (one.cached_tokens, target.read) == (0, 202)
    second = [*first, *one.output.token_ids, 5, 6]  # the next turn of a chat
    [two] = run(eng, [job(request(second, LONG.with_(max_tokens=30), 9))])
    assert two.cached_tokens == BLOCK * ((203 + 39) // BLOCK)
    assert target.read == 202 + len(second) - 1 - two.cached_tokens
    assert [two.output.token_ids] == plain_texts(TARGET, [request(second, LONG.with_(max_tokens=30), 9)])
    wanted = request(first, LONG.with_(max_tokens=2, prompt_logprobs=0))
    [three] = run(eng, [job(wanted)])
    assert three.cached_tokens == 0  # whoever wants the prompt's log-probabilities must have it read
    assert three.prompt_logprobs is not None
    assert len(three.prompt_logprobs) == 203
    settled(eng)


@pytest.mark.parametrize("trial", range(5))
def test_the_prefix_store_gives_back_what_was_kept_within_its_limit(trial: int) -> None:
    draw = random.Random(trial)
    cache, texts, size = SlotCache(2, 300), list[list[int]](), 2 * BLOCK * 8
    keys, values = cache.layer(0, (1, 1), (1, 1), torch.zeros(1, dtype=torch.float64))
    store = PrefixStore(size * 12)
    for _ in range(60):
        start = draw.choice(texts)[: draw.randrange(0, 130)] if texts else []
        text = start + [draw.randrange(5) for _ in range(draw.randrange(1, 60))]
        found = store.fetch(cache, 0, text)
        keys, values = cache.layers[0]
        assert found % BLOCK == 0
        assert keys[0, 0, :found, 0].tolist() == text[:found] == values[0, 0, :found, 0].tolist()
        cache.reserve([0], len(text))
        keys, values = cache.layers[0]
        keys[0, 0, : len(text), 0] = values[0, 0, : len(text), 0] = torch.tensor(text, dtype=torch.float64)
        store.keep(cache, 0, text)
        cache.release(0)
        assert store.bytes <= store.limit
        assert store.check() == []
        texts.append(text)
    assert store.hits > 0
    again = texts[-1]
    assert store.fetch(cache, 1, again) == min(len(again) // BLOCK, 12) * BLOCK
    store.clear()
    assert store.bytes == 0 == store.fetch(cache, 1, again)


def test_a_full_queue_says_when_to_come_back_and_clients_take_turns() -> None:
    target = Gated()
    eng = engine(target, rows=1, max_queue=2)
    slow = [job(request([1], LONG, i)) for i in range(3)]
    eng.submit(slow[:1])
    slow[0].sink.next()  # type: ignore[attr-defined]
    eng.submit(slow[1:])
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        eng.submit([job(request([1], LONG))])
    assert full.value.retry_after >= 1
    eng.cancel(slow)
    target.gate.set()
    assert [j.sink.result().output.finish_reason for j in slow] == ["abort"] * 3  # type: ignore[attr-defined]
    settled(eng)
    line = FairQueue(9)
    for number, client in enumerate("aaabbc"):
        line.put(job(request([1], LONG, number), client=client))
    assert [line.pop().request.seed for _ in range(2)] == [0, 3]
    back = job(request([1], LONG, 7), client="a")
    line.put_back(back)
    assert [line.pop().request.seed for _ in range(len(line))] == [7, 5, 4, 1, 2]


def test_cancelled_and_late_jobs_leave_and_disturb_nobody() -> None:
    target = Gated()
    eng = engine(target, rows=2)
    stays, goes, late = (job(request([1, i], LONG.with_(max_tokens=100), i)) for i in range(3))
    late.deadline = perf_counter() - 1
    eng.submit([stays, goes, late])
    goes.sink.next()  # type: ignore[attr-defined]
    eng.cancel([goes])
    target.gate.set()
    assert goes.sink.result().output.finish_reason == "abort"  # type: ignore[attr-defined]
    assert "deadline" in late.sink.result().output.stop_reason  # type: ignore[attr-defined]
    assert [stays.sink.result().output.token_ids] == plain_texts(TARGET, [stays.request])  # type: ignore[attr-defined]
    settled(eng)


def test_draining_hands_back_partial_text_and_takes_nobody_new() -> None:
    target = Gated()
    eng = engine(target, rows=1)
    running, waiting = job(request([1], LONG)), job(request([2], LONG))
    eng.submit([running, waiting])
    running.sink.next()  # type: ignore[attr-defined]
    eng.drain(0)
    target.gate.set()
    partial = running.sink.result().output  # type: ignore[attr-defined]
    assert (partial.finish_reason, partial.stop_reason) == ("abort", "the server is shutting down")
    assert partial.token_ids == plain_texts(TARGET, [running.request])[0][: len(partial.token_ids)] != []
    assert waiting.sink.result().output.token_ids == []  # type: ignore[attr-defined]
    with pytest.raises(EngineStopped, match="shutting down"):
        eng.submit([job(request([1], LONG))])
    settled(eng)


def test_what_cannot_run_is_refused_before_it_waits() -> None:
    eng = engine(kv_tokens=50)
    for bad, words in (
        (job(request([1] * 60, SamplingParams(max_tokens=1))), "60 tokens and the model holds 50"),
        (job(request([1], SamplingParams(max_tokens=60))), "max_tokens=49 or less"),
        (job(request([1], SamplingParams()), method="magic"), "no drafter 'magic' here; there are none, ngram"),
    ):
        with pytest.raises(ValueError, match=words):
            eng.submit([job(request([1], SamplingParams())), bad])
    assert not len(eng.queue)
    settled(eng)


class Raises(BaseDrafter):
    """Fails for one text and drafts well for the others."""

    def __init__(self, inner: Drafter, act: Callable[[Batch, Draft], Draft | None]) -> None:
        self.inner, self.act = inner, act

    def propose(self, batch: Batch) -> Draft:
        draft = self.inner.propose(batch)
        if any(tokens[0] == 9 for tokens in batch.tokens):
            return self.act(batch, draft)  # type: ignore[return-value]
        return draft

    def release(self, row: int) -> None:
        self.inner.release(row)


def _raise(batch: Batch, draft: Draft) -> Draft:
    raise RuntimeError("/secret/path")


NONSENSE = {
    "raises": _raise,
    "nothing": lambda batch, draft: None,
    "token outside": lambda batch, draft: Draft(torch.where(draft.parents >= 0, 10**6, draft.tokens), draft.parents),
    "too deep": lambda batch, draft: Draft(*chain([[t[-1], *[1] * 98] for t in batch.tokens])),
    "wrong root": lambda batch, draft: Draft((draft.tokens + 1) % VOCAB, draft.parents),
    "wrong rows": lambda batch, draft: Draft(draft.tokens.repeat(2, 1), draft.parents.repeat(2, 1)),
    "loops": lambda batch, draft: Draft(draft.tokens, draft.parents.abs()),
    "floats": lambda batch, draft: Draft(draft.tokens.float(), draft.parents),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(NONSENSE))
def test_a_drafter_that_fails_loses_the_row_and_not_the_text(kind: str) -> None:
    requests = [request([first, 2, 3], LONG.with_(max_tokens=50), first) for first in (1, 9, 2)]
    eng = engine(drafter=Raises(toy_drafters(TARGET)["self"](), NONSENSE[kind]))
    results = run(eng, [job(r) for r in requests])
    assert [r.output.token_ids for r in results] == plain_texts(TARGET, requests)
    assert results[0].undrafted is None is results[2].undrafted
    assert results[1].undrafted is not None
    assert "failed" in results[1].undrafted
    assert "secret" not in results[1].undrafted
    assert results[0].speculative is not None
    assert results[0].speculative.num_accepted_draft_tokens > 30  # the others are drafted for as before
    assert eng.stats.drafter_failures == 1
    settled(eng)


def test_a_law_that_is_no_law_loses_the_row_too() -> None:
    def spoil(batch: Batch, draft: Draft) -> Draft:
        assert draft.probs is not None
        return Draft(draft.tokens, draft.parents, draft.probs * float("nan"), draft.siblings)

    eng = engine(drafter=Raises(toy_drafters(TARGET)["draft_model"](), spoil), verifier="rejection")
    results = run(eng, [job(request([first, 2], LONG.with_(max_tokens=20))) for first in (9, 1)])
    assert [r.undrafted is None for r in results] == [False, True]
    settled(eng)


def broken(how: Callable[[torch.Tensor], None]) -> ToyModel:
    """A target that breaks for texts that begin with an 8."""

    class Broken(ToyModel):
        def forward(self, tokens, cache, rows, **options):
            out = super().forward(tokens, cache, rows, **options)
            for b, row in enumerate(rows):
                if cache.layers[0][0][row, 0, 0, 0] == 8:
                    how(out.logits[b])
            return out

    return Broken(VOCAB, seed=0, max_length=400)


def _oom(logits: torch.Tensor) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: /a/path")


@pytest.mark.parametrize(
    ("how", "words"),
    [(lambda x: x.fill_(float("nan")), "logits are not numbers"), (_oom, "^the server ran out of memory$")],
    ids=["NaN", "out of memory"],
)
@pytest.mark.parametrize("prompt", [[8], [8] * 40], ids=["while decoding", "at admission"])
def test_a_request_that_breaks_the_model_fails_alone(how: Callable, words: str, prompt: list[int]) -> None:
    requests = [
        request([1, 2], LONG.with_(max_tokens=60), 1),
        request(prompt, LONG.with_(max_tokens=300)),
        request([3], LONG, 2),
    ]
    eng = engine(broken(how))
    results = run(eng, [job(r) for r in requests])
    assert [results[0].output.token_ids, results[2].output.token_ids] == plain_texts(TARGET, [requests[0], requests[2]])
    assert results[1].output.finish_reason == "error"
    assert results[1].output.token_ids == []
    assert re.search(words, str(results[1].output.stop_reason))
    assert eng.alive
    assert eng.problem is None
    settled(eng)


def test_when_the_thread_dies_everybody_is_told() -> None:
    class Deadly(Gated):
        def forward(self, tokens, cache, rows, **options):
            out = super().forward(tokens, cache, rows, **options)
            if self.count > 5:
                raise SystemExit("killed")
            return out

    target = Deadly()
    eng = engine(target, rows=1)
    jobs = [job(request([i + 1], LONG)) for i in range(3)]
    eng.submit(jobs)
    jobs[0].sink.next()  # type: ignore[attr-defined]
    target.gate.set()
    results = [j.sink.result().output for j in jobs]  # type: ignore[attr-defined]
    assert [r.finish_reason for r in results] == ["error"] * 3
    assert results[0].stop_reason == "the engine has died (SystemExit)"
    eng._thread.join()
    assert not eng.alive
    with pytest.raises(EngineStopped, match="has died"):
        eng.submit(jobs)


def test_a_sink_that_raises_is_a_reader_that_has_gone() -> None:
    eng = engine(rows=1)
    left, done = threading.Event(), job(request([2], LONG.with_(max_tokens=20)))

    def gone(update: Update) -> None:
        left.set()
        raise OSError("connection lost")

    eng.submit([Job(request([1], LONG), gone), done])
    assert left.wait(30)
    assert len(done.sink.result().output.token_ids) == 20  # type: ignore[attr-defined]
    settled(eng)


def test_a_long_prompt_does_not_stop_those_who_write() -> None:
    eng = engine(rows=2, prefill_chunk=16, prefix_bytes=0)
    writer = job(request([1], LONG.with_(max_tokens=300)))
    eng.submit([writer])
    writer.sink.next()  # type: ignore[attr-defined]
    reader = job(request([2] * 200, LONG.with_(max_tokens=1)))
    eng.submit([reader])
    reader.sink.result()  # type: ignore[attr-defined]
    told = writer.sink.updates.qsize()  # type: ignore[attr-defined]
    assert told >= 199 // 16  # a step of the writer after every chunk of the reader
    eng.cancel([writer])
    writer.sink.result()  # type: ignore[attr-defined]
    settled(eng)
