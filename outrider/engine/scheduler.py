"""The scheduler: which sequences wait, run, give way and leave. One class, whether a server or a loop steps it.

One step ends what was cancelled or is late, and seats waiting sequences while slots and memory last. It reads a chunk of the
oldest unread prompts. Then it runs one draft-verify round of all sequences that decode, and hands out what was written. Noise is
keyed by position. So neither its neighbours, nor when it joined, nor a preemption changes a text.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import Counter, abc, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from outrider.core.types import Step
from outrider.drafters.method import NONE
from outrider.drafters.planned import PlannedDrafter
from outrider.engine.decoder import Decoder
from outrider.engine.queue import EngineStopped, FairQueue, QueueFull
from outrider.engine.request import Request, Sequence

if TYPE_CHECKING:
    from outrider.engine.trace import Recorder

HEADROOM = 32  # tokens that a sequence with a slot must be able to grow by
LATE, CLOSING = "the deadline of the request has passed", "the server is shutting down"
log = logging.getLogger("outrider.engine")


class Observer(Protocol):
    """Counts steps and sequences. Called by the thread that steps; must be quick."""

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """seconds: since each sequence's step before this one, None where it was the first."""

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended, with or without a text."""


class Scheduler:
    """Runs sequences on a decoder. `add` and `run` may be called by any thread, `step` by one.

    Args:
        decoder: Runs the rounds.
        roster: The decoder's drafter, where each sequence may choose a method and a draft length.
        max_queue: Sequences that may wait.
        kv_limit: Committed tokens of all sequences together, None for what the slots hold. When it runs short, the youngest
            sequences are preempted and read again later.
        prefill_chunk: Prompt tokens per step, of all sequences, while others decode, None for the decoder's own.
        observer: Counts steps and sequences.
        trace: Where every step is written.
        raises: An exception of the model or the drafter leaves `step`. Otherwise it ends the sequences that it concerns.
    """

    def __init__(
        self,
        decoder: Decoder,
        roster: PlannedDrafter | None = None,
        *,
        max_queue: float = math.inf,
        kv_limit: int | None = None,
        prefill_chunk: int | None = None,
        observer: Observer | None = None,
        trace: Recorder | None = None,
        raises: bool = False,
    ) -> None:
        self.decoder, self.roster = decoder, roster
        self.kv_limit = math.inf if kv_limit is None else kv_limit
        self.observers: tuple[Observer, ...] = () if observer is None else (observer,)
        self.trace, self.raises = trace, raises
        self._chunk_alone = max(prefill_chunk or 0, decoder.chunk)
        self._chunk = prefill_chunk or decoder.chunk
        self.queue = FairQueue(max_queue)
        self.preemptions = self.accepted = 0
        self.lock = threading.RLock()  # of the queue
        self._next_in_line, self._stepping = threading.Lock(), threading.Lock()
        # When sequences that are left end with what they have, and why no more are taken from then on.
        self.stop_at, self.stopped = math.inf, CLOSING
        self._seconds = 1.0  # of a sequence, lately
        self._owned = False  # a sequence had an owner
        # (deadline, order, sequence) of those that have one, as a heap; those that have ended stay until it has passed
        self._deadlines = list[tuple[float, int, ref[Sequence]]]()
        self._cancelled, self._order = deque[Sequence](), itertools.count()

    @property
    def running(self) -> dict[int, Sequence]:
        """The sequences that have a slot, by slot, in order of admission."""
        return self.decoder.sequences

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not len(self.queue)

    @property
    def _held(self) -> int:
        """Tokens that the seated sequences hold, or will hold once they are read."""
        return sum(len(sequence.tokens) for sequence in self.running.values())

    def _fits(self, held: int, count: int) -> bool:
        """Whether so many sequences, which hold so many tokens together, can all grow. One alone always can."""
        return held + HEADROOM * count <= self.kv_limit

    def _sequence(self, request: Request) -> Sequence:
        if (roster := self.roster) is None:
            return self.decoder.sequence(request)
        method, depth = roster.method(request.method, bool(request.prediction)), roster.planner.limit.depth
        return self.decoder.sequence(request, method, depth)

    def add(self, requests: Iterable[Request]) -> list[Sequence]:
        """Queue a sequence of each request, all or none. Raises ValueError, QueueFull or EngineStopped."""
        sequences = [self._sequence(request) for request in requests]
        with self.lock:
            if self.stop_at < math.inf:
                raise EngineStopped(self.stopped)
            waiting, free, limit = len(self.queue), len(self.decoder.free), self.queue.limit
            owner, room = sequences[0].request.owner if sequences else "", limit + free - waiting
            if owner and limit < math.inf:  # a quarter of the places is for others
                mine = sum(other.request.owner == owner for other in self.queue)
                room = min(room, limit - limit // 4 + free - mine)
            if len(sequences) > room:
                slots = self.decoder.cache.num_slots
                raise QueueFull(waiting, max(1, math.ceil(self._seconds * (waiting + 1) / slots)))
            self.accepted, self._owned = self.accepted + len(sequences), self._owned or bool(owner)
            for sequence in sequences:
                self.queue.put(sequence)
                if (deadline := sequence.request.deadline) < math.inf:
                    heapq.heappush(self._deadlines, (deadline, next(self._order), ref(sequence)))
        return sequences

    def cancel(self, sequence: Sequence) -> None:
        """Its reader has left. The next step ends it, whether it runs or waits."""
        sequence.cancelled = True
        self._cancelled.append(sequence)

    def watch(self, observer: Observer) -> None:
        """Add an observer. It sees every step and every end from now on."""
        with self.lock:
            self.observers = (*self.observers, observer)

    def unwatch(self, observer: Observer) -> None:
        """Remove an observer. An unknown one is ignored."""
        with self.lock:
            self.observers = tuple(o for o in self.observers if o is not observer)

    def step(self) -> tuple[Step | None, list[Sequence]]:
        """One step, as the module's docstring says. Returns the draft-verify round, if there was one, and its sequences."""
        with self.decoder.stepping:
            self._end_what_is_over(perf_counter())
            if len(self.queue):
                self._seat()
            bounded = self.kv_limit < math.inf  # else no step adds up what is held
            while bounded and len(self.running) > 1 and not self._fits(self._held, len(self.running)):
                self._unseat(next(reversed(self.running)))  # the youngest
            if self.decoder.waiting:
                self._read([*self.decoder.waiting])
            live = self.decoder.live
            return (self._round(live) if live else None), live

    def run(self, mine: abc.Sequence[Sequence]) -> Iterator[tuple[Step | None, list[Sequence]]]:
        """Run sequences that `add` queued to their ends, and yield each step as `step` returns it. A reader may stop early.

        Threads may do so at once. They step in turns, and each step moves the sequences of all.
        """
        try:
            for sequence in mine:
                while sequence.finish is None:
                    with self._turn():
                        moved = self.step()
                    yield moved
            with self._turn():
                pass  # a step of another thread that ended the last one has told its reader, too
        finally:
            self._leave(mine)

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Run sequences of these requests to their ends; returns them in the same order."""
        return [*self.each(requests)]

    def each(self, requests: Iterable[Request]) -> Generator[Sequence, None, None]:
        """Run these requests to their ends, and yield their sequences in the same order. A reader may stop early.

        All are checked before one runs. Each is queued when its turn is near: a sequence is many objects, and Python's garbage
        collector would look through those of all again and again. Raises what `add` raises.
        """
        rest, arrived, slots = deque(requests), perf_counter(), self.decoder.cache.num_slots
        for request in rest:
            (self._sequence if request.continued or request.method else self.decoder.check)(request)
        mine = deque[Sequence]()
        try:
            while rest or mine:
                if rest and (len(self.queue) < slots or not mine):  # as many as a step can seat
                    new = self.add(rest.popleft() for _ in range(min(slots, len(rest))))
                    for sequence in new:
                        sequence.clock.arrived = arrived
                    mine += new
                with self._turn():
                    if mine[0].finish is None:
                        self.step()
                    done = list[Sequence]()
                    while mine and mine[0].finish is not None:
                        done.append(mine.popleft())
                yield from done
        finally:
            self._leave(mine)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The turn to step, which waiting threads have in the order in which they came."""
        with self._next_in_line:
            self._stepping.acquire()
        try:
            yield
        finally:
            self._stepping.release()

    def _leave(self, mine: Iterable[Sequence]) -> None:
        """Cancel those that have not ended."""
        left = [sequence for sequence in mine if sequence.finish is None]
        for sequence in left:
            self.cancel(sequence)  # ends it with the next step, if another thread is within one
        if left and self._stepping.acquire(blocking=False):
            try:
                self._end_what_is_over(0.0)
            finally:
                self._stepping.release()

    def _end_what_is_over(self, now: float) -> None:
        """End the sequences that are late or cancelled; all of them where the scheduler has stopped."""
        if not (self._cancelled or self._deadlines or self.stop_at <= now):
            return
        over = list[Sequence]()
        with self.lock:
            if self.stop_at <= now:
                over = [*self.queue, *self.running.values()]
            while self._deadlines and self._deadlines[0][0] <= now:
                if (late := heapq.heappop(self._deadlines)[-1]()) is not None:
                    over.append(late)
            while self._cancelled:
                over.append(self._cancelled.popleft())
        for sequence in over:
            if sequence.finish is None:
                late = LATE if sequence.request.deadline <= now else CLOSING
                self.finish(sequence, "abort", "cancelled" if sequence.cancelled else late)

    def stop(self, when: float) -> None:
        """Take no more sequences. Those that are left at the `perf_counter` time `when` end with what they have."""
        with self.lock:
            self.stop_at = when

    def close(self, finish: str, reason: str) -> None:
        """End every sequence that is left, and take no more."""
        with self.lock:
            self.stop_at, self.stopped = 0.0, reason
            left = [*self.running.values(), *self.queue]
        for sequence in left:
            self.finish(sequence, finish, reason)

    def finish(self, sequence: Sequence, finish: str, reason: str | int | None) -> None:
        """End a sequence with what it has. Frees its slot and hands out the last delta."""
        with self.decoder.stepping:
            with self.lock:
                if sequence.finish is None and self.running.get(sequence.slot) is not sequence:
                    self.queue.remove(sequence)
            self._end(sequence, finish, reason)

    def _end(self, sequence: Sequence, finish: str, reason: str | int | None) -> None:
        """End a sequence that does not wait."""
        if sequence.finish is None and self.trace:
            self.trace.end(sequence, finish)
        sequence.end(finish, reason)
        self._progress(sequence)

    def problems(self) -> list[str]:
        """What is wrong with the tables between two steps. Empty, unless there is a bug."""
        d, wrong = self.decoder, list[str]()
        seats = sorted([*d.free, *d.sequences])
        if seats != list(range(d.cache.num_slots)):
            wrong.append(
                f"free slots {d.free} and used slots {list(d.sequences)} are not the {d.cache.num_slots} slots"
            )
        wrong += [f"free slot {s} holds {d.cache.length[s]} tokens" for s in d.free if d.cache.length[s]]
        for slot, sequence in d.sequences.items():
            held, last = d.cache.length[slot], len(sequence.tokens) - 1
            if sequence.slot != slot or held > last or (held < last) != (sequence in d.waiting):
                wrong.append(f"slot {slot} holds {held} of {last} tokens")
        r = self.roster
        left = {*r.assigned, *r.planner.depths, *r.lost} if r else set[int]()
        if not left <= set(d.sequences):
            wrong.append(f"the drafters remember slots {sorted(left - set(d.sequences))}, which are free")
        return wrong + (d.prefixes.check() if d.prefixes else [])

    def _seat(self) -> None:
        """Give free slots to the sequences whose turn it is, while they fit."""
        while self.decoder.free and len(self.queue):
            with self.lock:
                first = next(iter(self.queue), None)
                if first is None:
                    return
                held = self._held + len(first.tokens)
                if self.running and not self._fits(held, len(self.running) + 1):
                    return
                self.queue.pop()
            self._admit(first)
        self._make_way()

    def _make_way(self) -> None:
        """Give an owner that waits and has no slot one of the owner that has the most."""
        if not self._owned or not len(self.queue):
            return
        running = Counter(sequence.request.owner for sequence in self.running.values())
        most, count = running.most_common(1)[0]
        with self.lock:
            waits = next((s for s in self.queue if s.request.owner and s.request.owner not in running), None)
            if count < 2 or waits is None:
                return
            self.queue.remove(waits)
        self._unseat(next(slot for slot in reversed(self.running) if self.running[slot].request.owner == most))
        self._admit(waits)

    def _admit(self, sequence: Sequence) -> None:
        """Give a sequence a free slot."""
        if sequence.request.deadline <= perf_counter():  # it came after the step had looked for late ones
            self._end(sequence, "abort", LATE)
            return
        try:
            self.decoder.admit(sequence)
        except Exception as error:
            self._fail(sequence, error)
            return
        slot = sequence.slot
        if self.roster:
            self.roster.assigned[slot] = NONE if sequence.counts.undrafted else sequence.counts.method
            if sequence.request.num_speculative_tokens is not None:
                self.roster.planner.depths[slot] = sequence.request.num_speculative_tokens
        if sequence.finish is not None:  # the tokens that it continues end the text
            self._progress(sequence)

    def _free(self, slot: int) -> Sequence:
        """Take a slot back from the sequence that has it, and keep why a drafter lost it."""
        sequence = self.running[slot]
        if self.roster is not None:
            sequence.counts.undrafted = self.roster.lost.get(slot) or sequence.counts.undrafted
        if sequence.finish and sequence.finish.finish != "error":  # a conversation may go on after the answer
            self.decoder.remember(sequence)
            if self.decoder.text_memory is not None:
                self.decoder.text_memory.keep(sequence.request.whose, sequence.tokens)
        self.decoder.release(slot)
        return sequence

    def _unseat(self, slot: int) -> None:
        """Take a slot back. Its sequence waits for its turn and is computed again."""
        sequence = self._free(slot)
        sequence.counts.preemptions += 1
        self.preemptions += 1
        with self.lock:
            self.queue.put_back(sequence)

    def _read(self, unread: list[Sequence]) -> None:
        """Read a chunk of the oldest sequences' tokens."""
        try:
            self.decoder.prefill(unread, self._chunk if len(self.running) > 1 else self._chunk_alone)
        except Exception as error:
            if len(unread) > 1 and not self.raises:
                for sequence in unread:  # so that only the cause is lost
                    self._read([sequence])
            else:
                self._fail(unread[0], error)
        else:
            for sequence in unread:
                if sequence.finish is not None:  # a request that is only read
                    self._progress(sequence)

    def _round(self, live: list[Sequence]) -> Step | None:
        try:
            step = self.decoder.round(live)
        except Exception as error:
            if self.raises:
                raise
            if len(live) > 1:
                log.warning("a step failed (%s); its sequences are run one by one", type(error).__name__)
                self._one_by_one(live)
            else:
                self._fail(live[0], error)
            return None
        if self.trace:
            self.trace.keep(step, live)
        for observer in self.observers:
            observer.step(step, [sequence.clock.between for sequence in live])
        for sequence in live:
            self._progress(sequence)
        return step

    def _one_by_one(self, live: list[Sequence]) -> None:
        """After a step that failed: each sequence alone, so that only the cause is lost. A text is the same alone."""
        for sequence in live:
            held = self.decoder.cache.length[sequence.slot]
            if sequence.checker.count != len(sequence.output) or held > len(sequence.tokens) - 1:
                self._fail(sequence, RuntimeError("its step failed half-way"))
            elif sequence.finish is not None or held < len(sequence.tokens) - 1:
                # It was judged before the failure, and is not in the cache yet.
                if sequence.finish is None:
                    self.decoder.waiting.append(sequence)
                self._progress(sequence)
            else:
                self._round([sequence])

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if self.raises:
            raise error
        log.error("request %s failed: %s", sequence.id, error, exc_info=error)
        memory = isinstance(error, MemoryError) or "memory" in str(error).lower()
        reason = "the server ran out of memory" if memory else "the server failed on this request"
        sequence.finish = None  # also where a step that failed had ended it
        self._end(sequence, "error", reason)

    def _progress(self, sequence: Sequence) -> None:
        """Hand out what is new. If that was the end, the slot is free before a reader hears of it."""
        if sequence.finish is not None:
            if self.running.get(sequence.slot) is sequence:
                self._free(sequence.slot)
            self._seconds += 0.2 * (sequence.clock.total - sequence.clock.queued - self._seconds)
        sink = sequence.request.sink
        if sink is None or sequence.cursor.ended:
            return
        if sequence.finish is not None:  # exactly one delta says so
            for observer in self.observers:
                observer.finished(sequence)
        try:
            sink(sequence.delta())
        except Exception:  # the reader is gone
            self.cancel(sequence)
