"""The simulator against closed forms, against the engine's own scheduler, and its laws of conservation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.stopping import StopChecker
from outrider.core.types import Commit, Draft
from outrider.engine import Scheduler, policy
from outrider.engine import request as request_module
from outrider.engine import scheduler as scheduler_module
from outrider.engine.request import Sequence
from outrider.lab.plan import simulation
from outrider.lab.plan.acceptance_curve import AcceptanceCurve, constant
from outrider.lab.plan.serving_costs import by_length
from outrider.lab.plan.simulation import ReplicaLimits, SimulatedFleet, simulate
from outrider.lab.plan.workload import Arrival, Demand, Lengths


class Flat:
    """Costs that are easy to reckon with. A round: `base`, and `row`, `level` and `cell` for each of its sequences, draft
    tokens and tokens of context."""

    def __init__(self, base=1.0, row=0.0, level=0.0, cell=0.0, token=0.0, read=0.0, request=0.0) -> None:
        self.base, self.row, self.level, self.cell, self.token, self.read = base, row, level, cell, token, read
        self.request = request

    @property
    def drafter_reads(self) -> bool:
        return self.read > 0

    def round(self, batch_size: int, depth: int, context: float) -> float:
        return self.base + self.row * batch_size + self.level * depth + self.cell * context * batch_size

    def prefill(self, tokens: int, context: float) -> float:
        return self.token * tokens

    def reading(self, tokens: int) -> float:
        return self.read * tokens


def run(
    arrivals, costs, slots=1, replicas=1, depth=0, curve=None, seed=0, routing="random", **limits
) -> SimulatedFleet:
    curve = curve or constant(0.5, 8)
    seconds = by_length(costs, curve) if costs.cell == 0 else costs.round
    return simulate(
        arrivals, replicas, ReplicaLimits(slots, **limits), costs, seconds, [depth] * (slots + 1), curve, seed, routing
    )


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def fixed(qps: float, output: int, prompt: int = 1) -> Demand:
    return Demand(qps, Lengths("fixed", prompt, prompt), Lengths("fixed", output, output))


# -- closed forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_one_slot_is_the_queue_m_d_1(load):
    """Pollaczek-Khinchine: mean wait = load * service / (2 * (1 - load))."""
    service = 10.0  # ten rounds of a second
    count = 25_000
    fleet = run(fixed(load / service, 10).arrivals(count, seed=3), Flat())
    expected = load * service / (2 * (1 - load))
    assert mean(r.wait for r in fleet.requests) == pytest.approx(expected, rel=0.08)
    assert all(r.latency - r.wait == pytest.approx(service) for r in fleet.requests[:100])


@pytest.mark.parametrize("slots", [1, 8])
def test_many_slots_are_the_queue_m_m_c(slots):
    """Erlang's C: rounds that cost the same for any batch size, answers of geometric length, and short rounds."""
    service, load = 200.0, 0.8
    demand = Demand(slots * load / service, Lengths("fixed", 1, 1), Lengths("geometric", 200, 200))
    fleet = run(demand.arrivals(12_000, seed=5), Flat(), slots)
    offered = slots * load
    blocked = offered**slots / math.factorial(slots) / (1 - load)
    waits = blocked / (blocked + sum(offered**k / math.factorial(k) for k in range(slots)))
    expected = waits * service / (slots * (1 - load))
    assert mean(r.wait for r in fleet.requests) == pytest.approx(expected, rel=0.15)


def test_replicas_with_random_routing_are_queues_of_their_own():
    service, load = 10.0, 0.7
    fleet = run(fixed(8 * load / service, 10).arrivals(20_000, seed=1), Flat(), replicas=8)
    assert mean(r.wait for r in fleet.requests) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_the_less_loaded_of_two_waits_less():
    demand = fixed(8 * 0.8 / 10, 10)
    one, two = (
        mean(r.wait for r in run(demand.arrivals(8000, 1), Flat(), replicas=8, routing=how).requests)
        for how in ("random", "two")
    )
    assert two < 0.6 * one


@pytest.mark.parametrize(("rate", "depth"), [(0.0, 4), (0.5, 1), (0.7, 5), (1.0, 3)])
def test_tokens_a_round_are_those_of_leviathan(rate, depth):
    """Alone, an answer of n tokens takes about n / ((1 - a ** (k + 1)) / (1 - a)) rounds, each with its draft's cost."""
    fleet = run([Arrival(0.0, 1, 20_000)], Flat(base=1.0, level=0.1), depth=depth, curve=constant(rate, 8))
    tokens = 1 + depth if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)
    assert fleet.requests[0].latency == pytest.approx(20_000 / tokens * (1 + 0.1 * depth), rel=0.02)


