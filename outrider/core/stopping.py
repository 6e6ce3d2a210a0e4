"""Decodes tokens to text as they come, and decides where the text ends: end tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from outrider.core.params import SamplingParams


def content_text(content: Any) -> str | None:
    """The content of a chat message: a string, or a list of text parts put together; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = cast("list[Any]", content)
    texts: list[Any] = [cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


class Detokenizer:
    """Decodes a growing list of tokens. Text appears when no later token can change it: a split UTF-8 character waits.

    A short window is decoded twice, with and without the new tokens, and the difference is the new text (the method of vLLM).
    So it is right for tokenizers that add spaces between tokens, and costs the same at any length.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._tokens = list(prompt[-6:])
        self._prefix = 0
        self._read = len(self._tokens)
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token and return the new text."""
        self._tokens.append(token)
        return self._read_on(len(self._tokens) - self._read < 5)

    def flush(self) -> str:
        """Return the text that was held back, as it is."""
        return self._read_on(wait=False)

    def _read_on(self, wait: bool) -> str:
        """The new text. wait: hold an incomplete character back."""
        before = self._decode(self._tokens[self._prefix : self._read], skip_special_tokens=self._skip)
        after = self._decode(self._tokens[self._prefix :], skip_special_tokens=self._skip)
        if wait and after.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        new = after[len(before) :]
        self.text += new
        return new


@dataclass(frozen=True)
class FinishReason:
    """Why a text ended: `stop` (with the string or token id), `length`, `error` or `abort`. note: what a reader should know."""

    finish: str
    reason: str | int | None = None
    note: str | None = None


class StopChecker:
    """Decides, token by token, whether a text has ended. With a tokenizer it also keeps the text."""

    def __init__(
        self,
        params: SamplingParams,
        end_ids: Sequence[int],
        limit: int,
        tokenizer: Any | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """end_ids: tokens that end the text, beside those of params. limit: the most tokens.

        Raises ValueError for stop strings without a tokenizer.
        """
        self.params, self.limit = params, limit
        self._stop_ids = set(params.stop_token_ids)
        self._end_ids: set[int] = set(end_ids)
        if params.stops and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; give LLM(..., tokenizer=...) or use stop_token_ids")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._hold = 0 if params.include_stop_str_in_output else max((len(s) for s in params.stops), default=1) - 1
        self._cut: int | None = None  # where a stop string ends the text
        self.marks: list[int] = []  # length of the text after each token
        self.count = 0
        self.end: FinishReason | None = None

    def push(self, token: int) -> FinishReason | None:
        """Add one token. Returns the reason if it ends the text, else None."""
        self.count += 1
        params, own = self.params, token in self._end_ids
        if token < 0:
            self.end = FinishReason("error", "the model's logits are not numbers")
        elif (own or token in self._stop_ids) and self.count >= params.min_tokens:
            self.end = FinishReason("stop", None if own else token)
        new = ""
        if self._detokenizer and self._shows(token):
            new = self._detokenizer.push(token)
        if self.end is None and new and self.count >= params.min_tokens and (found := self._find(len(new))):
            self.end = FinishReason("stop", found)
        elif self.end is None and self.count >= self.limit:
            self.end = FinishReason("length")
        if self._detokenizer:
            if self.end and self._cut is None:
                self._detokenizer.flush()
            self.marks.append(len(self._detokenizer.text))
        return self.end

    def _shows(self, token: int) -> bool:
        """Whether a token adds to the text. One that ended it is no text, unless the parameters say so."""
        asked = self.params.include_stop_str_in_output or (
            token in self._end_ids and not self.params.skip_special_tokens
        )
        return token >= 0 and (self.end is None or asked)

    def finish(self, end: FinishReason) -> None:
        """End the text where it is. What was held back for a stop string is text now."""
        self.end = end

    def _find(self, new: int) -> str | None:
        """The stop string that ends within the last `new` characters. Of several, the one that starts first."""
        if not self.params.stops or self._detokenizer is None:
            return None
        text, best = self._detokenizer.text, None
        for stop in self.params.stops:
            at = text.find(stop, max(0, len(text) - new - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        at, stop = best
        self._cut = at + len(stop) if self.params.include_stop_str_in_output else at
        return stop

    @property
    def text(self) -> str:
        """The whole text so far, cut at a stop string."""
        text = self._detokenizer.text if self._detokenizer else ""
        return text if self._cut is None else text[: self._cut]

    @property
    def settled(self) -> str:
        """The text that no later token can take back. The possible start of a stop string is held back."""
        if self.end is not None or not self._hold:
            return self.text
        return self.text[: max(0, len(self.text) - self._hold)]
