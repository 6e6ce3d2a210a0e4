"""The tokenizer of a GGUF file gives the ids of the original, and its end tokens and chat template are the file's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from architectures import tiny
from gguf_files import tokenizer_metadata, write_file, write_gguf
from light import transformers
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from outrider.models.builtin.download import DOWNLOADS, find
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.chat_template import chat_prompt
from outrider.models.gguf.reader import GGUFFile, read
from outrider.models.gguf.tokenizer import end_ids, tokenizer_of
from outrider.models.load import load

_ODD = (
    "  ", "\t", "\n\n", "\r\n", "'s", "'LL", "don't", "1", "22", "4444", "é", "e\u0301", "日本語", "हिन्दी", "🙂", "\u200d",
    "\u00a0", "\u200b", "ﬁ", "__init__", "==", "//", "/*", "“”", "<|endoftext|>", "<eos>", "\x00", "½", "٣", "a", "camelCase",
    "▁", "Ġ", "<0x0A>", "def f(x):\n    return x\n", " world", "HTTPServer",
)  # fmt: skip
_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def lines() -> list[str]:
    draw = random.Random(0)
    texts = [line for path in sorted(Path(__file__).parent.glob("*.py")) for line in path.read_text().splitlines()]
    return texts[:500] + ["".join(draw.choices(_ODD, k=draw.randrange(1, 12))) for _ in range(800)]


def file_with(metadata: dict[str, Any], path: Path) -> GGUFFile:
    write_file(path, {"general.architecture": "llama"} | metadata, {"x": (np.zeros((1, 32), np.float32), "F32")})
    return read([path])


@pytest.fixture(scope="module")
def code() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(builtin_folder("builtin:code"))


def cut(tokenizer: Any, *parts: Any) -> Any:
    """A copy that cuts text in another way."""
    made = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts])
    return made


@pytest.mark.parametrize("pieces", ["gpt-2", "smollm", "dbrx"])
def test_the_ids_of_bytes_are_those_of_the_original(
    pieces: str, code: transformers.PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    parts = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "dbrx": [
            pre_tokenizers.Split(Regex(_DIGITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }[pieces]
    made = tokenizer_of(file_with(tokenizer_metadata(code, pieces), tmp_path / "model.gguf"))
    assert made is not None
    expected = [e.ids for e in cut(code, *parts).encode_batch(lines())]
    assert made(lines())["input_ids"] == expected
    assert made.batch_decode(expected) == code.batch_decode(expected)


@pytest.mark.parametrize(
    ("pieces", "kind"), [("gpt-2", transformers.GPT2Tokenizer), ("qwen2", transformers.Qwen2Tokenizer)]
)
def test_the_ids_are_those_of_transformers(
    pieces: str, kind: Any, code: transformers.PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    stored = tokenizer_metadata(code, pieces)
    merges = [tuple(m.split(" ")) for m in stored["tokenizer.ggml.merges"]]
    vocab = {t: i for i, t in enumerate(stored["tokenizer.ggml.tokens"])}
    made = tokenizer_of(file_with(stored, tmp_path / "model.gguf"))
    assert made is not None
    assert made(lines())["input_ids"] == kind(vocab=vocab, merges=merges)(lines())["input_ids"]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A small vocabulary in sentencepiece's form: spaces are a character, and unknown characters are bytes."""
    made = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *[f"<0x{b:02X}>" for b in range(256)]]
    plain = [line for line in lines()[:500] if "<" not in line]
    made.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    return made


def sentencepiece(trained: Any, **changes: Any) -> dict[str, Any]:
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=lambda t: vocab[t])
    kinds = [3 if i < 4 else 6 if t.startswith("<0x") and len(t) == 6 else 1 for i, t in enumerate(tokens)]
    given = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [-float(i) for i in range(len(tokens))],
        "add_space_prefix": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (given | changes).items()}


