"""Several clients on a server: ours, plain and with a drafter, and llama.cpp's on the same file. Prompts are token ids."""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_server import NEUTRAL, LlamaServer
from benchmarks.serve import Endpoint, load, server, take_turns
from benchmarks.texts import texts

SERVE = {
    "file": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
LENGTH = 1024  # tokens of a client's prompt and text


def served(
    target: str,
    draft: str | None,
    weights: str,
    llama: tuple[Path, str, str | None] | None,
    *,
    clients: Sequence[int],
    count: int,
    tokens: int,
    llama_draft: int,
) -> list[dict[str, Any]]:
    """A record for each arm and number of clients, with `differing_texts` of our arms.

    Args:
        target: a model.
        draft: its draft model, if any.
        weights: one of `SERVE`.
        llama: llama.cpp's program, target and draft, if it takes part.
        clients: how many at once.
        count: prompts of code, and of chat.
        tokens: of a text.
        llama_draft: llama.cpp's draft tokens of a step.
    """
    config = {"method": "auto", **({"model": draft} if draft else {})}
    options = argparse.Namespace(
        start=target, model="model", config=json.dumps(config), max_model_len=LENGTH, max_concurrency=list(clients),
        endpoint="/v1/completions", output_len=tokens, temperature=0.0, seed=0, request_rate=float("inf"), num_prompts=None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(server(options, SERVE[weights]))
        every = _prompts(options.base_url, count)
        arms = {
            "plain": Endpoint(options.base_url, "model", {"disable_spec_decode": True}),
            "auto": Endpoint(options.base_url, "model"),
        }
        if llama is not None:
            program, model, small = llama
            size: dict[str, Any] = {"slots": max(clients), "length": LENGTH}
            plain = stack.enter_context(LlamaServer(program, model, **size))
            arms["llama.cpp"] = Endpoint(plain.url, "model", {"cache_prompt": False, **NEUTRAL})
            if small:
                drafting = stack.enter_context(LlamaServer(program, model, small, longest=llama_draft, **size))
                name = f"llama.cpp draft {llama_draft}"
                arms[name] = Endpoint(drafting.url, "model", {"cache_prompt": False, **NEUTRAL})
        for end in arms.values():
            asyncio.run(load(options, end, every[:1], 1))
        runs, differ, compared = take_turns(options, arms, every, {name for name in arms if name.startswith("llama")})
    return [run | {"differing_texts": differ, "compared_texts": compared} for run in runs]


def _prompts(url: str, count: int) -> list[list[int]]:
    """Code and chat in turn, as our server encodes them: messages where the model has a chat template."""
    prompts = list[list[int]]()
    for pair in zip(
        *(zip(texts(w, True, count), texts(w, False, count), strict=True) for w in ("code", "chat")), strict=True
    ):
        prompts += [_tokenized(url, message.content, text.content) for message, text in pair]
    return prompts


def _tokenized(url: str, messages: Any, text: Any) -> list[int]:
    for body in ({"messages": messages}, {"prompt": text}):
        request = urllib.request.Request(
            url + "/tokenize", json.dumps({"model": "model", **body}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["tokens"]
        except urllib.error.HTTPError as error:
            if error.code != 400 or "prompt" in body:
                raise
    raise AssertionError("unreachable")
