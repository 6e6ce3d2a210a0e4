"""Text of tokens as they come: streamed, whole, and decoded by the libraries, for each kind of vocabulary and any tokens."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from typing import Any

import pytest
from vocabularies import DECODED, decoded

from outrider.core.detokenizer import Detokenizer, TokenBytes

BYTE = re.compile(r"<0x..>")
WORDS = [
    "a",
    "Ω",
    "漢字",
    "𓀀𓀁𓀂",
    "🙂🙂",
    "👩‍👩‍👧",
    "🇨🇭",
    "�",
    "e\u0301",
    "\u200d",
    " the cat",
    "  ",
    "\n",
    ".",
    " do not",
    "▁",
    "<0x41>",
]


@cache
def known(kind: str) -> tuple[Any, TokenBytes, list[int], list[int]]:
    """A vocabulary, the bytes of its tokens, its special tokens, and tokens that are parts of characters."""
    tokenizer = decoded(kind)
    tokens = TokenBytes(tokenizer)
    special = [i for i, t in tokenizer.added_tokens_decoder.items() if t.special]
    parts = [t for t in range(min(len(tokenizer), 3000)) if tokens.label(t).startswith("bytes:")]
    return tokenizer, tokens, special, parts


def drawn(kind: str, draw: random.Random) -> list[int]:
    """Tokens of words and parts of words, of single bytes in any order, of special tokens, and any others."""
    tokenizer, _, special, parts = known(kind)
    out: list[int] = []
    for _ in range(draw.randint(1, 6)):
        word = "".join(draw.choices(WORDS, k=draw.randint(1, 4)))
        found = tokenizer(word, add_special_tokens=False)["input_ids"]
        start = draw.randrange(len(found) + 1) if draw.random() < 0.3 else 0
        out += draw.choice([found[start:], found[:start], found])
        out += draw.choice([[], [], draw.choices(parts, k=draw.randint(1, 5)) if parts else [], draw.choices(special),
                            [draw.randrange(len(tokenizer))]])  # fmt: skip
    return out


def keeps_characters(kind: str, tokens: list[int], skip: bool) -> bool:
    """Whether tokenizers keeps the whole characters of these tokens. Of a run of byte tokens with one wrong byte it makes U+FFFD
    throughout, also of whole characters before that. The original SentencePiece keeps those, and so do we."""
    tokenizer, _, special, _ = known(kind)
    names = [tokenizer.convert_ids_to_tokens(t) for t in tokens if not (skip and t in special)]
    for is_byte, run in itertools.groupby(names, lambda name: bool(BYTE.fullmatch(name or ""))):
        data = bytes(int(name[3:5], 16) for name in run) if is_byte else b""
        if data.decode(errors="ignore") and "\ufffd" in data.replace("\ufffd".encode(), b"").decode(errors="replace"):
            return False
    return True


def library_text(tokenizer: Any, tokens: list[int], skip: bool) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def check(kind: str, draw: random.Random) -> int:
    """Compare the texts of drawn tokens, cut into prompt and answer at several places. Returns how many."""
    tokenizer, table, _, _ = known(kind)
    tokens, skip = drawn(kind, draw), draw.random() < 0.7
    whole = table.decode(tokens, skip)
    if keeps_characters(kind, tokens, skip):
        assert whole == library_text(tokenizer, tokens, skip), tokens
    cuts = {0, len(tokens), *(draw.randrange(len(tokens) + 1) for _ in range(8))} if tokens else {0}
    for cut in cuts:
        head = Detokenizer(table, (), skip).push(*tokens[:cut])
        reader, streamed = Detokenizer(table, tokens[:cut], skip), ""
        for token in tokens[cut:]:
            streamed += reader.push(token)
        late = reader.flush()
        assert set(late) <= {"\ufffd"}, "a whole character was held back"
        assert head + streamed + late == whole, (tokens, cut)
        assert reader.text == streamed + late
    return len(cuts)


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize("count", [250, pytest.param(15_000, marks=pytest.mark.long)])
def test_streamed_is_whole_is_what_the_libraries_decode(kind: str, count: int) -> None:
    draw, done = random.Random(f"{kind} {count}"), 0
    while done < count:
        done += check(kind, draw)
