"""Lookups in a text by a suffix automaton, in Python: the twin of those in native code, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from outrider.control.plan import Offer
from outrider.core.types import Budget
from outrider.drafters.lookup.corpus import REACH, Corpus
from outrider.drafters.lookup.mixture import WIDEST, Context, TextSource, grow

FORCED = 64  # length of match, in tokens, that what a grammar leaves no choice about counts as


class _State:
    """A state of the automaton: a set of substrings that end at the same places."""

    __slots__ = ("count", "length", "link", "next")

    def __init__(self, length: int, link: int, following: dict[int, int], count: int) -> None:
        self.length, self.link, self.next, self.count = length, link, following, count


class SuffixAutomaton:
    """All substrings of a growing token list, with how often each occurs (Blumer et al. 1985), built online.

    A `ContextSource` of the mixture, whose states are the automaton's. A token costs about four microseconds and two states.
    """

    _CLIMB = 64  # suffixes counted per token; those beyond are short and frequent anyway

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
        """Read the new tokens of a list whose start this automaton has read."""
        for token in tokens[self.read :]:
            self.push(token)

    def suffixes(self) -> list[tuple[int, int]]:
        """(state, length) of the longest end of the text that occurred before, then of ends at most half as long."""
        ends, at, longest = [], self.states[self.last].link, self.read
        while at > 0:
            state = self.states[at]
            if state.length <= longest:
                ends.append((at, state.length))
                longest = state.length // 2
            at = state.link
        return ends

    def following(self, state: int) -> tuple[int, list[tuple[int, int, int]]]:
        options = [(token, self.states[child].count, child) for token, child in self.states[state].next.items()]
        total = sum(count for _, count, _ in options)
        return total, nlargest(WIDEST, options, key=lambda option: option[1]) if len(options) > 1 else options


class PythonTextEnds:
    """`TextEnds` over the automaton."""

    def __init__(self, least: float, doubt: float) -> None:
        self.least, self.doubt = least, doubt
        self.automaton, self._text = SuffixAutomaton(), list[int]()

    @property
    def read(self) -> int:
        return self.automaton.read

    def offer(self, new: Sequence[int], corpora: Sequence[Corpus], forced: Sequence[int], budget: Budget) -> Offer:
        self._text += new
        self.automaton.extend(self._text)
        contexts = [Context(self.automaton, state, float(n) ** 2, n) for state, n in self.automaton.suffixes()[:3]]
        for corpus in corpora if budget.max_nodes else ():
            contexts += corpus.contexts(self._text[-REACH:])
        if forced and budget.max_nodes:
            contexts.append(Context(TextSource(forced), (0,), FORCED**2, FORCED))
        return grow(self._text[-1], contexts, budget, least=self.least, doubt=self.doubt)