def test_lookups_that_find_nothing_cost_and_gain_less():
    curve = AcceptanceCurve((0.9,) * 4, (0.25,) * 4)
    fleet = run([Arrival(0.0, 1, 20_000)], Flat(base=1.0, level=0.1), depth=4, curve=curve)
    tokens = 1 + 0.25 * sum(0.9**j for j in range(1, 5))
    assert curve.survival == pytest.approx([0.25 * 0.9**j for j in range(1, 5)])
    assert fleet.requests[0].latency == pytest.approx(20_000 / tokens * (1 + 0.25 * 0.4), rel=0.02)


def test_prompts_are_read_in_pieces_and_make_others_wait():
    """Alone in pieces of 256, beside others in pieces of `prefill_chunk`; rounds of the others go on between the pieces."""
    costs = Flat(base=1.0, token=0.01)
    alone = run([Arrival(0.0, 1001, 3)], costs).requests[0]
    assert alone.time_to_first_token == pytest.approx(10.0 + 1.0)  # a step with the last piece has a round, too
    both = run([Arrival(0.0, 1, 100), Arrival(5.0, 1001, 3)], costs, slots=2, prefill_chunk=100).requests
    assert both[1].time_to_first_token == pytest.approx(10 * (1.0 + 1.0))
    assert both[0].latency == pytest.approx(100 + 10.0)


def test_a_request_that_comes_takes_time_from_those_that_run():
    """Its text is checked and encoded, and it gets a slot: that many seconds, once for each request."""
    costs = Flat(base=1.0, request=0.25)
    some = [Arrival(0.0, 1, 100), *(Arrival(10.5 + 10 * n, 1, 1) for n in range(4))]
    found = run(some, costs, slots=2).requests
    assert found[0].latency == pytest.approx(100 + 5 * 0.25)
    assert found[1].time_to_first_token == pytest.approx(0.75 + 0.25 + 1.0)  # it comes in the middle of a round
    one = mean(r.latency for r in run([Arrival(200.0 * n, 1, 10) for n in range(5)], costs).requests)
    assert one == pytest.approx(10.25)
    both = run([Arrival(0.0, 1, 1), Arrival(0.0, 1, 1)], costs, slots=2).requests
    assert both[0].latency == pytest.approx(2 * 0.25 + 1.0)


# -- the engine's own scheduler ---------------------------------------------------------------------------------------------


class CountingDecoder:
    """Stands for `outrider.engine.decoder.Decoder`: counts in place of a model, and a clock that the costs move."""

    def __init__(self, slots: int, costs: Flat, draws: dict[int, np.ndarray], depth: int, clock: list[float]) -> None:
        self.costs, self.draws, self.depth, self.clock = costs, draws, depth, clock
        self.drafter, self.controller, self.plain, self.memory = SimpleNamespace(taps=()), None, True, None
        self.prefixes = None
        self.free, self.sequences, self.waiting, self.chunk = list(range(slots))[::-1], {}, [], 256
        self.cache = SimpleNamespace(num_slots=slots, length=[0] * slots)

    def sequence(self, request, method, depth) -> Sequence:
        return Sequence(request, StopChecker(request.params, (), request.params.max_tokens), (), method, depth)

    def admit(self, sequence) -> None:
        sequence.clock.admitted = sequence.clock.admitted or self.clock[0]
        sequence.slot = self.free.pop()
        self.sequences[sequence.slot] = sequence
        self.waiting.append(sequence)

    def remember(self, sequence) -> None:
        """It has no prefix cache."""

    def release(self, slot: int) -> None:
        sequence = self.sequences.pop(slot)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.length[slot] = 0
        self.free.append(slot)

    @property
    def live(self) -> list[Any]:
        return [s for s in self.sequences.values() if s not in self.waiting and s.finish is None]

    def prefill(self, sequence, chunk: int) -> None:
        done, last = self.cache.length[sequence.slot], len(sequence.tokens) - 1
        part = min(chunk, last - done)
        self.clock[0] += self.costs.prefill(part, done) if part else 0.0
        self.cache.length[sequence.slot] += part
        if self.cache.length[sequence.slot] == last:
            self.waiting.remove(sequence)

    def round(self, live) -> Any:
        context = sum(len(s.tokens) for s in live) / len(live)
        self.clock[0] += self.costs.round(len(live), self.depth, context)
        for s in live:
            new = min(1 + min(int(self.draws[s.id][s.steps]), self.depth), s.left)
            s.step_done(self.depth, Commit([0] * new, list(range(new)), new - 1, None, None))
            self.cache.length[s.slot] += new
            if not s.left:
                s.finish, s.clock.done = scheduler_finish(), self.clock[0]
        return SimpleNamespace(draft=Draft)


