"""Planted faults: mistakes that real systems have shipped, each of which the oracle must catch.

A fault that changed nothing would show that the proofs of `test_verify_exact.py` look away. (The fault of sharing noise
between draft and residual needs noise, and is planted in `test_verify_sampling.py`.)
"""

from fractions import Fraction
from functools import cache
from itertools import islice

import pytest
from oracles import RULES, ReusedCoins, judging

from outrider.core.types import Siblings
from outrider.testing.oracle import (
    Oracle,
    Toy,
    by_level,
    composed,
    distribution,
    drawn_chain,
    grown_tree,
    normal,
    plain,
    speculate,
    total_variation,
)
from outrider.verify import reference_block, reference_rejection
from outrider.verify.reference import clipped_ratio, leftover, residual
from outrider.verify.reference import normalized as normal_law

TOYS = [Toy(seed) for seed in range(6)] + [Toy(seed, "zeros") for seed in range(6)]


ENOUGH = 4  # toys on which a fault must be seen: the count stops there


def count(seen):
    """How many are true, up to `ENOUGH`. All are looked at before it says 0."""
    return len(list(islice((1 for one in seen if one), ENOUGH)))


@cache
def silent_without_a_fault(honest, toys, length):
    return all(composed(toy, RULES[honest], drawn_chain(2), length) == plain(toy, length) for toy in toys)


def caught(rule, drafter, honest="rejection", toys=TOYS, length=3):
    """On how many toys the oracle sees the fault, after it was seen to be silent without it."""
    assert silent_without_a_fault(honest, tuple(toys[:2]), length)
    return count(composed(toy, rule, drafter, length) != plain(toy, length) for toy in toys)


def flattened(q):
    """Another distribution on the same tokens: what a drafter returns that reports its logits before temperature."""
    return normal([0 if mass == 0 else int(60 * mass) + 10 for mass in q])


@pytest.mark.parametrize("honest", ["rejection", "block", "traversal"])
def test_wrong_q(honest):
    def rule(tokens, parents, target, drafter, choose):
        return RULES[honest](tokens, parents, target, lambda n: flattened(drafter(n)), choose)

    assert caught(rule, drawn_chain(2), honest) >= ENOUGH


@pytest.mark.parametrize("honest", ["rejection", "block", "traversal"])
def test_draft_tokens_drawn_but_judged_as_chosen(honest):
    """q taken as all mass on the draft token: right for n-grams, wrong for a draft token that was drawn... and yet exact.

    A draft token that ignores the coins may depend on anything. So this costs acceptance and never changes the distribution.
    """

    def rule(tokens, parents, target, drafter, choose):
        hot = [[Fraction(x == t) for x in range(3)] for t in tokens[1:]]
        return RULES[honest](tokens, parents, target, lambda n: hot[n], choose)

    assert caught(rule, drawn_chain(2), honest) == 0


def test_draft_tokens_chosen_but_judged_as_drawn():
    """argmax draft tokens with the soft q in the ratio: transformers #47932 and `jaymody` #3."""

    def drafter(toy, text, choose):
        drafted, distributions = (), []
        for _ in range(2):
            distributions.append(toy.q(text + drafted))
            drafted += (distributions[-1].index(max(distributions[-1])),)
        return [0, *drafted], [-1, 0, 1], distributions

    assert caught(reference_rejection, drafter) >= ENOUGH
    assert caught(reference_block, drafter, "block") >= ENOUGH


def test_argmax_accept():
    """Keep the draft token if it is the target's most likely token, as under greedy decoding, and else redraw."""

    def rule(tokens, parents, target, drafter, choose):
        for n in range(len(tokens) - 1):
            p = target(n)
            if p[tokens[n + 1]] != max(p):
                return list(range(n + 1)), choose.token(residual(1, p, drafter(n)), depth=n + 1)
        return list(range(len(tokens))), choose.token(target(len(tokens) - 1), depth=len(tokens))

    assert caught(rule, drawn_chain(2)) >= ENOUGH


def test_no_residual():
    """After a refusal the token is drawn from p."""

    def rule(tokens, parents, target, drafter, choose):
        path, _ = reference_rejection(tokens, parents, target, drafter, choose)
        return path, choose.token(target(path[-1]), depth=len(path))

    assert caught(rule, drawn_chain(2)) >= ENOUGH


def test_residual_of_the_bonus():
    """The residual drawn although everything was accepted."""

    def rule(tokens, parents, target, drafter, choose):
        path, token = reference_rejection(tokens, parents, target, drafter, choose)
        if len(path) == len(tokens):
            token = choose.token(residual(1, target(path[-1]), drafter(path[-2])), depth=len(path))
        return path, token

    assert caught(rule, drawn_chain(2)) >= ENOUGH


