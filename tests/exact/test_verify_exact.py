"""The proofs: the distribution of speculative decoding equals the distribution of plain decoding, in exact fractions.

Every test compares the joint distribution of several tokens, written in as many steps as it takes, on context-dependent toys.
"""

from fractions import Fraction

import pytest
from oracles import RULES, chosen_chain, judging, stopping_chain

from outrider.core.types import Siblings
from outrider.testing.oracle import (
    Toy,
    by_level,
    children_of,
    composed,
    distribution,
    drawn_chain,
    grown_tree,
    plain,
    point,
    speculate,
    step,
    toys,
)

F = Fraction


def ends_at_random(text, drafted, choose):
    """Lengths 0 to gamma, decided by a coin of its own."""
    return choose.pick([1, 2]) == 0


def ends_after_a_zero(text, drafted, choose):
    """Stops *after* a token it drew: the length depends on the draft tokens, and none is un-drawn."""
    return bool(drafted) and drafted[-1] == 0


def ends_by_text(text, drafted, choose):
    """Some texts get no draft token at all."""
    return len(drafted) >= (sum(text) + len(text)) % 3


CHAINS = {
    "drawn": drawn_chain(2),
    "drawn, any length": stopping_chain(2, ends_at_random, length=3),
    "drawn, stops after a zero": stopping_chain(2, ends_after_a_zero, length=3),
    "drawn, length by text": stopping_chain(2, ends_by_text),
    "chosen": chosen_chain(2),
    "none": chosen_chain(0),
}


