"""The engine: one thread that admits, prefills, steps and answers, until it is told to stop.

A turn of its loop: drop what was cancelled or is late; seat who waits, while rows and memory last; read a chunk of the
oldest unread prompt, and one for the draft model; one draft-verify round of all rows that decode; tell everybody what was
written. Because noise is keyed by position, neither the company a request has, nor when it joined, nor how often it had to
give way changes its text.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from outrider.control import Adaptive, PerDrafter
from outrider.core.stopping import FinishReason
from outrider.core.types import Step
from outrider.decode import Decoder, Row
from outrider.drafters import Drafter, NgramDrafter, PredictionDrafter, SuffixDrafter
from outrider.drafters.combine.guard import PerRequestDrafter
from outrider.engine.draft_prefill import Reading
from outrider.engine.lengths import PerRow
from outrider.engine.memory import Memory
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.queue import EngineStopped, FairQueue, Job, QueueFull, Result, Update
from outrider.llm import LLM
from outrider.trace import Recorder

LATE, CLOSING = "the deadline of the request has passed", "the server is shutting down"
log = logging.getLogger("outrider.engine")
HEADROOM = 32  # tokens that a seated row must be able to grow by


@dataclass(frozen=True)
class Stats:
    """The engine at one moment."""

    running: int
    waiting: int
    accepted: int  # jobs so far
    kv_tokens: int  # committed tokens in the cache
    kv_limit: int
    kv_bytes: int  # taken by keys and values, the drafters' among them
    memory_limit: int | None  # of these and the prefix store, in bytes
    prefix_bytes: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    drafter_failures: int


class Observer(Protocol):
    """Somebody who counts. Called from the engine's thread; must be quick."""

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """seconds: since each row's step before this one, None where it was the first."""
        ...

    def finished(self, job: Job, result: Result) -> None: ...


