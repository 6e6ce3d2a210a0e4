"""The planner on recorded texts, without a clock: seconds come from tables, so every figure is the same in every run.

The tables are of real machines (a quiet AVX2 machine, and one with AVX-512 VNNI), or made up to be hard. Each goal has a margin:
`python -m benchmarks.replays` prints the figures themselves.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.replays import MACHINES, by_kind, oracle_texts
from benchmarks.traces import read
from outrider.control import CostModel, DraftCost, Planner
from outrider_lab.tune.recorded import RecordedDraft, RecordedText
from outrider_lab.tune.replay import Machine, Played, auto, fixed, plain_seconds

TRACES = Path(__file__).parent.parent / "data" / "traces"
KINDS = ("chat", "maths", "code", "short", "edit", "summaries", "retrieval")
BOTH = ("suffix", "draft_model")


def more(*values: object):
    """The same on another machine or at another temperature."""
    return pytest.param(*values, marks=pytest.mark.long)


@cache
def texts(name: str, temperature: float) -> tuple[RecordedText, ...]:
    return tuple(text for text in read(TRACES / f"{name}.jsonl.gz") if text.temperature == temperature)


def planner(costs: CostModel, believed: CostModel | None = None) -> Planner:
    return auto(costs, believed=believed)


def one(costs: CostModel, some, names=BOTH, own: Planner | None = None, **options) -> list[Played]:
    """All texts through one planner, as a server has it."""
    machine = Machine(costs, own or planner(costs), names, ["suffix"], **options)
    return machine.write(some)


def fresh(costs: CostModel, some, names=BOTH, believed: CostModel | None = None, **options) -> list[Played]:
    """Each text through a planner of its own: first requests."""
    return [p for text in some for p in one(costs, [text], names, planner(costs, believed), **options)]


@cache
def in_a_row(machine: str, temperature: float) -> dict[str, float]:
    """The speeds of `one`."""
    return by_kind(one(MACHINES[machine], texts("qwen2.5-coder", temperature)), MACHINES[machine])


@cache
def first_requests(machine: str, temperature: float) -> list[Played]:
    return fresh(MACHINES[machine], texts("qwen2.5-coder", temperature))


def single(costs: CostModel, some, names: tuple[str, ...]) -> list[dict[str, float]]:
    """Every single method, and some lengths of each, by kind."""
    found = [by_kind(fresh(costs, some, (name,)), costs) for name in names]
    for name in names:
        lengths = (16,) if name == "suffix" else (1, 3, 5)
        found += [by_kind(one(costs, some, (name,), fixed(costs, k)), costs) for k in lengths]
    return found


def shuffled(some, seed: int) -> list[RecordedText]:
    mixed = list(some)
    random.Random(seed).shuffle(mixed)
    return mixed


@pytest.mark.parametrize(
    ("machine", "temperature", "least"),
    [("quiet", 0.0, 1.9), ("quiet", 0.7, 1.8), more("vnni", 0.0, 1.95), more("vnni", 0.7, 1.85)],
)
def test_a_server_is_as_fast_as_first_requests_in_any_order(machine: str, temperature: float, least: float) -> None:
    costs, some = MACHINES[machine], texts("qwen2.5-coder", temperature)
    first = by_kind(first_requests(machine, temperature), costs)
    assert first["all"] > least - 0.07
    for found in (in_a_row(machine, temperature), by_kind(one(costs, shuffled(some, 5)), costs)):
        assert found["all"] > least
        assert found["all"] > 0.96 * first["all"]
        assert found["chat"] > 0.96 * first["chat"]


@pytest.mark.parametrize("temperature", [0.0, more(0.7)])
def test_it_is_not_behind_the_best_single_method(temperature: float) -> None:
    costs, some = MACHINES["quiet"], texts("qwen2.5-coder", temperature)
    found, singles = in_a_row("quiet", temperature), single(costs, some, BOTH)
    assert found["all"] > 1.1 * max(s["all"] for s in singles)
    for kind in KINDS:
        floor = 0.95 if kind in ("chat", "maths", "edit") else 0.86  # of the others it reads some prompts in vain
        assert found[kind] > floor * max(s[kind] for s in singles), kind


def test_a_large_part_of_what_an_oracle_reaches() -> None:
    """The oracle knows what will be accepted."""
    costs, some = MACHINES["quiet"], texts("qwen2.5-coder", 0.0)
    best = by_kind(oracle_texts(some, costs, ["draft_model"], ["suffix"]), costs)
    found = by_kind(first_requests("quiet", 0.0), costs)
    assert 0.76 * best["all"] < found["all"] < best["all"]
    assert all(found[kind] <= best[kind] for kind in KINDS)


@pytest.mark.parametrize(
    ("machine", "temperature"),
    [
        *((machine, 0.0) for machine in ("quiet", "vnni", "gpu", "never")),
        ("quiet", 0.7),
        *(more(machine, 0.7) for machine in ("vnni", "gpu", "never")),
    ],
)
def test_no_answer_of_some_length_is_slower_than_plain_decoding(machine: str, temperature: float) -> None:
    costs = MACHINES[machine]
    for played in first_requests(machine, temperature):
        speed = plain_seconds(played.text, costs) / played.seconds
        assert speed > (0.95 if played.tokens >= 32 else 0.85), (played.text.kind, played.tokens, speed)


@pytest.mark.parametrize("temperature", [0.0, more(0.7)])
def test_a_draft_as_large_as_the_target_is_never_asked(temperature: float) -> None:
    costs, some = MACHINES["never"], texts("qwen2.5-coder", temperature)
    machine = Machine(costs, planner(costs), ["draft_model"])
    found = by_kind(machine.write(some), costs)
    assert machine.calls["draft_model"] == 0
    assert found["all"] > 0.99, "its plans take time"
    with_lookups = in_a_row("never", temperature)
    assert with_lookups["all"] > 0.98 * by_kind(one(costs, some, ("suffix",)), costs)["all"]


@pytest.mark.parametrize("machine", ["quiet", more("vnni")])
def test_wrong_costs_are_recovered_from(machine: str) -> None:
    """A server loses little. A first request may be over before the draft model is tried."""
    costs, some = MACHINES[machine], texts("qwen2.5-coder", 0.0)
    right, first = in_a_row(machine, 0.0)["all"], by_kind(first_requests(machine, 0.0), costs)["all"]
    draft = costs.drafters["draft_model"]
    wrong = [replace(costs, target={1: costs.target[1], 16: 1.01 * costs.target[1]})]
    for factor in (0.5, 2.0):
        own = DraftCost(draft.first * factor, draft.level * factor, draft.read * factor)
        wrong += [replace(costs, drafters={"draft_model": own})]
        wrong += [replace(costs, target={n: seconds * factor for n, seconds in costs.target.items()})]
    for believed in wrong:
        assert by_kind(one(costs, some, own=planner(costs, believed)), costs)["all"] > 0.93 * right, believed
    for believed in wrong[:3]:
        assert by_kind(fresh(costs, some, believed=believed), costs)["all"] > 0.79 * first, believed


WRONG = {"right": (1.0, 1.0), "twice": (2.0, 2.0), "five times": (5.0, 5.0), "a busy start": (2.5, 6.0), "half": (0.5, 0.5),
         "a fifth": (0.2, 0.2)}  # fmt: skip
"""Calibrations that other programs made wrong: seconds of four and of sixteen nodes, over the true ones."""


@cache
def start_and_rest(machine: str, wrong: str) -> tuple[float, float]:
    """Tokens a second of the first 300 tokens of a server, and of later ones, in four orders of the texts."""
    costs, plain = MACHINES[machine], MACHINES[machine].forward(1)
    some = texts("smollm2-head" if machine == "head" else "qwen2.5-coder", 0.0)
    names = ("suffix", *costs.drafters)
    sizes = zip((1, 4, 16), (1.0, *WRONG[wrong]), strict=True)
    believed = replace(costs, target={n: max(costs.forward(n) * factor, plain) for n, factor in sizes})
    parts = [[0, 0.0], [0, 0.0]]
    for order in range(4):
        server, written = Machine(costs, planner(costs, believed), names, ["suffix"], jitter=0.05, seed=order), 0
        for text in shuffled(some, order)[:24]:
            [played], part = server.write([text]), parts[written >= 300]
            written, part[0], part[1] = written + played.tokens, part[0] + played.tokens, part[1] + played.seconds
    return parts[0][0] / parts[0][1], parts[1][0] / parts[1][1]


@pytest.mark.parametrize("wrong", [name for name in WRONG if name != "right"])
@pytest.mark.parametrize("machine", ["head", "quiet", more("vnni"), more("gpu")])
def test_a_calibration_beside_other_programs_is_soon_forgotten(machine: str, wrong: str) -> None:
    """What looks too dear is not tried, so nothing would correct it."""
    start, rest = (a / b for a, b in zip(start_and_rest(machine, wrong), start_and_rest(machine, "right"), strict=True))
    assert start > 0.94
    assert rest > 0.98


def test_noise_costs_little() -> None:
    costs, some = MACHINES["quiet"], texts("qwen2.5-coder", 0.0)
    right = in_a_row("quiet", 0.0)["all"]
    assert by_kind(one(costs, some, jitter=0.15, seed=3), costs)["all"] > 0.96 * right


def test_a_machine_that_changes_its_speed_is_followed() -> None:
    costs, some = MACHINES["quiet"], texts("qwen2.5-coder", 0.0)

    def seconds(speed: float) -> float:
        """Of the second half of the texts, at another speed than the first."""
        machine = Machine(costs, planner(costs), BOTH, ["suffix"])
        machine.write(some[::2])
        machine.speed = speed
        return sum(played.seconds for played in machine.write(some[1::2]))

    steady = seconds(1.0)
    assert all(seconds(speed) < 1.15 * steady / speed for speed in (0.4, 2.5))


def test_a_store_full_of_wrong_text_is_soon_ignored() -> None:
    """Every lookup finds a long match, states that it is sure, and is wrong."""
    costs, some = MACHINES["quiet"], texts("qwen2.5-coder", 0.0)[::2]
    sure = RecordedDraft(0, 12, [0.95] * 8, 8)
    wrong = [replace(t, drafts={**t.drafts, "suffix": [sure] * len(t.output)}) for t in some]
    model = by_kind(one(costs, some, ("draft_model",)), costs)["all"]
    assert by_kind(one(costs, wrong), costs)["all"] > 0.95 * model
    assert by_kind(fresh(costs, wrong), costs)["all"] > 0.7 * model, "each first request must find it out"


@pytest.mark.parametrize(
    ("machine", "slots", "least"),
    [("quiet", 4, 1.08), ("vnni", 8, 0.99), ("gpu", 4, 1.9), more("vnni", 4, 1.15), more("gpu", 8, 1.65)],
)
def test_clients_side_by_side(machine: str, slots: int, least: float) -> None:
    """Half code, half chat: faster than plain decoding, and than fixed lengths."""
    costs = MACHINES[machine]
    some = shuffled([t for t in texts("qwen2.5-coder", 0.0) if t.kind in ("code", "chat")] * 2, 1)

    def taken(own: Planner, names: tuple[str, ...]) -> float:
        machine = Machine(costs, own, names, ["suffix"], slots=slots)
        machine.write(some)
        return machine.seconds

    plain = taken(fixed(costs, 0), ())
    found = plain / taken(planner(costs), BOTH)
    lengths = [("suffix", 16), ("draft_model", 1), ("draft_model", 3)]
    best = max(plain / taken(fixed(costs, k), (name,)) for name, k in lengths)
    assert found > least
    assert found > 0.9 * best


@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 1.0), more(0.7, 0.98)])
def test_a_head_and_lookups_together_are_not_behind_the_best_of_them(temperature: float, floor: float) -> None:
    costs, some = MACHINES["head"], texts("smollm2-head", temperature)[::2]
    names = ("suffix", "eagle")
    singles = single(costs, some, names)
    assert by_kind(one(costs, some, names), costs)["all"] > floor * max(s["all"] for s in singles)
