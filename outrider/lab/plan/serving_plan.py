"""The plan: what a batch costs at every size, when speculation pays, and how many replicas a demand needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from outrider.control.shapes import expected_tokens
from outrider.lab.bench.stats import percentile
from outrider.lab.plan.acceptance_curve import AcceptanceCurve
from outrider.lab.plan.serving_costs import ServingCosts, by_length
from outrider.lab.plan.simulation import ReplicaLimits, SimulatedFleet, SimulatedRequest, simulate
from outrider.lab.plan.workload import Arrival, Demand

SIMULATED = 16  # replicas that are simulated of a larger fleet, each with its share of the requests
_PER_REPLICA = 60  # requests of each in a simulation, at least
_BATCHES = 5  # and full batches
_REQUESTS = 3000  # of a simulation of a part of the fleet, about
_WARM = 0.3  # of the requests, from the first, that find the replicas still filling
_MOST = 10_000  # replicas
_FULL = 0.98  # of its capacity at which the queue of a fleet grows without end, in any simulation of finite length


@dataclass(frozen=True)
class Forecast:
    """What a fleet of so many replicas does, from a simulation. Times are 90th percentiles in seconds.

    policy: plain, fixed or adaptive. stable: the queue does not grow without end. throughput: output tokens per second of the
    fleet. tpot: per token after the first. batch_size: mean of a round. drafted: share of rounds with drafts. load: of the
    fleet's capacity.
    """

    policy: str
    replicas: int
    stable: bool
    load: float
    throughput: float
    wait: float
    ttft: float
    tpot: float
    latency: float
    median_latency: float
    batch_size: float
    drafted: float
    preemptions: int


@dataclass(frozen=True)
class BatchFigures:
    """A full batch of one size, prompts included.

    reached: whether its keys and values fit, and prompts are read fast enough to keep it full. plain_seconds, seconds: of a
    plain round, and of one with the best draft.
    speedup: of decoding. plain_tokens, tokens: output tokens per second of a replica, prompts included. by_depth: speedup of
    decoding at each draft length from 0.
    """

    batch_size: int
    reached: bool
    depth: int
    plain_seconds: float
    seconds: float
    speedup: float
    plain_tokens: float
    tokens: float
    by_depth: list[float]


@dataclass(frozen=True)
class ServingPlan:
    """All inputs of a plan, and what follows from them.

    targets: seconds that a forecast may have, by its names: wait, ttft, tpot, latency. price: of a replica for an hour, or None.
    seed: of the simulations.
    """

    demand: Demand
    costs: ServingCosts
    curve: AcceptanceCurve
    limits: ReplicaLimits
    targets: Mapping[str, float] = field(default_factory=lambda: {"wait": 1.0})
    price: float | None = None
    seed: int = 0
    whole_fleet: bool = False
    _known: dict[object, Forecast] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def seconds(self) -> Callable[[int, int, float], float]:
        """Of a round: (batch size, depth, context) -> seconds."""
        return by_length(self.costs, self.curve)

    @cached_property
    def context(self) -> float:
        """Tokens of a sequence on average: its prompt and half of its answer."""
        return self.demand.prompt.mean + self.demand.output.mean / 2

    @cached_property
    def batch_limit(self) -> int:
        """Sequences that fit together when each is as long as it gets on average."""
        fits = self.limits.kv_tokens / (self.demand.prompt.mean + self.demand.output.mean)
        return max(1, min(self.limits.max_num_seqs, int(min(fits, 1 << 30))))

    @cached_property
    def adaptive(self) -> list[int]:
        """The draft length with the most tokens per second by batch size, at index 0 to `max_num_seqs`.

        What the drafter must read of a prompt counts. 0 is plain decoding, and wins a tie.
        """
        found = list[int]()
        for size in range(1, self.limits.max_num_seqs + 1):
            rates = [self._tokens_per_second(size, k) for k in range(self.curve.depth + 1)]
            found.append(rates.index(max(rates)))
        return [found[0], *found]

    @property
    def policies(self) -> dict[str, list[int]]:
        """Draft length by batch size of the three ways to serve. fixed: what is best for one sequence, for all sizes."""
        size = self.limits.max_num_seqs + 1
        return {"plain": [0] * size, "fixed": [self.adaptive[0]] * size, "adaptive": self.adaptive}

    @property
    def pieces(self) -> int:
        """Steps that read a prompt of mean length."""
        return max(1, math.ceil((self.demand.prompt.mean - 1) / self.limits.prefill_chunk))

    @cached_property
    def prefill_seconds(self) -> float:
        """Taking a request, and reading its prompt in pieces."""
        prompt, chunk = max(round(self.demand.prompt.mean) - 1, 0), self.limits.prefill_chunk
        pieces = [min(chunk, prompt - at) for at in range(0, prompt, chunk)]
        return self.costs.request + sum(self.costs.prefill(n, i * chunk) for i, n in enumerate(pieces))

    def batch(self, size: int) -> BatchFigures:
        """The figures of a batch of this size."""
        survival = self.curve.survival
        plain = self.seconds(size, 0, self.context)
        by_depth = [
            expected_tokens(survival[:k]) * plain / self.seconds(size, k, self.context)
            for k in range(len(survival) + 1)
        ]
        depth = self.adaptive[size]

        most = min(self.batch_limit, max(self.demand.output.mean / self.pieces, 1.0))
        return BatchFigures(
            batch_size=size,
            reached=size <= most,
            depth=depth,
            plain_seconds=plain,
            seconds=self.seconds(size, depth, self.context),
            speedup=by_depth[depth],
            plain_tokens=self._tokens_per_second(size, 0),
            tokens=self._tokens_per_second(size, depth),
            by_depth=by_depth,
        )

    def _tokens_per_second(self, size: int, depth: int) -> float:
        """Output tokens per second of a batch, with the reading of its prompts.

        A step reads one piece of one prompt. So a batch cannot grow beyond rounds of an answer / pieces of a prompt.
        """
        reads = self.costs.reading(round(self.demand.prompt.mean)) if depth else 0.0
        rounds = self.demand.output.mean / expected_tokens(self.curve.survival[:depth])
        batch = min(float(size), max(rounds / self.pieces, 1.0))
        decoding = rounds * self.seconds(round(batch), depth, self.context) / batch
        return self.demand.output.mean / (self.prefill_seconds + reads + decoding)

    def table(self) -> list[BatchFigures]:
        """The figures of batch sizes 1, 2, 4, ... up to the largest."""
        most = self.limits.max_num_seqs
        return [self.batch(n) for n in sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})]

    def loses_from(self) -> int | None:
        """The batch size from which on the best draft for one sequence is slower than plain decoding; None if it never is."""
        depth = self.adaptive[0]
        if not depth:
            return 1
        slower = [n for n in range(1, self.limits.max_num_seqs + 1) if self.batch(n).by_depth[depth] < 1]
        return slower[0] if slower else None

    @cached_property
    def capacity(self) -> dict[str, float]:
        """Requests per second of a replica that always has some waiting, by policy; from a simulation."""
        return {name: self.saturated(depths) for name, depths in self.policies.items()}

    def saturated(self, depths: Sequence[int]) -> float:
        """Requests per second of a replica that always has some waiting. depths: draft tokens by batch size."""
        count = max(_BATCHES * self.batch_limit, 200)
        arrivals = (Arrival(0.0, a.prompt, a.output) for a in self.demand.arrivals(count, self.seed))
        fleet = simulate(arrivals, 1, self.limits, self.costs, self.seconds, depths, self.curve, self.seed)
        ends = sorted(r.done or 0.0 for r in fleet.requests)
        first, last = ends[int(0.2 * count)], ends[int(0.8 * count)]
        return (int(0.8 * count) - int(0.2 * count)) / (last - first)

    def forecast(self, replicas: int, policy: str = "adaptive", share: float = 1.0) -> Forecast:
        """Simulate so many replicas. share: of the demand's requests per second."""
        key = (replicas, policy, share)
        if key not in self._known:
            self._known[key] = self._simulated(replicas, policy, share)
        return self._known[key]

    def _simulated(self, replicas: int, policy: str, share: float) -> Forecast:
        load = self.demand.qps * share / replicas / self.capacity[policy]
        each = max(_PER_REPLICA, round(_BATCHES * self.batch_limit * min(load, 1.0)))
        part = replicas if self.whole_fleet else min(replicas, max(_REQUESTS // each, 2), SIMULATED)
        count = max(part * each, 400)
        arrivals = self.demand.arrivals(count, self.seed, share * part / replicas)
        depths = self.policies[policy]
        fleet = simulate(arrivals, part, self.limits, self.costs, self.seconds, depths, self.curve, self.seed)
        found = steady(fleet, count)
        seconds = max(r.done or 0.0 for r in found) - min(r.arrived for r in found)
        offered = self.demand.qps * share * self.demand.output.mean
        measured = sum(r.output for r in found) / seconds * replicas / part

        def p90(name: str) -> float:
            return percentile([getattr(r, name) for r in found], 90)

        return Forecast(
            policy=policy,
            replicas=replicas,
            stable=load < _FULL,
            load=load,
            throughput=offered if load < _FULL else min(offered, measured),
            wait=p90("wait"),
            ttft=p90("time_to_first_token"),
            tpot=p90("time_per_output_token"),
            latency=p90("latency"),
            median_latency=percentile([r.latency for r in found], 50),
            batch_size=fleet.batch_size,
            drafted=fleet.drafted_share,
            preemptions=sum(r.preemptions for r in found),
        )

    def fleet(self, policy: str = "adaptive") -> Forecast:
        """The smallest fleet that keeps the targets. Raises ValueError where no fleet does, with the reason."""
        least = max(1, math.ceil(self.demand.qps / self.capacity[policy] / _FULL))
        if least > _MOST:
            raise ValueError(
                f"{self.demand.qps:g} requests per second need {least:,} replicas of {self.capacity[policy]:.3g} each, and plans "
                f"end at {_MOST:,}; split the demand, or use larger replicas"
            )
        self._refuse_impossible(policy)
        low, high = least - 1, least
        while not self._keeps(high, policy):
            low, high = high, min(2 * high, high + max(high // 4, 1))
            if high > 2 * _MOST:
                found = self.forecast(low, policy)
                missed = ", ".join(f"{name} {getattr(found, name):.3g} s" for name in self.missed(found))
                raise ValueError(f"no fleet of up to {_MOST:,} replicas keeps the targets: {missed}")
        while high - low > max(1, low // 100):  # to a replica, or a percent
            middle = (low + high) // 2
            low, high = (low, middle) if self._keeps(middle, policy) else (middle, high)
        return self.forecast(high, policy)

    def _keeps(self, replicas: int, policy: str) -> bool:
        found = self.forecast(replicas, policy)
        return found.stable and not self.missed(found)

    def missed(self, found: Forecast) -> list[str]:
        """The targets that a forecast does not keep."""
        return [name for name, limit in self.targets.items() if getattr(found, name) > limit]

    def _refuse_impossible(self, policy: str) -> None:
        """Raise ValueError for a target that even a replica without other requests misses."""
        found = replace(self, demand=replace(self.demand, qps=1e-6), _known={}).forecast(1, policy)
        for name in self.missed(found):
            raise ValueError(
                f"no number of replicas keeps a p90 {name} of {self.targets[name]:g} s: a request that is alone on a replica "
                f"takes {getattr(found, name):.3g} s; allow more, or use faster hardware for each replica"
            )

    def cost_per_million(self, found: Forecast) -> float | None:
        """Money for a million output tokens of a fleet; None without a price."""
        return None if self.price is None else self.price * found.replicas / (found.throughput * 3600) * 1e6

    def replica_hours_per_million(self, found: Forecast) -> float:
        return found.replicas / (found.throughput * 3600) * 1e6


def steady(fleet: SimulatedFleet, count: int) -> list[SimulatedRequest]:
    """The requests that found the fleet neither filling nor running dry: from `_WARM` of all on, without the last tenth."""
    some = [r for r in fleet.requests if _WARM * count <= r.id < 0.9 * count]
    return some or fleet.requests
