"""What a certificate asks of the thing it tests. A subject writes texts with speculation and without, and knows its target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated

Prompt = str | tuple[int, ...]


class Unsupported(Exception):
    """The subject cannot be asked this. The message says why, and what would make it possible."""


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class SamplingParams:
    """How tokens are chosen and when a text ends. Names and meanings are vLLM's.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. repetition_penalty counts prompt and output, and 1 is off; the
    other penalties count the output. bad_words: token ids that must not follow one another, or a text. seed: None lets the
    engine draw one. logprobs: how many alternatives to report. Raises ValueError for a value out of range.
    """

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] = 1
    logprobs: Annotated[int | None, Field(ge=0)] = None


@dataclass(frozen=True)
class TextRequest:
    """A text to write."""

    prompt: Prompt  # a text or token ids
    params: SamplingParams  # with the seed
    companions: int = 0  # other texts in the same batch

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt, if it is token ids; empty if it is a text."""
        return () if isinstance(self.prompt, str) else self.prompt

    def with_(self, **params: Any) -> TextRequest:
        """The same request with some sampling parameters changed."""
        return replace(self, params=replace(self.params, **params))


@dataclass(frozen=True)
class SpeculationVariant:
    """One configuration of speculation."""

    name: str  # unique
    options: dict[str, Any] = field(default_factory=dict)
    adversarial: bool = False  # whether it is to provoke mistakes, and not what the user certifies


@dataclass
class GeneratedText:
    """A text that was written. What the subject does not tell is empty or None."""

    tokens: list[int] = field(default_factory=list)  # of the text
    text: str = ""
    prompt: list[int] = field(default_factory=list)  # token ids
    finish: str | None = None
    logprobs: list[dict[int, float]] | None = None  # of each token, by token id
    alternatives: list[int] = field(default_factory=list)  # how many log-probabilities came with each token
    drafted: list[int] = field(default_factory=list)  # draft tokens of each step
    accepted: list[int] = field(default_factory=list)  # of these, by step
    usage: int | None = None  # output tokens as the subject counts them
    error: str | None = None  # why there is no text
    broke: bool = False  # the engine failed while it wrote; it did not refuse

    @property
    def content(self) -> tuple[list[int], str]:
        """What two texts must have in common to be the same."""
        return self.tokens, self.text

    def steps(self) -> list[tuple[int, int]]:
        """(step, depth in the step) of each token; empty if the subject does not tell its steps."""
        out = [(s, d) for s, accepted in enumerate(self.accepted) for d in range(accepted + 1)]
        return out[: len(self.tokens)] if len(out) >= len(self.tokens) else []


def failed(error: Exception) -> GeneratedText:
    """What an engine wrote that raised an error."""
    return GeneratedText(error=f"{type(error).__name__}: {error}"[:300], broke=True)


@dataclass(frozen=True)
class TokenDistribution:
    """The target's distribution of one token, as far as it is known."""

    probs: np.ndarray  # float64 [known], after all sampling parameters
    ids: np.ndarray | None = None  # int64 [known], the tokens they belong to; None: all tokens in order
    logits: np.ndarray | None = None  # float64 [vocab] before the sampling parameters, if known

    @property
    def whole(self) -> bool:
        """Whether every token's probability is known."""
        return self.ids is None

    def index(self, token: int) -> int | None:
        """Where `probs` has the token; None if its probability is not known."""
        if self.ids is None:
            return token
        return int(np.flatnonzero(self.ids == token)[0]) if token in self.ids else None

    def prob(self, token: int) -> float | None:
        at = self.index(token)
        return None if at is None else float(self.probs[at])


