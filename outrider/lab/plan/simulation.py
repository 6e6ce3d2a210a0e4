"""A simulator of replicas that batch continuously and speculate. Events in place of a clock; the same seed gives the same run.

A replica takes the decisions of `outrider.engine.Scheduler`, by the same functions (`outrider.engine.policy`) and with the same
queue. A step seats what waits, reads a piece of the oldest unread prompt, and runs a round of all sequences that decode. A draft
model reads as the planner lets it: after the first token, one sequence a round, in pieces. Nothing changes in a batch between an
arrival, a finished prompt and a finished answer. So the rounds between them are one event, and cost what a round costs at their
mean context.

How many draft tokens each round of a sequence accepts is drawn when it arrives. So a longer draft accepts what a shorter one
would have accepted, and other settings meet the same luck.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from outrider.control.price import piece_of_reading
from outrider.engine import policy
from outrider.engine.queue import FairQueue
from outrider.lab.plan.acceptance_curve import AcceptanceCurve
from outrider.lab.plan.serving_costs import ServingCosts
from outrider.lab.plan.workload import Arrival

ALONE = 256  # prompt tokens per step where no other sequence waits; as `outrider.engine.decoder.PREFILL_CHUNK`

RoundSeconds = Callable[[int, int, float], float]  # batch size, depth, context


@dataclass(frozen=True)
class ReplicaLimits:
    """What a replica holds; the names are those of `outrider serve`. kv_tokens: of all sequences together."""

    max_num_seqs: int
    kv_tokens: float = math.inf
    prefill_chunk: int = 64


class SimulatedRequest:
    """A request, and when what happened to it. Times in seconds from the beginning; None where it did not happen."""

    __slots__ = ("_draws", "_sums", "admitted", "arrived", "client", "done", "first", "held", "id", "output", "preemptions",
                 "prompt", "read", "replica", "steps", "written")  # fmt: skip

    def __init__(self, number: int, arrival: Arrival, draws: np.ndarray | None) -> None:
        """draws: accepted draft tokens of each round, int [output], for the longest draft; None without drafts."""
        self.id, self.client, self.replica = number, "", -1
        self.arrived, self.prompt, self.output = arrival.at, arrival.prompt, arrival.output
        self.held = self.read = self.written = self.steps = self.preemptions = 0
        self.admitted: float | None = None
        self.first: float | None = None
        self.done: float | None = None
        self._draws, self._sums = draws, dict[int, list[int]]()

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt + self.written

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        assert self.done is not None
        return self.done - self.arrived

    @property
    def time_to_first_token(self) -> float:
        assert self.first is not None
        return self.first - self.arrived

    @property
    def wait(self) -> float:
        """Seconds in the queue."""
        assert self.admitted is not None
        return self.admitted - self.arrived

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds of a token after the first; 0 for an answer of one."""
        assert self.done is not None
        assert self.first is not None
        return (self.done - self.first) / (self.output - 1) if self.output > 1 else 0.0

    def sums(self, depth: int) -> list[int]:
        """Tokens written before each round if every draft has this depth."""
        found = self._sums.get(depth)
        if found is None:
            draws = self._draws
            each = [1] * self.output if draws is None or not depth else (np.minimum(draws, depth) + 1).tolist()
            found = self._sums[depth] = [0, *accumulate(each)]
        return found

    def rounds_left(self, depth: int) -> int:
        """Rounds to the end of the answer."""
        sums = self.sums(depth)
        return bisect_left(sums, sums[self.steps] + self.output - self.written, self.steps) - self.steps

    def advance(self, depth: int, rounds: int) -> int:
        """So many rounds are done. Returns the tokens they wrote."""
        sums = self.sums(depth)
        new = min(sums[self.steps + rounds] - sums[self.steps], self.output - self.written)
        self.steps += rounds
        self.written += new
        return new

    def end(self, now: float) -> None:
        """The answer is complete."""
        self.done = now
        self._draws, self._sums = None, {}


