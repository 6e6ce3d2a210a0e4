"""Expected tokens until the end of an answer."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.control.beliefs import AnswerLengths


def ended(*lengths: int) -> AnswerLengths:
    known = AnswerLengths()
    for length in lengths:
        known.observe(length)
    return known


def test_short_answers_are_soon_expected() -> None:
    assert ended().remaining(0) == 128
    assert ended(*[15] * 8).remaining(0) < 40
    assert ended(*[15] * 32).remaining(0) < 25


def test_an_answer_that_outlives_the_short_ones_is_one_of_the_long_ones() -> None:
    known = ended(*[10] * 16, *[300] * 16)
    assert known.remaining(0) < 160 < 250 < known.remaining(20)


def test_old_answers_are_forgotten() -> None:
    assert ended(*[1000] * 50, *[10] * 32).remaining(0) < 20


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(0, 10_000))
def test_something_is_always_left(lengths: list[int], written: int) -> None:
    assert ended(*lengths).remaining(written) >= 1
