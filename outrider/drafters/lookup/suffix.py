"""Suffix decoding: propose what followed the longest ends of the text, in this text, in other answers or in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from operator import is_not

from outrider.control.plan import Offer
from outrider.core.infill import Marks, gap_marks, in_order
from outrider.core.types import Budget, Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.corpus import REACH, Corpus, Index, read_corpus
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.lookup.mixture import WIDEST, Context, TextSource, drafted, grow
from outrider.kernels.cpu import available
from outrider.kernels.cpu.lookup import Lookup, SortedTexts

_FEED = 256  # tokens of a running answer that are added to the shared store at a time
_FORCED = 64  # length of match, in tokens, that what a grammar leaves no choice about counts as
_LEAD = 16  # earlier tokens that are stored with a piece, so that its start can be found


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


class TextEnds:
    """A growing text, and what followed its ends: here in native code. least, doubt: as of `SuffixDrafter`."""

    def __init__(self, least: float, doubt: float) -> None:
        self._lookup, self._segments = Lookup(least, doubt), list[list[Index]]()
        self._sorted = SortedTexts(())

    @property
    def read(self) -> int:
        """Tokens of the text."""
        return self._lookup.read

    def offer(self, new: Sequence[int], corpora: Sequence[Corpus], forced: Sequence[int], budget: Budget) -> Offer:
        """Read more of the text and propose what follows it. forced: what a grammar leaves no choice about."""
        segments = [corpus.segments for corpus in corpora]  # lists that do not change: another thread may give others
        if len(segments) != len(self._segments) or any(map(is_not, segments, self._segments)):
            self._sorted = SortedTexts([[(s.tokens, s.order) for s in some] for some in segments])
            self._segments = segments
        return Offer(*self._lookup.offer(new, self._sorted, forced, budget.depth, budget.width, budget.max_nodes))


class PythonTextEnds:
    """The same in Python: the reference, and what runs without native kernels."""

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
            contexts.append(Context(TextSource(forced), (0,), _FORCED**2, _FORCED))
        return grow(self._text[-1], contexts, budget, least=self.least, doubt=self.doubt)


class _Document:
    """The text of a sequence as a document has it, and what followed its ends.

    Args:
        tokens: As committed.
        head: The prompt in another order, where it has a gap.
        stored: How many tokens are in the store.
        ends: What followed the ends of the text.
    """

    def __init__(self, tokens: list[int], head: list[int], stored: int, ends: TextEnds | PythonTextEnds) -> None:
        self.tokens, self.head, self.stored, self.ends = tokens, head, stored, ends

    def since(self, start: int) -> list[int]:
        """The tokens from a place on."""
        start = max(start, 0)
        return self.head[start:] + self.tokens[max(start, len(self.head)) :]


class SuffixDrafter(BaseDrafter):
    """Suffix decoding (arXiv 2411.04975), as a tree: long matches draft many tokens, weak ones few or none.

    It looks in three places: the sequence's own prompt and answer (an automaton); the answers of other requests, running and
    finished (a store); and `corpus`, texts that the user gives. A grammar adds what it leaves no choice about, such as keys.
    `mixture` explains how counts become probabilities.

    Other requests change only how fast an answer comes, never its tokens under `match`. If users must not learn even that of
    each other, set shared=0, or give a text memory by client. Raises ValueError for values out of range.

    Args:
        corpus: Texts that the user gives.
        shared: Most tokens in the store of other answers; the oldest go first; 0 for no store.
        text_memory: Finished texts, in place of the store.
        least: A path ends where its probability falls below this.
        doubt: Match length, in tokens, at which a continuation seen once has probability 1/2.
        gap: Marks of a gap. What fills it is drafted as what follows the text before it.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        shared: int = 2**18,
        *,
        text_memory: TextMemory | None = None,
        least: float = 0.1,
        doubt: float = 2.0,
        gap: Marks | None = None,
    ) -> None:
        if shared < 0 or not 0 <= least <= 1 or doubt < 0:
            raise ValueError(f"shared, doubt >= 0 and 0 <= least <= 1, got {shared}, {doubt} and {least}")
        self.corpora = [] if corpus is None else [corpus]
        self.store = Corpus(shared) if shared and text_memory is None else None
        self.text_memory = text_memory
        if self.store is not None:
            self.corpora.append(self.store)
        self.least, self.doubt, self.gap = least, doubt, gap
        self._texts: dict[int, _Document] = {}

    def reset(self) -> None:
        """Empty the store of other requests' answers."""
        if self.store is not None:
            self.store.clear()

    def release(self, slot: int) -> None:
        if (text := self._texts.pop(slot, None)) is not None:
            self._feed(text, 1)

    def propose(self, context: DraftContext) -> Draft:
        offers = list[Offer]()
        for b, (slot, tokens, budget) in enumerate(zip(context.slots, context.tokens, context.budgets, strict=True)):
            text = self._texts.get(slot) or self._text(slot, tokens, context.prompt_lengths[b])
            text.tokens = tokens
            self._feed(text, _FEED)
            history, forced = context.warp.histories[b], list[int]()
            if budget.max_nodes and history.mask is not None:
                forced = history.mask.forced_tokens(history.tokens, history.prompt_length)
            offers.append(text.ends.offer(text.since(text.ends.read), self._corpora(context, b), forced, budget))
        return drafted(offers)

    def _corpora(self, context: DraftContext, b: int) -> list[Corpus]:
        """Where to look for an entry of the batch."""
        if self.text_memory is None:
            return self.corpora
        return [*self.corpora, self.text_memory.corpus(context.clients[b] if context.clients else "")]

    def _text(self, slot: int, tokens: list[int], prompt_length: int) -> _Document:
        """A text that begins."""
        prompt = tokens[:prompt_length] if self.gap is not None else []
        head = in_order(prompt, self.gap)
        ends = (TextEnds if available() else PythonTextEnds)(self.least, self.doubt)
        self._texts[slot] = _Document(tokens, head if head != prompt else [], prompt_length, ends)
        return self._texts[slot]

    def _feed(self, text: _Document, least: int) -> None:
        """Adds the new tokens of an answer to the store, if there are `least` or more."""
        if self.store is not None and len(text.tokens) - text.stored >= least:
            self.store.add(text.since(text.stored - _LEAD))
            text.stored = len(text.tokens)


def from_setup(setup: DrafterSetup) -> SuffixDrafter:
    config, target = setup.config, setup.target
    corpus = None
    if config.corpus is not None:
        corpus = read_corpus(config.corpus, target.tokenizer, target.model.vocab_size, config.corpus_tokens)
    shared, least = config.suffix_shared_tokens, config.suffix_decoding_min_token_prob
    return SuffixDrafter(corpus, shared, text_memory=setup.text_memory, least=least, gap=gap_marks(target.tokenizer))