class Subject:
    """Base of all subjects. Derive from it to certify an engine of your own, and name it `module:class` on the command line.

    Greedy texts are always to be those of plain decoding.
    """

    name = "subject"  # for the page
    exact_tokens = False  # whether sampled texts, too, are promised to be those of plain decoding with the same seed
    exact_numbers = False  # whether `distributions` computes the numbers of plain decoding to the last bit
    partial_distributions = False  # whether it knows the likeliest tokens only, at temperature 1
    batches = False  # whether `generate` gives a request its companions
    slots = 0  # sequences that it writes side by side, 0 if not known; with more, some wait or lose their place
    long_context = 0  # tokens of a long prompt, 0 for none
    end_ids: tuple[int, ...] = ()  # tokens that end a text

    def __init__(self) -> None:
        # for the page
        self.properties: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.weights: dict[str, str] = {}

    # -- what to ask ------------------------------------------------------------------------------------------------------

    def prompts(self) -> Sequence[Prompt]:
        """Prompts that suit the model; at least two."""
        raise NotImplementedError

    def variants(self) -> Sequence[SpeculationVariant]:
        """The configurations of speculation that are tested. The first is the subject's own."""
        return [SpeculationVariant("as it is")]

    # -- what it does -----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        """Write texts with speculation, side by side where a request has companions. One for each request and each of its n."""
        raise NotImplementedError

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        """Write texts without speculation. Raises Unsupported if it cannot."""
        raise Unsupported("it cannot write without speculation")

    def constrained(self, request: TextRequest, choices: Sequence[str]) -> GeneratedText:
        """Write a text that a grammar makes one of the choices. Raises Unsupported if the subject has no grammars."""
        raise Unsupported("it is not asked for grammars")

    # -- what it should do ------------------------------------------------------------------------------------------------

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        """The target's distribution of every token of a text, given the tokens before it. Raises Unsupported."""
        raise Unsupported("the probabilities of its target are not known")

    def draft_distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution] | None:
        """The drafter's distribution of every token, as it should draw it; None if not known."""
        return None

    def noise(self) -> float | None:
        """The largest difference of a logit between two ways to compute the same one; None if not known."""
        return 0.0 if self.exact_numbers else None

    def margin(self, request: TextRequest, text: GeneratedText, at: int, other: int | None) -> float | None:
        """How far apart plain decoding scored its token `at` and the token `other` that speculation wrote. In logits.

        None if not known. other: None if there is no other token.
        """
        if self.exact_numbers:
            return 1.0  # each difference is an error
        return self.gap(request, text, at, other)

    def gap(self, request: TextRequest, text: GeneratedText, at: int, other: int | None) -> float | None:
        """How far apart the target scores the token `at` of a greedy text and the token `other`, in logits; None if not known."""
        if other is None or request.params.temperature > 0:
            return None
        read = replace(text, tokens=text.tokens[: at + 1])
        try:
            scores = self.distributions(request.with_(temperature=1.0), read)[at]
        except Unsupported:
            return None
        p, q = scores.prob(text.tokens[at]), scores.prob(other)
        return abs(math.log(p) - math.log(q)) if p and q else None

    def ready(self) -> str:
        """Why it can be asked nothing more; "" if it can. Asked before each trial, and may wait for it."""
        return ""

    def troubles(self) -> dict[str, int]:
        """What went wrong with its answers, and how often, beside what the tests say."""
        return {}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises Unsupported if it is not known."""
        raise Unsupported("it does not tell the text of token ids")

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        """The token ids of a prompt, or of a text after one. Raises Unsupported if they are not known."""
        raise Unsupported("it does not tell the token ids of a text")

    def tokens_of(self, text: GeneratedText) -> list[int]:
        """The tokens of a text; if it tells none, those of its letters. These are a guess: letters may be split otherwise."""
        if text.tokens:
            return text.tokens
        try:
            tokens = self.encode(text.text, prompt=False)
        except Unsupported:
            return []
        return tokens if text.usage in (None, len(tokens)) else []

    def show(self, tokens: Sequence[int]) -> str:
        """Tokens as a person reads them."""
        return " ".join(map(str, tokens))

    def reproduce(self, request: TextRequest, variant: SpeculationVariant) -> str:
        """What a person types to see the texts of a request, with speculation and without."""
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        usual = SamplingParams()
        params = {f.name: getattr(request.params, f.name) for f in fields(usual)}
        words = ", ".join(f"{k}={v!r}" for k, v in params.items() if v != getattr(usual, k))
        beside = f", {request.companions} companions" if request.companions else ""
        return f"prompt={prompt!r}, SamplingParams({words}), {variant.name}{beside}"
