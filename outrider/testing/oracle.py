"""The oracle: the exact distribution of a program that takes its random choices from an object.

`distribution(program)` runs the program once for every outcome of its choices and adds up exact fractions. So "lossless" is
`distribution(speculative) == distribution(plain)`, without tolerance, seed or luck. Toy models, drafters and the loop are here
too, so a proof in a test is one line.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from outrider.core.types import Siblings

Text = tuple[int, ...]
Probs = list[Fraction]


ZERO = Fraction(0)


class Oracle:
    """Takes a scripted branch at each choice, and the first branch after the script. Records the branches and their weight."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = list(script)
        self.trail: list[tuple[int, int]] = []  # (branch taken, branches there are)
        self.position = 0  # of the text; the loop sets it before each step
        self._over, self._under = 1, 1

    @property
    def weight(self) -> Fraction:
        """The probability of the branches taken."""
        return Fraction(self._over, self._under)

    def pick(self, weights: Sequence[Fraction | int]) -> int:
        """An index with probability proportional to its weight. Branches without weight do not exist."""
        common = math.lcm(*(w.denominator for w in weights))
        parts = [w.numerator * (common // w.denominator) for w in weights]
        live = [i for i, part in enumerate(parts) if part]
        assert live, "a choice among nothing"
        assert min(parts) >= 0, "a negative probability"
        if len(live) == 1:
            return live[0]
        branch = self.script[len(self.trail)] if len(self.trail) < len(self.script) else 0
        self.trail.append((branch, len(live)))
        self._over, self._under = self._over * parts[live[branch]], self._under * sum(parts)
        return live[branch]

    def token(self, probs: Sequence[Any], *, depth: int) -> int:
        return self.pick(probs)

    def coin(self, part: Any, whole: Any, *, depth: int, node: int) -> bool:
        heads, both = part.numerator * whole.denominator, whole.numerator * part.denominator
        if heads >= both:
            return both > 0
        return self.pick([heads, both - heads]) == 0

    def next_script(self) -> list[int] | None:
        """The script of the next unexplored run, depth first, or None after the last."""
        trail = list(self.trail)
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        return [b for b, _ in trail[:-1]] + [trail[-1][0] + 1] if trail else None


def distribution(program: Callable[[Any], Hashable], oracle: type[Oracle] = Oracle) -> dict[Any, Fraction]:
    """outcome -> probability, over every branch of the program."""
    result: dict[Any, Fraction] = {}
    script: list[int] | None = []
    while script is not None:
        choose = oracle(script)
        outcome = program(choose)
        result[outcome] = result.get(outcome, ZERO) + choose.weight
        script = choose.next_script()
    assert sum(result.values()) == 1
    return result


def total_variation(a: dict[Any, Fraction], b: dict[Any, Fraction]) -> float:
    return float(sum(abs(a.get(k, ZERO) - b.get(k, ZERO)) for k in {*a, *b}) / 2)


# Toy models: distributions that depend on the whole text before, with every kind of special case.

KINDS = ("random", "zeros", "ties", "one-hot q", "one-hot p", "disjoint", "equal")


class Toy:
    """A target's p and a drafter's q: distributions of the next token given a text, drawn at random once for each text."""

    def __init__(self, seed: int, kind: str = "random", vocab: int = 3) -> None:
        self.seed, self.kind, self.vocab = seed, kind, vocab
        self._known: dict[Text, tuple[Probs, Probs]] = {}

    def p(self, text: Text) -> Probs:
        return self._at(text)[0]

    def q(self, text: Text) -> Probs:
        return self._at(text)[1]

    def _at(self, text: Text) -> tuple[Probs, Probs]:
        if text not in self._known:
            self._known[text] = self._make(random.Random(f"{self.seed} {self.kind} {text}"))
        return self._known[text]

    def _make(self, rng: random.Random) -> tuple[Probs, Probs]:
        n, kind = self.vocab, self.kind
        if kind == "disjoint":
            mine = set(rng.sample(range(n), rng.randint(1, n - 1)))
            p, q = ([(i in mine) is owns and rng.randint(1, 4) for i in range(n)] for owns in (True, False))
            return normal(p), normal(q)
        low, high = {"zeros": (0, 2), "ties": (1, 2)}.get(kind, (1, 5))
        p, q = normal([rng.randint(low, high) for _ in range(n)]), normal([rng.randint(low, high) for _ in range(n)])
        if kind == "one-hot q":
            q = point(rng.randrange(n), n)
        if kind == "one-hot p":
            p = point(rng.randrange(n), n)
        return (p, p) if kind == "equal" else (p, q)


def normal(weights: Sequence[int]) -> Probs:
    total = sum(weights)
    return [Fraction(w, total) for w in weights] if total else [Fraction(1, len(weights))] * len(weights)


def point(token: int, vocab: int) -> Probs:
    return [Fraction(i == token) for i in range(vocab)]


def toys(count: int, vocab: int = 3) -> Iterator[Toy]:
    """`count` toys, of all kinds in turn."""
    for seed, kind in zip(range(count), itertools.cycle(KINDS), strict=False):
        yield Toy(seed, kind, vocab)


# Drafters: (toy, text, choose) -> (tokens, parents, q of the children of each node). Node 0 is the root.

Drafted = tuple[list[int], list[int], list[Probs]]
Drafter = Callable[[Toy, Text, Any], Drafted]


Width = Callable[[Text], int]  # how many children a node gets, by its own path below the root


def by_level(*widths: int) -> Width:
    """widths[d] children of every node at level d, none below."""
    return lambda path: widths[len(path)] if len(path) < len(widths) else 0


def grown_tree(width: Width, siblings: Siblings, length: int | None = None) -> Drafter:
    """Children chosen from q or drawn from it, as `siblings` says; level by level, all children of a node together.

    length: where the text ends. No token is drawn that could not be committed, as the real loop clips its budgets. Without
    it the last step overshoots, which must not matter either. A node has fewer children if q has fewer tokens.
    """

    def draft(toy: Toy, text: Text, choose: Any) -> Drafted:
        tokens, parents, paths = [0], [-1], list[Text]([()])
        room = None if length is None else length - len(text) - 1
        for node, path in enumerate(paths):  # it grows
            wide = 0 if len(path) == room else width(path)
            for token in children_of(toy.q(text + path), wide, siblings, choose):
                tokens.append(token)
                parents.append(node)
                paths.append((*path, token))
        return tokens, parents, [toy.q(text + path) for path in paths]

    return draft


def drawn_chain(gamma: int) -> Drafter:
    """gamma tokens drawn from q."""
    return grown_tree(by_level(*[1] * gamma), Siblings.IID)


def children_of(q: Probs, width: int, siblings: Siblings, choose: Any) -> list[int]:
    """Up to `width` tokens, chosen or drawn from q as `siblings` says."""
    children = list[int]()
    if siblings in (Siblings.POINT, Siblings.TOP_THEN_SAMPLED) or not width:
        best = sorted(range(len(q)), key=q.__getitem__, reverse=True)[:width]
        if siblings is Siblings.POINT or not width:
            return best
        children = [t for t in best if q[t]][:-1]
    left = [ZERO if t in children else mass for t, mass in enumerate(q)]
    draws = 1 if siblings is Siblings.TOP_THEN_SAMPLED else width
    for _ in range(draws):
        if sum(left):
            children.append(choose.pick(left))
            if siblings is Siblings.WITHOUT_REPLACEMENT:
                left[children[-1]] = ZERO
    return children


# The loop.

Rule = Callable[[Sequence[int], Sequence[int], Callable[[int], Any], Callable[[int], Any], Any], tuple[list[int], int]]


def node_texts(text: Text, tokens: Sequence[int], parents: Sequence[int]) -> list[Text]:
    """The text at every node: the committed text, the node's ancestors and the node."""
    texts = [text]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], token))
    return texts


