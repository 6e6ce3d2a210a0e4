"""The text of tokens: the bytes that each one stands for, and what makes text of them as they come."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that byte-level BPE writes as they are
_OTHER = sorted({*range(256)} - {*_PRINTED})
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(_OTHER)}
FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH = "outrider.each"  # U+FFFD for each byte that is no text, as SentencePiece has it
codecs.register_error(_EACH, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class Piece(NamedTuple):
    """What a token stands for."""

    name: str  # in the vocabulary
    data: bytes
    first: bytes  # at the beginning of a text, where some tokenizers leave a space out
    special: bool  # texts are shown without it


class TokenBytes:
    """The bytes of each token of a tokenizer. It looks each one up once.

    A decoder of the vocabulary makes a string of tokens, and so loses the bytes of a token that is a part of a character. These
    are in the token's name: byte-level BPE has a letter for each byte (GPT-2: `Ġ` is a space), SentencePiece has `<0xF0>`.
    tokenizer: of transformers, or None, with which nothing has bytes.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, Piece] = {}

    def __getitem__(self, token: int) -> Piece:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> Piece:
        name = None if self.tokenizer is None or token < 0 else self.tokenizer.convert_ids_to_tokens(token)
        if self.tokenizer is None or not isinstance(name, str):
            return Piece("", b"", b"", False)
        once, twice = self._joined(name), self._joined(name, name)
        text = once if self._neighbours else twice[len(once) :]  # as it is inside a text
        if "\ufffd" in twice and (match := FALLBACK.fullmatch(name)):
            data = first = bytes([int(match[1], 16)])
        elif "\ufffd" in twice and BYTE_OF.keys() >= set(name):
            data = first = bytes(map(BYTE_OF.__getitem__, name))
        else:
            data, first = text.encode("utf-8", "replace"), once.encode("utf-8", "replace")
        special = bool(data) and not self.tokenizer.decode([token, token], skip_special_tokens=True)
        return Piece(name, data, first, special)

    def _joined(self, *names: str) -> str:
        return self.tokenizer.convert_tokens_to_string(list(names))  # type: ignore[union-attr]

    def after(self, before: int | None, token: int) -> bytes:
        """The bytes that a token adds to a text. before: the token that the text ends with, None at its beginning."""
        piece = self[token]
        if before is None or not self._neighbours:
            return piece.first if before is None else piece.data
        name = self[before].name
        return self._joined(name, piece.name)[len(self._joined(name)) :].encode()

    @cached_property
    def _neighbours(self) -> bool:
        """The text of a token depends on the token before it, which may end a word (GPT-1)."""
        return self._joined("a</w>", "a") == "a a" != self._joined("a", "a")

    @cached_property
    def errors(self) -> str:
        """What becomes of bytes that are no text, as codecs call it."""
        each = self.tokenizer is not None and self._joined("<0xF0>", "<0x9F>") == "\ufffd\ufffd"
        return _EACH if each else "replace"

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The whole text of tokens."""
        reader = Detokenizer(self, (), skip_special_tokens)
        return reader.push(*tokens) + reader.flush()

    def shows(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether a token is a part of the text."""
        piece = self[token]
        return bool(piece.data) and not (piece.special and skip_special_tokens)

    def begins(self, tokens: Iterable[int], skip_special_tokens: bool, begins: bool = True) -> list[bool]:
        """Whether a text begins with each token, and with the one after them. begins: it begins with the first."""
        hidden = (not self.shows(token, skip_special_tokens) for token in tokens)
        return list(itertools.accumulate(hidden, min, initial=begins))

    def label(self, token: int, begins: bool = False, mark: str = "bytes:") -> str:
        """A token as a string: its text, with the space before a word. begins: it begins a text. mark: before the bytes of a
        token that is no text of its own. OpenAI writes such a token as `bytes:\\xf0\\x9f`."""
        data = self[token].first if begins else self[token].data
        try:
            return data.decode()
        except UnicodeDecodeError:
            return mark + repr(data)[2:-1]

    def places(self, text: str, tokens: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Where each token of a prompt begins in the text of the prompt: int [tokens].

        A tokenizer may spell a text in another way, because Unicode has several forms of one character. Then it says itself which
        characters each token stands for.
        """
        reader, ends = Detokenizer(self, (), skip_special_tokens), [0]
        for token in tokens:
            reader.push(token)
            ends.append(len(reader.text))
        if not text.startswith(reader.text) and getattr(self.tokenizer, "is_fast", False):
            spelled = self.tokenizer(text, return_offsets_mapping=True)  # type: ignore[misc]
            if list(spelled["input_ids"]) == list(tokens):
                begins, after = zip(*spelled["offset_mapping"], strict=True)
                return list(itertools.accumulate(map(min, begins, (0, *after)), max))
        return [min(end, len(text)) for end in ends[:-1]]


class Detokenizer:
    """Makes text of tokens that come one after another.

    The text is what decoding prompt and tokens together adds to the prompt. The bytes of a character wait for its end,
    and nothing else waits. An unfinished character at the end of the prompt is finished here. A token costs the
    same at any length.
    """

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokens, self._skip = tokens, skip_special_tokens
        self._before: int | None = None
        self._reader = codecs.getincrementaldecoder("utf-8")(tokens.errors)
        end = b""
        for token in reversed(prompt):
            if tokens.shows(token, skip_special_tokens):
                self._before, end = token if self._before is None else self._before, tokens[token].data + end
                if len(end) > 2:  # a character has four bytes at most, so its first one is here
                    break
        self._reader.decode(end)
        self.text = ""

    def push(self, *tokens: int) -> str:
        """Add tokens and return the new text."""
        data = list[bytes]()
        for token in tokens:
            if self._tokens.shows(token, self._skip):
                data.append(self._tokens.after(self._before, token))
                self._before = token
        new = self._reader.decode(b"".join(data))
        self.text += new
        return new

    def flush(self) -> str:
        """Return what was held back: the replacement of a character that nothing finishes."""
        new = self._reader.decode(b"", True)
        self.text += new
        return new
