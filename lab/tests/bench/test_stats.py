"""Intervals against a simulated machine: right as often as they say. Ratios, percentiles, comparisons against arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from outrider.core import intervals
from outrider.core.intervals import Interval, student_quantile
from outrider_lab.bench import stats
from outrider_lab.bench.report import compare
from outrider_lab.bench.run import PromptRecord, Run, Sample, Setting

TRIALS = 200


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 400)


def machine(
    draw: np.random.Generator, prompts: int, repeats: int, gains: np.ndarray, lengths: np.ndarray, drift: float = 0.1
) -> tuple[list[Sample], list[Sample]]:
    """Answers of two settings that take turns, A B B A, on a machine whose speed wanders; every answer has noise of its own
    and now and then a pause. gains: log of how much faster the second setting is on each prompt."""
    wander, speed, turn = drift * math.sqrt(1 - 0.9**2), draw.normal(0, drift), 0
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    for repeat in range(repeats):
        for p in range(prompts):
            for side in (0, 1) if (p + repeat) % 2 == 0 else (1, 0):
                speed = 0.9 * speed + draw.normal(0, wander)
                noise = draw.normal(0, 0.03) + (draw.random() < 0.02) * draw.exponential(0.3)
                seconds = lengths[p] * math.exp(speed + noise - side * gains[p])
                name = "plain" if side == 0 else "fast"
                tokens = round(100 * lengths[p])
                sides[side].append(
                    Sample.model_construct(
                        prompt=str(p), setting=name, repeat=repeat, turn=turn, seconds=seconds, output_tokens=tokens
                    )
                )
                turn += 1
    return sides


def covered(prompts: int, repeats: int, gain: float, spread: float, seed: int) -> float:
    """How often the interval holds the truth. spread: of the gain from prompt to prompt."""
    draw, hits = np.random.default_rng(seed), 0
    truth = math.exp(gain - spread**2 / 2)  # of all prompts: the gains are normal, the lengths independent of them
    for _ in range(TRIALS):
        gains, lengths = draw.normal(gain, spread, prompts), draw.lognormal(0, 0.5, prompts)
        plain, fast = machine(draw, prompts, repeats, gains, lengths)
        found = stats.ratio(fast, plain)
        assert found is not None
        hits += found.low <= truth <= found.high
    return hits / TRIALS


@pytest.mark.parametrize(
    ("prompts", "repeats", "gain", "spread"),
    [(12, 3, -0.1, 0.05), (6, 3, 0.3, 0.15), (24, 1, 0.3, 0.15)],
)
def test_intervals_cover_the_truth(prompts: int, repeats: int, gain: float, spread: float) -> None:
    """200 trials: a share of 0.95 lies within 0.90..0.985 all but once in a thousand times; few prompts cost a little."""
    assert 0.90 <= covered(prompts, repeats, gain, spread, seed=1) <= 0.985


@pytest.mark.parametrize(("prompts", "repeats"), [(6, 2), (24, 1)])
def test_a_setting_is_not_called_faster_than_itself(prompts: int, repeats: int) -> None:
    assert 1 - covered(prompts, repeats, 0.0, 0.0, seed=2) <= 0.05 + 0.04


def test_a_plain_percentile_bootstrap_would_be_wrong() -> None:
    """Why `interval` widens: the same simulation without it misses the truth too often."""
    draw, hits = np.random.default_rng(3), 0
    for _ in range(TRIALS):
        table = np.exp(draw.normal(0, 0.2, (6, 2)))
        picks = draw.multinomial(6, np.full(6, 1 / 6), 1000) @ table
        low, high = np.quantile(picks[:, 0] / picks[:, 1], [0.025, 0.975])
        hits += low <= 1 <= high
    assert hits / TRIALS < 0.91


def run_of(draw: np.random.Generator, offset: float, gains: np.ndarray, lengths: np.ndarray) -> Run:
    """A whole run on a machine that is slower by `offset` throughout."""
    prompts = len(gains)
    plain, fast = machine(draw, prompts, 2, gains, lengths * math.exp(offset), drift=0.02)
    for s in (*plain, *fast):
        s.output_tokens, s.text, s.error, s.ttft, s.gaps, s.drafted, s.accepted, s.token_ids = (
            50, "x", None, s.seconds / 10, [], None, None, None,
        )  # fmt: skip
    return Run(
        date="", command="", model="toy", machine={}, sampling={}, samples=[*plain, *fast],
        settings=[Setting(name="plain"), Setting(name="fast", speculative_config={"method": "suffix"})],
        prompts=[PromptRecord(id=str(p), text=f"text {p}") for p in range(prompts)],
    )  # fmt: skip


def by_measure(found: compare.Comparison, setting: str) -> dict[str, compare.Change]:
    return {c.measure: c for c in found.changes if c.setting == setting}


def test_two_runs_of_the_same_setting_are_rarely_called_different() -> None:
    draw, wrong, trials = np.random.default_rng(4), 0, 60
    for _ in range(trials):
        gains, lengths = draw.normal(0.3, 0.1, 12), draw.lognormal(0, 0.3, 12)
        before, after = (run_of(draw, offset, gains, lengths) for offset in (0.0, 0.2))
        wrong += by_measure(compare.compare_runs(before, after), "fast")[compare.SPEEDUP].ratio.significant
    assert wrong / trials <= 0.05 + 0.05


def test_comparing_sees_what_moved() -> None:
    draw = np.random.default_rng(5)
    gains, lengths = draw.normal(0.1, 0.02, 12), draw.lognormal(0, 0.3, 12)
    before, after = run_of(draw, 0.0, gains, lengths), run_of(draw, 0.3, gains + 0.2, lengths)
    after.samples[0].text = "other"
    after.settings.append(Setting(name="third"))
    found = compare.compare_runs(before, after)
    fast, plain = by_measure(found, "fast"), by_measure(found, "plain")
    assert fast[compare.SPEEDUP].effect == "better"
    assert fast[compare.SPEEDUP].ratio.value == pytest.approx(math.exp(0.2), rel=0.05)
    assert plain["tokens/s"].effect == plain["seconds per answer"].effect == "worse"  # the machine was slower
    assert plain["tokens/s"].ratio.value == pytest.approx(plain["tokens/s"].after / plain["tokens/s"].before)
    assert "Only after: third." in found.notes
    assert not any("differ in" in note or "that both runs have" in note for note in found.notes)
    assert found.differing == {"plain": (1, 24), "fast": (0, 24)}
    few = after.model_copy(
        update={"prompts": after.prompts[:6], "samples": [s for s in after.samples if int(s.prompt) < 6]}
    )
    apart = compare.compare_runs(before, few)
    assert "The runs differ in prompts. The change may come from that." in apart.notes
    assert "Only the prompts that both runs have are compared." in apart.notes
    change = by_measure(apart, "fast")[compare.SPEEDUP]
    assert (change.effect, change.ratio.groups) == ("better", 6)


@pytest.mark.parametrize("df", [*range(1, 12), 23, 47, 500])
def test_student(df: int) -> None:
    assert student_quantile(df) == pytest.approx(reference.t.ppf(0.975, df), rel=2e-3)


def sample(prompt: str, setting: str, turn: int, seconds: float, tokens: int, **more: object) -> Sample:
    return Sample(prompt=prompt, setting=setting, repeat=0, turn=turn, seconds=seconds, output_tokens=tokens, **more)  # type: ignore[arg-type]


def test_a_turn_takes_as_long_as_its_longest_answer() -> None:
    samples = [sample("a", "x", 0, 2.0, 10), sample("b", "x", 0, 4.0, 30), sample("c", "x", 1, 1.0, 10)]
    assert stats.wall(samples) == 5
    found = stats.rate(samples)
    assert found is not None
    assert (found.value, found.groups) == (10, 2)


def test_only_pairs_count() -> None:
    ours = [sample("a", "x", 0, 1.0, 10), sample("b", "x", 2, 100.0, 10)]
    base = [sample("a", "y", 1, 2.0, 10), sample("c", "y", 3, 1.0, 10)]
    found = stats.ratio(ours, base)
    assert found == Interval(2.0, 0.0, math.inf, 1)  # one prompt shows nothing of others
    assert not found.significant
    assert stats.ratio(ours[1:], base) is None
    assert stats.rate([]) is None


@pytest.mark.parametrize("seconds", [(1e-300, 1e300, 1.0), (5e-324, 1.0, 1e308), (1e308, 1e308, 1.0)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_absurd_clock_is_no_error(seconds: tuple[float, ...]) -> None:
    """It gives a wide interval, or no ratio where the seconds of all answers are no finite number."""
    ours = [sample(str(p), "x", p, s, 10) for p, s in enumerate(seconds)]
    base = [sample(str(p), "y", p, 1.0, 10) for p in range(3)]
    ratios = [stats.ratio(ours, base), stats.ratio(base, ours)]
    assert (ratios == [None, None]) == math.isinf(sum(seconds))
    for found in (*ratios, stats.rate(ours)):
        if found is None:
            continue
        assert found.low <= found.value <= found.high
        assert not found.significant or found.groups == 3


def test_acceptance_counts_the_models_own_token() -> None:
    found = stats.acceptance([sample("a", "x", 0, 1.0, 9, drafted=[4, 4, 0, 2], accepted=[4, 1, 0, 0])])
    assert found is not None
    assert (found.length, found.rate) == (1 + 5 / 4, 5 / 10)
    assert found.by_depth == [2 / 4, 1 / 4, 1 / 4, 1 / 4]
    assert stats.acceptance([sample("a", "x", 0, 1.0, 9, drafted=[0, 0], accepted=[0, 0])]) is None


def test_differing_looks_at_tokens_where_there_are_some() -> None:
    base = [sample("a", "y", 0, 1, 2, text="x", token_ids=[1, 2]), sample("b", "y", 1, 1, 2, text="x")]
    ours = [sample("a", "x", 2, 1, 2, text="x", token_ids=[1, 3]), sample("b", "x", 3, 1, 2, text="x")]
    assert stats.differing(ours, base) == ([("a", 0)], 2)
    assert stats.differing(base, base) == ([], 2)
