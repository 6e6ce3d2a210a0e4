"""Where the prompts of a training run come from: files, and the target itself.

A chat model can invent prompts: after the words that open a user's turn, it writes what users ask (Magpie, Xu et al. 2024,
arXiv 2406.08464). A model without a chat template begins texts of its own. A beginning is drawn, since at temperature 0 all
texts from the first token on are the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from outrider.core.params import SamplingParams
from outrider.core.suggest import did_you_mean
from outrider.engine.decoder import nth_seed
from outrider.engine.llm import LLM
from outrider_lab.bench.prompts import SETS, read

SELF = "self"
_INVENTED = SamplingParams(temperature=0.8, top_p=0.95)
_MARK = "\x1a"  # stands for the user's words in a chat template


@dataclass(frozen=True)
class Asked:
    """A prompt to answer. tokens: its ids, not empty. answer: ids of an answer from elsewhere; None to write one.
    held_out: the answer measures the head and does not train it."""

    tokens: list[int]
    answer: list[int] | None
    held_out: bool


class Source(Protocol):
    """A source of prompts. The same number always gives the same prompt.

    name: for the run card.
    """

    name: str

    def take(self, numbers: Sequence[int]) -> list[Asked | None]:
        """The prompts of these numbers, from 0 on. None where there is none that can be used."""
        ...


def held_out(number: int) -> bool:
    """Every 25th prompt of a source is held out, the first one among them."""
    return number % 25 == 0


def sources(names: Sequence[str], llm: LLM, seed: int, longest: int) -> list[Source]:
    """The sources by name: `self`, a file or a set of `outrider_lab.bench.prompts`. longest: tokens that the model invents.

    Raises FileNotFoundError or ValueError for a name that is none, and for a file without a usable line.
    """
    result: list[Source] = []
    for name in names:
        if name == SELF and not Path(SELF).exists():
            result.append(InventedPrompts(llm, seed, longest))
        elif name in SETS or Path(name).is_file():
            result.append(FilePrompts(name, llm))
        else:
            raise FileNotFoundError(
                f"there is no file {name}{did_you_mean(name, [SELF, *SETS])}; give .jsonl or .txt files of prompts, or "
                f"`{SELF}`: the model then invents its prompts"
            )
    return result


class FilePrompts:
    """Lines with "prompt" or "messages", as `outrider bench` reads them. After the last line comes the first one again.

    Messages that end with the assistant's words are a conversation: they are learnt as they are.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = Path(name).name
        self._prompts = [p.content for p in read(name)[0]]
        self._llm = llm

    def take(self, numbers: Sequence[int]) -> list[Asked | None]:
        return [self._asked(n % len(self._prompts)) for n in numbers]

    def _asked(self, line: int) -> Asked | None:
        content = self._prompts[line]
        if isinstance(content, str) or content[-1]["role"] != "assistant":
            tokens = self._llm.encode(content)
            return Asked(tokens, None, held_out(line)) if tokens else None
        if len(content) == 1:
            raise ValueError(
                f"line {line + 1} of {self.name} is an answer without a question; put the user's message before"
            )
        tokenizer: Any = self._llm.tokenizer
        tokens = self._llm.encode(content[:-1])
        whole = [*tokenizer.apply_chat_template(content, return_dict=True)["input_ids"]]
        if whole[: len(tokens)] != tokens:
            raise ValueError(
                f"the chat template writes the question of line {line + 1} of {self.name} in another way once it is answered, "
                "so the answer cannot be told apart; leave the assistant's message out, and the model answers itself"
            )
        return Asked(tokens, whole[len(tokens) :], held_out(line))


class InventedPrompts:
    """Prompts that the target writes itself: questions, or the beginnings of texts. One that is too long is cut, and is still a
    prompt."""

    name = SELF

    def __init__(self, llm: LLM, seed: int, longest: int) -> None:
        """Raises ValueError for a model that has neither a chat template nor a first token."""
        self._llm, self._seed, self._longest = llm, seed, longest
        tokenizer = llm.tokenizer
        self._opening = self._begin = None
        if tokenizer is not None and getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": _MARK}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            self._opening = tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"]
            return
        first = None if tokenizer is None else tokenizer.bos_token_id
        begin = [first] if first is not None else list(llm.loaded.end_ids[:1])
        if not begin:
            raise ValueError(
                f"{llm.loaded.name} has no token that begins a text, so it cannot invent prompts; give files: --prompts FILE"
            )
        self._begin = begin

    def take(self, numbers: Sequence[int]) -> list[Asked | None]:
        params = [_INVENTED.with_(seed=nth_seed(self._seed, n), max_tokens=self._length(n)) for n in numbers]
        opening = self._opening if self._begin is None else self._begin
        written = self._llm.generate([{"prompt_token_ids": opening}] * len(params), params)
        return [self._asked(n, out.outputs[0]) for n, out in zip(numbers, written, strict=True)]

    def _length(self, number: int) -> int:
        """Tokens to write at most. Beginnings have different lengths, so that heads also learn the first tokens of texts."""
        if self._begin is None:
            return self._longest
        return int(np.random.default_rng([self._seed, number]).integers(1, self._longest + 1))

    def _asked(self, number: int, written: Any) -> Asked | None:
        if self._begin is not None:
            tokens = written.token_ids
            if written.finish_reason == "stop":  # it ended; a part of it leaves something to write
                tokens = tokens[: len(tokens) // 2]
            return Asked([*self._begin, *tokens], None, held_out(number))
        text = written.text.strip()
        if not text:
            return None
        return Asked(self._llm.encode([{"role": "user", "content": text}]), None, held_out(number))
