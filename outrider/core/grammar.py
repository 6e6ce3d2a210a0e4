"""Text that fits a JSON schema, a regular expression or a list of choices, at every node of a draft. Needs xgrammar.

A grammar's state is committed to, like a cache. One matcher has read the committed tokens. For a node of a draft, a fork of it
reads the node's ancestors and gives the mask. The matcher itself never reads a rejected token, so nothing is rolled back. The
mask is part of the target's distribution, so the text is that of plain decoding.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Limits of a schema, a regular expression or a list of choices.
MAX_BYTES, MAX_DEPTH, MAX_CHOICES = 64 << 10, 32, 1000
_CACHE = 64 << 20  # bytes of compiled grammars that are kept


def available() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class Grammars:
    """Compiles grammars for one tokenizer. Every method raises ValueError for a grammar that cannot be compiled.

    vocab_size: the model's. end_ids: the tokens that end a text. One of them is written when the grammar is complete.
    Raises ImportError without xgrammar, and ValueError if the model has no end token or no tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        if not available():
            raise ImportError("grammars need xgrammar; install it with: pip install 'outrider[grammar]'")
        if tokenizer is None or not end_ids:
            raise ValueError("a grammar needs a tokenizer and an end token, and this model lacks one of them")
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE)
        self._matcher = xgrammar.GrammarMatcher
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)

    def json(self) -> Any:
        """Any JSON value that is an object or an array."""
        return self._compiler.compile_builtin_json_grammar()

    def schema(self, schema: dict[str, Any] | bool | str) -> Any:
        """JSON that fits a schema. Limits: MAX_BYTES, MAX_DEPTH."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _small(text, "the schema")
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
        if _depth(parsed) > MAX_DEPTH:
            raise ValueError(
                f"the schema is nested deeper than {MAX_DEPTH} levels; use $defs and $ref for what repeats"
            )
        return self._compiled("the schema", self._compiler.compile_json_schema, text)

    def regex(self, pattern: str) -> Any:
        """A text that a regular expression matches as a whole."""
        _small(pattern, "the regular expression")
        return self._compiled("the regular expression", self._compiler.compile_regex, pattern)

    def choice(self, choices: Sequence[str]) -> Any:
        """One of the given texts."""
        if not choices or len(choices) > MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"choice is 1 to {MAX_CHOICES} strings that are not empty")
        _small("".join(choices), "the list of choices")
        rule = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)
        return self._compiled("the list of choices", self._compiler.compile_grammar, rule)

    def tag(self, tag: dict[str, Any]) -> Any:
        """A structural tag of xgrammar: fixed text around JSON that fits schemas."""
        text = json.dumps(tag)
        _small(text, "the schemas of the tools")
        if _depth(tag) > MAX_DEPTH:
            raise ValueError(f"the schemas of the tools are nested deeper than {MAX_DEPTH} levels")
        return self._compiled("the schemas of the tools", self._compiler.compile_structural_tag, text)

    def mask(self, compiled: Any) -> GrammarMask:
        """The state of one text under a compiled grammar."""
        return GrammarMask(self._matcher(compiled), self.vocab_size, self.end_ids)

    def _compiled(self, what: str, compile_: Any, text: str) -> Any:
        try:
            return compile_(text)
        except Exception as error:  # xgrammar raises RuntimeError, and says where in its own source
            raise ValueError(
                f"{what} cannot be used: {re.sub(r'^.*?[.]cc:[0-9]+: ', '', str(error)).strip()}"
            ) from None


class GrammarMask:
    """What a grammar allows after the text and some draft tokens. A `TokenMask` of `outrider.core.sampling`, for one text."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._read = 0  # committed tokens the matcher has read
        self._bits = torch.zeros(1, (vocab_size + 31) // 32, dtype=torch.int32)
        self._vocab_size = vocab_size
        self._end = torch.zeros(vocab_size, dtype=torch.bool)
        self._end[list(end_ids)] = True
        self._known: dict[tuple[int, ...], Tensor] = {}  # draft tokens after the committed ones -> the mask there

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Tensor:
        """bool [vocab]: what may follow `tokens[start:]` and then `extra`. `tokens` are committed, `extra` are draft tokens."""
        if start + self._read < len(tokens):
            for token in tokens[start + self._read :]:
                if not self._matcher.is_terminated():
                    self._matcher.accept_token(token)
            self._read = len(tokens) - start
            self._known.clear()
        key = tuple(extra)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._after(key)
        return found

    def _after(self, extra: tuple[int, ...]) -> Tensor:
        matcher = self._matcher
        if extra:
            matcher = matcher.fork()
            for token in extra:
                if not matcher.is_terminated() and not matcher.accept_token(token):
                    return torch.zeros(self._vocab_size, dtype=torch.bool)  # nothing follows a forbidden token
        if matcher.is_terminated():
            return self._end
        matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.astype(np.bool_))  # pyright: ignore[reportUnknownMemberType]


def _small(text: str, what: str) -> None:
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{what} has {len(text.encode())} bytes and may have {MAX_BYTES}")


def _depth(value: Any) -> int:
    """Levels of lists and objects."""
    level, depth = [value], 0
    while level := [
        v for x in level if isinstance(x, (dict, list)) for v in (x.values() if isinstance(x, dict) else x)
    ]:
        depth += 1
    return depth
