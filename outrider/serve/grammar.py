"""Text that fits a JSON schema, a regular expression or a list of choices, at every node of a draft. Needs llguidance.

One matcher reads the committed tokens. For a node of a draft, a copy of it reads the node's ancestors and gives the mask. So
nothing is rolled back, and what is asked of a draft changes nothing. The mask is part of the target's distribution, so the text
is that of plain decoding.

llguidance enforces each keyword of a schema or refuses it, and bounds the work of a mask. What it cannot see stands here:
`_checked`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from outrider.core.types import Array
from outrider.drafters.model.vocabulary import Vocabulary
from outrider.serve.logs import log
from outrider.serve.tools import literal

MAX_BYTES = 1 << 20  # of a schema, a regular expression or a list of choices
KEPT = 8  # compiled grammars
MAX_STATES = 20_000  # of one text; each takes one or two kB
MAX_ITEMS = 20_000  # ways to read a place in a text; an object has one or more for each optional key
# Tokens that a mask takes at once, where a string may go on. The library's own four such sets are no faster. For 150,000 tokens
# they take 0.57 s to make, and this one 0.33 s, in which no other thread runs.
SLICES = [r'[^"\\\x00-\x1F\x7F]+']
# Space between two parts of JSON: a line may be indented by so many levels. Without a bound a model may write spaces for ever.
SPACE = r" ?\r?\n(\t{0,%d}| {0,%d})|[ \t]"
LEVELS = 8  # of an indent; up to four times as many, if the schema has more
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_OPERATOR = re.compile(r"\[\^?\]?[^\]]*?(&&|--|~~|\[)")  # [a&&b], [a--b], [a~~b], [[a]b]
_ANY_TOKENS = '%llguidance {"no_forcing": true}\n'  # also other tokens of a text than its tokenizer would make
_PLAIN = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
# Keywords with values that allow all, as programs write them; llguidance has no rule for the keyword
_IDLE: dict[str, list[Any]] = {"propertyNames": [True, {}, {"type": "string"}], "uniqueItems": [False]}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # have schemas by names


def available() -> bool:
    return importlib.util.find_spec("llguidance") is not None


@dataclass(frozen=True)
class Grammar:
    """A grammar that is not compiled yet. The functions that make one raise ValueError.

    what: how messages call it. lark: in llguidance's language, where @s0, @s1, ... are the schemas, which are JSON.
    """

    what: str
    lark: str
    schemas: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in (self.lark, *self.schemas))
        if size > MAX_BYTES:
            raise ValueError(f"{self.what} has {size} bytes and may have {MAX_BYTES}")

    @staticmethod
    def schema(schema: dict[str, Any] | bool | str | None = None) -> Grammar:
        """JSON that fits a schema; an object without one."""
        given = {"type": "object"} if schema is None else schema
        return Grammar("the schema", "start: @s0", (given if isinstance(given, str) else json.dumps(given),))

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        _check_classes(pattern)
        slashes = re.sub(r"(?s)(\\.)|/", lambda found: found[1] or r"\/", pattern)
        return Grammar("the regular expression", f"start: /{slashes}/")

    @staticmethod
    def choice(choices: Sequence[str]) -> Grammar:
        """One of the given texts."""
        if not choices or not all(isinstance(c, str) and c for c in choices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("choice is a list of strings that are not empty")
        return Grammar("the list of choices", "start: TEXT\nTEXT: " + " | ".join(map(literal, choices)))

    @staticmethod
    def tools(lark: str, schemas: Sequence[Mapping[str, Any]]) -> Grammar:
        """Text around JSON that fits the schemas of tools; see `ToolOffer.grammar`. A function takes the arguments it names."""
        closed = ({"additionalProperties": False} if s.keys() <= _PLAIN and "properties" in s else {} for s in schemas)
        texts = tuple(json.dumps(more | dict(schema)) for more, schema in zip(closed, schemas, strict=True))
        return Grammar("the schemas of the tools", lark, texts)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps what was used last.

    vocab_size: the model's. end_ids: the tokens that end a text. One of them is written when the grammar is complete.
    Raises ValueError if the model has no end token or no tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        if tokenizer is None or not end_ids:
            raise ValueError("a grammar needs a tokenizer and an end token, and this model lacks one of them")
        import llguidance

        words = llguidance.TokenizerWrapper(_Words(Vocabulary(tokenizer, vocab_size, end_ids), end_ids))
        self._tokenizer = llguidance.LLTokenizer(words, eos_token=list(end_ids), slices=SLICES)
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_STATES, max_items_in_row=MAX_ITEMS, step_max_items=10 * MAX_ITEMS, verbose_errors=False
        )
        self.vocab_size, self._end_ids, self._matcher = vocab_size, tuple(end_ids), llguidance.LLMatcher
        self.compiled = lru_cache(KEPT)(self._compiled)

    def _compiled(self, grammar: Grammar) -> Any:
        """The matcher of a grammar. Raises ValueError for one that cannot be enforced, is too complex or allows nothing."""
        try:
            parts = [{"lark_grammar": _ANY_TOKENS + grammar.lark}]
            parts += [{"name": f"s{n}", "json_schema": _checked(text)} for n, text in enumerate(grammar.schemas)]
            text = json.dumps({"grammars": parts})
            matcher = self._matcher(self._tokenizer, text, log_level=0, limits=self._limits)
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(_why(matcher.get_error()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{grammar.what} cannot be used: {str(error) or 'it is nested too deeply'}") from None
        return matcher

    def mask(self, compiled: Any) -> GrammarMask:
        """The state of one text under a compiled grammar."""
        return GrammarMask(compiled, self.vocab_size, self._end_ids)


class GrammarMask:
    """What a grammar allows after the text and some draft tokens. A `TokenMask` of `outrider.core.sampling`, for one text."""

    def __init__(self, compiled: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._compiled, self._vocab_size, self._end_ids = compiled, vocab_size, end_ids
        self._read = 0  # committed tokens the matcher has read
        self._known: dict[tuple[int, ...], Array] = {}  # draft tokens after the committed ones -> the mask there

    @cached_property
    def _matcher(self) -> Any:
        """It takes memory, so a text that waits has none."""
        return self._compiled.deep_copy()

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Array:
        """bool [vocab]: what may follow `tokens[start:]` and then `extra`. `tokens` are committed, `extra` are draft tokens.

        Nothing may follow a token that the grammar forbids, nor where a mask needs more work than the limits allow.
        """
        self._follow(tokens, start)
        key = tuple(extra)
        if key not in self._known:
            matcher = self._matcher.deep_copy() if key else self._matcher
            self._consume(matcher, key)
            bits = b"" if matcher.is_error() else matcher.compute_logit_bias()
            if matcher.is_error():
                log.debug("a grammar cannot go on: %s", _why(matcher.get_error()))
                bits = bytes(self._vocab_size)
            self._known[key] = np.frombuffer(bits, np.uint8)[: self._vocab_size] != 0
        return self._known[key]

    def legal_prefix(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> int:
        """See `TokenMask`. It makes no masks."""
        self._follow(tokens, start)
        if self._matcher.is_stopped():  # an end token may follow, or nothing
            return sum(bool(self.allowed(tokens, start, ())[token]) for token in extra[:1])
        return self._matcher.validate_tokens(list(extra))

    def forced_tokens(self, tokens: Sequence[int], start: int) -> list[int]:
        """See `TokenMask`: such as the rest of a key."""
        self._follow(tokens, start)
        return self._matcher.compute_ff_tokens() if self._matcher.compute_ff_bytes() else []

    def _follow(self, tokens: Sequence[int], start: int) -> None:
        """Read the committed tokens."""
        if new := tokens[start + self._read :]:
            self._consume(self._matcher, new)
            self._read += len(new)
            self._known.clear()

    def _consume(self, matcher: Any, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not (matcher.is_stopped() and token in self._end_ids):
                matcher.consume_token(token)


class _Words:
    """The tokenizer, as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary, end_ids: Sequence[int]) -> None:
        special = {i for i, piece in enumerate(vocabulary.pieces) if piece is None}
        self.tokens, self.special_token_ids = [piece or b"" for piece in vocabulary.pieces], [*special.union(end_ids)]
        self.eos_token_id, self.bos_token_id, self._encode = end_ids[0], None, vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def _checked(text: str) -> dict[str, Any]:
    """A schema with our settings. Raises ValueError for what llguidance would take, and not enforce."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]}
    escapes = True
    deepest = max(accumulate(1 if sign in "[{" else -1 for sign in re.findall(r"[\[\]{}]", text)), default=0)
    levels = max(LEVELS, min(deepest, 4 * LEVELS))
    for part in _parts(schema):
        if part.get("format") not in FORMATS:
            part.pop("format", None)  # the standard has it that other formats are notes
        for name, idle in _IDLE.items():
            if part.get(name) in idle:
                del part[name]
        if part.get("minimum") == -(1 << 63):  # llguidance takes the next one that a float holds
            part["minimum"] = 1024 - (1 << 63)
        names = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(names if isinstance(names, dict) else ())):
            if isinstance(pattern, str):
                _check_classes(pattern)
        least, required = part.get("minProperties"), part.get("required")
        if isinstance(least, int) and least > 1 + len(required if isinstance(required, list) else ()):
            raise ValueError(
                f"minProperties {least} cannot be enforced, because a key that is not in `required` may come twice"
            )
        # "\u0061" is another way to write the key "a", and its value would not be that of "a"
        if not {"properties", "patternProperties"}.isdisjoint(part) and part.get("additionalProperties") is not False:
            escapes = False
    options = {"whitespace_pattern": SPACE % (levels, 4 * levels), "json_allowed_escapes": 'nrbtf\\"' + "u" * escapes}
    return {**schema, "x-guidance": {**options, "json_allow_general_unicode_escapes": True}}


def _check_classes(pattern: str) -> None:
    """Raise ValueError for classes of characters that mean other things in Python, JavaScript and Rust."""
    if operator := _OPERATOR.search(re.sub(r"(?s)\\.", "__", pattern)):
        part, sign = pattern[operator.start() : operator.end()][:80], operator[1][0]
        raise ValueError(
            f"{part!r} cannot be used: languages read it in other ways; write \\{sign} for the letter {sign}"
        )


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and the schemas in it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name not in ("const", "enum", "default", "examples", "x-guidance"):
                    waiting += value.values() if name in _NAMED and isinstance(value, dict) else [value]
        elif isinstance(part, list):
            waiting += part


def _why(error: str) -> str:
    """What an error of llguidance says, without the place in a grammar that the client has not seen."""
    said = re.sub(r"^at \d+\(\d+\): |\n*<non-verbose/>|\n\s+\d+ \| (.|\n)*", "", error).strip()
    said = re.sub("Enable '.*", "Write anyOf, or give each of them a property with a const of its own", said)
    return "no text fits" if said in ("", "NoExtensionBias") else " ".join(said.split())[:500]
