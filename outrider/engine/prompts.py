"""From prompts to token ids, and to the requests that the engine runs."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Mapping
from operator import index
from typing import Any

from outrider.core.params import SamplingParams
from outrider.engine.decoder import draw_seed, nth_seed
from outrider.engine.request import Request
from outrider.models.chat_template import chat_prompt
from outrider.models.load import Loaded

Prompt = str | Mapping[str, Any] | abc.Sequence[Mapping[str, str]]


class PromptEncoder:
    """The tokenizer and the chat template of a model."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._numbers = itertools.count()  # of requests

    @property
    def tokenizer(self) -> Any | None:
        """The model's own, or the object that was given."""
        return self.loaded.tokenizer

    def requests(self, ids: list[int], params: SamplingParams, **fields: Any) -> list[Request]:
        """The requests of one prompt: params.n of them, each with a number and a seed of its own. Runs and checks nothing.

        Args:
            ids: Token ids of the prompt.
            params: Its bad words and its prediction become token ids.
            fields: Further ones of each `Request`.

        Raises ValueError for what cannot be encoded.
        """
        seed = draw_seed() if params.seed is None else params.seed
        bad = tuple(form for word in params.bad_words for form in self._bad_word(word))
        prediction = params.prediction or ()
        if isinstance(prediction, str):
            prediction = self._ids_of(prediction, "a prediction as text", "prediction=[17, 4]")
        fields |= {"bad_words": bad, "prediction": tuple(prediction)}
        return [Request(next(self._numbers), ids, params, nth_seed(seed, i), **fields) for i in range(params.n)]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises ValueError for what cannot be encoded."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise ValueError(
                    f'a prompt given as a dict is {{"prompt_token_ids": [...]}}, got keys {sorted(prompt)}'
                )
            ids = prompt["prompt_token_ids"]
            try:
                return [index(t) for t in ids]
            except TypeError as error:
                raise ValueError(f"prompt_token_ids are whole numbers, [17, 4], got {ids!r:.80}") from error
        if self.loaded.tokenizer is None:
            raise ValueError(
                f'{self.loaded.name} has no tokenizer; pass tokenizer=..., or {{"prompt_token_ids": [...]}}'
            )
        if isinstance(prompt, str):
            if not prompt.isascii() and any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError(f"the prompt {prompt!r:.80} has half of a surrogate pair, which is no text")
            return list(self.loaded.tokenizer(prompt)["input_ids"])
        if not isinstance(prompt, abc.Sequence) or not all(isinstance(message, Mapping) for message in prompt):
            forms = '"a text", [{"role": "user", "content": "a text"}] or {"prompt_token_ids": [17, 4]}'
            raise ValueError(f"a prompt is {forms}, got {prompt!r:.80}")
        if not getattr(self.loaded.tokenizer, "chat_template", None):
            raise ValueError(f"the tokenizer of {self.loaded.name} has no chat template; give the prompt as one string")
        return list(self._ids_of(chat_prompt(self.loaded.tokenizer, prompt, add_generation_prompt=True)))

    def _ids_of(self, text: str, what: str = "a text", instead: str = "[17, 4]") -> tuple[int, ...]:
        """The token ids of a text within a request. what: it is. instead: how to give it without a tokenizer."""
        if self.loaded.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; give token ids, e.g. {instead}")
        return tuple(self.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _bad_word(self, word: str | abc.Sequence[int]) -> list[tuple[int, ...]]:
        """The token sequences that write a forbidden word: at the start of a text and after a space."""
        if not isinstance(word, str):
            return [tuple(word)] if word else []
        forms = {self._ids_of(f, "a word of bad_words", "bad_words=[[17, 4]]") for f in (word, " " + word.lstrip())}
        return [f for f in forms if f]