def scheduler_finish() -> Any:
    from outrider.core.stopping import FinishReason

    return FinishReason("length", None)


def scheduled(arrivals: list[Arrival], costs: Flat, slots: int, depth: int, draws, monkeypatch, **limits) -> list[Any]:
    """The same arrivals on the engine's scheduler, whose clock is moved by the costs."""
    from outrider.core.params import SamplingParams
    from outrider.engine.request import Request

    clock = [0.0]
    for module in (scheduler_module, request_module):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    decoder = CountingDecoder(slots, costs, draws, depth, clock)
    scheduler = Scheduler(decoder, kv_limit=limits.get("kv_tokens"), prefill_chunk=limits.get("prefill_chunk"))  # pyright: ignore
    every = [
        Request(n, [0] * a.prompt, SamplingParams(max_tokens=a.output, ignore_eos=True)) for n, a in enumerate(arrivals)
    ]
    left, sequences = list(zip(arrivals, every, strict=True)), list[Any]()
    while left or not scheduler.idle:
        if scheduler.idle:
            clock[0] = max(clock[0], left[0][0].at)
        while left and left[0][0].at <= clock[0]:
            arrival, request = left.pop(0)
            [sequence] = scheduler.add([request])
            sequence.clock.arrived = arrival.at
            sequences.append(sequence)
        scheduler.step()
    return sequences


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kv_tokens", [None, 400])
def test_the_same_as_the_scheduler(depth, kv_tokens, monkeypatch):
    """Every request is admitted, first answered and finished when the engine's scheduler would, preemptions included."""
    rng = np.random.default_rng(4)
    arrivals = [
        Arrival(float(at), int(p), int(n))
        for at, p, n in zip(
            rng.exponential(9.0, 120).cumsum(), rng.integers(1, 200, 120), rng.integers(1, 80, 120), strict=True
        )
    ]
    costs = Flat(base=0.5, row=0.2, level=0.1, token=0.01)
    limits = {"prefill_chunk": 32, **({"kv_tokens": kv_tokens} if kv_tokens else {})}
    draws = dict[int, np.ndarray]()
    kept = simulation._Luck.draws

    def remembered(self, rounds):
        draws[len(draws)] = found = kept(self, rounds)
        return found

    monkeypatch.setattr(simulation._Luck, "draws", remembered)
    fleet = run(arrivals, costs, slots=4, depth=depth, curve=constant(0.6, 8), **limits)
    draws = draws or {n: np.zeros(80, dtype=int) for n in range(120)}
    engine = scheduled(arrivals, costs, 4, depth, draws, monkeypatch, **limits)
    assert sum(s.counts.preemptions for s in engine) == sum(r.preemptions for r in fleet.requests)
    assert (sum(r.preemptions for r in fleet.requests) > 0) == bool(kv_tokens)
    for ours, theirs in zip(fleet.requests, engine, strict=True):
        assert ours.admitted == pytest.approx(theirs.clock.admitted)
        assert ours.first == pytest.approx(theirs.clock.first)
        assert ours.done == pytest.approx(theirs.clock.done)


# -- laws -------------------------------------------------------------------------------------------------------------------

some_arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=60)
@given(
    some_arrivals, st.integers(1, 5), st.integers(1, 3), st.integers(0, 4), st.sampled_from([0.0, 0.001]),
    st.sampled_from([math.inf, 400.0]),
)  # fmt: skip
def test_laws(gaps, slots, replicas, depth, read, kv_tokens):
    """Everything is answered once, in causal order; replicas are never slower than real time; the same seed, the same run."""
    now, arrivals = 0.0, list[Arrival]()
    for gap, prompt, output in gaps:
        now += gap
        arrivals.append(Arrival(now, prompt, output))
    costs = Flat(base=0.1, row=0.05, level=0.02, cell=1e-5, token=0.001, read=read)
    fleet, again = (
        run(arrivals, costs, slots, replicas, depth, routing="two", kv_tokens=kv_tokens, prefill_chunk=64)
        for _ in range(2)
    )
    assert [(r.done, r.replica) for r in fleet.requests] == [(r.done, r.replica) for r in again.requests]
    assert len(fleet.requests) == len(arrivals)
    for r in fleet.requests:
        assert r.written == r.output
        assert r.admitted is not None
        assert r.first is not None
        assert r.done is not None
        assert r.arrived <= r.admitted <= r.first <= r.done
        least = math.ceil(r.output / (depth + 1)) * (0.1 + 0.05)
        assert r.done - r.admitted >= least - 1e-9
    for replica in fleet.replicas:
        assert not replica.running
        assert not len(replica.queue)
        assert replica._held == 0
    if kv_tokens == math.inf:
        assert not any(r.preemptions for r in fleet.requests)