class Engine:
    """Runs jobs on the model and drafter of an `LLM`, which must not be used otherwise while the engine lives.

    max_queue: jobs that may wait. kv_tokens: committed tokens that all rows together may hold, None for as many as the
    rows can; when it runs short the youngest rows give way and are computed again later. prefix_bytes: keys and values
    kept for prompts that start alike, 0 for none. prefill_chunk: prompt tokens per turn while other rows decode. memory:
    bytes that keys and values, the drafters' and the prefix store's among them, may take at most; ValueError when that is
    too little for the rows and lengths asked for. observer: counts steps and jobs. trace: where every step is written.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_queue: int = 64,
        kv_tokens: int | None = None,
        prefix_bytes: int = 256 << 20,
        prefill_chunk: int = 64,
        memory: int | None = None,
        observer: Observer | None = None,
        trace: Recorder | None = None,
    ) -> None:
        base = llm.decoder
        method = "+".join(llm.config.methods) if llm.config.budget.max_nodes else "none"
        drafters: dict[str, Drafter] = {
            "ngram": NgramDrafter(),
            "suffix": SuffixDrafter(),
            "prediction": PredictionDrafter(),
        }
        if method != "none":  # of several at once, each can be chosen alone
            drafters |= {**llm.drafter.inner(), method: llm.drafter}
        self.llm, self.roster = llm, PerRequestDrafter(drafters, method, base.target.vocab_size)
        controller = base.controller
        if isinstance(controller, Adaptive):
            controller = PerDrafter(controller, method, self._method_of, lambda: self.roster.draft_seconds)
        self._lengths = PerRow(controller)
        rows, length = base.cache.num_slots, base.max_length
        self.kv_limit = rows * length if kv_tokens is None else kv_tokens
        self.prefixes = PrefixCache(prefix_bytes) if prefix_bytes else None
        self.decoder = Decoder(
            base.target,
            self.roster,
            base.verifier.name,
            self._lengths,
            rows=rows,
            max_length=min(length, self.kv_limit),  # one row alone always fits
            end_ids=base.end_ids,
            tokenizer=base.tokenizer,
            prefixes=self.prefixes,
        )
        self.reading = self._lengths.reading = Reading(self.roster, self.decoder.rows)
        self.memory = Memory(base.target, self.decoder.cache, drafters.values())
        if memory is not None:
            self.memory.bound(memory, self.prefixes.limit if self.prefixes else 0)
        self.observer, self.trace, self._chunk = observer, trace, prefill_chunk
        self._chunk_alone = max(prefill_chunk, self.decoder.chunk)
        self.queue, self.running = FairQueue(max_queue), dict[int, Job]()  # by row
        self.preemptions = self.accepted = 0
        self.problem: str | None = None  # what is wrong with the engine, for its doctor
        self._wake = threading.Condition()
        self._stop, self._end = False, math.inf  # _end: when jobs that are left end with what they have
        self._seconds, self._turned = 1.0, perf_counter()  # of a job, lately; when the last turn began
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    # -- for any thread ---------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stop

    @property
    def stalled(self) -> float:
        """Seconds that a turn has lasted; 0 without work."""
        return perf_counter() - self._turned if self.running or len(self.queue) else 0.0

    @property
    def stats(self) -> Stats:
        decoder, prefixes = self.decoder, self.prefixes
        return Stats(
            running=len(self.running),
            waiting=len(self.queue),
            accepted=self.accepted,
            kv_tokens=sum(decoder.cache.length),
            kv_limit=self.kv_limit,
            kv_bytes=self.memory.bytes,
            memory_limit=self.memory.limit,
            prefix_bytes=prefixes.bytes if prefixes else 0,
            prefix_queries=prefixes.queries if prefixes else 0,
            prefix_hits=prefixes.hits if prefixes else 0,
            preemptions=self.preemptions,
            drafter_failures=self.roster.failures,
        )

    def check(self, job: Job) -> None:
        """Raise ValueError if the job could never run."""
        self.decoder.check(job.request)
        if job.method not in (None, "none", *self.roster.drafters):
            raise ValueError(
                f"there is no drafter {job.method!r} here; there are none, {', '.join(self.roster.drafters)}"
            )

    def _method_of(self, slot: int) -> str:
        """The drafter of a slot, "none" where it has failed."""
        return "none" if slot in self.roster.lost else self.roster.method(slot)

    def method(self, job: Job) -> str:
        """Whose guesses a job gets: a request with a prediction of its own, and no other wish, gets that."""
        if job.depth == 0:
            return "none"
        return job.method or ("prediction" if job.request.prediction else self.roster.default)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none. Raises ValueError, QueueFull or EngineStopped."""
        for job in jobs:
            self.check(job)
        with self._wake:
            if self._end < math.inf or not self.alive:
                raise EngineStopped(self.problem or CLOSING)
            waiting = len(self.queue)
            room = self.queue.limit + len(self.decoder.free) - waiting
            if len(jobs) > room:
                raise QueueFull(
                    waiting, max(1, math.ceil(self._seconds * (waiting + 1) / self.decoder.cache.num_slots))
                )
            self.accepted += len(jobs)
            if not waiting and not self.running:
                self._turned = perf_counter()
            for job in jobs:
                self.queue.put(job)
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more. They leave before the next step."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more jobs; what is not finished after `seconds` ends with the text it has."""
        with self._wake:
            self._end = perf_counter() + seconds
            self._wake.notify()

    def close(self) -> None:
        """End the thread; every job that is left is told so."""
        with self._wake:
            self._end, self._stop = 0.0, True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def integrity(self) -> list[str]:
        """What is wrong with the engine's tables between two turns; nothing, unless there is a bug."""
        d, wrong = self.decoder, list[str]()
        seats = sorted([*d.free, *d.rows])
        if seats != list(range(d.cache.num_slots)):
            wrong.append(f"free rows {d.free} and used rows {list(d.rows)} are not the {d.cache.num_slots} rows")
        if set(self.running) != set(d.rows):
            wrong.append(f"jobs run in rows {list(self.running)}, the decoder has {list(d.rows)}")
        wrong += [f"free row {r} holds {d.cache.length[r]} tokens" for r in d.free if d.cache.length[r]]
        for slot, row in d.rows.items():
            held, last = d.cache.length[slot], len(row.tokens) - 1
            if row.slot != slot or held > last or (held < last) != (row in d.waiting):
                wrong.append(f"row {slot} holds {held} of {last} tokens")
        left = set(self.roster.assigned) | set(self._lengths.depth) | set(self.roster.lost) | set(self.reading.spent)
        if not left <= set(d.rows):
            wrong.append(f"the drafters remember rows {sorted(left - set(d.rows))}, which are free")
        return wrong + (self.prefixes.check() if self.prefixes else [])

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:  # whatever it was, nobody may be left waiting
            log.exception("the engine's thread died")
            self.problem = f"the engine has died ({type(error).__name__})"
        finally:
            with self._wake:
                self._stop = True
                left = [*self.running.values(), *self.queue]
                self.queue = FairQueue(0)
            for job in left:
                self._finish(job, "error" if self.problem else "abort", self.problem or CLOSING)

    def _turn(self) -> None:
        with self._wake:
            if not self.running and not len(self.queue):
                if wrong := self.integrity():
                    self.problem = "; ".join(wrong)
                    log.error("the engine's tables are wrong: %s", self.problem)
                while not (len(self.queue) or self._stop):
                    self._wake.wait()
            self._turned = now = perf_counter()
            late = [j for j in self.queue if j.cancelled or min(j.deadline, self._end) <= now]
            for job in late:
                self.queue.remove(job)
        for job in [*late, *(j for j in self.running.values() if j.cancelled or min(j.deadline, self._end) <= now)]:
            self._finish(job, "abort", "cancelled" if job.cancelled else LATE if job.deadline <= now else CLOSING)
        self._seat()
        self._give_way()
        if self.decoder.waiting:
            self._prefill(self.decoder.waiting[0])
        self.reading.read()
        if live := self.decoder.live:
            self._round(live)

    def _seat(self) -> None:
        """Give free rows to those whose turn it is, while they fit."""
        while self.decoder.free:
            with self._wake:
                if not len(self.queue):
                    return
                job = self.queue.peek()
                size = len(job.row.tokens if job.row else job.request.prompt)
                if self.running and self._held() + size + HEADROOM * (len(self.running) + 1) > self.kv_limit:
                    return
                self.queue.pop()
            try:
                if job.row is None:
                    job.row = self.decoder.admit(job.request)
                else:
                    self.decoder.resume(job.row)
            except Exception as error:
                self._fail(job, error)
                continue
            slot = job.row.slot
            self.running[slot] = job
            self.roster.assign(slot, "none" if job.undrafted else self.method(job))
            if job.depth is not None:
                self._lengths.depth[slot] = job.depth
            job.admitted = job.admitted or perf_counter()

    def _held(self) -> int:
        """Tokens that the seated rows hold or will hold once they are read."""
        return sum(len(row.tokens) for row in self.decoder.rows.values())

    def _give_way(self) -> None:
        """Free rows, the youngest first, until the next step fits. One row alone always does."""
        while len(self.running) > 1 and self._held() + HEADROOM * len(self.running) > self.kv_limit:
            slot = list(self.decoder.rows)[-1]
            job = self.running.pop(slot)
            job.undrafted = self.roster.lost.get(slot, job.undrafted)
            self.decoder.release(slot)
            job.preemptions += 1
            self.preemptions += 1
            with self._wake:
                self.queue.put_back(job)

    def _prefill(self, row: Row) -> None:
        self.decoder.chunk = self._chunk if len(self.running) > 1 else self._chunk_alone
        try:
            self.decoder.prefill(row)
        except Exception as error:
            self._fail(self.running[row.slot], error)
            return
        if row.end is not None:  # a request that is only read
            self._finish(self.running[row.slot], row.end.finish, row.end.reason)

    def _round(self, live: list[Row]) -> None:
        try:
            step = self.decoder.round(live)
        except Exception as error:
            if len(live) > 1:
                log.warning("a step failed (%s); its rows are run one by one", type(error).__name__)
                self._one_by_one(live)
            else:
                self._fail(self.running[live[0].slot], error)
            return
        if self.trace:
            self.trace.keep(step, live)
        if self.observer:
            now, last = perf_counter(), [self.running[row.slot].last for row in live]
            self.observer.step(step, [None if then is None else now - then for then in last])
        drafted = step.draft.num_draft_tokens.tolist()
        for b, row in enumerate(live):
            self._progress(self.running[row.slot], drafted[b], step.commits[b].num_accepted)

    def _one_by_one(self, live: list[Row]) -> None:
        """After a step that failed: each row alone, so that only the ones to blame are lost. A text is the same alone."""
        for row in live:
            job, held = self.running[row.slot], self.decoder.cache.length[row.slot]
            if row.ending.count != len(row.output) or held > len(row.tokens) - 1:
                self._fail(job, RuntimeError("its step failed half-way"))
            elif (
                row.end is not None or held < len(row.tokens) - 1
            ):  # judged before the failure, and not yet in the cache
                if row.end is None:
                    self.decoder.waiting.append(row)
                self._progress(job, 0, 0)
            else:
                self._round([row])

    def _progress(self, job: Job, drafted: int, accepted: int) -> None:
        """Tell a job what a step wrote, and free its row if that was the end."""
        row = job.row
        assert row is not None
        job.drafted.append(drafted)
        job.accepted.append(accepted)
        job.last = perf_counter()
        if job.first is None and row.output:
            job.first = job.last
        if row.end is not None:
            self._finish(job, row.end.finish, row.end.reason)
        else:
            self._tell(job, (drafted, accepted), None)

    def _fail(self, job: Job, error: Exception) -> None:
        log.error("request %s failed: %s", job.request.id, error, exc_info=error)
        memory = isinstance(error, MemoryError) or "memory" in str(error).lower()
        self._finish(job, "error", "the server ran out of memory" if memory else "the server failed on this request")

    def _finish(self, job: Job, finish: str, reason: str | int | None) -> None:
        """Free the job's row, if it has one, and give it its result."""
        row = job.row
        if row is not None and row.end is None:
            if self.trace:
                self.trace.end(row, finish)
            row.ending.end = FinishReason(
                finish, reason
            )  # what was held back, in case it became a stop string, is text now
        if row is not None and self.running.get(row.slot) is job:
            del self.running[row.slot]
            job.undrafted = self.roster.lost.get(row.slot, job.undrafted)
            if self.prefixes is not None and finish in ("stop", "length"):
                held = self.decoder.cache.length[row.slot]
                self.prefixes.keep(self.decoder.cache, row.slot, row.tokens[:held])
            self.decoder.release(row.slot)
        depth = self.llm.config.budget.depth if job.depth is None else job.depth
        result = job.result(finish, reason, self.decoder.guarantee, self.method(job), depth)
        self._seconds += 0.2 * (result.total - result.queued - self._seconds)
        self._tell(job, (job.drafted[-1], job.accepted[-1]) if job.drafted else None, result)

    def _tell(self, job: Job, counts: tuple[int, int] | None, result: Result | None) -> None:
        """Hand out what is new; exactly one update carries the result."""
        if job.finished:
            return
        job.finished = result is not None
        if result is not None and self.observer:
            self.observer.finished(job, result)
        try:
            job.sink(Update(*job.news(), *(counts or (0, 0)), result))
        except Exception:  # the reader is gone
            job.cancelled = True
