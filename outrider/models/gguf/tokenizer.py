"""The tokenizer of a GGUF file: vocabulary, merges, special tokens, end tokens and chat template.

A file names how its vocabulary cuts text into pieces (tokenizer.ggml.pre). The patterns are those of the original tokenizers,
as llama.cpp's llama-vocab.cpp lists them by that name.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outrider.models.gguf.reader import GGUFFile
from outrider.models.tokenizer import FastTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # ggml's types of tokens
_SPACE = "▁"


class _Pieces(NamedTuple):
    """How a vocabulary of bytes cuts text. patterns: one after another; the last may be GPT-2's own, which is None.

    nfc: the original tokenizer composes characters first. whole: a piece that is a token is not cut further. bos: texts start
    with the first token unless the file says otherwise.
    """

    patterns: tuple[str | None, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = rf"{_CUT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_MARKED = rf"{_CUT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ONE_DIGIT = rf"{_CUT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"

_GPT2 = _Pieces((None,))
_STARCODER = _Pieces((r"\p{N}", None))
_QWEN2 = _Pieces((_ONE_DIGIT,), nfc=True)
_LLAMA3 = _Pieces((_THREE_DIGITS,), whole=True, bos=True)
_CL100K = _Pieces((_THREE_DIGITS,))
_GPT4O = _Pieces((rf"{_CASED % (_CUT + '?', _CUT + '?')}|\p{{N}}{{1,3}}|{_SLASHES}",))
_TEKKEN = _Pieces((rf"{_CASED % ('', '')}|\p{{N}}|{_SLASHES}",), whole=True, bos=True)
_BY_NAME = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _STARCODER),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    "qwen35": _Pieces((_MARKED,), nfc=True),
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
}
# Control tokens that end a text or a turn in the models that have them. A file names only one of its end tokens.
_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>", "<eos>",
    "<|endofprompt|>", "<EOT>", "_<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>", "<|end_of_role|>",
)  # fmt: skip


def tokenizer_of(file: GGUFFile) -> FastTokenizer | None:
    """The tokenizer, or None with a warning if outrider cannot make it: a model can still continue token ids.

    Raises ValueError for a vocabulary that is not consistent.
    """
    kind, tokens = file.metadata.get("tokenizer.ggml.model"), _tokens(file)
    if not tokens or kind in ("none", "no_vocab"):
        return None
    if kind == "gpt2":
        pair = _bytes(file, tokens)
    elif kind in ("llama", "gemma4"):
        pair = _sentencepiece(file, tokens)
    else:
        pair = None
    if pair is None:
        name = f"{kind} ({file.metadata.get('tokenizer.ggml.pre', 'no kind of pieces named')})"
        warnings.warn(
            f"outrider cannot make the tokenizer of {file.paths[0].name}, {name}, so the model takes token ids only; give one: "
            "LLM(model, tokenizer=FOLDER)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    tokenizer, bos = pair
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(
            f"{file.paths[0]} has {len(tokens)} tokens and {len(kinds)} types of tokens; download it again"
        )
    for wanted in (_CONTROL, _USER_DEFINED):
        add = tokenizer.add_special_tokens if wanted == _CONTROL else tokenizer.add_tokens
        texts = [t for t, k in zip(tokens, kinds, strict=True) if k == wanted and t]
        add([AddedToken(t, normalized=False, special=wanted == _CONTROL) for t in texts])
    named = {n: _named(file, tokens, n) for n in ("bos", "eos", "unknown", "padding")}
    first = named["bos"] if file.metadata.get("tokenizer.ggml.add_bos_token", bos) else None
    last = named["eos"] if file.metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first or last:
        ends = [(t, tokenizer.token_to_id(t)) for t in (first, last) if t]
        form = [*([first] if first else []), "$A", *([last] if last else [])]
        steps = [tokenizer.post_processor] if tokenizer.post_processor is not None else []
        steps.append(processors.TemplateProcessing(single=form, special_tokens=ends))
        tokenizer.post_processor = processors.Sequence(steps)
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return FastTokenizer(tokenizer, {setting: named[name] for setting, name in special.items()}, _templates(file))


def _templates(file: GGUFFile) -> Any:
    """The chat template; by their names, if there are several."""
    first, key = file.metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    more = {name.removeprefix(key): text for name, text in file.metadata.items() if name.startswith(key)}
    return {"default": first, **more} if first and more else first


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """The tokens that end a text: those the file names (eos, eot, eom), and control tokens that end one in every model."""
    tokens = _tokens(file)
    keys = (f"tokenizer.ggml.{n}_token_id" for n in ("eos", "eot", "eom"))
    ids = [file.metadata[k] for k in keys if isinstance(file.metadata.get(k), int)]
    kinds = file.metadata.get("tokenizer.ggml.token_type") or []
    ends = {*_ENDS}
    ids += [i for i, (t, k) in enumerate(zip(tokens, kinds, strict=False)) if k == _CONTROL and t in ends]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < len(tokens)))


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    return tokens if isinstance(tokens, list) and all(isinstance(t, str) for t in tokens[:1]) else []


def _named(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[token] if isinstance(token, int) and 0 <= token < len(tokens) else None


def _bytes(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool] | None:
    """Byte-level BPE, and whether texts start with bos by default."""
    pieces = _BY_NAME.get(file.metadata.get("tokenizer.ggml.pre", ""))
    merges = file.metadata.get("tokenizer.ggml.merges")
    if pieces is None or merges is None:
        return None
    pairs = [tuple(m.split(" ")) for m in merges]
    tokenizer = _model(file, tokens, pairs, ignore_merges=pieces.whole)
    parts: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in pieces.patterns if p]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces.patterns[-1] is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    if pieces.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pieces.bos


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """BPE with bytes for unknown characters. A file without merges has them in the order of the scores of merged tokens."""
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    ids = {t: i for i, t in enumerate(tokens)}
    listing = file.metadata.get("tokenizer.ggml.merges")
    merges: list[tuple[str, str]] = [(left, right) for left, _, right in (m.partition(" ") for m in listing or ())]
    for _, token in [] if listing else sorted(zip(scores, tokens, strict=False), key=lambda scored: -scored[0]):
        if " " in token:  # no text has one: each is a mark below
            continue
        cuts = range(1, len(token))
        pairs = [(token[:cut], token[cut:]) for cut in cuts if token[:cut] in ids and token[cut:] in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(pairs) > 1 else pairs
    unknown = _named(file, tokens, "unknown")
    tokenizer = _model(file, tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(undo)
    return tokenizer, True


def _model(file: GGUFFile, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"the vocabulary of {file.paths[0]} is not consistent ({error}); download it again") from error
