"""Text that fits a JSON schema, a regular expression or a list of choices, at every node of a draft. Needs xgrammar.

A grammar's state is committed to, like a cache. One matcher has read the committed tokens. For a node of a draft, a fork of it
reads the node's ancestors and gives the mask. The matcher itself never reads a rejected token, so nothing is rolled back. The
mask is part of the target's distribution, so the text is that of plain decoding.

xgrammar ignores some keywords of JSON schemas silently; then a text may break its schema. `unenforced` finds them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from time import thread_time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.core.child import Child, TooSlow
from outrider.core.compiling import MASK_SECONDS, MASK_SECONDS_EACH, follow
from outrider.core.extras import install

# Limits of a schema, a regular expression or a list of choices.
MAX_BYTES, MAX_DEPTH, MAX_CHOICES = 64 << 10, 32, 1000
_CACHE = 64 << 20  # bytes of compiled grammars that are kept
# How JSON usually goes on after a character, where a grammar allows any space
_NEXT = ', "', "}"  # after a value
_USUAL = {
    "{": ('"',),
    "[": ('"',),
    ",": (' "',),
    ":": (" ",),
    " ": ('"',),
    '"': (": ", *_NEXT),
    **dict.fromkeys("el]}", _NEXT),
}
_FREE = 8  # where more than this part of the vocabulary is allowed, the text is free
_PARTS = 24  # of an expected text


def available() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


@dataclass(frozen=True)
class Grammar:
    """A grammar that is valid as far as one can see, and not compiled yet. The functions that make one raise ValueError.

    what: how messages call it. method: of xgrammar's compiler. arguments: of the method.
    """

    what: str
    method: str
    arguments: tuple[str, ...] = ()

    @staticmethod
    def json() -> Grammar:
        """Any JSON value that is an object or an array."""
        return Grammar("JSON", "compile_builtin_json_grammar")

    @staticmethod
    def schema(schema: dict[str, Any] | bool | str) -> Grammar:
        """JSON that fits a schema. Limits: MAX_BYTES, MAX_DEPTH, and keywords that take effect."""
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
        _counts(parsed, "the schema")
        return Grammar("the schema", "compile_json_schema", (text,))

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        _small(pattern, "the regular expression")
        return Grammar("the regular expression", "compile_regex", (pattern,))

    @staticmethod
    def choice(choices: Sequence[str]) -> Grammar:
        """One of the given texts."""
        if not choices or len(choices) > MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"choice is 1 to {MAX_CHOICES} strings that are not empty")
        _small("".join(choices), "the list of choices")
        rule = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)
        return Grammar("the list of choices", "compile_grammar", (rule,))

    @staticmethod
    def tag(tag: dict[str, Any], schemas: Sequence[Any]) -> Grammar:
        """A structural tag of xgrammar: fixed text around JSON that fits schemas."""
        text, what = json.dumps(tag), "the schemas of the tools"
        _small(text, what)
        if _depth(tag) > MAX_DEPTH:
            raise ValueError(f"{what} are nested deeper than {MAX_DEPTH} levels")
        for schema in schemas:
            _counts(schema, what)
        return Grammar(what, "compile_structural_tag", (text,))


class Grammars:
    """Compiles grammars for one tokenizer, and keeps what was used last.

    vocab_size: the model's. end_ids: the tokens that end a text. One of them is written when the grammar is complete.
    info: the tokenizer, for `outrider.core.compiling.compiler`. Threads may share it.
    Raises ImportError without xgrammar, and ValueError if the model has no end token or no tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        if not available():
            raise ImportError(f"grammars need xgrammar: {install('grammar')}")
        if tokenizer is None or not end_ids:
            raise ValueError("a grammar needs a tokenizer and an end token, and this model lacks one of them")
        import xgrammar

        self._info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_ids)
        )
        self._xgrammar, self._tokenizer = xgrammar, tokenizer
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)
        self._kept, self._held, self._lock = OrderedDict[Grammar, Any](), 0, Lock()

    @cached_property
    def info(self) -> str:
        return self._info.serialize_json()

    def known(self, grammar: Grammar) -> Any:
        """The compiled grammar, if it is kept; None otherwise."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compiled(self, grammar: Grammar, child: Child | None = None, seconds: float = 0.0) -> Any:
        """Compile a grammar, in the child if there is one. seconds: of the child.

        Raises TooSlow after them, and ValueError for a grammar that cannot be compiled or allows nothing.
        """
        made = self.known(grammar)
        if made is not None:
            return made
        try:
            if child is None:
                compiler = self._xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
                made = getattr(compiler, grammar.method)(*grammar.arguments)
                matcher: Any = self._xgrammar.GrammarMatcher(made)
                follow(matcher._handle, self.vocab_size, self.end_ids)
            else:
                text = child.ask([grammar.method, list(grammar.arguments)], seconds)
                made = self._xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        except ChildProcessError:
            raise
        except TooSlow as slow:
            raise TooSlow(f"{grammar.what} cannot be used: {slow}") from None
        except Exception as error:  # xgrammar raises RuntimeError, and says where in its own source
            why = re.sub(r"^.*?[.]cc:[0-9]+: ", "", str(error)).strip()
            raise ValueError(f"{grammar.what} cannot be used: {why}") from None
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = made
                self._held += made.memory_size_bytes
            while self._held > _CACHE and len(self._kept) > 1:
                self._held -= self._kept.popitem(last=False)[1].memory_size_bytes
        return made

    def mask(self, compiled: Any) -> GrammarMask:
        """The state of one text under a compiled grammar."""
        return GrammarMask(self._xgrammar.GrammarMatcher(compiled), self.vocab_size, self.end_ids, self._tokenizer)


class GrammarMask:
    """What a grammar allows after the text and some draft tokens. A `TokenMask` of `outrider.core.sampling`, for one text."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int], tokenizer: Any) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self.slow, self._asked, self._seconds = False, 0, 0.0  # of processor time
        self._drafting = 0.0  # seconds for drafts; they do not make a grammar slow, since no draft may end a text
        self._read = 0  # committed tokens the matcher has read
        self._bits = torch.zeros(1, (vocab_size + 31) // 32, dtype=torch.int32)
        self._vocab_size = vocab_size
        self._end = torch.zeros(vocab_size, dtype=torch.bool)
        self._end[list(end_ids)] = True
        self._known: dict[tuple[int, ...], Tensor] = {}  # draft tokens after the committed ones -> the mask there

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Tensor:
        """bool [vocab]: what may follow `tokens[start:]` and then `extra`. `tokens` are committed, `extra` are draft tokens.

        Nothing may follow once the masks of this text have taken too long, which ends it with an error.
        """
        if self.slow:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        started = thread_time()
        self._follow(tokens, start)
        key = tuple(extra)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._after(key)
        self._asked += 1
        self._seconds += thread_time() - started
        self.slow = self._seconds > MASK_SECONDS + MASK_SECONDS_EACH * self._asked
        return found

    def expected(self, tokens: Sequence[int], start: int) -> list[int]:
        """See `TokenMask`. It is the text that alone may follow, such as a key of an object, with the usual spaces of JSON."""
        if self.slow or self._drafting > MASK_SECONDS:
            return []
        started = thread_time()
        self._follow(tokens, start)
        matcher, text, last = self._matcher.fork(), "", self._tokenizer.decode(tokens[-1:])
        for _ in range(_PARTS):
            part = "" if matcher.is_terminated() else matcher.find_jump_forward_string()
            options = (part,) if part else self._usual(matcher, (text or last)[-1:])
            chosen = next((option for option in options if matcher.accept_string(option)), None)
            if chosen is None:
                break
            text += chosen
        self._drafting += thread_time() - started
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _usual(self, matcher: Any, last: str) -> tuple[str, ...]:
        free = matcher.is_terminated() or self._next(matcher).sum() > self._vocab_size // _FREE
        return () if free else _USUAL.get(last, ())

    def _follow(self, tokens: Sequence[int], start: int) -> None:
        """Read the committed tokens."""
        if start + self._read < len(tokens):
            for token in tokens[start + self._read :]:
                if not self._matcher.is_terminated():
                    self._matcher.accept_token(token)
            self._read = len(tokens) - start
            self._known.clear()

    def _after(self, extra: tuple[int, ...]) -> Tensor:
        matcher = self._matcher
        if extra:
            matcher = matcher.fork()
            for token in extra:
                if not matcher.is_terminated() and not matcher.accept_token(token):
                    return torch.zeros(self._vocab_size, dtype=torch.bool)  # nothing follows a forbidden token
        if matcher.is_terminated():
            return self._end
        return torch.from_numpy(self._next(matcher).astype(np.bool_))  # pyright: ignore[reportUnknownMemberType]

    def _next(self, matcher: Any) -> np.ndarray:
        """uint8 [vocab]: 1 for each token that a matcher allows."""
        matcher.fill_next_token_bitmask(self._bits)
        return np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._vocab_size]


