"""What the engine is asked for and what it answers: jobs, updates, results, and the queue they wait in."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from outrider.core.types import Guarantee
from outrider.decode import Request, Row
from outrider.outputs import CompletionOutput, SpeculativeMetrics


class QueueFull(Exception):
    """No room to wait. retry_after: seconds until there may be."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The engine takes no requests: it is shutting down, or its thread has died."""


@dataclass(frozen=True)
class Result:
    """How a job ended. Times in seconds since it was submitted.

    output: finish_reason `error` (stop_reason says why) and `abort` (cancelled, late, or the server stops) included.
    undrafted: why the text was written on without guesses, or None. cached_tokens: prompt tokens found in the prefix cache.
    prediction: guesses from the request's own prediction that were (kept, not kept), or None without one.
    """

    output: CompletionOutput
    prompt_tokens: int
    cached_tokens: int
    queued: float
    first: float | None
    total: float
    preemptions: int
    speculative: SpeculativeMetrics | None
    undrafted: str | None
    prediction: tuple[int, int] | None
    prompt_logprobs: list[dict[int, float] | None] | None


@dataclass(frozen=True)
class Update:
    """What one step added. pieces: its text cut at the borders of tokens. drafted, accepted: guesses of the step."""

    text: str
    token_ids: list[int]
    pieces: list[str]
    logprobs: list[dict[int, float]]
    drafted: int = 0
    accepted: int = 0
    result: Result | None = None


@dataclass(eq=False)
class Job:
    """One text to write. sink: called from the engine's thread with every update, the last one carrying the result.

    client: who asks; clients take turns in the queue. method: whose guesses, None for the configured drafter, "none" for
    nobody's. depth: guesses per step, None for the controller's choice. deadline: a `perf_counter` time.
    """

    request: Request
    sink: Callable[[Update], None]
    client: str = ""
    method: str | None = None
    depth: int | None = None
    deadline: float = math.inf

    row: Row | None = field(default=None, init=False)  # kept while preempted
    submitted: float = field(default_factory=perf_counter, init=False)
    admitted: float | None = field(default=None, init=False)
    first: float | None = field(default=None, init=False)
    last: float | None = field(default=None, init=False)
    drafted: list[int] = field(default_factory=list, init=False)  # guesses of each step
    accepted: list[int] = field(default_factory=list, init=False)
    told: int = field(default=0, init=False)  # output tokens handed out
    sent: int = field(default=0, init=False)  # characters handed out
    marks: int = field(default=0, init=False)  # token borders passed
    preemptions: int = field(default=0, init=False)
    undrafted: str | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    finished: bool = field(default=False, init=False)

    def news(self) -> tuple[str, list[int], list[str], list[dict[int, float]]]:
        """Text, tokens, pieces and log-probabilities written since the last call."""
        row = self.row
        if row is None:
            return "", [], [], []
        text, borders = row.ending.settled, row.ending.marks
        pieces, at = list[str](), self.sent
        while self.marks < len(borders) and borders[self.marks] <= len(text):
            pieces.append(text[at : borders[self.marks]])
            at = max(at, borders[self.marks])
            self.marks += 1
        if row.end is not None or not borders:
            pieces.append(text[at:])
            at = len(text)
        new, tokens = text[self.sent : at], row.tokens[len(row.request.prompt) + self.told :]
        logprobs = row.logprobs[self.told :]
        self.sent, self.told = at, self.told + len(tokens)
        return new, tokens, [p for p in pieces if p], logprobs

    def result(self, finish: str, reason: str | int | None, guarantee: Guarantee, method: str, depth: int) -> Result:
        """How it ends, now. method: whose guesses it had. depth: guesses per step that it could have."""
        row, request, now = self.row, self.request, perf_counter()
        asked = request.params.logprobs is not None
        output = CompletionOutput(
            index=0,
            text=row.ending.text if row else "",
            token_ids=list(row.output) if row else [],
            finish_reason=finish,
            stop_reason=reason,
            seed=request.seed,
            guarantee=guarantee,
            logprobs=row.logprobs if asked and row else None,
        )
        kept = sum(self.accepted)
        return Result(
            output=output,
            prompt_tokens=len(request.prompt),
            cached_tokens=row.cached if row else 0,
            queued=(self.admitted or now) - self.submitted,
            first=None if self.first is None else self.first - self.submitted,
            total=now - self.submitted,
            preemptions=self.preemptions,
            speculative=SpeculativeMetrics.of(self.drafted, self.accepted, depth) if method != "none" else None,
            undrafted=self.undrafted,
            prediction=(kept, sum(self.drafted) - kept) if method == "prediction" else None,
            prompt_logprobs=row.prompt_logprobs if row and request.params.prompt_logprobs is not None else None,
        )


class FairQueue:
    """First come, first served within a client; clients take turns. Bounded."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._clients.values())

    def __iter__(self) -> Iterator[Job]:
        return (job for jobs in self._clients.values() for job in jobs)

    def put(self, job: Job) -> None:
        self._clients.setdefault(job.client, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """A job that had its turn and lost it is the next one."""
        self._clients.setdefault(job.client, deque()).appendleft(job)
        self._clients.move_to_end(job.client, last=False)

    def peek(self) -> Job:
        """The job whose turn it is. Raises StopIteration when nobody waits."""
        return next(iter(self._clients.values()))[0]

    def pop(self) -> Job:
        """Take that job; its client goes to the end of the line."""
        client, jobs = next(iter(self._clients.items()))
        job = jobs.popleft()
        del self._clients[client]
        if jobs:
            self._clients[client] = jobs
        return job

    def remove(self, job: Job) -> None:
        jobs = self._clients[job.client]
        jobs.remove(job)
        if not jobs:
            del self._clients[job.client]
