"""Decodes tokens to text as they come, and decides where the text ends: end tokens, stop strings, length."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.detokenizer import Detokenizer, TokenBytes
from outrider.core.params import SamplingParams


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
        tokens: TokenBytes | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """end_ids: tokens that end the text, beside those of params. limit: the most tokens. tokens: of the tokenizer; without
        them there is no text, and no stop string."""
        self.params, self.limit = params, limit
        self._ends = {token: FinishReason("stop", token) for token in params.stop_token_ids}
        self._ends |= dict.fromkeys(end_ids, FinishReason("stop"))
        self._tokens = tokens or TokenBytes(None)
        self._reader = Detokenizer(self._tokens, prompt, params.skip_special_tokens)
        self._unread, self._marks = deque[int](), list[int]()  # tokens that are no text yet; of the others as `marks`
        self._reading = threading.Lock()  # one thread writes the text, and others ask for it
        self._hold = 0 if params.include_stop_str_in_output else max((len(s) for s in params.stops), default=1) - 1
        self._cut: int | None = None  # where a stop string ends the text
        self.count, self.silent = 0, False  # tokens; whether the last one is no text, because it ended the text
        self.end: FinishReason | None = None

    def push(self, token: int) -> FinishReason | None:
        """Add one token. Returns the reason if it ends the text, else None."""
        self.count += 1
        ready = self.count >= self.params.min_tokens
        if token < 0:
            self.end = FinishReason("error", "the model's logits are not numbers")
        elif ready:
            self.end = self._ends.get(token)
        if self.end is None and self.count < self.limit and not self.params.stops:
            self._unread.append(token)
        else:
            self._read(token, ready)
        return self.end

    def _read(self, token: int, ready: bool) -> None:
        """Make text of a token that may end it."""
        params, piece = self.params, self._tokens[token]
        self._catch_up()
        if self.end is None and ready and piece.special and params.skip_special_tokens and piece.name in params.stops:
            self.end = FinishReason("stop", piece.name)  # the text does not show it
        self.silent = self.end is not None and not self._shows(token)
        new = "" if self.silent else self._reader.push(token)
        if self.end is None and self.count >= self.limit:
            self.end = FinishReason("length")
        new += self._reader.flush() if self.end else ""
        if new and ready and token >= 0 and (stop := self._find(len(new))):
            self.end = FinishReason("stop", stop)
        self._marks.append(len(self._reader.text))

    def _catch_up(self) -> None:
        """Make text of the tokens that were pushed: not before it is asked for, and then of all at once."""
        if not self._unread:
            return
        with self._reading:
            while self._unread:
                self._reader.push(self._unread[0])
                self._marks.append(len(self._reader.text))
                self._unread.popleft()  # last: a thread that finds none need not wait

    def _shows(self, token: int) -> bool:
        """Whether a token that ended the text adds to it. It is no text, unless the parameters say so."""
        ends = self._ends.get(token)
        is_end = ends is not None and ends.reason is None
        return token >= 0 and (
            self.params.include_stop_str_in_output or (is_end and not self.params.skip_special_tokens)
        )

    def finish(self, end: FinishReason) -> None:
        """End the text where it is. What was held back for a stop string is text now. Bytes of an unfinished character are not:
        a text that was cut off can go on."""
        self._catch_up()
        self.end = end

    def _find(self, new: int) -> str | None:
        """The stop string that ends within the last `new` characters. Of several, the one that starts first."""
        text = self._reader.text
        begins = ((text.find(stop, max(0, len(text) - new - len(stop) + 1)), stop) for stop in self.params.stops)
        at, stop = min(((at, stop) for at, stop in begins if at >= 0), key=lambda found: found[0], default=(-1, None))
        if stop is not None:
            self._cut = at + len(stop) if self.params.include_stop_str_in_output else at
        return stop

    @property
    def text(self) -> str:
        """The whole text so far, cut at a stop string."""
        self._catch_up()
        return self._reader.text[: self._cut]

    @property
    def settled(self) -> str:
        """The text that no later token can take back. The possible start of a stop string is held back."""
        if self.end is not None or not self._hold:
            return self.text
        return self.text[: max(0, len(self.text) - self._hold)]

    @property
    def marks(self) -> list[int]:
        """The length of the text after each token."""
        self._catch_up()
        return self._marks
