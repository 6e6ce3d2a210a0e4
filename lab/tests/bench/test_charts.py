"""The drawing of the report: scales and escaping."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outrider_lab.bench.report.charts import Scale, draw


@given(st.lists(st.floats(1e-6, 1e6), min_size=1))
def test_scales_hold_what_they_show(values: list[float]) -> None:
    scale = Scale.around(values)
    assert all(0 <= scale.at(v) <= 100 for v in values)
    assert all(math.isfinite(t) and -0.1 <= scale.at(t) <= 100.1 for t in scale.ticks())
    assert 1 <= len(scale.ticks()) <= 8
    order = sorted(values)
    assert [scale.at(v) for v in order] == sorted(scale.at(v) for v in order)


def test_charts_escape() -> None:
    assert "<b>" not in draw.axis(Scale(1, 2), {1: "<b>"})
    assert '"x"' not in draw.dots(Scale(1, 2), [1], 1, 1, 2, 'a "x"')
