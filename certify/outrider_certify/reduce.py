"""A difference, reduced to the shortest prompt and the fewest parameters that still show it.

Each step leaves something out and asks both sides again. What cannot be left out names the mistake better than the text does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from outrider_certify.conditions import AGAIN, LOGPROBS, SEVERAL, not_asked
from outrider_certify.parameters import turned_off
from outrider_certify.subject import GeneratedText, Prompt, SpeculationVariant, Subject, TextRequest, Unsupported

MOST = 48  # questions of one reduction
COMPANIONS = "companions"
_numbers = count(1_000_000)  # of prompts that nothing else asks


@dataclass(frozen=True)
class ReducedCase:
    """The smallest request that still shows a difference."""

    request: TextRequest
    variant: SpeculationVariant
    needs: tuple[str, ...] = ()  # what could not be left out, by name
    again: bool = False  # whether it shows in the second text of a prompt only
    stable: bool = True  # whether it showed at all when it was asked again


class _Reduction:
    """One reduction: asks until `MOST` questions are spent."""

    def __init__(self, subject: Subject, variant: SpeculationVariant) -> None:
        self.subject, self.variant, self.left = subject, variant, MOST

    def differs(self, request: TextRequest, times: int = 1) -> bool:
        """Whether the last of some texts with speculation is another one than plain decoding writes."""
        if self.left <= 0:
            return False
        self.left -= 1 + times
        try:
            wanted = self.subject.plain([request])
            got = list[GeneratedText]()
            for _ in range(times):
                got = self.subject.generate([request], self.variant)
        except (Unsupported, ConnectionError, ValueError):
            return False
        if any(text.error for text in (*wanted, *got)):
            return False
        return any(not same(a, b) for a, b in zip(got, wanted, strict=False))

    def fresh(self, prompt: Prompt) -> Prompt:
        """A prompt that no other reduction asked, with the same end."""
        return not_asked(prompt, next(_numbers))

    def reduce(self, request: TextRequest) -> ReducedCase:
        needs = list[str]()
        if not self.differs(request):
            return ReducedCase(request, self.variant, stable=False)
        for name, smaller in _without(request):
            candidate = smaller(request)
            if self.differs(candidate):
                request = candidate
            else:
                needs.append(name)
        if request.companions:
            fewest = next(
                (n for n in range(1, request.companions) if self.differs(replace(request, companions=n))),
                request.companions,
            )
            request = replace(request, companions=fewest)
        again = False
        if not self.differs(replace(request, prompt=self.fresh(request.prompt))):
            again = self.differs(replace(request, prompt=self.fresh(request.prompt)), 2)
            needs += [AGAIN] * again
        if not again:
            request = self._shorter_prompt(request)
        return ReducedCase(self._shorter_text(request), self.variant, tuple(needs), again)

    def _shorter_prompt(self, request: TextRequest) -> TextRequest:
        """The shortest end of the prompt that still shows it, among halves and then one by one at the last."""
        size = len(request.prompt)
        while size > 1:
            smaller = next((n for n in (size // 2, size - 1) if self._shows(request, n)), None)
            if smaller is None:
                break
            request, size = replace(request, prompt=request.prompt[-smaller:]), smaller
        return request

    def _shows(self, request: TextRequest, size: int) -> bool:
        return 0 < size < len(request.prompt) and self.differs(replace(request, prompt=request.prompt[-size:]))

    def _shorter_text(self, request: TextRequest) -> TextRequest:
        length = request.params.max_tokens
        while length > 1 and self.differs(request.with_(max_tokens=length // 2)):
            length //= 2
            request = request.with_(max_tokens=length)
        low = length // 2
        while length - low > 1:  # it shows at `length`, and not at `low`
            middle = (low + length) // 2
            if self.differs(request.with_(max_tokens=middle)):
                length, request = middle, request.with_(max_tokens=middle)
            else:
                low = middle
        return request


def _without(request: TextRequest) -> Iterator[tuple[str, Any]]:
    """What a request has beyond the least: its name, and the request without it."""
    params = request.params
    if request.companions:
        yield COMPANIONS, lambda r: replace(r, companions=0)
    if params.logprobs is not None:
        yield LOGPROBS, lambda r: r.with_(logprobs=None)
    if params.n > 1:
        yield SEVERAL, lambda r: r.with_(n=1)
    for name, off in turned_off(params).items():
        yield name, lambda r, off=off: r.with_(**off)


def reduced(subject: Subject, request: TextRequest, variant: SpeculationVariant) -> ReducedCase:
    """The smallest request that still shows the difference of `request`."""
    return _Reduction(subject, variant).reduce(request)


def same(got: GeneratedText, want: GeneratedText) -> bool:
    """Whether two texts are the same, token by token where both tell their tokens."""
    tokens = got.tokens == want.tokens or not (got.tokens and want.tokens)
    return tokens and (got.text, got.finish) == (want.text, want.finish)
