"""The proofs: the law of speculative decoding equals the law of plain decoding, in exact fractions.

Every test compares the joint law of several tokens, written in as many steps as it takes, on context-dependent toys.
"""

from fractions import Fraction

import pytest
from oracle import (
    RULES,
    Toy,
    chosen_chain,
    composed,
    drawn_chain,
    drawn_tree,
    law,
    plain,
    point,
    speculate,
    step,
    top_tree,
    toys,
)

F = Fraction


def ends_at_random(text, guesses, choose):
    """Lengths 0 to gamma, decided by a coin of its own."""
    return choose.pick([1, 2]) == 0


def ends_after_a_zero(text, guesses, choose):
    """Stops *after* a token it drew: the length depends on the guesses, and none is un-drawn."""
    return bool(guesses) and guesses[-1] == 0


def ends_by_text(text, guesses, choose):
    """Some texts get no guess at all."""
    return len(guesses) >= (sum(text) + len(text)) % 3


CHAINS = {
    "drawn": drawn_chain(2),
    "drawn, any length": drawn_chain(2, ends_at_random, length=3),
    "drawn, stops after a zero": drawn_chain(2, ends_after_a_zero, length=3),
    "drawn, length by text": drawn_chain(2, ends_by_text),
    "chosen": chosen_chain(2),
    "none": chosen_chain(0),
}