def step(toy: Toy, rule: Rule, drafter: Drafter, text: Text, choose: Any) -> Text:
    """One draft-verify round: the tokens it commits."""
    tokens, parents, q = drafter(toy, text, choose)
    texts = node_texts(text, tokens, parents)
    path, token = rule(tokens, parents, lambda n: toy.p(texts[n]), lambda n: q[n], choose)
    return (*(tokens[n] for n in path[1:]), token)


def speculate(toy: Toy, rule: Rule, drafter: Drafter, length: int) -> Callable[[Any], Text]:
    """The program that writes `length` tokens in as many steps as needed. The last step may overshoot."""

    def program(choose: Any) -> Text:
        text: Text = ()
        while len(text) < length:
            choose.position = len(text)
            text += step(toy, rule, drafter, text, choose)
        return text[:length]

    return program


def composed(toy: Toy, rule: Rule, drafter: Drafter, length: int) -> dict[Text, Fraction]:
    """The distribution of `speculate`, one step at a time.

    The choices of a step depend on the text before it alone, so the distribution of a run is the product over its steps. This
    is much faster. `test_oracle` checks that the distribution is the same.
    """
    done: dict[Text, Fraction] = {}
    open_texts: dict[Text, Fraction] = {(): Fraction(1)}
    while open_texts:
        text = min(open_texts, key=len)  # all ways to this text have been added up
        weight = open_texts.pop(text)
        for new, mass in distribution(lambda choose, text=text: step(toy, rule, drafter, text, choose)).items():
            longer = (text + new)[:length]
            bucket = done if len(longer) == length else open_texts
            bucket[longer] = bucket.get(longer, ZERO) + weight * mass
    return done


def plain(toy: Toy, length: int) -> dict[Text, Fraction]:
    """The distribution of plain decoding: the product of the target's own distributions."""
    result: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        result = {
            (*text, token): weight * mass
            for text, weight in result.items()
            for token, mass in enumerate(toy.p(text))
            if mass
        }
    return result
