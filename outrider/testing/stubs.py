"""Simple drafters for tests and for learning: always right, always wrong, right with a known probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.types import Commit, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, TargetPass, chains
from outrider.drafters.proposal import NodeList, own_commit


class Wrong(BaseDrafter):
    """Always proposes one token, which is almost never right. Speculation must still be exact, only slower."""

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def propose(self, context: DraftContext) -> Draft:
        return chains(context, [[self.token] * b.depth for b in context.budgets])


class Echo(BaseDrafter):
    """Proposes a known text, found by its prompt. With the target's own continuation everything is accepted."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        """texts: prompt tokens -> all tokens of prompt and continuation."""
        self.texts = texts

    def propose(self, context: DraftContext) -> Draft:
        proposals = []
        for tokens, n, budget in zip(context.tokens, context.prompt_lengths, context.budgets, strict=True):
            text = self.texts.get(tuple(tokens[:n]), [])
            proposals.append(text[len(tokens) : len(tokens) + budget.depth])
        return chains(context, proposals)


class _Wrapper(BaseDrafter):
    """Passes everything on to another drafter."""

    def __init__(self, wrapped: Drafter) -> None:
        self.wrapped = wrapped
        self.taps = wrapped.taps

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        self.wrapped.start(slot, tokens, first, features)

    def propose(self, context: DraftContext) -> Draft:
        return self.wrapped.propose(context)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        self.wrapped.update(context, commits, target)

    def release(self, slot: int) -> None:
        self.wrapped.release(slot)

    def reset(self) -> None:
        self.wrapped.reset()

    def inner(self) -> Mapping[str, Drafter]:
        return {"wrapped": self.wrapped}


class Noisy(_Wrapper):
    """Another drafter's draft, each token kept with probability alpha. With `Echo` inside, alpha is the acceptance rate."""

    def __init__(self, wrapped: Drafter, alpha: float, vocab_size: int, seed: int = 0) -> None:
        """Raises ValueError for an alpha outside 0..1."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is a probability, got {alpha}")
        super().__init__(wrapped)
        self.alpha, self.vocab_size, self.seed = alpha, vocab_size, seed
        self._proposals: dict[int, NodeList] = {}  # by slot, before tokens were changed

    def propose(self, context: DraftContext) -> Draft:
        draft = self.wrapped.propose(context)
        self._proposals = dict(zip(context.slots, draft.host, strict=True))
        n = draft.nodes
        if n == 1:
            return draft
        seed = torch.full((len(context.slots),), self.seed)
        coin = Noise(seed, seed).uniform(Stream.DRAFT, context.positions, 2 * n)
        other = (coin[:, n:] * (self.vocab_size - 1)).long()
        other = other + (other >= draft.tokens)  # any token but the drafted one
        spoil = (coin[:, :n] >= self.alpha) & (draft.parents >= 0)
        return Draft(torch.where(spoil, other.clamp_max(self.vocab_size - 1), draft.tokens), draft.parents)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        renumbered = [own_commit(c, self._proposals.get(slot)) for slot, c in zip(context.slots, commits, strict=True)]
        self._proposals = {}
        super().update(context, renumbered, target)


class Tapped(_Wrapper):
    """Another drafter with the taps of a trained head. Asserts that it sees what a head needs.

    Each committed position's features must come exactly once and in order, through `start` and `update`, from the first
    position on that no prefix cache held. `expected` recomputes them where the values are to be checked too.
    """

    def __init__(
        self,
        wrapped: Drafter,
        taps: tuple[int, ...],
        expected: Callable[[Sequence[int]], Tensor] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """expected: tokens -> float [token, feature], what the target gives for a whole sequence."""
        super().__init__(wrapped)
        self.taps, self.expected, self.tolerance = taps, expected, tolerance
        self.seen: dict[int, int] = {}  # slot -> the position after the last one whose features came
        self.positions = 0  # checked so far, over all sequences

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        assert len(tokens) > first + len(features), "a token must follow each chunk"
        self._take(slot, tokens, first, features)

    def propose(self, context: DraftContext) -> Draft:
        for slot, tokens, prompt in zip(context.slots, context.tokens, context.prompt_lengths, strict=True):
            seen = self.seen.get(slot, 0)
            assert seen == len(tokens) - 1 or (not seen and len(tokens) == prompt), (
                f"slot {slot}: features up to position {seen}, {len(tokens) - 1} are committed"
            )
        return super().propose(context)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            assert commit.features is not None, "a step without features"
            first = len(tokens) - 1 - len(commit.features)
            self._take(slot, tokens, first, commit.features)
        super().update(context, commits, target)

    def release(self, slot: int) -> None:
        self.seen.pop(slot, None)
        super().release(slot)

    def _take(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        next_position = self.seen.get(slot, first)
        assert first == next_position, f"slot {slot}: position {first} comes where {next_position} was next"
        self.seen[slot] = first + len(features)
        self.positions += len(features)
        if self.expected is not None:
            want = self.expected(tokens[: first + len(features)])[first:]
            gap = float((features - want).abs().max()) if len(features) else 0.0
            assert gap <= self.tolerance, f"slot {slot}: other features than the target's, by {gap:.2g}"


__all__ = ["Echo", "Noisy", "Tapped", "Wrong"]