def test_long_events_are_the_same_as_single_rounds(monkeypatch):
    """With costs that grow with the context, rounds taken together cost what they cost one by one."""
    demand = Demand(0.05, Lengths("uniform", 1, 200), Lengths("uniform", 10, 200))
    costs = Flat(base=0.2, row=0.02, cell=2e-4, token=0.002)
    together = run(demand.arrivals(300, 2), costs, slots=6, depth=2)
    monkeypatch.setattr(simulation.SimulatedReplica, "_lags", lambda self: True)
    single = run(demand.arrivals(300, 2), costs, slots=6, depth=2)
    latencies, exact = ([r.latency for r in fleet.requests] for fleet in (together, single))
    assert mean(latencies) == pytest.approx(mean(exact), rel=0.005)
    assert (
        sum(abs(a - b) > 0.01 * b for a, b in zip(latencies, exact, strict=True)) < 90
    )  # seated a round earlier or later


def test_a_draft_model_reads_before_it_drafts():
    """The first token comes first. Then the prompt is read in pieces, between rounds without drafts; the rest with a draft."""
    costs = Flat(base=1.0, token=0.0, read=0.01)
    alone = run([Arrival(0.0, 1001, 40)], costs, slots=2, depth=3, curve=constant(1.0, 3)).requests[0]
    assert alone.time_to_first_token == pytest.approx(1.0)
    assert alone.steps == 3 + 10  # two pieces of 400 tokens, each in the time of four rounds
    assert alone.latency == pytest.approx(13 + 10.03)
    both = run(
        [Arrival(0.0, 1, 400), Arrival(0.5, 1025, 40)], costs, 2, depth=3, curve=constant(1.0, 3), prefill_chunk=4096
    )
    assert both.requests[1].time_to_first_token < 4
    assert both.requests[1].steps == 11 + 8  # ten pieces of 100 tokens, each in the time of a round


def test_one_sequence_is_read_in_a_round():
    """Of several, the one with the fewest tokens to read; the others wait, and go without drafts."""
    costs = Flat(base=1.0, token=0.0, read=0.01)
    some = [Arrival(0.0, 1001, 40), Arrival(0.0, 601, 40)]
    some = run(some, costs, 2, depth=3, curve=constant(1.0, 3), prefill_chunk=4096).requests
    assert some[1].steps < some[0].steps
    assert some[1].done < some[0].done


# -- planted faults ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "the youngest is not the one that gives way": (policy, "must_preempt", lambda running, held, limit: False),
    "a sequence is seated too early": (policy, "may_seat", lambda running, held, tokens, limit: True),
    "prompts are read whole": (policy, "prefill_tokens", lambda running, chunk, alone: 1 << 20),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    """If the simulator took another decision than the scheduler, the comparison of the two would fail."""
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(simulation, "policy", SimpleNamespace(**{**vars(module), name: wrong}))
    with pytest.raises(AssertionError):
        test_the_same_as_the_scheduler(3, 400, monkeypatch)


def test_the_closed_form_finds_a_slow_service(monkeypatch):
    kept = simulation.SimulatedReplica._pass
    monkeypatch.setattr(simulation.SimulatedReplica, "_pass", lambda self, spent: kept(self, 1.1 * spent))
    with pytest.raises(AssertionError):
        test_one_slot_is_the_queue_m_d_1(0.8)


def test_ten_thousand_replicas():
    """A fleet of this size is simulated whole: nobody waits at low load, and everybody is answered."""
    demand = fixed(10_000 * 0.2 / 5, 20, prompt=64)
    fleet = run(demand.arrivals(12_000, 1), Flat(base=0.25, token=1e-4), slots=4, replicas=10_000, routing="two")
    assert len(fleet.requests) == 12_000
    assert mean(r.latency for r in fleet.requests) == pytest.approx(5.0, rel=0.02)
