"""Compares two tokenizers: the bytes of every token, the tokens that both have, and the text of one in tokens of the other.

Tokens are compared by the bytes that they stand for. So the way in which a tokenizer writes bytes is undone first: byte-level
BPE has a letter for each byte (GPT-2: `Ġ` is a space); SentencePiece writes `▁` for a space and `<0x0A>` for a byte. Special
tokens stand for no bytes. They are the same if they have the same name or the same role.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.core.detokenizer import BYTE_OF, FALLBACK

_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as surrogateescape shows them
_BORDER = re.compile(rb"(?<=\S) (?=\S)")  # where practically every tokenizer cuts: before the space before a word
_LOOK_BACK = 4  # committed tokens that are encoded again with what follows them
_SHORT, _LONG = 48, 256  # least and most bytes of a segment


class Vocabulary:
    """The tokens of a tokenizer as bytes.

    Attributes:
        pieces: Bytes of each token by id; None for special tokens and unused ids.
        ids: Bytes -> id.
        names: Name of a special token -> id.
        begin: Token that the tokenizer puts before every text, or None.
        end: Token that ends a text, or None.
        leads: Whether the tokenizer puts a space before every text.
    """

    def __init__(self, tokenizer: Any, size: int, end_ids: Sequence[int] = ()) -> None:
        """tokenizer: a tokenizer of transformers. size: the model's vocabulary size. end_ids: the model's end tokens."""
        self.tokenizer, self.size = tokenizer, size
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if i < size}
        plain = {t: i for t, i in tokenizer.get_vocab().items() if i < size and i not in added}
        spaced = any("▁" in t for t in plain)
        lettered = not spaced and "Ġ" in plain
        self.pieces: list[bytes | None] = [None] * size
        self.names = {t.content: i for i, t in added.items() if t.special}
        self.names |= {t: plain.pop(t) for t in tokenizer.all_special_tokens if t in plain}
        for token, i in plain.items():
            if lettered:
                self.pieces[i] = bytes(BYTE_OF[c] for c in token) if set(token) <= BYTE_OF.keys() else token.encode()
            elif spaced and (byte := FALLBACK.fullmatch(token)):
                self.pieces[i] = bytes([int(byte[1], 16)])
            else:
                self.pieces[i] = (token.replace("▁", " ") if spaced else token).encode("utf-8", "replace")
        for i, token in added.items():
            if not token.special:
                self.pieces[i] = token.content.encode()
        # tokens of single bytes, which lose against a plain token for the same byte
        spelled = {i for t, i in plain.items() if FALLBACK.fullmatch(t)}
        order = sorted((i in spelled, i, piece) for i, piece in enumerate(self.pieces) if piece)
        self.ids = {piece: i for _, i, piece in reversed(order)}
        begin = tokenizer.bos_token_id
        self.begin = begin if begin is not None and begin < size and begin in tokenizer("")["input_ids"][:1] else None
        self.end = next((i for i in end_ids if i < size), None)
        self.leads = self.decode(self._encode("a")) == b" a"

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes that the tokens stand for. Special tokens stand for none."""
        return b"".join(self.pieces[i] or b"" for i in ids)

    def encode(self, text: bytes, begins: bool = False) -> list[int]:
        """Encode a piece of text. No space is put before it unless it `begins` the text.

        Bytes that are not UTF-8 become tokens of single bytes. They are left out if the tokenizer has no such tokens.
        """
        out: list[int] = []
        for part in _BROKEN.split(text.decode("utf-8", "surrogateescape")):
            if _BROKEN.match(part):
                single = (self.ids.get(bytes([b])) for b in part.encode("utf-8", "surrogateescape"))
                out += [i for i in single if i is not None]
            elif part:
                ids = self._encode(part)
                out += ids if begins and not out else self._unled(ids, part)
        return out

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [i for i in ids if i < self.size]

    def _unled(self, found: list[int], text: str) -> list[int]:
        """The tokens without the space that the tokenizer puts before a text."""
        first = self.pieces[found[0]] if found else None
        if not self.leads or not first or self.decode(found) != b" " + text.encode():
            return found
        rest = first[1:]
        whole = [self.ids[rest]] if rest in self.ids else [self.ids.get(bytes([b]), -1) for b in rest]
        return found if -1 in whole else [*whole, *found[1:]]


