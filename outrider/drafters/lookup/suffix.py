"""Suffix decoding: propose what followed the longest ends of the text, in this text, in other answers or in a corpus."""

from __future__ import annotations

from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.lookup.automaton import SuffixAutomaton
from outrider.drafters.lookup.corpus import REACH, Corpus
from outrider.drafters.lookup.documents import read_corpus
from outrider.drafters.lookup.mixture import Context, drafted, grow
from outrider.drafters.method import DrafterSetup

_FEED = 256  # tokens of a running answer that are added to the shared store at a time
_LEAD = 16  # earlier tokens that are stored with a piece, so that its start can be found


class SuffixDrafter(BaseDrafter):
    """Suffix decoding (arXiv 2411.04975), as a tree: long matches draft many tokens, weak ones few or none.

    It looks in three places: the sequence's own prompt and answer (an automaton); the answers of other requests, running and
    finished (a store); and `corpus`, texts that the user gives. `mixture` explains how counts become probabilities.

    shared: most tokens in the store of other answers; the oldest go first; 0 for no store. least: a path ends where its
    probability falls below this. doubt: match length, in tokens, at which a continuation seen once has probability 1/2.

    Other requests change only how fast an answer comes, never its tokens under `match`. If users must not learn even that of
    each other, set shared=0. Raises ValueError for values out of range.
    """

    def __init__(
        self, corpus: Corpus | None = None, shared: int = 2**18, *, least: float = 0.1, doubt: float = 2.0
    ) -> None:
        if shared < 0 or not 0 <= least <= 1 or doubt < 0:
            raise ValueError(f"shared, doubt >= 0 and 0 <= least <= 1, got {shared}, {doubt} and {least}")
        self.corpora = [] if corpus is None else [corpus]
        self.store = Corpus(shared) if shared else None
        if self.store is not None:
            self.corpora.append(self.store)
        self.least, self.doubt = least, doubt
        self._automata: dict[int, SuffixAutomaton] = {}
        self._texts: dict[int, tuple[list[int], int]] = {}  # slot -> (its text, how many tokens of it are in the store)

    def reset(self) -> None:
        """Empty the store of other requests' answers."""
        if self.store is not None:
            self.store.segments.clear()

    def release(self, slot: int) -> None:
        self._automata.pop(slot, None)
        if slot in self._texts:
            self._feed(slot, 1)
            del self._texts[slot]

    def propose(self, context: DraftContext) -> Draft:
        trees = []
        for b, (slot, tokens, budget) in enumerate(zip(context.slots, context.tokens, context.budgets, strict=True)):
            self._texts[slot] = (tokens, self._texts.get(slot, ((), context.prompt_lengths[b]))[1])
            self._feed(slot, _FEED)
            automaton = self._automata.setdefault(slot, SuffixAutomaton())
            automaton.extend(tokens)
            found = [Context(automaton, state, float(n) ** 2, n) for state, n in automaton.suffixes()[:3]]
            for corpus in self.corpora if budget.max_nodes else ():
                found += corpus.contexts(tokens[-REACH:])
            trees.append(grow(tokens[-1], found, budget, least=self.least, doubt=self.doubt))
        return drafted(trees)

    def _feed(self, slot: int, least: int) -> None:
        """Adds the new tokens of an answer to the store, if there are `least` or more."""
        tokens, done = self._texts[slot]
        if self.store is not None and len(tokens) - done >= least:
            self.store.add(tokens[max(0, done - _LEAD) :])
            self._texts[slot] = (tokens, len(tokens))


def from_setup(setup: DrafterSetup) -> SuffixDrafter:
    config, target = setup.config, setup.target
    corpus = None
    if config.corpus is not None:
        corpus = read_corpus(config.corpus, target.tokenizer, target.model.vocab_size, config.corpus_tokens)
    return SuffixDrafter(corpus, config.suffix_shared_tokens, least=config.suffix_decoding_min_token_prob)