def _small(text: str, what: str) -> None:
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{what} has {len(text.encode())} bytes and may have {MAX_BYTES}")


def _counts(schema: Any, what: str) -> None:
    found = unenforced(schema)
    if found is not None:
        raise ValueError(f"{what} cannot be used: it has {found}")


def _depth(value: Any) -> int:
    """Levels of lists and objects."""
    level, depth = [value], 0
    while level := [
        v for x in level if isinstance(x, (dict, list)) for v in (x.values() if isinstance(x, dict) else x)
    ]:
        depth += 1
    return depth


_NEVER = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # what stands beside one of these is ignored
_TEXT = ("pattern", "format", "minLength", "maxLength")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
_OBJECT = (
    *("properties", "additionalProperties", "unevaluatedProperties", "propertyNames", "patternProperties"),
    *("required", "minProperties", "maxProperties"),
)
_TYPED = (*_TEXT, *_NUMBER, *_ARRAY, *_OBJECT)
_IMPLIES = ("properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems", "unevaluatedItems")
_FORMATS = ("date", "time", "date-time", "duration", "email", "uri", "hostname", "ipv4", "ipv6", "uuid")


def unenforced(schema: Any) -> str | None:
    """The first keyword of a schema that would be ignored, and why. None if all count. Found by trial with xgrammar 0.2.8.

    Formats that are not known are notes, as the standard has it. `oneOf` counts as `anyOf`.
    """
    for part in _parts(schema):
        if (found := _ignored(part)) is not None:
            return found
    return None