@pytest.mark.parametrize("drafter", CHAINS)
@pytest.mark.parametrize("rule", RULES)
def test_chains_keep_the_law(rule, drafter):
    for toy in toys(42):
        assert composed(toy, RULES[rule], CHAINS[drafter], 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_four_tokens_keep_the_law(rule):
    for toy in toys(14, vocab=4):
        assert composed(toy, RULES[rule], drawn_chain(2), 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_longer_chains_keep_the_law(rule):
    for toy in toys(7):
        assert composed(toy, RULES[rule], drawn_chain(3, ends_after_a_zero), 4) == plain(toy, 4), toy.kind
    toy = Toy(2, "zeros")
    assert composed(toy, RULES[rule], drawn_chain(3), 4) == plain(toy, 4)


@pytest.mark.parametrize("rule", RULES)
def test_the_whole_program_keeps_the_law(rule):
    for toy in toys(7):
        assert law(speculate(toy, RULES[rule], drawn_chain(1), 3)) == plain(toy, 3), toy.kind


TREES = {
    "with replacement": drawn_tree([2], replacement=True),
    "without replacement": drawn_tree([2], replacement=False),
    "two levels without replacement": drawn_tree([2, 2], replacement=False, length=3),
    "two levels with replacement": drawn_tree([2, 1], replacement=True, length=3),
    "top tokens": top_tree([2, 2]),
    "uneven": top_tree([3, 1, 1]),
}


@pytest.mark.parametrize("drafter", TREES)
def test_match_keeps_the_law_on_trees(drafter):
    for toy in toys(7 if "levels" in drafter else 42):
        assert composed(toy, RULES["match"], TREES[drafter], 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("habit", ["always right", "always wrong", "right at odd positions", "siblings"])
def test_match_writes_the_targets_own_tokens_for_a_drafter_that_sees_them(habit):
    """The target's choice at every text is fixed first, as noise fixes it; an adversary looks at all of them.

    So the drafter may be any function of the noise, a coupled one included: the tokens are those of plain decoding in
    every single branch, and their law is the target's.
    """

    def program_of(toy, length):
        def program(choose):
            chosen = {}

            def choice(text):
                if text not in chosen:
                    chosen[text] = choose.token(toy.p(text), depth=1)
                return chosen[text]

            def drafter(toy, text, choose):
                tokens, parents, here = [0], [-1], text
                for _ in range(2):
                    right = choice(here)
                    wrong = (right + 1) % toy.vocab
                    guess = wrong if habit == "always wrong" or (habit[0] == "r" and len(here) % 2) else right
                    parent = next(n for n in range(len(tokens)) if node_text(text, tokens, parents, n) == here)
                    for token in (wrong, guess) if habit == "siblings" else (guess,):
                        tokens.append(token)
                        parents.append(parent)
                    here = (*here, guess)
                return tokens, parents, []

            text = plain_text = ()
            while len(text) < length:
                greedy = GreedyToy(toy, choice)
                text += step(greedy, RULES["match"], drafter, text, choose)
            while len(plain_text) < length:
                plain_text += (choice(plain_text),)
            return text[:length], plain_text

        return program

    for toy in toys(42):
        outcomes = law(program_of(toy, 2))
        assert all(speculative == plain_text for speculative, plain_text in outcomes)
        assert {text: mass for (text, _), mass in outcomes.items()} == plain(toy, 2), toy.kind


class GreedyToy:
    """The target given its noise: all mass on the token that it chooses after a text."""

    def __init__(self, toy, choice):
        self.vocab, self.choice = toy.vocab, choice

    def p(self, text):
        return point(self.choice(text), self.vocab)


def node_text(text, tokens, parents, node):
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return text + tuple(path[::-1])


def test_coupled_match_is_exact_with_one_noise_for_both():
    """Drafter and target read the same number at a position: u uniform on four points, token = inverse CDF of a law in
    quarters. Enumerated over every u: same text as plain decoding, and its law is the target's."""

    def cdf(u, law):
        return next(token for token in range(len(law)) if u < int(4 * sum(law[: token + 1])))

    for seed in range(42):
        toy = QuartersToy(seed)

        def program(choose, toy=toy):
            noise = {}

            def drafter(toy, text, choose):
                guesses = ()
                while len(guesses) < min(2, 3 - len(text)):
                    guesses += (cdf(u(len(text + guesses)), toy.q(text + guesses)),)
                return [0, *guesses], list(range(-1, len(guesses))), []

            def u(position):
                if position not in noise:
                    noise[position] = choose.pick([1] * 4)
                return noise[position]

            text = plain_text = ()
            greedy = GreedyToy(toy, lambda text: cdf(u(len(text)), toy.p(text)))
            greedy.q = toy.q
            while len(text) < 3:
                text += step(greedy, RULES["match"], drafter, text, choose)
            while len(plain_text) < 3:
                plain_text += (greedy.choice(plain_text),)
            return text[:3], plain_text

        outcomes = law(program)
        assert all(speculative == plain_text for speculative, plain_text in outcomes)
        assert {text: mass for (text, _), mass in outcomes.items()} == plain(toy, 3)


class QuartersToy(Toy):
    """Laws in quarters, zeros among them."""

    def _make(self, rng):
        cuts = [sorted(rng.choices(range(5), k=2)) for _ in "pq"]
        p, q = ([F(a, 4), F(b - a, 4), F(4 - b, 4)] for a, b in cuts)
        return p, q


# Known answers.


class Fixed(Toy):
    def __init__(self, p, q):
        super().__init__(0, vocab=len(p))
        self._make = lambda rng: (p, q)


def emitted(toy, rule, gamma):
    """Expected tokens of one step, exactly."""
    lengths = law(lambda choose: len(step(toy, RULES[rule], drawn_chain(gamma), (), choose)))
    return sum(n * mass for n, mass in lengths.items())


def test_the_example_of_the_block_paper():
    toy = Fixed([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)])  # Sun et al., section 3: 10/9 and 11/9 accepted of two
    assert emitted(toy, "rejection", 2) - 1 == F(10, 9)
    assert emitted(toy, "block", 2) - 1 == F(11, 9)


def test_rejection_accepts_one_minus_total_variation():
    for toy in toys(21):
        overlap = sum(map(min, toy.p(()), toy.q(())))
        assert emitted(toy, "rejection", 1) - 1 == overlap
        assert emitted(toy, "match", 1) - 1 == sum(a * b for a, b in zip(toy.p(()), toy.q(()), strict=True))


def test_block_keeps_at_least_as_much_as_rejection():
    gains = [emitted(toy, "block", 3) - emitted(toy, "rejection", 3) for toy in toys(21)]
    assert min(gains) == 0
    assert sum(gain > 0 for gain in gains) >= 6


def test_all_rules_agree_on_chosen_guesses():
    """With one-hot q the ratio test keeps a guess with probability p(x), as matching does, and block gains nothing."""
    for toy in toys(14):
        drafter = chosen_chain(2)
        outcome = [law(lambda choose, rule=rule: step(toy, rule, drafter, (), choose)) for rule in RULES.values()]
        assert outcome[0] == outcome[1] == outcome[2], toy.kind
