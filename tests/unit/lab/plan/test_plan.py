"""Plans: figures from formulas, what is refused and why, the command and its page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.control.shapes import geometric, speedup
from outrider.lab.bench.run import PromptRecord, Run, Sample, Setting
from outrider.lab.explain import rooflines
from outrider.lab.hardware import ACCELERATORS, Accelerator, Hardware, find_hardware
from outrider.lab.plan import acceptance_curve, serving_costs
from outrider.lab.plan.acceptance_curve import constant, find_curve
from outrider.lab.plan.answer import answer, kv_tokens
from outrider.lab.plan.planned_model import planned
from outrider.lab.plan.serving_costs import MeasuredCosts, RooflineCosts, by_length, measured_costs
from outrider.lab.plan.serving_plan import ServingPlan
from outrider.lab.plan.simulation import ReplicaLimits
from outrider.lab.plan.workload import Demand, Lengths

# A device with round figures: a pass over 1e9 weights of 16 bits reads for 2 ms and reckons 2 us for each token.
DEVICE = Accelerator("round", 10e9, 1e12, 1e15, None, 1e11, "made for this test")
ROUND = Hardware(DEVICE, 1, 1.0, 1.0, 1.0, 0.0, 0.0)


def costs(draft: str | None = None, hardware: Hardware = ROUND, **more) -> RooflineCosts:
    return RooflineCosts(planned("1B", **more), hardware, None if draft is None else planned(draft))


def plan(qps=5.0, rate=0.7, found=None, limits=None, **more) -> ServingPlan:
    lengths = Lengths.of("64", "--prompt"), Lengths.of("50", "--output")
    return ServingPlan(
        Demand(qps, *lengths), found or costs(), constant(rate, 6), limits or ReplicaLimits(16, 1e5, 256), **more
    )


# -- rooflines --------------------------------------------------------------------------------------------------------------


def test_a_plain_step_reads_the_weights_and_the_cells():
    model = costs().model
    cells = 8 * 100 * model.kv_per_token
    assert costs().round(8, 0, 100) == pytest.approx((2e9 + cells) / 1e12)
    assert model.kv_per_token == 2 * 16 * 8 * 64 * 2  # the shape of Llama 3.2 1B


def test_many_tokens_take_the_time_of_arithmetic():
    tokens = 4096
    attention = 4 * 16 * 32 * 64 * 10 * tokens
    assert costs().round(1024, 3, 10) == pytest.approx((2e9 * tokens + attention) / 1e15)


def test_the_terms_are_the_round():
    found = costs("0.5B", Hardware(DEVICE, 4, 0.5, 0.5, 0.9, 1e-5, 1e-3))
    assert sum(term.seconds for term in found.terms(8, 3, 200)) == found.round(8, 3, 200)
    assert {term.name for term in found.terms(8, 3, 200)} == {
        "outside of the model", "draft: memory traffic", "memory traffic", "sums over devices",
    }  # fmt: skip


def test_devices_share_the_work_and_sum_up():
    one, four = costs(), costs(hardware=Hardware(DEVICE, 4, 1.0, 1.0, 1.0, 1e-6, 0.0))
    sums = 2 * 16 * (1e-6 + 2 * 3 / 4 * 8 * 2048 * 2 / 1e11)
    assert four.round(8, 0, 0) == pytest.approx(one.round(8, 0, 0) / 4 + sums)


def test_a_mixture_of_experts_reads_what_its_tokens_choose():
    model = planned("100B", "10B")
    assert model.read_bytes(1) == pytest.approx(0.1 * 200e9)
    assert model.read_bytes(10) == pytest.approx((1 - 0.9**10) * 200e9)
    assert planned("100B").read_bytes(1) == 200e9


def test_lower_precision_reads_less_and_reckons_faster():
    h100 = find_hardware("h100")
    assert h100.arithmetic(8) == pytest.approx(2 * h100.arithmetic(16), rel=0.01)
    assert planned("8B", weight="int4").weight_bytes == 4e9
    assert find_hardware("a100").arithmetic(8) == find_hardware("a100").arithmetic(16)  # it has no 8-bit floats


def test_the_speedup_is_leviathans_while_reading_takes_the_time():
    """Theorem 3.8 with the cost of a draft pass over that of a target pass, no keys and values, and free verification."""
    found = costs("0.5B")
    c = 0.5
    made = plan(found=found)
    seconds = by_length(found, constant(0.7, 6))
    for k in range(1, 7):
        ours = (1 + sum(geometric(0.7, k))) * seconds(1, 0, 0) / seconds(1, k, 0)
        assert ours == pytest.approx(speedup(geometric(0.7, k), k * c), rel=1e-6)
    assert made.batch(1).by_depth[0] == 1


def test_the_best_length_falls_with_the_batch_and_ends():
    made = plan(found=costs("0.1B"), limits=ReplicaLimits(1024, 1e6, 4096))
    lengths = [made.adaptive[n] for n in (1, 16, 64, 256, 1024)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 0
    assert lengths[-1] == 0
    loses = made.loses_from()
    assert loses is not None
    assert made.batch(loses).by_depth[made.adaptive[0]] < 1 <= made.batch(loses - 1).by_depth[made.adaptive[0]]


# -- hardware ---------------------------------------------------------------------------------------------------------------


def test_data_sheets_are_plausible_and_named():
    for device in ACCELERATORS.values():
        assert 50 < device.half / device.bandwidth < 500  # operations for a byte
        assert device.fp8 is None or device.fp8 == pytest.approx(2 * device.half, rel=0.03)
        assert re.search(r"(data sheet|architecture).* 20\d\d[,;]", device.source), device.name
    pictures = {curve.name: curve.balance for curve in rooflines()}
    assert pictures["NVIDIA H100 SXM"] == pytest.approx(989 / 3.35)


def test_a_hardware_file(tmp_path: Path):
    file = tmp_path / "box.json"
    file.write_text(json.dumps({"base": "h100", "count": 2, "bandwidth_share": 0.6, "memory_gb": 94}))
    found = find_hardware(str(file))
    assert (found.count, found.bandwidth_share, found.device.memory) == (2, 0.6, 94e9)
    assert found.device.bandwidth == 3.35e12
    file.write_text(json.dumps({"name": "mine", "memory_gb": 32, "bandwidth_gb_s": 100, "half_tflops": 2}))
    assert find_hardware(str(file)).bandwidth == pytest.approx(0.75 * 100e9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"memory_gb": 32}', "lacks bandwidth_gb_s, half_tflops"),
        ('{"base": "h100", "speed": 2}', "has 'speed', which is none of"),
        ('{"base": "h1000"}', "did you mean 'h100'"),
        ("[1]", "holds a list"),
        ("{", "is not JSON"),
        ('{"base": "h100", "bandwidth_share": 1.5}', "bandwidth_share: Input should be less than or equal to 1"),
    ],
)
def test_a_bad_hardware_file(text, says, tmp_path: Path):
    file = tmp_path / "box.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        find_hardware(str(file))


# -- acceptance -------------------------------------------------------------------------------------------------------------


def report(
    drafted: list[list[int]], accepted: list[list[int]], method: str = "draft_model", tmp: Path | None = None
) -> Path:
    assert tmp is not None
    settings = [
        Setting(name="plain"),
        Setting(name="ours", speculative_config={"method": method, "num_speculative_tokens": 3}),
    ]
    samples = [
        Sample(
            prompt="a", setting="ours", repeat=n, turn=n, seconds=1.0, ttft=0.1, output_tokens=10, drafted=d, accepted=a
        )
        for n, (d, a) in enumerate(zip(drafted, accepted, strict=True))
    ]
    run = Run(
        date="2026",
        command="",
        model="m",
        machine={},
        sampling={},
        settings=settings,
        prompts=[PromptRecord(id="a", text="")],
        samples=samples,
    )
    run.save(tmp / "run.json")
    return tmp / "run.json"


def test_the_curve_of_a_report(tmp_path: Path):
    """Position 2 is only tried where position 1 was accepted, and a draft that ended early says nothing of what follows."""
    file = report([[3, 3, 3, 1] * 10, [2] * 40], [[3, 1, 0, 1] * 10, [2, 0] * 20], tmp=tmp_path)
    curve = find_curve(str(file))
    assert curve.chances == pytest.approx(((30 + 20) / 80, (10 + 20) / 40)[:2])
    assert curve.depth == 2  # the third position was tried 10 times, too few
    assert curve.model
    assert curve.available == (1.0, 1.0)
    assert len(curve.answers) == 2
    assert curve.answers[0].chances[0] == pytest.approx((30 + 8 * curve.chances[0]) / 48)


def test_a_lookup_does_not_always_draft(tmp_path: Path):
    file = report([[3, 0, 0, 0] * 20], [[3, 0, 0, 0] * 20], "ngram", tmp_path)
    curve = find_curve(str(file))
    assert curve.chances == (1.0,) * 3
    assert curve.available == (0.25,) * 3
    assert not curve.model
    assert curve.survival == [0.25] * 3


def test_answers_differ_in_what_a_lookup_finds(tmp_path: Path):
    """One answer repeats itself and the other does not: the slow tenth of the answers is the second kind."""
    file = report([[3] * 60, [0] * 60], [[3] * 60, [0] * 60], "ngram", tmp_path)
    curve = find_curve(str(file))
    assert curve.available == (0.5,) * 3
    assert [a.available[0] for a in curve.answers] == pytest.approx([(60 + 4) / 68, 4 / 68])


def test_a_result_of_vllm(tmp_path: Path):
    file = tmp_path / "vllm.json"
    file.write_text(json.dumps({"spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.1]}))
    assert find_curve(str(file)).survival == pytest.approx([0.8, 0.4, 0.1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"method": "ngram"}, "is a setting and holds no acceptance; measure it: outrider bench"),
        ({"other": 1}, "is not a measurement of this outrider version"),
    ],
)
def test_a_file_without_acceptance(content, says, tmp_path: Path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=says):
        find_curve(str(file))


def test_too_few_drafts(tmp_path: Path):
    with pytest.raises(ValueError, match="too few to know the acceptance"):
        find_curve(str(report([[2, 2]], [[1, 0]], tmp=tmp_path)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        find_curve("1.2")
    with pytest.raises(FileNotFoundError, match="--acceptance takes one, or a rate"):
        find_curve("missing.json")


def test_a_trace_is_a_measurement(tmp_path: Path):
    from outrider.core.params import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.trace import Recorder

    with Recorder(tmp_path / "run.jsonl", "counts") as recorder:
        config = {
            "method": "draft_model",
            "model": "builtin:code-draft",
            "num_speculative_tokens": 2,
            "controller": "fixed",
        }
        llm = LLM("builtin:code", speculative_config=config, trace=recorder)
        llm.generate("def quicksort(xs):", SamplingParams(max_tokens=48, temperature=0, ignore_eos=True))
    curve = find_curve(str(tmp_path / "run.jsonl"))
    assert 0.2 < curve.chances[0] < 1
    assert curve.model


# -- plans ------------------------------------------------------------------------------------------------------------------


def test_memory():
    hardware = find_hardware("h100x8")
    model, draft = planned("70B"), planned("1B")
    room = kv_tokens(hardware, model, draft, 4096)
    assert room == int((8 * 80e9 * 0.9 - 142e9) // (model.kv_per_token + draft.kv_per_token))
    with pytest.raises(
        ValueError, match=r"fit on NVIDIA H100 SXM: 140 GB of weights .* use 2 devices, or --weights fp8"
    ):
        kv_tokens(find_hardware("h100"), model, None, 4096)


def test_more_requests_need_more_replicas_and_twice_as_many_twice():
    counts = [plan(qps).fleet("plain").replicas for qps in (50, 500, 5000)]
    capacity = plan().capacity["plain"]
    for qps, count in zip((50, 500, 5000), counts, strict=True):
        assert qps / capacity <= count <= 1.3 * qps / capacity + 1


def test_the_capacity_is_where_the_queue_starts_to_grow():
    """Just below it the wait is short, and just above it the wait grows with the length of the run."""
    made = plan(limits=ReplicaLimits(4, 1e5, 256))
    capacity = made.capacity["plain"]
    below, above = (
        plan(share * capacity, limits=ReplicaLimits(4, 1e5, 256)).forecast(1, "plain") for share in (0.85, 1.3)
    )
    assert below.stable
    assert not above.stable
    assert above.wait > 10 * below.wait


def test_a_part_of_a_fleet_stands_for_the_whole():
    part, whole = (plan(400.0, whole_fleet=w).forecast(40) for w in (False, True))
    assert part.latency == pytest.approx(whole.latency, rel=0.05)
    assert part.batch_size == pytest.approx(whole.batch_size, rel=0.1)


def test_speculation_pays_with_few_requests_and_not_with_many():
    """The same model and acceptance: low load wants drafts, a full replica on slow arithmetic does not."""
    slow = Hardware(Accelerator("slow", 10e9, 1e12, 40e12, None, 1e11, "made"), 1, 1.0, 1.0, 1.0, 0.0, 0.0)
    low = answer(plan(1.0, found=costs("0.1B", slow)), [])
    assert low.policy != "plain"
    assert low.speedup > 1.2
    busy = plan(1000.0, 0.4, found=costs("0.1B", slow), limits=ReplicaLimits(64, 1e6, 4096))
    high = answer(busy, [])
    assert high.fleets["fixed"].replicas > high.fleets["plain"].replicas
    assert high.policy in ("plain", "adaptive")
    assert high.loses_from is not None


def test_every_figure_tells_its_formula():
    found = answer(plan(price=2.0), [])
    named = {figure.name: figure for figure in found.figures}
    assert all(figure.formula and figure.value for figure in found.figures)
    chosen = found.chosen
    hours = chosen.replicas / (5.0 * 50 * 3600) * 1e6
    assert found.replica_hours == pytest.approx(hours)
    assert found.cost == pytest.approx(2 * hours)
    assert named["cost of a million output tokens"].formula == "replica hours x 2 for a replica and hour"
    assert json.loads(found.to_json())["policy"] == found.policy


@pytest.mark.parametrize(
    ("made", "replicas", "says"),
    [
        (lambda: plan(10_000.0), 1, "the queue of 1 replicas grows without end: 10000 requests come per second"),
        (lambda: plan(1e9), None, "need .* replicas of .* each, and plans end at 10,000"),
        (lambda: plan(targets={"latency": 1e-3}), None, "no number of replicas keeps a p90 latency of 0.001 s"),
        (lambda: plan(targets={"tpot": 1e-6}), None, "no number of replicas keeps a p90 tpot"),
        (lambda: plan(0.0), None, "--qps is requests per second, more than 0"),
    ],
)
def test_what_no_machine_can_give(made, replicas, says):
    with pytest.raises(ValueError, match=says):
        answer(made(), [], replicas)


def test_a_tighter_limit_needs_more_replicas():
    loose = plan(200.0).fleet("plain")
    tight = plan(200.0, targets={"latency": 0.85 * loose.latency}).fleet("plain")
    assert tight.replicas > loose.replicas
    assert tight.latency <= 0.85 * loose.latency


def test_measured_costs_go_through_their_points(tmp_path: Path):
    measured = MeasuredCosts(
        [[1, 0, 0, 1.0], [1, 2, 0, 1.5], [4, 0, 0, 2.0], [4, 2, 0, 4.0]],
        [[0, 0, 0.0], [64, 0, 0.5], [64, 100, 0.7]],
        0.01,
        "made",
    )
    assert measured.round(1, 1, 0) == pytest.approx(1.25)
    assert measured.round(2, 0, 0) == pytest.approx(4 / 3)
    assert measured.prefill(32, 0) == pytest.approx(0.25)
    assert measured.prefill(64, 50) == pytest.approx(0.6)
    (tmp_path / "costs.json").write_text(measured.to_json())
    assert measured_costs(tmp_path / "costs.json") == measured
    told = {
        **json.loads(measured.to_json()),
        "outside": 0.01,
        "fits": {},
    }  # as `benchmarks.simulated calibrate` writes it
    (tmp_path / "costs.json").write_text(json.dumps(told))
    assert measured_costs(tmp_path / "costs.json") == measured
    (tmp_path / "costs.json").write_text(json.dumps({**told, "rounds": []}))
    with pytest.raises(ValueError, match="has no rounds; write it again"):
        measured_costs(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_text("{}")
    assert measured_costs(tmp_path / "costs.json") is None


# -- planted faults ---------------------------------------------------------------------------------------------------------


def test_cells_that_cost_nothing_are_found(monkeypatch):
    monkeypatch.setattr(type(planned("1B")), "kv_per_token", property(lambda self: 0.0))
    with pytest.raises(AssertionError):
        test_a_plain_step_reads_the_weights_and_the_cells()


def test_draft_passes_that_are_free_are_found(monkeypatch):
    free = Hardware(Accelerator("x", 1, 1e30, 1e30, None, 1, ""), 1, 1, 1, 1, 0, 0)
    monkeypatch.setattr(serving_costs.RooflineCosts, "_one_device", free)
    with pytest.raises(AssertionError):
        test_the_speedup_is_leviathans_while_reading_takes_the_time()


def test_a_curve_that_counts_untried_positions_is_found(monkeypatch, tmp_path: Path):
    def wrong(steps):
        return [(len(steps), sum(a > j for _, a in steps)) for j in range(max(d for d, _ in steps))]

    monkeypatch.setattr(acceptance_curve.stats, "by_depth", wrong)
    with pytest.raises(AssertionError):
        test_the_curve_of_a_report(tmp_path)


# -- the command and its page -------------------------------------------------------------------------------------------------

SMALL = [
    "plan",
    "--model-params",
    "8B",
    "--hardware",
    "h100",
    "--prompt",
    "64",
    "--output",
    "32",
    "--max-num-seqs",
    "8",
]


def test_the_command(tmp_path: Path):
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    done = CliRunner().invoke(
        app, [*SMALL, "--qps", "4", "--acceptance", "0.8", "--price", "2.5", "-o", str(page), "--json", str(figures)]
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"Speculate, .*: 1 replicas", done.output)
    assert "the shape of Llama 3.1 8B" in done.output
    assert "cost of a million output tokens" in done.output
    found = json.loads(figures.read_text())
    assert found["kind"] == "outrider-plan"
    assert found["cost"] == pytest.approx(2.5 / (4 * 32 * 3600) * 1e6)
    assert all(math.isfinite(f["latency"]) for f in found["fleets"].values())
    text = page.read_text()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_an_overloaded_queue_has_no_times_to_compare():
    """Its times only say how long the simulation lasted. A number of replicas that was given is not called the fewest."""
    done = CliRunner().invoke(
        app, [*SMALL, "--acceptance", "0.8", "--qps", "30", "--replicas", "1", "--p90-latency", "0.05"]
    )
    output = " ".join(done.output.split())
    assert "plain decoding: 1 replicas at 108% load, the queue grows without end" in output
    assert "1 replicas; of plain decoding on as many, the queue grows without end." in output
    assert "x as fast" not in output
    assert "speedup of an answer" not in output
    assert "replicas: 1 = the number of --replicas" in output
    assert "A limit is not kept: the p90 latency of 1 replicas is more than 0.05 s." in output


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--hardware", "tpu"], "no hardware is known as 'tpu'"),
        (["--hardware", "l4"], "does not fit on NVIDIA L4"),
        (["--prompt", "0"], "--prompt is a number of tokens"),
        (["--model-params", "big"], "is no number of weights"),
        (["--active-params", "9B"], "a token cannot use 9B of 8B weights"),
        (["--weights", "fp32"], "--weights is one of"),
        (["--replicas", "1", "--qps", "5000"], "grows without end"),
        (["--kv-tokens", "100000000"], "do not fit"),
        (["-o", "/nowhere/page.html"], "there is no folder"),
    ],
)
def test_the_command_refuses(more, says):
    weights = ["--weights", "bf16"] if "l4" not in more else ["--weights", "bf16", "--model-params", "70B"]
    done = CliRunner().invoke(app, [*SMALL, *weights, *more])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_the_size_of_a_measured_draft_model_is_asked_for(tmp_path: Path):
    file = report([[3, 3, 3, 3] * 10], [[3, 1, 0, 2] * 10], tmp=tmp_path)
    done = CliRunner().invoke(app, [*SMALL, "--acceptance", str(file)])
    assert done.exit_code == 2
    assert "--draft-params 1B" in done.output
    assert CliRunner().invoke(app, [*SMALL, "--acceptance", str(file), "--draft-params", "1B"]).exit_code == 0


def test_without_drafts_there_is_nothing_to_compare():
    found = answer(plan(rate=0.0), [])
    assert found.policy == "plain"
    assert set(found.fleets) == {"plain"}
