"""The oracle itself: what proves the verifiers must be right first."""

from fractions import Fraction

import pytest
from oracles import RULES, ReusedCoins, chosen_chain

from outrider.testing.oracle import Oracle, Toy, composed, distribution, drawn_chain, plain, speculate, toys

F = Fraction


def test_two_dice():
    sums = distribution(lambda choose: choose.pick([1] * 6) + choose.pick([1] * 6) + 2)
    assert sums == {s: F(6 - abs(s - 7), 36) for s in range(2, 13)}


def test_a_choice_may_depend_on_an_earlier_one():
    def program(choose):
        first = choose.coin(F(1, 3), F(1), depth=1, node=1)
        return (first, choose.pick([1, 2, 3])) if first else (first, None)

    assert distribution(program) == {
        (True, 0): F(1, 18),
        (True, 1): F(1, 9),
        (True, 2): F(1, 6),
        (False, None): F(2, 3),
    }


def test_weights_need_no_normalising_and_zero_is_never_taken():
    assert distribution(lambda choose: choose.token([F(0), F(3), F(0), F(1)], depth=1)) == {1: F(3, 4), 3: F(1, 4)}


@pytest.mark.parametrize(("part", "whole", "chance"), [(1, 3, F(1, 3)), (5, 3, F(1)), (0, 3, F(0)), (0, 0, F(0))])
def test_a_coin_is_the_clipped_ratio(part, whole, chance):
    heads = distribution(lambda choose: choose.coin(F(part), F(whole), depth=1, node=1))
    assert heads.get(True, F(0)) == chance


@pytest.mark.parametrize("weights", [[0, 0], [], [2, -1]])
def test_no_distribution_is_refused(weights):
    with pytest.raises(AssertionError):
        Oracle().pick(weights)


def test_reused_coins_are_one_uniform():
    def program(choose):
        return choose.coin(F(1, 3), F(1), depth=1, node=1), choose.coin(F(2, 3), F(1), depth=1, node=2)

    fresh, reused = distribution(program), distribution(program, ReusedCoins)
    assert fresh[True, False] == F(1, 9)
    assert reused == {(True, True): F(1, 3), (False, True): F(1, 3), (False, False): F(1, 3)}


def test_plain_is_the_distribution_of_the_plain_program():
    toy = Toy(3, "zeros")

    def program(choose):
        text = ()
        for _ in range(4):
            text += (choose.token(toy.p(text), depth=1),)
        return text

    assert distribution(program) == plain(toy, 4)


@pytest.mark.parametrize("rule", RULES)
def test_composing_steps_gives_the_distribution_of_the_whole_program(rule):
    for toy in toys(7):
        for drafter in (drawn_chain(1), chosen_chain(2)):
            assert composed(toy, RULES[rule], drafter, 3) == distribution(speculate(toy, RULES[rule], drafter, 3))
    toy = Toy(0)
    assert composed(toy, RULES[rule], drawn_chain(2), 2) == distribution(speculate(toy, RULES[rule], drawn_chain(2), 2))


def test_toys_hold_every_corner():
    for toy in toys(28):
        for text in ((), (0,), (1, 2)):
            p, q = toy.p(text), toy.q(text)
            assert sum(p) == sum(q) == 1
            assert (p, q) == (Toy(toy.seed, toy.kind).p(text), Toy(toy.seed, toy.kind).q(text))
            if toy.kind == "disjoint":
                assert all(a * b == 0 for a, b in zip(p, q, strict=True))
            if toy.kind == "equal":
                assert p == q
            if toy.kind.startswith("one-hot"):
                assert max({"p": p, "q": q}[toy.kind[-1]]) == 1
    assert any(0 in toy.p(()) for toy in toys(28) if toy.kind == "zeros")
    assert any(len(set(toy.p(()))) < 3 for toy in toys(28) if toy.kind == "ties")
    assert toys_depend_on_context()


def toys_depend_on_context():
    return all(Toy(seed).p((0,)) != Toy(seed).p((1,)) or Toy(seed).p(()) != Toy(seed).p((0,)) for seed in range(10))