class Pairing:
    """What the vocabularies of a target and a draft have in common.

    shared: target token -> the draft's token with the same bytes or the same role. first: draft token -> the longest target
    token that its bytes begin with, -1 if there is none. total: whether both have the same tokens, perhaps with other ids.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        """Raises ValueError if no draft token begins with a token of the target."""
        self.target, self.draft = target, draft
        self.shared = {i: draft.ids[piece] for piece, i in target.ids.items() if piece in draft.ids}
        self.shared |= {i: draft.names[name] for name, i in target.names.items() if name in draft.names}
        if target.end is not None and draft.end is not None:
            self.shared[target.end] = draft.end
        back = {d: t for t, d in reversed(self.shared.items())}
        self.shared = {t: d for d, t in back.items()}  # each token of either side once
        self.first = [
            back[i] if i in back else -1 if piece is None else _longest(piece, target.ids)
            for i, piece in enumerate(draft.pieces)
        ]
        self.total = target.ids.keys() == draft.ids.keys()
        if not any(piece and t >= 0 for piece, t in zip(draft.pieces, self.first, strict=True)):
            raise ValueError("no token of the draft begins with a token of the target")

    @property
    def equal(self) -> bool:
        """Whether every id stands for the same bytes in both."""
        return self.target.pieces == self.draft.pieces


def _longest(piece: bytes, ids: dict[bytes, int]) -> int:
    return next((ids[piece[:n]] for n in range(len(piece), 0, -1) if piece[:n] in ids), -1)


class Spelling:
    """A target's text in the tokens of its draft, updated as the text grows. It is a function of the text alone.

    The text is cut into segments where tokenizers cut too, and at the latest after 256 bytes. Each segment is encoded alone, so
    a step encodes only the last one again. If both have the same tokens, each token is translated instead.

    ids: the draft's tokens so far. sure: how many of them later text cannot change.
    """

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.ids: list[int] = [] if pairing.draft.begin is None else [pairing.draft.begin]
        self.sure = len(self.ids)
        self._read = 0
        self._open = b""
        self._begins = True  # no text before the open segment
        self._leads = pairing.target.leads  # the next piece may begin with a space that is not in the text

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens for the target's tokens of a text. The text must begin with what was read before."""
        if self._read == len(tokens):
            return self.ids
        target, draft = self.pairing.target, self.pairing.draft
        new, self._read = tokens[self._read :], len(tokens)
        del self.ids[self.sure :]
        for token in new:
            piece = target.pieces[token]
            if piece is None or self.pairing.total:
                self._close(len(self._open))
                self._add(token)
            else:
                self._open += piece.removeprefix(b" ") if self._leads else piece
                self._leads = False
        while cut := _cut(self._open):
            self._close(cut)
        self.ids += draft.encode(self._open, self._begins)
        return self.ids

    def _close(self, cut: int) -> None:
        if cut:
            self.ids += self.pairing.draft.encode(self._open[:cut], self._begins)
            self._open, self._begins, self.sure = self._open[cut:], False, len(self.ids)

    def _add(self, token: int) -> None:
        """Translate one token. A token without a counterpart is left out."""
        draft_token = self.pairing.shared.get(token)
        if draft_token is not None and not (self._begins and self.ids == [draft_token] == [self.pairing.draft.begin]):
            self.ids.append(draft_token)
        self.sure = len(self.ids)


def _cut(text: bytes) -> int:
    """Where the first segment of an open text ends; 0 if that is not known yet."""
    border = _BORDER.search(text, _SHORT)
    if border and border.start() < _LONG:
        return border.start()
    if len(text) < _LONG + 2:  # a border at the last place shows one byte later
        return 0
    return next((n for n in range(_LONG, _LONG - 4, -1) if text[n] & 0xC0 != 0x80), _LONG)


def continued(vocabulary: Vocabulary, committed: Sequence[int], text: bytes) -> list[int]:
    """Tokens for a text that follows committed tokens, as if both were encoded together. The committed tokens do not change.

    The last few committed tokens are encoded again with the text, and the tokens after them are returned. If a token
    crosses the border, the text is encoded alone. The tokens stand for `text` or a start of it, byte for byte.
    """
    before = list(itertools.takewhile(lambda i: vocabulary.pieces[i], reversed(committed[-_LOOK_BACK:])))[::-1]
    tail = vocabulary.decode(before)
    ids = vocabulary.encode(tail + text)
    ends = itertools.accumulate((len(vocabulary.pieces[i] or b"") for i in ids), initial=0)
    border = next((n for n, end in enumerate(ends) if end >= len(tail)), 0)
    ids, out = ids[border:] if vocabulary.decode(ids[:border]) == tail else vocabulary.encode(text), list[int]()
    for i in ids:  # up to the first that differs from the text: a tokenizer may change the text that it encodes
        piece = vocabulary.pieces[i]
        if not piece or not text.startswith(piece):
            break
        out.append(i)
        text = text[len(piece) :]
    return out
