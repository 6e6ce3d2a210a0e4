"""Prompt lookup: propose what followed the last n tokens earlier in the text. No second model, no training."""

from __future__ import annotations

from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.mixture import Context, TextSource, drafted, grow

_PLACES = 16  # latest occurrences of an n-gram that are kept


class NgramDrafter(BaseDrafter):
    """Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487), as a tree.

    The last n tokens are looked up for every n of `shortest..longest`. The longest match decides first, by counts; of equals
    the latest place wins. Shorter matches fill the rest of the budget. An index per sequence maps each n-gram to its latest
    places, so a proposal costs a few look-ups at any text length.

    Raises ValueError unless 1 <= shortest <= longest.
    """

    def __init__(self, shortest: int = 2, longest: int = 5) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram lengths must satisfy 1 <= min <= max, got {shortest} and {longest}")
        self.shortest, self.longest = shortest, longest
        # slot -> (tokens read, n-gram -> the places after it)
        self._index: dict[int, tuple[int, dict[tuple[int, ...], tuple[int, ...]]]] = {}

    def release(self, slot: int) -> None:
        self._index.pop(slot, None)

    def propose(self, context: DraftContext) -> Draft:
        texts = zip(context.slots, context.tokens, context.budgets, strict=True)
        return drafted([grow(tokens[-1], self._contexts(slot, tokens), budget) for slot, tokens, budget in texts])

    def _contexts(self, slot: int, tokens: list[int]) -> list[Context]:
        """The ends of the text that were found. Each has a hundred times the weight of the next shorter one."""
        read, index = self._index.get(slot, (1, {}))
        for end in range(read, len(tokens)):  # n-grams that end before `end`; the last one has no continuation yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                gram = tuple(tokens[end - n : end])
                index[gram] = (end, *index.get(gram, ())[: _PLACES - 1])
        self._index[slot] = (max(read, len(tokens)), index)
        contexts, source = [], TextSource(tokens)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            places = index.get(tuple(tokens[-n:]))
            if places:
                contexts.append(Context(source, places, 100.0 ** -len(contexts), n))
        return contexts


def from_setup(setup: DrafterSetup) -> NgramDrafter:
    return NgramDrafter(setup.config.prompt_lookup_min, setup.config.prompt_lookup_max)
