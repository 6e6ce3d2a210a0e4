"""The engine: a thread around a scheduler."""

from __future__ import annotations

import logging
import math
import threading
from collections import abc
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.engine.memory import Memory
from outrider.engine.prefix_cache import BYTES, PrefixCache
from outrider.engine.request import Request, Sequence
from outrider.engine.runtime import Runtime
from outrider.engine.scheduler import CLOSING, Observer, Scheduler

if TYPE_CHECKING:
    from outrider.engine.trace import Recorder

log = logging.getLogger("outrider.engine")
SHORTEST = 256  # tokens of a text for which a server makes room, however little memory is free


@dataclass(frozen=True)
class Stats:
    """The engine at one moment."""

    running: int
    waiting: int
    accepted: int  # sequences so far
    kv_tokens: int  # committed tokens in the cache
    kv_limit: int  # the most of them
    kv_bytes: int  # keys and values, those of drafters included
    memory_limit: int | None  # bytes of these and the prefix cache
    prefix_bytes: int
    prefix_queries: int
    prefix_hits: int
    prefix_file_tokens: int  # that came from files of the prefix cache
    prefix_file_bytes: int  # of these files
    preemptions: int
    drafter_failures: int


class Engine:
    """Runs sequences on a runtime, for example `LLM.runtime`. If the `LLM` is asked too, both step in turns.

    Args:
        runtime: With drafters.
        max_queue: Sequences that may wait.
        kv_tokens: Committed tokens of all sequences together, None for as many as fit. See `Scheduler`.
        prefix_bytes: Keys and values kept for prompts that start alike, 0 for none.
        prefill_chunk: Prompt tokens per step while others decode.
        memory_limit: Bytes of keys and values at most, those of drafters and the prefix cache included.
        room: Bytes in which each slot must be able to hold a text, beside the prefix cache. The longest texts are shortened.
        observer: Counts steps and sequences.
        trace: Where every step is written.

    Raises ValueError when `memory_limit` is too little for the slots and lengths.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        max_queue: int = 64,
        kv_tokens: int | None = None,
        prefix_bytes: int = BYTES,
        prefill_chunk: int = 64,
        memory_limit: int | None = None,
        room: int | None = None,
        observer: Observer | None = None,
        trace: Recorder | None = None,
    ) -> None:
        if runtime.roster is None:
            raise ValueError("a runtime without drafters has no methods to choose from; use LLM(..., any_method=True)")
        self.runtime, self.decoder, self.roster, files = runtime, runtime.decoder, runtime.roster, runtime.files
        self.memory = Memory(self.decoder.target, self.decoder.cache, self.roster.drafters.values())
        length = self.decoder.max_length
        if room is not None:
            length = min(length, max(self.memory.longest(room - prefix_bytes), SHORTEST))
            self.memory.shorten(length)
        self.kv_limit = self.decoder.cache.num_slots * length if kv_tokens is None else kv_tokens
        self.prefixes = PrefixCache(prefix_bytes, files) if prefix_bytes or files else None
        self.decoder.limit(min(length, self.kv_limit), self.prefixes)  # one sequence alone always fits
        self.scheduler = Scheduler(
            self.decoder,
            self.roster,
            max_queue=max_queue,
            kv_limit=kv_tokens,
            prefill_chunk=prefill_chunk,
            observer=observer,
            trace=trace,
        )
        if memory_limit is not None:
            self.memory.bound(memory_limit, self.prefixes.limit if self.prefixes else 0)
        self.problem: str | None = None  # why /health reports failure, or None
        self._wake = threading.Condition(self.scheduler.lock)
        self._stop, self._turned = False, perf_counter()  # _turned: when the last step began
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread runs and takes sequences."""
        return self._thread.is_alive() and not self._stop

    @property
    def closing(self) -> bool:
        """It takes no more sequences."""
        return self.scheduler.stop_at < math.inf or not self.alive

    @property
    def stalled(self) -> float:
        """Seconds that a step has lasted; 0 without work."""
        return 0.0 if self.scheduler.idle else perf_counter() - self._turned

    @property
    def stats(self) -> Stats:
        scheduler, prefixes = self.scheduler, self.prefixes
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.queue),
            accepted=scheduler.accepted,
            kv_tokens=sum(self.decoder.cache.length),
            kv_limit=self.kv_limit,
            kv_bytes=self.memory.bytes,
            memory_limit=self.memory.limit,
            prefix_bytes=prefixes.bytes if prefixes else 0,
            prefix_queries=prefixes.queries if prefixes else 0,
            prefix_hits=prefixes.hits if prefixes else 0,
            prefix_file_tokens=prefixes.files.read if prefixes and prefixes.files else 0,
            prefix_file_bytes=prefixes.files.folder.bytes if prefixes and prefixes.files else 0,
            preemptions=scheduler.preemptions,
            drafter_failures=self.roster.failures,
        )

    def submit(self, requests: abc.Sequence[Request]) -> list[Sequence]:
        """Queue a sequence of each request, all or none. Raises ValueError, QueueFull or EngineStopped."""
        if self.scheduler.idle:
            self._turned = perf_counter()
        sequences = self.scheduler.add(requests)
        with self._wake:
            self._wake.notify()
        return sequences

    def cancel(self, sequences: abc.Sequence[Sequence]) -> None:
        """These have no reader any more. They leave before the next step."""
        for sequence in sequences:
            self.scheduler.cancel(sequence)
        with self._wake:
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more sequences. What is not finished after `seconds` ends with the text it has."""
        self.scheduler.stop(perf_counter() + seconds)
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """End the thread and every sequence that is left."""
        with self._wake:
            self.scheduler.stop(0.0)
            self._stop = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop:
                with self._wake:
                    if self.scheduler.idle:
                        if wrong := self.scheduler.problems():
                            self.problem = "; ".join(wrong)
                            log.error("the scheduler's tables are wrong: %s", self.problem)
                        while self.scheduler.idle and not self._stop:
                            self._wake.wait()
                    self._turned = perf_counter()
                self.scheduler.step()
        except BaseException as error:  # no reader may be left waiting, whatever it was
            log.exception("the engine's thread died")
            self.problem = f"the engine has died ({type(error).__name__})"
        finally:
            with self._wake:
                self._stop = True
            self.scheduler.close("error" if self.problem else "abort", self.problem or CLOSING)
