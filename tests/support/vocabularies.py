"""Tokenizers that are trained on the tests' own text, and the toy pair of vocabularies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from helpers import VOCAB
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.drafters.model.vocabulary import Pairing, Vocabulary

END = "<end>"
CODE = "\n".join(p.read_text() for p in sorted(Path(__file__).parents[1].rglob("test_t*.py"))).replace("▁", "_")


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


@cache
def byte_level(size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that cuts as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([CODE], trainers.BpeTrainer(vocab_size=size, special_tokens=[END],
                                  initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    return wrapped(tokenizer)


@cache
def sentencepiece(size: int) -> PreTrainedTokenizerFast:
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
def letters(*tokens: str) -> PreTrainedTokenizerFast:
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