class SimulatedReplica:
    """One replica. It is brought up to date when it is asked: `advance` runs all that has begun by then.

    depths: draft tokens of a round by batch size. seconds: of a round. clock: the end of the last step.
    rounds, row_rounds: rounds, and the sum of their batch sizes. drafted_rounds: those with drafts.
    """

    def __init__(
        self, limits: ReplicaLimits, costs: ServingCosts, seconds: RoundSeconds, depths: Sequence[int]
    ) -> None:
        self.limits, self.costs, self.seconds, self.depths = limits, costs, seconds, depths
        self.queue = FairQueue[SimulatedRequest](math.inf)
        self.running = dict[int, SimulatedRequest]()  # in order of admission
        self.unread = deque[SimulatedRequest]()  # of these, those whose prompt is not all read
        self.live = dict[int, SimulatedRequest]()  # and those that decode
        self.clock = 0.0
        self.rounds = self.row_rounds = self.drafted_rounds = 0
        self._ended = 0  # in the last step
        self._held = 0  # tokens of all that runs
        self._seated = 0  # requests that came since the last step
        self._level = True  # has the draft model read all that is live?

    def load(self, now: float) -> int:
        """Requests that wait or run."""
        return len(self.queue) + len(self.running) + (self._ended if self.clock > now else 0)

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a request that comes now; the replica must have been advanced to now."""
        if not self.running and not len(self.queue):
            self.clock = max(self.clock, request.arrived)
        self.queue.put(request)

    def advance(self, until: float) -> None:
        """Run all steps that begin before `until`."""
        while (self.running or len(self.queue)) and self.clock < until:
            self._seat()
            self._preempt()
            if self.unread or self._lags():
                self._step()
            else:
                self._stretch(until)

    def _seat(self) -> None:
        while len(self.running) < self.limits.max_num_seqs and len(self.queue):
            request = next(iter(self.queue))
            if not policy.may_seat(len(self.running), self._held, request.tokens, self.limits.kv_tokens):
                return
            self.queue.pop()
            request.admitted = self.clock if request.admitted is None else request.admitted
            self.running[request.id] = request
            self.unread.append(request)
            self._held += request.tokens
            self._seated += 1

    def _preempt(self) -> None:
        while policy.must_preempt(len(self.running), self._held, self.limits.kv_tokens):
            request = self.running.popitem()[1]
            if self.live.pop(request.id, None) is None:
                self.unread.remove(request)
            self._held -= request.tokens
            request.held = request.read = 0
            request.preemptions += 1
            self.queue.put_back(request)

    def _lags(self) -> bool:
        """Whether the draft model has not read all that it is to draft for."""
        return not self._level and self.costs.drafter_reads and self.depths[len(self.live)] > 0

    def _step(self) -> None:
        """One step of the scheduler."""
        spent = self._seated * self.costs.request + self._prefill()
        self._seated = 0
        if self.live:
            spent += self._round()
        self._pass(spent)

    def _prefill(self) -> float:
        if not self.unread:
            return 0.0
        request, last = self.unread[0], self.unread[0].tokens - 1
        chunk = max(self.limits.prefill_chunk, ALONE)
        count = min(policy.prefill_tokens(len(self.running), self.limits.prefill_chunk, chunk), last - request.held)
        spent = self.costs.prefill(count, request.held) if count else 0.0
        request.held += count
        if request.held == last:
            self.live[request.id] = self.unread.popleft()
        return spent

    def _piece(self, size: int, context: float) -> int:
        """Tokens that the draft model reads of one sequence between two rounds; fewer are read within a round."""
        plain, each = self.seconds(size, 0, context), self.costs.reading(ALONE) / ALONE
        return piece_of_reading(size, plain, each)

    def _round(self) -> float:
        size, spent, drafted = len(self.live), 0.0, 0
        depth, reads = self.depths[size], self.depths[size] > 0 and self.costs.drafter_reads
        context = sum([request.tokens for request in self.live.values()]) / size
        piece = self._piece(size, context) if reads else 0
        behind, fewest = None, math.inf  # what has the fewest tokens to read, of those that are read between rounds
        self._level = depth > 0
        for request in self.live.values():
            own, missing = depth, request.tokens - 1 - request.read
            if reads and (not request.written or missing > piece):  # the first token comes first
                own, self._level = 0, False
                if request.written and missing < fewest:
                    behind, fewest = request, missing
            elif reads and missing > 0:
                spent += self.costs.reading(missing)
            self._held += request.advance(own, 1)
            if own:
                drafted += 1
                request.read = request.tokens
        if behind is not None:
            spent += self.costs.reading(piece)
            behind.read += piece
        depth = depth if drafted else 0
        self._count(size, depth, 1)
        return spent + self.seconds(size, depth, context)

    def _stretch(self, until: float) -> None:
        """All rounds until an answer ends, until a sequence may have to give way, or those that begin before `until`."""
        live, size = self.live.values(), len(self.live)
        depth, before = self.depths[size], self._held
        rounds = min([r.rounds_left(depth) for r in live])
        if size > 1 and self.limits.kv_tokens < math.inf:
            spare = self.limits.kv_tokens - before - policy.HEADROOM * size
            rounds = min(rounds, max(int(spare // (size * (depth + 1))), 1))
        if until < math.inf:
            each = self.seconds(size, depth, before / size)
            rounds = min(rounds, max(math.ceil((until - self.clock) / each), 1) if each else rounds)
        for request in live:
            self._held += request.advance(depth, rounds)
            if depth:
                request.read = request.prompt + request.written
        self._level = depth > 0
        self._count(size, depth, rounds)
        # The context of the first round is `before`, that of the last one round less than now.
        context = (before + self._held - (self._held - before) / rounds) / 2 / size
        self._pass(rounds * self.seconds(size, depth, context))

    def _count(self, size: int, depth: int, rounds: int) -> None:
        self.rounds += rounds
        self.row_rounds += rounds * size
        self.drafted_rounds += rounds if depth else 0

    def _pass(self, spent: float) -> None:
        """Time passes, and complete answers leave."""
        self.clock += spent
        ended = list[SimulatedRequest]()
        for request in self.live.values():
            if request.first is None:
                request.first = self.clock
            if request.written >= request.output:
                ended.append(request)
        for request in ended:
            del self.running[request.id], self.live[request.id]
            self._held -= request.tokens
            request.end(self.clock)
        self._ended = len(ended)


@dataclass(frozen=True, eq=False)
class SimulatedFleet:
    """What happened. requests: all that were answered, by arrival."""

    requests: list[SimulatedRequest]
    replicas: list[SimulatedReplica]

    @property
    def batch_size(self) -> float:
        """Mean batch size of a round."""
        return sum(r.row_rounds for r in self.replicas) / max(sum(r.rounds for r in self.replicas), 1)

    @property
    def drafted_share(self) -> float:
        """The share of rounds with drafts."""
        return sum(r.drafted_rounds for r in self.replicas) / max(sum(r.rounds for r in self.replicas), 1)


def simulate(
    arrivals: Iterable[Arrival],
    replicas: int,
    limits: ReplicaLimits,
    costs: ServingCosts,
    seconds: RoundSeconds,
    depths: Sequence[int],
    curve: AcceptanceCurve,
    seed: int = 0,
    routing: str = "two",
) -> SimulatedFleet:
    """Run a fleet to the end of its last answer.

    arrivals: by time. seconds: of a round, as of `by_length`. depths: draft tokens by batch size, at index 0 to
    `max_num_seqs`. routing: "two" takes the less loaded of two replicas at random, as Ray Serve does; "random" any.
    """
    rng = np.random.default_rng([seed, 1])
    fleet = [SimulatedReplica(limits, costs, seconds, depths) for _ in range(replicas)]
    luck, deepest = _Luck(curve, rng), max(depths)
    requests = list[SimulatedRequest]()
    for number, arrival in enumerate(arrivals):
        request = SimulatedRequest(number, arrival, luck.draws(arrival.output) if deepest else None)
        some = rng.integers(replicas, size=2 if routing == "two" else 1).tolist()
        for n in some:
            fleet[n].advance(arrival.at)
        request.replica = min(some, key=lambda n: fleet[n].load(arrival.at))
        fleet[request.replica].submit(request)
        requests.append(request)
    for replica in fleet:
        replica.advance(math.inf)
    return SimulatedFleet(requests, fleet)


class _Luck:
    """Draws how many draft tokens are accepted. An answer has the acceptance of a measured answer, or the common one."""

    def __init__(self, curve: AcceptanceCurve, rng: np.random.Generator) -> None:
        answers = curve.answers or (curve,)
        self.rng, self.certain = rng, min(curve.available, default=1.0) == 1
        # Both fall with the position; reversed they can be searched.
        self.kept = [np.array(answer.kept[::-1]) for answer in answers]
        self.some = [np.array(answer.available[::-1]) for answer in answers]

    def draws(self, rounds: int) -> np.ndarray:
        """Accepted draft tokens of each round for the longest draft: int64 [rounds]."""
        one = int(self.rng.integers(len(self.kept))) if len(self.kept) > 1 else 0
        found = self._positions(self.kept[one], rounds)
        return found if self.certain else np.minimum(found, self._positions(self.some[one], rounds))

    def _positions(self, reached: np.ndarray, rounds: int) -> np.ndarray:
        """How many positions are reached in each round. reached: the chance of each, the last one first."""
        return len(reached) - np.searchsorted(reached, self.rng.random(rounds), side="right")