def block_with(first_failure=False, token_residual=False, mass_of=leftover):
    """`reference_block`, with one thing wrong."""

    def rule(tokens, parents, target, drafter, choose):
        last = len(tokens) - 1
        kept, kept_weight, weight = 0, 1, 1
        for n in range(1, last + 1):
            weight = clipped_ratio(weight * target(n - 1)[tokens[n]], drafter(n - 1)[tokens[n]])
            part, whole = weight, 1
            if n < last:
                mass = sum(mass_of(weight, target(n), drafter(n)))
                part, whole = mass, mass + 1 - weight
            if choose.coin(part, whole, depth=n, node=n) or weight == 1:
                kept, kept_weight = n, weight
            elif first_failure:
                break
        probs = target(last) if kept == last else residual(kept_weight, target(kept), drafter(kept))
        if token_residual and kept < last:
            probs = residual(1, target(kept), drafter(kept))
        return list(range(kept + 1)), choose.token(probs, depth=kept + 1)

    return rule


def test_block_without_a_fault():
    assert caught(block_with(), drawn_chain(2), "block") == 0


def test_block_that_stops_at_the_first_failure():
    assert caught(block_with(first_failure=True), drawn_chain(2), "block") >= ENOUGH


def test_block_with_the_residual_of_rejection():
    assert caught(block_with(token_residual=True), drawn_chain(2), "block") >= 3


def test_block_with_the_residual_of_rejection_hides_among_two_tokens():
    """Why the toys have three tokens and more."""
    two = [Toy(seed, vocab=2) for seed in range(12)]
    assert caught(block_with(token_residual=True), drawn_chain(2), "block", toys=two) == 0


def test_block_that_leaves_the_weight_out_of_the_mass():
    assert caught(block_with(mass_of=lambda w, p, q: leftover(1, p, q)), drawn_chain(2), "block") >= ENOUGH


def test_block_with_coins_read_again_by_the_next_step():
    """Coins keyed by position alone: a decision of step one looked at coins that step two reads again."""
    drafter = drawn_chain(2)
    toys = TOYS[:5]
    distance = [
        total_variation(distribution(speculate(toy, reference_block, drafter, 2), ReusedCoins), plain(toy, 2))
        for toy in toys
    ]
    assert sum(d > 0 for d in distance) >= 3
    assert max(distance) > 0.005
    for toy in toys[:2]:  # silent with fresh coins; and under rejection, which never looks beyond what it refuses
        assert distribution(speculate(toy, reference_block, drafter, 2), Oracle) == plain(toy, 2)
        assert distribution(speculate(toy, reference_rejection, drafter, 2), ReusedCoins) == plain(toy, 2)


def caught_on_trees(faulty, rule, siblings, *widths, vocab=3):
    """On how many of 14 toys the oracle sees `faulty`, after it was seen that the rule itself is right."""
    drafter, length = grown_tree(by_level(*(widths or (2,))), siblings), 2
    toys = [Toy(seed, vocab=vocab) for seed in range(10)] + [Toy(seed, "zeros", vocab) for seed in range(4)]
    assert trees_are_silent(rule, siblings, widths or (2,), vocab)
    return count(composed(toy, faulty, drafter, length) != plain(toy, length) for toy in toys)


