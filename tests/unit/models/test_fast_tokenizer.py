"""Outrider's tokenizer gives what transformers' own gives for the same files: ids, texts, special tokens and prompts of chats."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import byte_level, decoded, sentencepiece

from outrider.core.extras import MissingExtra
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.reader import read
from outrider.models.gguf.tokenizer import tokenizer_of as gguf_tokenizer
from outrider.models.tokenizer import FastTokenizer, of_folder, tokenizer_of

transformers = pytest.importorskip("transformers")

TEMPLATES = sorted((Path(__file__).parents[2] / "data" / "templates").glob("*.jinja"))
FILES = ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-1.5b.gguf", "gemma-3-270m.gguf"]
KINDS = ["builtin:code", "byte-level", "llama-2", "llama class", "gemma class", "bert class", "added", *FILES]
ODD = [
    "  ", "\t", "\n\n", "don't", "1234", "e\u0301", "日本語", "हिन्दी", "🙂", "👩\u200d👧", "\u00a0", "\ufb01", "\x00", "½",
    "▁", "Ġ", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<s>", "</s>", "<end>", "<new>", "[SEP]", "##a",
    "<0x0A>", "def f(x):\n    return x\n", " n't , a .", "HTTPServer", "\ufffd",
]  # fmt: skip
WORDS = st.lists(
    st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)), max_size=9
)
LINES = [
    *Path(__file__).read_text(encoding="utf-8").splitlines(),
    *("".join(random.Random(n).choices(ODD, k=n % 12)) for n in range(300)),
    "x" * 3000,
]


def _added(folder: Path) -> None:
    """As a fine-tune writes it: new tokens, and the chat template in a file."""
    of_folder(builtin_folder("builtin:code")).save_pretrained(folder)
    size = len(byte_level(500))
    tokens = {"<|endoftext|>": True, "<new>": True, "two words": False}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(n): {
                "content": text,
                "lstrip": text == "<new>",
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for n, (text, special) in enumerate(tokens.items(), size)
        },
        "additional_special_tokens": ["<new>", "<other>"],
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "image_token": "<image>",
        "add_bos_token": True,
        "bos_token": "<s>",
        "chat_template": "old",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ bos_token }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson(indent=1) }}")


def _bert(folder: Path) -> None:
    words = {
        w: n
        for n, w in enumerate(
            ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdehnrst.,'", "##a", "##n", "##t", "don")
        )
    }
    made = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([*words][:5])
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir(exist_ok=True)
    made.enable_truncation(7)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    named = {f"{name.lower()[1:-1]}_token": name for name in [*words][:5]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    config = {"tokenizer_class": "BertTokenizer", "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _sentencepiece(folder: Path, family: str) -> None:
    """Saved by the class of a family, which makes it anew when it reads it."""
    model = json.loads(sentencepiece(500).backend_tokenizer.to_str())["model"]
    tokens = [*model["vocab"]]
    tokens[:1] = ["<unk>", "<s>", "</s>"] if family == "Llama" else ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocab = {token: n for n, token in enumerate(tokens)}
    kind = getattr(transformers, f"{family}Tokenizer")
    made = kind(vocab=vocab, merges=[tuple(m) for m in model["merges"]], add_bos_token=True)
    made.save_pretrained(folder)


def both(kind: str, folder: Path) -> tuple[FastTokenizer, Any]:
    """Outrider's tokenizer and transformers' own."""
    if kind in FILES:
        file = Path(os.environ.get("OUTRIDER_MODELS", "."), kind)
        if not file.exists():
            pytest.skip(f"there is no {file}; OUTRIDER_MODELS names the folder of the GGUF files")
        made = gguf_tokenizer(read([file]))
        assert isinstance(made, FastTokenizer)
        other = transformers.PreTrainedTokenizerFast(
            tokenizer_object=made.backend_tokenizer, chat_template=made.chat_template, **made.special_tokens_map
        )
        return made, other
    if kind == "added":
        _added(folder)
    elif kind == "bert class":
        _bert(folder)
    elif kind.endswith(" class"):
        _sentencepiece(folder, kind.split()[0].title())
    elif kind == "builtin:code":
        folder = Path(builtin_folder(kind))
    else:
        decoded(kind).save_pretrained(folder)
    made = of_folder(str(folder))
    assert isinstance(made, FastTokenizer)
    return made, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FastTokenizer, Any]:
    return both(request.param, tmp_path_factory.mktemp("tokenizer"))


def same(pair: tuple[FastTokenizer, Any], texts: list[str]) -> None:
    ours, theirs = pair
    for special in (True, False):
        ids = theirs(texts, add_special_tokens=special)["input_ids"]
        assert ours(texts, add_special_tokens=special)["input_ids"] == ids
        for skip in (True, False):
            assert ours.batch_decode(ids, skip_special_tokens=skip) == theirs.batch_decode(
                ids, skip_special_tokens=skip
            )
    for text in texts[:20]:
        found, expected = (made(text, return_offsets_mapping=True) for made in pair)
        assert [found[name] == expected[name] for name in ("input_ids", "offset_mapping")] == [True, True]
        assert ours.encode(text) == theirs.encode(text)
        assert [ours.convert_ids_to_tokens(i) for i in ours.encode(text)] == theirs.convert_ids_to_tokens(
            ours.encode(text)
        )


def test_texts_and_ids_are_those_of_transformers(pair: tuple[FastTokenizer, Any]) -> None:
    same(pair, LINES)


@settings(max_examples=60)
@given(words=WORDS)
def test_so_are_those_of_any_text(pair: tuple[FastTokenizer, Any], words: list[str]) -> None:
    same(pair, ["".join(words)])


@settings(max_examples=60)
@given(numbers=st.lists(st.integers(0, 2**20), max_size=12))
def test_so_are_the_texts_of_any_ids(pair: tuple[FastTokenizer, Any], numbers: list[int]) -> None:
    ours, theirs = pair
    ids = [n % len(ours) for n in numbers]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(np.array(ids, dtype=np.int64), skip) == ours.decode(tuple(ids), skip)
    names = ours.convert_ids_to_tokens(ids)
    assert names == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_string(names) == theirs.convert_tokens_to_string(names)


def test_special_tokens_are_those_of_transformers(pair: tuple[FastTokenizer, Any]) -> None:
    ours, theirs = pair
    for name in (
        "special_tokens_map",
        "all_special_tokens",
        "all_special_ids",
        "added_tokens_decoder",
        "chat_template",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("bos", "eos", "unk", "pad"):
        for field in (f"{name}_token", f"{name}_token_id"):
            assert getattr(ours, field) == getattr(theirs, field), field
    assert (ours.get_vocab(), len(ours)) == (theirs.get_vocab(), len(theirs))
    assert ours.convert_tokens_to_ids(["a", "no such token"]) == theirs.convert_tokens_to_ids(["a", "no such token"])


def test_saved_files_are_read_by_both(pair: tuple[FastTokenizer, Any], tmp_path: Path) -> None:
    ours, theirs = pair
    ours.save_pretrained(tmp_path)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for made in (of_folder(str(tmp_path)), again):
        assert made.special_tokens_map == ours.special_tokens_map
        assert made.chat_template == ours.chat_template
        assert made.all_special_tokens == ours.all_special_tokens
        same((made, theirs), LINES[-30:])


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "<b>é</b>", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"word": "fox"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a fox?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "a fox", "name": "look", "tool_call_id": "call00001"},
    ],
]


def outcome(make: Any) -> Any:
    try:
        return make()
    except Exception as error:  # a template is a program and fails in its own ways
        return type(error), str(error)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("file", [None, *TEMPLATES], ids=lambda file: file and file.stem)
def test_chat_templates_give_what_they_give_in_transformers(file: Path | None, tools: Any, tmp_path: Path) -> None:
    pair = both("builtin:code", tmp_path)
    source = (
        "{% generation %}{% set x = 1 %}{{ messages[0] | tojson }}{% endgeneration %}{{ x }}"
        "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}"
    )
    for made in pair:
        made.chat_template = source if file is None else file.read_text(encoding="utf-8")
    for chat in CHATS:
        for prompted in (True, False):
            given: Any = {
                "tools": tools,
                "add_generation_prompt": prompted,
                "date_string": "1 May",
                "strftime_now": str,
            }
            ours, theirs = (outcome(lambda m=m: m.apply_chat_template(chat, tokenize=False, **given)) for m in pair)
            assert ours == theirs
            ours, theirs = (outcome(lambda m=m: m.apply_chat_template(chat, return_dict=True, **given)) for m in pair)
            assert ours == theirs or ours["input_ids"] == theirs["input_ids"]


def test_a_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    ours, _ = both("builtin:code", tmp_path)
    ours.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match=r"access to attribute '__class__' .* is unsafe"):
        ours.apply_chat_template(CHATS[0])


def test_threads_share_it(tmp_path: Path) -> None:
    ours, theirs = both("builtin:code", tmp_path)
    expected = [theirs(text)["input_ids"] for text in LINES[:40]]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: ours(LINES[n % 40])["input_ids"] == expected[n % 40], range(200)))


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizer_of(str(tmp_path)) is None


def test_other_kinds_are_read_by_transformers_and_the_line_that_installs_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert tokenizer_of(str(tmp_path)).decode(tokenizer_of(str(tmp_path))("ab")["input_ids"]) == "ab"
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        MissingExtra, match=r"which has no tokenizer.json, needs transformers.*pip install '.\[torch\]'"
    ):
        tokenizer_of(str(tmp_path))


def test_an_added_token_keeps_its_settings(tmp_path: Path) -> None:
    ours, _ = both("added", tmp_path)
    found = {t.content: t for t in ours.added_tokens_decoder.values()}
    assert (found["<new>"].lstrip, found["two words"].special) == (True, False)
    assert isinstance(found["<new>"], AddedToken)
