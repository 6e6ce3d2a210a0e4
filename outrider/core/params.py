"""`SamplingParams`: what a request asks for. Names and meanings are vLLM's, and speculation honours every one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

# Below this temperature a text is greedy. Logits divided by less would not fit into a float.
GREEDY_BELOW = 1e-6
HOTTEST = 1e6  # at it all tokens are alike in float32, and far above it logits are not numbers
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
COUNTS = ("top_k", "min_tokens", "n")
OPTIONAL_COUNTS = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
LISTS = ("bad_words", "allowed_token_ids", "stop_token_ids")
RANGES: dict[str, tuple[float | None, float | None, str]] = {
    "temperature": (0, HOTTEST, "from 0 (greedy) to a million (all tokens are alike)"),
    "top_k": (-1, None, "0 (off) or a positive whole number"),
    "top_p": (0, 1, "in [0, 1]; 1 is off"),
    "min_p": (0, 1, "in [0, 1]; 0 is off"),
    # beyond these a logit may not be a number
    "repetition_penalty": (1 / HOTTEST, HOTTEST, f"from {1 / HOTTEST:g} to {HOTTEST:g}; 1 is off"),
    "presence_penalty": (-2, 2, "in [-2, 2]"),
    "frequency_penalty": (-2, 2, "in [-2, 2]"),
    "max_tokens": (1, None, "1 or more, or None"),
    "min_tokens": (0, None, "0 or more"),
    "n": (1, None, "1 or more"),
    "logprobs": (0, None, "0 or more, or None"),
    "prompt_logprobs": (0, None, "0 or more, or None"),
    "seed": (-(2**63), 2**64 - 1, "a whole number of at most 64 bits, or None"),
}
"""Of each number: the least, the most, and both in words."""


class BadParameter(ValueError):
    """A parameter is out of range. name: its name. The message says what is allowed."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class ContextOverflow(BadParameter):
    """Prompt and text do not fit into the model's length. Clients know OpenAI's code and words, and shorten a conversation.

    prompt: tokens of the prompt, or fewer if it is not encoded to its end. limit: that fit. asked: of the text.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt: int, limit: int, asked: int | None = None) -> None:
        self.prompt, self.limit = prompt, limit
        said, name = f"This model's maximum context length is {limit} tokens. However, ", "prompt"
        if prompt >= limit:
            said += f"your prompt resulted in {prompt} tokens, and an answer needs one more. "
            said += "Please reduce the length of the prompt."
        else:
            name, total = "max_tokens", f"{prompt + (asked or 0)!s:.20}"
            said += f"you requested {total} tokens ({prompt} in the prompt, {asked!s:.20} in the completion). "
            said += f"Please reduce the length of the prompt, or use max_tokens={limit - prompt} or less."
        super().__init__(said, name)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    Names and meanings are vLLM's. A temperature below 1e-6 becomes 0. A top_p of 0 leaves the likeliest token.
    Raises BadParameter, a ValueError, for a value out of range. The message says what is allowed.

    Args:
        temperature: 0 is greedy.
        top_k: Sample from so many of the likeliest tokens; 0 or -1 is off.
        top_p: Sample from the likeliest tokens with this probability together; 1 is off.
        min_p: Drop tokens below this share of the likeliest token's probability; 0 is off.
        repetition_penalty: Makes tokens of the prompt and the output less likely; 1 is off.
        presence_penalty: Lowers the logit of each token that is in the output; 0 is off.
        frequency_penalty: Lowers a token's logit once for each time that it is in the output; 0 is off.
        logit_bias: Token id -> number to add to its logit.
        bad_words: Strings, or lists of token ids, that must not appear.
        allowed_token_ids: The only tokens that may appear; None allows all.
        min_tokens: The text does not end before it has this many tokens.
        max_tokens: Tokens of a text, at most; without it, as many as fit.
        stop: A text that ends the output, and is cut from it. There may be several.
        stop_token_ids: Tokens that end the output, cut off in the same way.
        ignore_eos: Continue after the end token.
        include_stop_str_in_output: The output keeps the text that ends it.
        skip_special_tokens: Leave special tokens out of the text.
        seed: Without it, a seed is drawn and shown.
        prediction: A text, or token ids, that the answer will mostly repeat (OpenAI's predicted outputs). It is drafted from and
            never changes the answer.
        n: Outputs per prompt.
        logprobs: How many alternatives to report for each token, from the model's own distribution.
        prompt_logprobs: The same for the tokens of the prompt.
        stops: `stop` as a tuple; derived.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    prediction: str | Sequence[int] | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stops: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise BadParameter(f"{name} must be {allowed}, got {getattr(self, name)!r:.80}", name)

        values: dict[str, Any] = vars(self)  # of any type
        for name in NUMBERS:
            check(isinstance(values[name], Real), name, "a number")
        for name in COUNTS + OPTIONAL_COUNTS:
            missing = values[name] is None and name in OPTIONAL_COUNTS
            whole = isinstance(values[name], Integral) and values[name] is not True and values[name] is not False
            check(whole or missing, name, "a whole number" + ", or None" * (name in OPTIONAL_COUNTS))
        for name in LISTS:
            if values[name] is None and name != "allowed_token_ids":
                values[name] = ()  # as vLLM takes it
            listed = isinstance(values[name], Iterable) and not isinstance(values[name], (str, bytes))
            check(listed or values[name] is None, name, "a list")
        words = all(isinstance(word, Iterable) for word in values["bad_words"])
        empty = [word for word in values["bad_words"] if words and hasattr(word, "__len__") and len(word) == 0]
        check(words and not empty, "bad_words", "strings or lists of token ids, none of them empty")
        bias: Any = values["logit_bias"] or {}
        said: Any = values["prediction"] or ""
        fits = hasattr(bias, "values") and all(isinstance(b, Real) and b < float("inf") for b in bias.values())
        check(fits, "logit_bias", "token ids with the number that each adds to its logit, for example {17: -2.0}")
        check(isinstance(said, Iterable) and not isinstance(said, bytes), "prediction", "a text or token ids")
        for name, (low, high, allowed) in RANGES.items():
            value = values[name]
            fits = value is None or ((low is None or low <= value) and (high is None or value <= high))
            check(fits, name, allowed)
        values |= {name: float(values[name]) for name in NUMBERS}  # of numpy's types some would widen logits
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            more = f"min_tokens={self.min_tokens!s:.20} is more than max_tokens={self.max_tokens!s:.20}"
            raise BadParameter(f"{more}; raise max_tokens", "min_tokens")
        check(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "None or not empty"
        )
        stops: tuple[Any, ...] = (self.stop,) if isinstance(self.stop, (str, int)) else tuple(self.stop or ())
        if any(not isinstance(s, str) or not s for s in stops):
            got = f"{self.stop!r:.80}"
            raise BadParameter(f"stop must be non-empty strings, got {got}; for token ids use stop_token_ids", "stop")
        object.__setattr__(self, "stops", stops)
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one. Among equals it is the one with the lowest id."""
        return self.temperature == 0

    def with_(self, **changes: object) -> SamplingParams:
        """Return the same parameters with some changed. Raises ValueError as the constructor does."""
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError for token ids outside [0, vocab_size)."""
        named: dict[str, Iterable[Any]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": () if self.allowed_token_ids is None else self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
            "prediction": () if isinstance(self.prediction, str) else (self.prediction or ()),
            "bad_words": [t for w in self.bad_words if not isinstance(w, str) for t in w],
        }
        for name, ids in named.items():
            wrong = [t for t in ids if not (isinstance(t, Integral) and 0 <= int(t) < vocab_size)]
            if wrong:
                holds = f"{wrong[:5]!s:.80}"
                raise BadParameter(f"{name} holds {holds}, outside the vocabulary of {vocab_size} tokens", name)
