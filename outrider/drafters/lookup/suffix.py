"""Suffix decoding: propose what followed the longest ends of the text, in this text, in other answers or in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not

from outrider.control.plan import Offer
from outrider.core.infill import Marks, gap_marks, in_order
from outrider.core.types import Budget, Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.corpus import REACH, Corpus, Index, alike, read_corpus
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.lookup.mixture import Context, TextSource, drafted, grow
from outrider.kernels.cpu import available
from outrider.kernels.cpu.lookup import Lookup, SortedTexts

_FEED = 256  # tokens of a running answer that are added to the shared store at a time
_FORCED = 64  # length of match, in tokens, that what a grammar leaves no choice about counts as
_DOUBT = 2.0  # match length, in tokens, at which a continuation seen once has probability 1/2
_LEAD = 16  # earlier tokens that are stored with a piece, so that its start can be found


class TextEnds:
    """A growing text, and what followed its ends: here in native code. least, doubt: as of `SuffixDrafter`."""

    def __init__(self, least: float, doubt: float) -> None:
        self._lookup, self._segments = Lookup(least, doubt), list[list[Index]]()
        self._sorted = SortedTexts(())

    def offer(self, new: Sequence[int], corpora: Sequence[Corpus], forced: Sequence[int], budget: Budget) -> Offer:
        """Read more of the text and propose what follows it. forced: what a grammar leaves no choice about."""
        segments = [corpus.segments for corpus in corpora]  # lists that do not change: another thread may give others
        if len(segments) != len(self._segments) or any(map(is_not, segments, self._segments)):
            self._sorted = SortedTexts([[(s.tokens, s.order) for s in some] for some in segments])
            self._segments = segments
        return Offer(*self._lookup.offer(new, self._sorted, forced, budget.depth, budget.width, budget.max_nodes))


class PlainTextEnds:
    """The same without the native kernels: each place behind the last token is compared, as far as corpora are."""

    def __init__(self, least: float, doubt: float) -> None:
        self.least, self.doubt = least, doubt
        self._text, self._behind = list[int](), dict[int, list[int]]()  # token -> the places after it
        self._source = TextSource(self._text)

    def offer(self, new: Sequence[int], corpora: Sequence[Corpus], forced: Sequence[int], budget: Budget) -> Offer:
        for token in new:
            self._text.append(token)
            self._behind.setdefault(token, []).append(len(self._text))
        contexts = self._contexts()
        for corpus in corpora if budget.max_nodes else ():
            contexts += corpus.contexts(self._text[-REACH:])
        if forced and budget.max_nodes:
            contexts.append(Context(TextSource(forced), (0,), _FORCED**2, _FORCED))
        return grow(self._text[-1], contexts, budget, least=self.least, doubt=self.doubt)

    def _contexts(self) -> list[Context]:
        """The longest end of the text that occurred before, then two more, each at most half as long."""
        end, contexts, most = self._text[: -REACH - 1 : -1], list[Context](), REACH
        places = self._behind[end[0]][:-1]
        lengths = [alike(self._text[max(at - REACH, 0) : at][::-1], end) for at in places]
        while len(contexts) < 3 and (length := max((n for n in lengths if n <= most), default=0)):
            found = tuple(at for at, n in zip(places, lengths, strict=True) if n >= length)
            contexts.append(Context(self._source, found, float(length) ** 2, length))
            most = length // 2
        return contexts


@dataclass(eq=False)
class _Document:
    """The text of a sequence as a document has it, and what followed its ends."""

    tokens: list[int]  # as committed
    head: list[int]  # the prompt in another order, where it has a gap
    stored: int  # how many tokens are in the store
    ends: TextEnds | PlainTextEnds  # what followed the ends of the text
    read: int = 0  # how many tokens `ends` has read

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
        gap: Marks of a gap. What fills it is drafted as what follows the text before it.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        shared: int = 2**18,
        *,
        text_memory: TextMemory | None = None,
        least: float = 0.1,
        gap: Marks | None = None,
    ) -> None:
        if shared < 0 or not 0 <= least <= 1:
            raise ValueError(f"shared >= 0 and 0 <= least <= 1, got {shared} and {least}")
        self.corpora = [] if corpus is None else [corpus]
        self.store = Corpus(shared) if shared and text_memory is None else None
        self.text_memory = text_memory
        if self.store is not None:
            self.corpora.append(self.store)
        self.least, self.gap = least, gap
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
            corpora = list(self.corpora)
            if self.text_memory is not None:
                corpora.append(self.text_memory.corpus(context.clients[b] if context.clients else ""))
            offers.append(text.ends.offer(text.since(text.read), corpora, forced, budget))
            text.read = len(tokens)
        return drafted(offers)

    def _text(self, slot: int, tokens: list[int], prompt_length: int) -> _Document:
        """A text that begins."""
        prompt = tokens[:prompt_length] if self.gap is not None else []
        head = in_order(prompt, self.gap)
        ends = (TextEnds if available() else PlainTextEnds)(self.least, _DOUBT)
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
