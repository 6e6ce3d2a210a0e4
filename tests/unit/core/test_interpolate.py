"""Straight lines through measured points."""

from outrider.core.interpolate import interpolate


def test_interpolation() -> None:
    points = {1: 1.0, 3: 2.0, 5: 2.0}
    assert [interpolate(points, x) for x in (1, 2, 3, 4, 9, 0)] == [1, 1.5, 2, 2, 2, 0.5]
    assert interpolate({4: 7.0}, 100) == 7
    assert interpolate({1: 2.0, 2: 1.0}, 9) == 1  # noise is no reason to expect that more costs less