def _ignored(part: dict[str, Any]) -> str | None:
    for keyword in _NEVER:
        if keyword in part:
            return f"{keyword!r}, which has no effect"
    if part.get("uniqueItems"):
        return "'uniqueItems', which has no effect"
    ref = part.get("$ref")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        return f"'$ref' to {ref[:80]!r}; only a place in the schema itself can be read, such as '#/$defs/NAME'"
    first = next((k for k in _ALONE if k in part), None)
    beside = next((k for k in (*_TYPED, *_ALONE) if k in part and k != first), None)
    if first is not None and beside is not None:
        return f"{beside!r} beside {first!r}, where it has no effect; move it into the schema that {first!r} gives"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "'allOf' of several schemas, which has no effect; write one schema"
    if "type" not in part and first is None and not any(k in part for k in _IMPLIES):
        lonely = next((k for k in _TYPED if k in part), None)
        if lonely is not None:
            return f"{lonely!r} without 'type', where it has no effect; add the type"
    if "multipleOf" in part and (part.get("type") != "integer" or any(k in part for k in _NUMBER[:4])):
        return "'multipleOf' for numbers or beside a bound, where it has no effect; use it for integers, alone"
    known = part.get("format") if part.get("format") in _FORMATS else None
    length = next((k for k in ("minLength", "maxLength") if k in part), None)
    if length is not None and ("pattern" in part or known is not None):
        return f"{length!r} beside 'pattern' or 'format', where it has no effect"
    if known is not None and "pattern" in part:
        return "'pattern' beside 'format', where it has no effect"
    if "patternProperties" in part and "properties" in part:
        return "'patternProperties' beside 'properties', where it has no effect"
    required, named = part.get("required"), part.get("properties")
    if isinstance(required, list):
        there = cast(dict[str, Any], named) if isinstance(named, dict) else {}
        absent = [r for r in cast(list[Any], required) if isinstance(r, str) and r not in there]
        if absent:
            return f"'required' with {absent[0][:80]!r}, which 'properties' lacks; add it there"
    return None


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and the schemas in it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        found = cast(dict[str, Any], part)
        yield found
        for keyword, value in found.items():
            if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                waiting += value.values()
            elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
                waiting += value
            elif keyword in (
                "items",
                "additionalProperties",
                "unevaluatedProperties",
                "unevaluatedItems",
                "propertyNames",
            ):
                waiting.append(value)
