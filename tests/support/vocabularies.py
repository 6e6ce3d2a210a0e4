"""Tokenizers that are trained on the tests' own text, and the toy pair of vocabularies."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import VOCAB
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from outrider.core.detokenizer import BYTE_OF
from outrider.drafters.model.vocabulary import Pairing, Vocabulary
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.reader import read
from outrider.models.gguf.tokenizer import tokenizer_of
from outrider.models.tokenizer import FastTokenizer

END = "<end>"
CODE = "\n".join(p.read_text() for p in sorted(Path(__file__).parents[1].rglob("test_t*.py"))).replace("▁", "_")


def wrapped(tokenizer: Tokenizer) -> FastTokenizer:
    tokenizer.add_special_tokens([END])
    return FastTokenizer(tokenizer, {"eos_token": END})


@cache
def byte_level(size: int) -> FastTokenizer:
    """Byte-level BPE that cuts as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([CODE], trainers.BpeTrainer(vocab_size=size, special_tokens=[END],
                                  initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    return wrapped(tokenizer)


@cache
def single_bytes() -> FastTokenizer:
    """A token for each byte, with the byte as its id, and the special tokens `<end>` (256) and `<stop>`."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<stop>"])
    return wrapped(tokenizer)


@cache
def sentencepiece(size: int) -> FastTokenizer:
    """BPE as Llama 2 has it: `▁` for a space, one before every text, bytes to fall back on."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.train_from_iterator([CODE], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    tokens = [END, *(f"<0x{b:02X}>" for b in range(256))]
    learned = sorted(raw.get_vocab(), key=raw.get_vocab().get)
    tokens += [t for t in learned if "\n" not in t]
    ids = {t: i for i, t in enumerate(tokens)}
    merges = [
        (t[:n], t[n:]) for t in tokens[257:] for n in range(1, len(t)) if t[:n] in ids and t[n:] in ids and len(t) > 1
    ]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer)


@cache
def letters(*tokens: str) -> FastTokenizer:
    """The end token and these, longer ones merged of two that are there."""
    ids = {t: i for i, t in enumerate((END, *tokens))}
    merges = [(t[:n], t[n:]) for t in tokens for n in range(1, len(t)) if t[:n] in ids and t[n:] in ids]
    return wrapped(Tokenizer(models.BPE(vocab=ids, merges=merges)))


@cache
def vocabulary(kind: str) -> Vocabulary:
    tokenizer = {"bytes": byte_level, "small": byte_level, "pieces": sentencepiece}[kind]({"small": 300}.get(kind, 500))
    return Vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


TOY = letters(*"abcdef ", "ab", "cd", "\n")  # 11 tokens
TOY_DRAFT = letters(*"fedcba ", "bc", "de", "abc", "x")  # 12, of which eight are shared
assert len(TOY) == VOCAB


def pairing(draft: Any = TOY_DRAFT, target: Any = TOY) -> Pairing:
    return Pairing(*(Vocabulary(t, len(t), [t.eos_token_id]) for t in (target, draft)))


def _spelled(tokens: list[str], model: Any, decoder: Any, normalizer: Any = None) -> FastTokenizer:
    """A tokenizer with these tokens after the end token. What it cannot write are bytes, if it has them."""
    tokenizer = Tokenizer(model({token: n for n, token in enumerate([END, *tokens])}))
    tokenizer.decoder, tokenizer.normalizer = decoder, normalizer
    tokenizer.add_special_tokens([END, "<|im_start|>"])
    tokenizer.add_tokens(["two words", " led", "é!"])
    return wrapped(tokenizer)


_PARTS = [
    "a",
    "b",
    " ",
    "\n",
    ".",
    "▁",
    "▁the",
    "▁▁",
    "the",
    "▁漢",
    "漢",
    "字",
    "e\u0301",
    "\ufffd",
    "▁true",
    "true",
    "\u200d",
]
_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def _pieces(tokens: dict[str, int]) -> Any:
    return models.BPE(vocab=tokens, merges=[], byte_fallback=True, fuse_unk=True)


@cache
def decoded(kind: str) -> Any:
    """A tokenizer for each way in which vocabularies write text."""
    if kind in ("byte-level", "byte-level composed"):
        found = byte_level(501 + len(kind))  # which nothing else uses
        found.backend_tokenizer.add_special_tokens(["<|im_start|>"])
        found.backend_tokenizer.add_tokens(["two words", " led", "é", "漢字"])
        return found
    if kind == "llama-2":
        return sentencepiece(500)
    if kind == "gemma":
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return _spelled(_FALLBACK + _PARTS, _pieces, decoder, normalizers.Replace(" ", "▁"))
    if kind == "metaspace":
        return _spelled(_FALLBACK + _PARTS, _pieces, decoders.Metaspace(), normalizers.Replace(" ", "▁"))
    if kind == "no decoder":
        return _spelled(_PARTS, lambda tokens: models.WordLevel(tokens, unk_token=END), None)
    if kind == "word pieces":
        parts = [*_PARTS, *(f"##{part}" for part in _PARTS), "don", "'", "##'", "t", "n't", " n't", "do not"]
        return _spelled(parts, lambda tokens: models.WordPiece(tokens, unk_token=END), decoders.WordPiece())
    if kind == "ends of words":
        parts = [*_PARTS, *(f"{part}</w>" for part in _PARTS)]
        return _spelled(parts, lambda tokens: models.BPE(tokens, [], unk_token=END), decoders.BPEDecoder())
    if kind == "builtin:code":
        return FastTokenizer.of_folder(Path(builtin_folder(kind)))
    file = Path(os.environ.get("OUTRIDER_MODELS", "."), kind)
    if not file.exists():
        pytest.skip(f"there is no {file}; OUTRIDER_MODELS names the folder of the GGUF files")
    return tokenizer_of(read([file]))


DECODED = ["byte-level", "llama-2", "gemma", "metaspace", "no decoder", "word pieces", "ends of words", "builtin:code"]
DECODED += ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-1.5b.gguf", "gemma-3-270m.gguf"]
