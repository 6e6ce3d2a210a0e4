"""Drafts taken from the text itself: prompt lookup and the suffix automaton. No second model, no training."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import BaseDrafter, Batch, chains
from outrider.types import Draft


class NgramDrafter(BaseDrafter):
    """Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487): what followed the last n tokens when they came before.

    The longest n of `shortest..longest` that matches decides, and among several places the latest. An index per row maps
    each n-gram to where its continuation starts, so a proposal costs a few look-ups at any text length.
    """

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram lengths must satisfy 1 <= min <= max, got {shortest} and {longest}")
        self.shortest, self.longest = shortest, longest
        self._index: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}  # row -> tokens read, n-gram -> next place

    def release(self, row: int) -> None:
        self._index.pop(row, None)

    def propose(self, batch: Batch) -> Draft:
        return chains(
            batch, [self._guess(r, t, b.depth) for r, t, b in zip(batch.rows, batch.tokens, batch.budgets, strict=True)]
        )

    def _guess(self, row: int, tokens: list[int], depth: int) -> Sequence[int]:
        read, index = self._index.get(row, (0, {}))
        for end in range(
            max(read, 1), len(tokens)
        ):  # n-grams that end before `end`; the last one has no continuation yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                index[tuple(tokens[end - n : end])] = end
        self._index[row] = (len(tokens), index)
        if depth == 0:
            return ()
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            start = index.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + depth]
        return ()


class _State:
    """A state of the automaton: a set of substrings that end at the same places."""

    __slots__ = ("count", "length", "link", "next")

    def __init__(self, length: int, link: int, following: dict[int, int], count: int) -> None:
        self.length, self.link, self.next, self.count = length, link, following, count


class SuffixAutomaton:
    """All substrings of a growing token list, with how often each occurs (Blumer et al. 1985; online)."""

    _CLIMB = 64  # suffixes counted per token; the shorter ones beyond are frequent anyway

    def __init__(self) -> None:
        self.states = [_State(0, -1, {}, 0)]
        self.last = 0
        self.read = 0

    def push(self, token: int) -> None:
        states = self.states
        new, p = len(states), self.last
        states.append(_State(states[p].length + 1, 0, {}, 0))
        while p >= 0 and token not in states[p].next:
            states[p].next[token] = new
            p = states[p].link
        if p >= 0:
            q = states[p].next[token]
            if states[p].length + 1 == states[q].length:
                states[new].link = q
            else:
                clone = len(states)
                states.append(_State(states[p].length + 1, states[q].link, dict(states[q].next), states[q].count))
                while p >= 0 and states[p].next.get(token) == q:
                    states[p].next[token] = clone
                    p = states[p].link
                states[q].link = states[new].link = clone
        self.last, self.read = new, self.read + 1
        at = new
        for _ in range(self._CLIMB):
            if at <= 0:
                break
            states[at].count += 1
            at = states[at].link

    def extend(self, tokens: Sequence[int]) -> None:
        """Read what is new of a list that this automaton has read the start of."""
        for token in tokens[self.read :]:
            self.push(token)

    def guess(self, depth: int, factor: float, least: float) -> tuple[list[int], float]:
        """The best continuation and its score: the tokens one may expect to be right, by counts."""
        best: list[int] = []
        score = 0.0
        state = self.states[self.last].link  # the longest suffix that occurred before
        while state > 0:
            length = self.states[state].length
            path, expected, prob, at = [], 0.0, 1.0, state
            while len(path) < min(depth, int(length * factor)):
                here = self.states[at]
                if not here.next:
                    break
                token, child = max(here.next.items(), key=lambda item: self.states[item[1]].count)
                # the suffix itself is one of its own occurrences, and nothing follows it yet
                seen = here.count - (1 if at == state else 0)
                prob *= min(1.0, self.states[child].count / max(seen, 1))
                if prob < least:
                    break
                path.append(token)
                expected += prob
                at = child
            if expected > score:
                best, score = path, expected
            if length <= 1:
                break
            state = self.states[state].link
        return best, score


class SuffixDrafter(BaseDrafter):
    """Suffix decoding (arXiv 2411.04975) over prompt and output: long matches draft long, rare ones little or nothing.

    factor: tokens drafted at most per token matched. least: a path ends where its estimated probability falls below it.
    """

    def __init__(self, factor: float = 2.0, least: float = 0.2) -> None:
        self.factor, self.least = factor, least
        self._automata: dict[int, SuffixAutomaton] = {}

    def release(self, row: int) -> None:
        self._automata.pop(row, None)

    def propose(self, batch: Batch) -> Draft:
        guesses = []
        for row, tokens, budget in zip(batch.rows, batch.tokens, batch.budgets, strict=True):
            automaton = self._automata.setdefault(row, SuffixAutomaton())
            automaton.extend(tokens)
            guesses.append(automaton.guess(budget.depth, self.factor, self.least)[0])
        return chains(batch, guesses)