@pytest.mark.parametrize("listed", [False, True])  # Gemma 4 lists its merges
def test_the_ids_of_sentencepiece_are_those_of_gemma(listed: bool, trained: Any, tmp_path: Path) -> None:
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    known = {t: i for i, t in enumerate(tokens)}
    merges = [
        (t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known and known[t] > 259
    ]
    scores = [float(i) for i in range(len(tokens))]  # which would merge in another order
    listing = {"model": "gemma4", "merges": [" ".join(m) for m in merges], "scores": scores}
    more = listing if listed else {}
    made = tokenizer_of(file_with(sentencepiece(trained, **more), tmp_path / "model.gguf"))
    assert made is not None
    gemma = transformers.GemmaTokenizer(vocab=known, merges=cast("Any", merges))
    expected = gemma(lines(), add_special_tokens=False)["input_ids"]
    assert made(lines(), add_special_tokens=False)["input_ids"] == expected
    assert made("a b")["input_ids"][0] == 2  # the default of this kind
    assert made.batch_decode(expected) == gemma.batch_decode(expected)


def test_a_prefix_of_a_space_is_the_file_s_choice(trained: Any, tmp_path: Path) -> None:
    made = tokenizer_of(file_with(sentencepiece(trained, add_space_prefix=True), tmp_path / "model.gguf"))
    plain = tokenizer_of(file_with(sentencepiece(trained), tmp_path / "plain.gguf"))
    assert made is not None
    assert plain is not None
    assert made("def f")["input_ids"] == plain(" def f")["input_ids"]
    assert made.decode(made("def f", add_special_tokens=False)["input_ids"]) == "def f"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_first_and_last_tokens_are_the_file_s_choice(bos: bool, eos: bool, trained: Any, tmp_path: Path) -> None:
    given = sentencepiece(trained, add_bos_token=bos, add_eos_token=eos)
    made = tokenizer_of(file_with(given, tmp_path / "model.gguf"))
    assert made is not None
    ids = made("x")["input_ids"]
    assert (ids[0] == 2, ids[-1] == 1) == (bos, eos)
    assert (made.bos_token, made.eos_token, made.unk_token) == ("<bos>", "<eos>", "<unk>")


def test_user_defined_tokens_stay_whole(trained: Any, tmp_path: Path) -> None:
    given = sentencepiece(trained)
    given["tokenizer.ggml.tokens"] = [*given["tokenizer.ggml.tokens"], "<think>", "  "]
    given["tokenizer.ggml.token_type"] = [*given["tokenizer.ggml.token_type"], 4, 4]
    given["tokenizer.ggml.scores"] = [*given["tokenizer.ggml.scores"], 0.0, 0.0]
    made = tokenizer_of(file_with(given, tmp_path / "model.gguf"))
    assert made is not None
    think, spaces = len(trained.get_vocab()), len(trained.get_vocab()) + 1
    assert made("<think>  x", add_special_tokens=False)["input_ids"][:2] == [think, spaces]
    assert made.decode([think, 0], skip_special_tokens=True) == "<think>"  # a control token is hidden, this is not


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 7}, (5, 6, 7)),
        ({"eos_token_id": 99999}, ()),
        ({"eos_token_id": 3, "tokens": ["<|im_end|>", "<end_of_turn>", "<x>", "a"], "token_type": [3, 1, 3, 1]}, (3, 0)),
    ],
)  # fmt: skip
def test_end_tokens(metadata: dict[str, Any], ends: tuple[int, ...], tmp_path: Path) -> None:
    given = {"model": "gpt2", "tokens": [*"abcdefghij"], "merges": ["a b"]} | metadata
    file = file_with({f"tokenizer.ggml.{k}": v for k, v in given.items()}, tmp_path / "model.gguf")
    assert end_ids(file) == ends


def test_the_chat_template_is_the_file_s(code: transformers.PreTrainedTokenizerBase, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    stored = tokenizer_metadata(code, "gpt-2") | {"tokenizer.chat_template": template}
    stored |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0}
    made = tokenizer_of(file_with(stored, tmp_path / "model.gguf"))
    assert made is not None
    text = made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|endoftext|>[user]hi<|endoftext|>"


def test_a_file_may_have_a_template_for_chats_with_tools(
    code: transformers.PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Published files name the others in `tokenizer.chat_templates`, and keep each under its name."""
    key, one = "tokenizer.chat_template", "{{ messages[0].content }}"
    other = "{{ tools[0].function.name }}: " + one
    stored = tokenizer_metadata(code, "gpt-2") | {key: one, f"{key}.tool_use": other, f"{key}s": ["tool_use"]}
    made = tokenizer_of(file_with(stored, tmp_path / "model.gguf"))
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert chat_prompt(made, [{"role": "user", "content": "x"}]) == "x"
    assert chat_prompt(made, [{"role": "user", "content": "x"}], tools=tools) == "look: x"


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "rwkv"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "no-such-pieces", "tokenizer.ggml.merges": ["a b"]},
    ],
)
def test_a_tokenizer_that_outrider_cannot_make_leaves_token_ids(metadata: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), file, metadata={"tokenizer.ggml.tokens": ["a", "b"]} | metadata)
    with pytest.warns(RuntimeWarning, match=r"takes token ids only.*LLM\(model, tokenizer=FOLDER\)"):
        assert load(file).tokenizer is None


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path: Path, code: transformers.PreTrainedTokenizerBase) -> None:
    file, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_gguf(tiny("llama"), file)
    assert load(file).tokenizer is None
    file_with(tokenizer_metadata(code, "gpt-2"), other)
    given = load(file, tokenizer=str(other)).tokenizer
    assert given is not None
    assert given("def f")["input_ids"] == code("def f")["input_ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.token_type": [1]}, r"tokens and 1 types of tokens"),
        ({"tokenizer.ggml.merges": ["no such"]}, "vocabulary of .* is not consistent"),
        ({"tokenizer.ggml.merges": ["a"]}, "vocabulary of .* is not consistent"),
    ],
)
def test_a_vocabulary_that_is_not_consistent_is_named(
    changes: dict[str, Any], message: str, code: transformers.PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_of(file_with(tokenizer_metadata(code, "gpt-2") | changes, tmp_path / "model.gguf"))


def test_a_real_vocabulary() -> None:
    """SmolLM2, where it is installed or cached. The ids are llama.cpp's."""
    path = find(DOWNLOADS["builtin:smollm2-135m"])
    if path is None:
        pytest.skip("builtin:smollm2-135m is not here")
    file = read([path])
    made = tokenizer_of(file)
    assert made is not None
    text = "Hello  World 12345 def f(x):\n    return x+1 é ▁ 日本 <|im_start|>user   "
    assert made(text)["input_ids"] == [
        19556, 216, 2260, 216, 33, 34, 35, 36, 37, 753, 275, 24, 104, 727, 472, 1003, 1792, 27, 33, 26411, 29566, 219, 17097,
        241, 115, 40993, 216, 1, 4093, 333,
    ]  # fmt: skip
    assert end_ids(file) == (2, 0)
    assert made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith(
        "user\nhi<|im_end|>\n"
    )