@pytest.mark.parametrize("drafter", CHAINS)
@pytest.mark.parametrize("rule", RULES)
def test_chains_keep_the_distribution(rule, drafter):
    for toy in toys(21):
        assert composed(toy, RULES[rule], CHAINS[drafter], 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_four_tokens_keep_the_distribution(rule):
    for toy in toys(14, vocab=4):
        assert composed(toy, RULES[rule], drawn_chain(2), 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_longer_chains_keep_the_distribution(rule):
    for toy in toys(7):
        assert composed(toy, RULES[rule], stopping_chain(3, ends_after_a_zero), 4) == plain(toy, 4), toy.kind
    toy = Toy(2, "zeros")
    assert composed(toy, RULES[rule], drawn_chain(3), 4) == plain(toy, 4)


@pytest.mark.parametrize("rule", RULES)
def test_the_whole_program_keeps_the_distribution(rule):
    for toy in toys(7):
        assert distribution(speculate(toy, RULES[rule], drawn_chain(1), 3)) == plain(toy, 3), toy.kind


def lopsided(path):
    """Two children of the root; below the first token of the alphabet two more, and a chain below the last."""
    return 2 if len(path) == 0 else {0: 2, 1: 0, 2: 1}[path[-1]] if len(path) == 1 else 0


def by_own_path(path):
    """The root's width is fixed; deeper nodes go by the tokens above them alone."""
    return 2 if not path else (sum(path) + len(path)) % 3 if len(path) < 3 else 0


SHAPES = {
    "pair": (by_level(2), 2),
    "three": (by_level(3), 2),
    "fork below": (by_level(1, 2), 3),
    "chains side by side": (by_level(2, 1), 3),
    "lopsided": (lopsided, 3),
    "by own path": (by_own_path, 3),
}


@pytest.mark.parametrize("siblings", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["match", "rejection", "traversal"])
def test_trees_keep_the_distribution(rule, shape, siblings):
    width, length = SHAPES[shape]
    for toy in toys(21 if length == 2 else 7):
        drafter = grown_tree(width, siblings, length)
        assert composed(toy, judging(rule, siblings), drafter, length) == plain(toy, length), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_trees_that_overshoot_keep_the_distribution(rule):
    """No clipping at the end of the text: the last step may write more than is wanted."""
    for siblings in Siblings:
        for toy in toys(7):
            tree = grown_tree(by_level(2, 1), siblings)
            assert composed(toy, judging(rule, siblings), tree, 2) == plain(toy, 2), toy.kind


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_trees_of_four_tokens_keep_the_distribution(rule):
    for siblings in Siblings:
        for toy in toys(7, vocab=4):
            tree = grown_tree(by_level(3), siblings)
            assert composed(toy, judging(rule, siblings), tree, 2) == plain(toy, 2), toy.kind


def best_first(siblings, expansions, drop=False):
    """Expands the node with the largest product of q, again and again: the shape follows everything drawn so far.

    drop: the fault of leaving out a child after it was seen, here one that q was not sure of.
    """

    def draft(toy, text, choose):
        tokens, parents, paths, value = [0], [-1], [()], {0: F(1)}
        for _ in range(expansions):
            node = max(value, key=lambda n: (value[n], -n))
            q, worth = toy.q(text + paths[node]), value.pop(node)
            for token in children_of(q, 2, siblings, choose):
                if drop and q[token] < F(1, 3):
                    continue
                value[len(tokens)] = worth * q[token]
                tokens.append(token)
                parents.append(node)
                paths.append((*paths[node], token))
            if not value:
                break
        return tokens, parents, [toy.q(text + path) for path in paths]

    return draft


@pytest.mark.parametrize("siblings", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_trees_grown_best_first_keep_the_distribution(rule, siblings):
    for toy in toys(7):
        assert composed(toy, judging(rule, siblings), best_first(siblings, 2), 3) == plain(toy, 3), toy.kind


@pytest.mark.parametrize("siblings", [Siblings.IID, Siblings.WITHOUT_REPLACEMENT], ids=lambda s: s.name)
def test_a_child_left_out_after_it_was_seen(siblings):
    """Biased under the rules that read a distribution, exact under match."""
    wrong = {
        rule: sum(
            composed(toy, judging(rule, siblings), best_first(siblings, 1, drop=True), 2) != plain(toy, 2)
            for toy in toys(14)
        )
        for rule in ("match", "rejection", "traversal")
    }
    assert wrong["match"] == 0
    assert min(wrong["rejection"], wrong["traversal"]) >= 6


@pytest.mark.parametrize("habit", ["always right", "always wrong", "right at odd positions", "siblings"])
def test_match_writes_the_targets_own_tokens_for_a_drafter_that_sees_them(habit):
    """The target's choice at every text is fixed first, as noise fixes it; an adversary looks at all of them.

    So the drafter may be any function of the noise, a coupled one included: the tokens are those of plain decoding in
    every single branch, and their distribution is the target's.
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

    for toy in toys(21):
        outcomes = distribution(program_of(toy, 2))
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
    """Drafter and target read the same number at a position: u uniform on four points, token = inverse CDF of a distribution in
    quarters. Enumerated over every u: same text as plain decoding, and its distribution is the target's."""

    def cdf(u, probs):
        return next(token for token in range(len(probs)) if u < int(4 * sum(probs[: token + 1])))

    for seed in range(21):
        toy = QuartersToy(seed)

        def program(choose, toy=toy):
            noise = {}

            def drafter(toy, text, choose):
                drafted = ()
                while len(drafted) < min(2, 3 - len(text)):
                    drafted += (cdf(u(len(text + drafted)), toy.q(text + drafted)),)
                return [0, *drafted], list(range(-1, len(drafted))), []

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

        outcomes = distribution(program)
        assert all(speculative == plain_text for speculative, plain_text in outcomes)
        assert {text: mass for (text, _), mass in outcomes.items()} == plain(toy, 3)


class QuartersToy(Toy):
    """LogitsDistribution in quarters, zeros among them."""

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
    """Expected tokens of one step with a drawn chain, exactly."""
    return expected_length(toy, RULES[rule], drawn_chain(gamma))


def expected_length(toy, rule, drafter):
    return sum(n * mass for n, mass in distribution(lambda choose: len(step(toy, rule, drafter, (), choose))).items())


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


def test_all_rules_agree_on_chosen_draft_tokens():
    """With one-hot q the ratio test keeps a draft token with probability p(x), as matching does, and block gains nothing."""
    for toy in toys(14):
        drafter = chosen_chain(2)
        outcome = [
            distribution(lambda choose, rule=rule: step(toy, rule, drafter, (), choose)) for rule in RULES.values()
        ]
        assert all(other == outcome[0] for other in outcome), toy.kind


def test_traversal_keeps_at_least_as_much_as_rejection_on_trees():
    for siblings in (Siblings.IID, Siblings.WITHOUT_REPLACEMENT):
        tree, gains = grown_tree(by_level(2, 1), siblings), []
        for toy in toys(7):
            top_down, bottom_up = (
                expected_length(toy, judging(rule, siblings), tree) for rule in ("rejection", "traversal")
            )
            gains.append(bottom_up - top_down)
        assert min(gains) >= 0
        assert max(gains) > 0


def test_two_children_keep_the_share_that_the_papers_say():
    """Without replacement keeps more than with; top-then-sampled keeps p(S) + sum of min(p, q') outside S, its optimum."""
    for toy in toys(21):
        p, q = toy.p(()), toy.q(())
        share = {
            s: expected_length(toy, judging("rejection", s), grown_tree(by_level(2), s)) - 1
            for s in (Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED)
        }
        if all(q):
            assert share[Siblings.WITHOUT_REPLACEMENT] >= share[Siblings.IID]
        top = q.index(max(q))
        if q[top] < 1:
            rest = sum(min(p[x], q[x] / (1 - q[top])) for x in range(3) if x != top)
            assert share[Siblings.TOP_THEN_SAMPLED] == p[top] + rest