@cache
def trees_are_silent(rule, siblings, widths, vocab):
    drafter, length = grown_tree(by_level(*widths), siblings), 2
    toys = [Toy(seed, vocab=vocab) for seed in range(3)]
    return all(composed(toy, judging(rule, siblings), drafter, length) == plain(toy, length) for toy in toys)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("declared", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("drawn", list(Siblings), ids=lambda s: s.name)
def test_siblings_that_were_made_in_another_way_than_the_draft_says(rule, drawn, declared):
    first_may_be_anything = (drawn, declared) == (Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED)
    if declared is Siblings.POINT or first_may_be_anything:  # a choice that looks at no coin may follow anything
        assert caught_on_trees(judging(rule, declared), rule, drawn) == 0
    elif drawn is not declared:
        assert caught_on_trees(judging(rule, declared), rule, drawn) >= ENOUGH


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_the_drawn_child_judged_after_the_chosen_ones(rule):
    """Top-then-sampled in the order of its tokens, with q as it was: the second child's distribution is not what is left."""

    def faulty(tokens, parents, target, drafter, choose):
        return RULES[rule](tokens, parents, target, drafter, choose, Siblings.IID)

    assert caught_on_trees(faulty, rule, Siblings.TOP_THEN_SAMPLED) >= ENOUGH


def rejection_with(scale=True, carry=True, strip=True):
    """`reference_rejection` without replacement, with one thing wrong."""

    def rule(tokens, parents, target, drafter, choose):
        path = [0]
        while True:
            p, q = target(path[-1]), drafter(path[-1])
            for child in [n for n, up in enumerate(parents) if up == path[-1]]:
                x = tokens[child]
                if choose.coin(p[x], q[x], depth=len(path), node=child):
                    path.append(child)
                    break
                p = residual(1, p if carry else target(path[-1]), q)
                p = normal_law(p) if scale else p
                q = normal_law([0 if v == x else mass for v, mass in enumerate(q)]) if strip else q
            else:
                return path, choose.token(p, depth=len(path))

    return rule


def test_rejection_without_a_fault_on_trees():
    assert caught_on_trees(rejection_with(), "rejection", Siblings.WITHOUT_REPLACEMENT) == 0


@pytest.mark.parametrize("fault", ["scale", "carry", "strip"])
def test_sibling_judged_by_the_wrong_remainder(fault):
    """The residual not brought back to sum 1; the residual of the last sibling alone; q with the refused token in it."""
    faulty = rejection_with(**{fault: False})
    assert caught_on_trees(faulty, "rejection", Siblings.WITHOUT_REPLACEMENT, vocab=4) >= ENOUGH


def traversal_with(weigh=True, weight_of_parent=True, residual_at_parent=True):
    """`reference_traversal` with replacement, with one thing wrong."""

    def rule(tokens, parents, target, drafter, choose):
        def visit(node, depth, weight):
            p = target(node)
            for child in [n for n, up in enumerate(parents) if up == node]:
                q, x = drafter(node), tokens[child]
                found = visit(child, depth + 1, clipped_ratio((weight if weigh else 1) * p[x], q[x]))
                if found:
                    return [node, *found[0]], found[1]
                rest = leftover(weight, p, q)
                mass = sum(rest)
                if mass and residual_at_parent:
                    p = normal_law(rest)
                if weight_of_parent:
                    weight = 1 if weight == 1 else mass / (mass + 1 - weight)
            if node == 0 or choose.coin(weight, 1, depth=depth, node=node):
                return [node], choose.token(p, depth=depth + 1)
            return None

        return visit(0, 0, 1)

    return rule


def test_traversal_without_a_fault():
    assert caught_on_trees(traversal_with(), "traversal", Siblings.IID, 2, 1) == 0


@pytest.mark.parametrize("fault", ["weigh", "weight_of_parent", "residual_at_parent"])
def test_traversal_that_forgets(fault):
    """The parent's weight in the ratio; to lower it after a refusal; to leave the residual behind."""
    assert caught_on_trees(traversal_with(**{fault: False}), "traversal", Siblings.IID, 2, 1) >= ENOUGH


def un_drawing(toy, text, choose):
    """Draws two tokens and drops the second where q was not sure of it."""
    tokens, parents, distributions = drawn_chain(2)(toy, text, choose)
    if distributions[1][tokens[2]] < Fraction(1, 3):
        tokens, parents, distributions = tokens[:2], parents[:2], distributions[:1]
    return tokens, parents, distributions


def test_a_draft_token_un_drawn():
    """Dropping a draft token after seeing it is biased under the ratio tests and exact under match."""

    def first_un_drawn(toy, text, choose):
        tokens, parents, distributions = drawn_chain(1)(toy, text, choose)
        return (tokens, parents, distributions) if distributions[0][tokens[1]] >= Fraction(1, 3) else ([0], [-1], [])

    for rule in ("rejection", "block", "traversal"):
        assert caught(RULES[rule], first_un_drawn, rule) >= ENOUGH
        assert caught(RULES[rule], un_drawing, rule) >= ENOUGH
    assert caught(RULES["match"], first_un_drawn, "match") == 0
    assert caught(RULES["match"], un_drawing, "match") == 0


@pytest.mark.parametrize("rule", [reference_rejection, reference_block])
@pytest.mark.parametrize("strict", [True, False])
def test_a_weak_inequality_keeps_what_the_target_never_says(rule, strict):
    """u <= h with a coin that can be 0, as `torch.rand` can: a draft token with p = 0 gets through. With u < h it cannot."""

    class Zero(Oracle):
        def coin(self, part, whole, *, depth, node):
            u = Fraction(0)
            return u * whole < part if strict else u * whole <= part

    toy = Toy(1, "disjoint")
    texts = distribution(speculate(toy, rule, drawn_chain(2), 2), Zero)
    assert (set(texts) <= set(plain(toy, 2))) is strict
