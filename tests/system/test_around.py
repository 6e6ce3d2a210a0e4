"""The command that measures the time around a draft."""

from __future__ import annotations

import pytest

from benchmarks.around import KINDS, Meter, measure


def test_each_step_is_of_one_kind_and_texts_are_equal() -> None:
    steps = measure("builtin:code", None, 1, 24)
    assert [*steps] == [*KINDS]
    assert steps["plain"]["steps"] == 48  # two texts of 24 tokens
    assert 0 < sum(row["steps"] for kind, row in steps.items() if kind != "plain") <= 48
    assert steps["plain"]["around"][1] > 0
    assert steps["plain"]["lookup"] == [0, 0, 0]


def test_a_call_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("benchmarks.around.thread_time", lambda: float(next(ticks)))
    meter = Meter()
    inner = meter.timed("target", lambda: None)
    meter.timed("model", inner)()
    assert meter.seconds == {"model": 1.0}
    inner()
    assert meter.seconds == {"model": 1.0, "target": 1.0}
