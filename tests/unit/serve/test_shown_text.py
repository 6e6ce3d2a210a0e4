"""Texts of answers, prompts and tokens over HTTP, with vocabularies whose tokens are parts of characters or lose a space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from plain import write_checkpoint
from serving import TEMPLATE, Live, serving
from tokenizers import normalizers, processors
from vocabularies import decoded

from outrider import LLM
from outrider.serve.options import ServeOptions

KINDS = ["byte-level", "llama-2", "gemma"]
EMOJI = "🦜🪁🫠 ᚠᛇᚻ"


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Live]]:
    """A server of a random model for each kind of vocabulary."""
    with ExitStack() as stack:
        found = {}
        for kind in KINDS:
            tokenizer = decoded(kind)
            tokenizer.chat_template = TEMPLATE
            folder = write_checkpoint(tmp_path_factory.mktemp(kind), vocab_size=len(tokenizer))
            llm = LLM(str(folder), tokenizer=tokenizer, any_method=True)
            found[kind] = stack.enter_context(serving(llm, ServeOptions(model="tiny", host="0.0.0.0")))
        yield found


def streamed(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    return [choice for event in live.events(path, **body) for choice in event["choices"]]


def parts_of(live: Live) -> list[int]:
    """Tokens that are bytes of characters, and a few that are words."""
    known = live.service.tokens
    parts = [t for t in range(len(known.tokenizer)) if known.label(t).startswith("bytes:")]
    return [*parts, *live.service.prompts.tokenizer("a b🙂漢", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_what_prompt_and_answer_have_together(kind: str, lives: dict[str, Live]) -> None:
    """Whole, streamed, in logprobs and by /detokenize; the prompt ends anywhere, also inside of a character."""
    live, tokens = lives[kind], lives[kind].service.tokens
    ids = live.service.prompts.tokenizer("a 𓀀𓀁🙂🙂", add_special_tokens=False)["input_ids"]
    for seed, cut in enumerate((1, len(ids) // 2, len(ids))):
        body = {
            "prompt": ids[:cut],
            "seed": seed,
            "max_tokens": 24,
            "allowed_token_ids": parts_of(live),
            "ignore_eos": True,
        }
        body |= {"logprobs": 3, "return_token_ids": True, "temperature": 2.0}
        choice = live.ask("/v1/completions", **body)["choices"][0]
        together = live.ask("/detokenize", tokens=ids[:cut] + choice["token_ids"])["prompt"]
        head = tokens.decode(ids[:cut]).rstrip("\ufffd")
        assert together == head + choice["text"]
        chunks = streamed(live, "/v1/completions", **body)
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        shown = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        assert {name: list(itertools.chain(*(x[name] for x in shown))) for name in shown[0]} == choice["logprobs"]
        pieces = streamed(live, "/v1/completions", **body, return_pieces=True)
        assert "".join(text for chunk in pieces for text, _ in chunk.get("pieces", [])) == choice["text"]
        echoed = live.ask("/v1/completions", **body, echo=True)["choices"][0]
        assert echoed["text"] == together
        assert sorted(echoed["logprobs"]["text_offset"]) == echoed["logprobs"]["text_offset"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_logprobs_join_to_the_text(kind: str, lives: dict[str, Live]) -> None:
    live = lives[kind]
    end = live.service.prompts.tokenizer.eos_token_id
    for seed in range(2):
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 4, "max_tokens": 30}
        body |= {"structured_outputs": {"regex": f"{EMOJI}|a 漢 ok"}, "seed": seed, "temperature": 1.0}
        body |= {"return_token_ids": True}
        choice = live.ask("/v1/chat/completions", **body)["choices"][0]
        content = choice["logprobs"]["content"]
        text = choice["message"]["content"]
        joined = b"".join(bytes(token["bytes"]) for token in content)
        assert joined.decode(errors="replace") == text or choice["finish_reason"] == "length"
        assert all(token["bytes"] == list(token["token"].encode()) or "\\x" in token["token"] or
                   token["bytes"] == [] for token in content)  # fmt: skip
        assert [t["bytes"] for t, i in zip(content, choice["token_ids"], strict=True) if i == end] in ([], [[]])
        tops = [{(t["token"], t["logprob"]) for t in token["top_logprobs"]} for token in content]
        assert all(len(top) == 4 for top in tops)
        chunks = streamed(live, "/v1/chat/completions", **body)
        assert [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]] == content


@pytest.mark.parametrize("kind", KINDS)
def test_every_alternative_has_a_key(kind: str, lives: dict[str, Live]) -> None:
    live = lives[kind]
    shown = live.ask("/v1/completions", prompt=EMOJI + " <0x41> A", max_tokens=0, echo=True, logprobs=10)["choices"][0]
    known, text = shown["logprobs"], shown["text"]
    assert text == EMOJI + " <0x41> A"
    assert known["token_logprobs"][0] is None
    for name, own, top in list(zip(known["tokens"], known["token_logprobs"], known["top_logprobs"], strict=True))[1:]:
        assert len(top) in (10, 11)
        assert top[name] == own
    if kind != "gemma":
        assert any(name.startswith("bytes:\\x") for name in known["tokens"])


@pytest.mark.parametrize(("kind", "n"), [*zip(KINDS, (1, 2, 1), strict=True)])
def test_echo_begins_with_the_prompt_that_was_sent(kind: str, n: int, lives: dict[str, Live]) -> None:
    """Character for character: with a space at the beginning, tokens of its own, and other forms of characters."""
    live = lives[kind]
    prompts = [" a b", "a  b ", "cafe\u0301 ok", EMOJI, "two words led", "<end>a", "\n\n x"]
    body = {"prompt": prompts, "max_tokens": 2, "n": n, "echo": True, "seed": 3, "temperature": 0.0 if n == 1 else 1.0}
    plain = live.ask("/v1/completions", **body | {"echo": False})["choices"]
    choices = live.ask("/v1/completions", **body, logprobs=1)["choices"]
    texts = [choice["text"] for choice in choices]
    assert texts == [prompts[i // n] + choice["text"] for i, choice in enumerate(plain)]
    chunks = streamed(live, "/v1/completions", **body)
    assert ["".join(c["text"] for c in chunks if c["index"] == i) for i in range(len(texts))] == texts
    for choice in choices:
        known = choice["logprobs"]
        places, names = [*known["text_offset"], len(choice["text"])], known["tokens"]
        assert places[0] == 0
        assert places == sorted(places)
        whole = [i for i, name in enumerate(names) if not name.startswith("bytes:") and name != "<end>"]
        for i in whole if choice["text"].startswith((" a b", "a  b", "\n")) else ():
            assert choice["text"][places[i] : places[i + 1]] in (names[i], names[i] + "\ufffd", "\ufffd" + names[i])


def test_a_normalizer_and_begin_tokens_do_not_move_the_echo(tmp_path: Path) -> None:
    tokenizer = decoded("byte-level composed")
    raw = tokenizer.backend_tokenizer
    raw.normalizer = normalizers.NFC()
    begin = ("<|im_start|>", raw.token_to_id("<|im_start|>"))
    raw.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    llm = LLM(str(write_checkpoint(tmp_path, vocab_size=len(tokenizer))), tokenizer=tokenizer, any_method=True)
    with serving(llm, ServeOptions(model="tiny", host="0.0.0.0")) as live:
        prompt = "cafe\u0301 ok"
        choice = live.ask("/v1/completions", prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0)[
            "choices"
        ][0]
        plain = live.ask("/v1/completions", prompt=prompt, max_tokens=1, temperature=0)["choices"][0]
        assert choice["text"] == prompt + plain["text"]
        places = choice["logprobs"]["text_offset"]
        assert places[:2] == [0, 0]
        assert places[choice["logprobs"]["tokens"].index("k")] == prompt.index("k")
        assert places[-1] == len(prompt)
        ids = live.ask("/tokenize", prompt=prompt)["tokens"]
        bare = live.ask("/tokenize", prompt=prompt, add_special_tokens=False)["tokens"]
        assert ids == [begin[1], *bare]


def test_a_token_keeps_its_space(lives: dict[str, Live]) -> None:
    live = lives["llama-2"]
    for prompt in ("the text was  here", "a 🙂 b"):
        answer = live.ask("/tokenize", prompt=prompt, return_token_strs=True)
        names = [name for name in answer["token_strs"] if not name.startswith("bytes:")]
        assert "".join(names) == prompt.replace("🙂", "")
    body = {"prompt": "the text", "max_tokens": 20, "logprobs": 5, "seed": 1, "ignore_eos": True}
    ids = [number for token, number in live.service.prompts.tokenizer.get_vocab().items() if token.startswith("▁")]
    choice = live.ask("/v1/completions", **body, allowed_token_ids=ids)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert all(name.startswith(" ") for name in choice["logprobs"]["tokens"])


def test_each_field_of_tokenize_has_an_effect(lives: dict[str, Live]) -> None:
    live = lives["byte-level"]
    messages = [{"role": "user", "content": "hello"}]
    ask = partial(live.ask, "/tokenize", messages=messages)
    usual = ask()
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for more in ({"add_generation_prompt": False}, {"continue_final_message": True}, {"tools": [tool]}):
        assert ask(**more)["tokens"] != usual["tokens"]
    refused = httpx.post(live.url + "/tokenize", json={"prompt": "a", "tools": [tool]}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
