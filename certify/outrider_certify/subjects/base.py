"""What a certificate asks of the thing it tests. A subject writes texts with speculation and without, and knows its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee

Prompt = str | tuple[int, ...]


class Unsupported(Exception):
    """The subject cannot be asked this. The message says why, and what would make it possible."""


@dataclass(frozen=True)
class Job:
    """A text to write. prompt: a text or token ids. params: with the seed. companions: other texts in the same batch."""

    prompt: Prompt
    params: SamplingParams
    companions: int = 0

    def with_(self, **params: Any) -> Job:
        """The same job with some sampling parameters changed."""
        return replace(self, params=self.params.with_(**params))


@dataclass(frozen=True)
class Way:
    """A way to speculate. name: unique. own: what the user asked to certify; others are there to provoke mistakes."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    own: bool = True


@dataclass
class Writing:
    """A text that was written.

    tokens: of the text; empty if the subject gives no tokens. prompt: token ids, if known. logprobs: of each token, by token id.
    drafted, accepted: draft tokens of each step, and how many were accepted; empty if unknown. usage: output tokens as the
    subject counts them. error: why there is no text. broke: the engine failed while it wrote; it did not refuse.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    usage: int | None = None
    error: str | None = None
    broke: bool = False

    def steps(self) -> list[tuple[int, int]]:
        """(step, depth in the step) of each token; empty if the subject does not tell its steps."""
        out = [(s, d) for s, kept in enumerate(self.accepted) for d in range(kept + 1)]
        return out[: len(self.tokens)] if len(out) >= len(self.tokens) else []


def failed(error: Exception) -> Writing:
    """What an engine wrote that raised an error."""
    return Writing(error=f"{type(error).__name__}: {error}"[:300], broke=True)


@dataclass(frozen=True)
class Row:
    """The target's distribution of one token, as far as it is known.

    probs: float64 [known], after all sampling parameters. ids: int64 [known], the tokens they belong to; None: all tokens in
    order. logits: float64 [vocab] before the sampling parameters, if known.
    """

    probs: np.ndarray
    ids: np.ndarray | None = None
    logits: np.ndarray | None = None

    @property
    def whole(self) -> bool:
        """Whether every token's probability is known."""
        return self.ids is None


class Subject:
    """Base of all subjects. Derive from it to certify an engine of your own, and name it `module:class` on the command line.

    name: for the page. promise: what its sampled texts have in common with plain decoding. Greedy texts are always to be the
    same. exact_numbers: whether `rows` computes the numbers of plain decoding to the last bit. partial_rows: whether `rows` knows
    the likeliest tokens only, at temperature 1. batches: whether `write` gives a job its companions. properties: for the page.
    """

    name = "subject"
    promise = Guarantee.EXACT_DISTRIBUTION
    exact_numbers = False
    partial_rows = False
    batches = False
    vocab_size: int | None = None
    end_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.properties: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.weights: dict[str, str] = {}

    # -- what to ask ------------------------------------------------------------------------------------------------------

    def prompts(self) -> Sequence[Prompt]:
        """Prompts that suit the model; at least two."""
        raise NotImplementedError

    def ways(self) -> Sequence[Way]:
        """The ways to speculate that are tested. The first is the subject's own."""
        return [Way("as it is")]

    # -- what it does -----------------------------------------------------------------------------------------------------

    def write(self, jobs: Sequence[Job], way: Way) -> list[Writing]:
        """Write texts with speculation, side by side where a job asks for companions. One for each job and each of its n."""
        raise NotImplementedError

    def plain(self, jobs: Sequence[Job]) -> list[Writing]:
        """Write texts without speculation. Raises Unsupported if it cannot."""
        raise Unsupported("it cannot write without speculation")

    def constrained(self, job: Job, choices: Sequence[str]) -> Writing:
        """Write a text that a grammar makes one of the choices. Raises Unsupported if the subject has no grammars."""
        raise Unsupported("it is not asked for grammars")

    # -- what it should do ------------------------------------------------------------------------------------------------

    def rows(self, job: Job, writing: Writing) -> list[Row]:
        """The target's distribution of every token of a writing, given the tokens before it. Raises Unsupported."""
        raise Unsupported("the probabilities of its target are not known")

    def draft_rows(self, job: Job, writing: Writing) -> list[Row] | None:
        """The drafter's distribution of every token, as it should draw it; None if not known."""
        return None

    def noise(self) -> float | None:
        """The largest difference of a logit between two ways to compute the same one; None if not known."""
        return 0.0 if self.exact_numbers else None

    def margin(self, job: Job, writing: Writing, at: int, other: int | None) -> float | None:
        """How far apart plain decoding scored its token `at` and the token `other` that speculation wrote. In logits.

        None if not known. other: None if there is no other token.
        """
        return None

    def ready(self) -> str:
        """Why it can be asked nothing more; "" if it can. Asked before each trial, and may wait for it."""
        return ""

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens as a person reads them."""
        return " ".join(map(str, tokens))

    def close(self) -> None:
        """Free what it holds."""
