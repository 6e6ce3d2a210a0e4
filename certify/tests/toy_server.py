"""OpenAI's API over a toy engine, for tests of subjects that are servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from broken import LETTERS, ToyEngine

from outrider_certify.certificate import CertificatePart
from outrider_certify.subject import GeneratedText, SamplingParams, SpeculationVariant, TextRequest
from outrider_certify.subjects.server import ServerSubject
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds

PROMPTS = ToyEngine().prompts()[:3]


Answer = Callable[[dict[str, Any]], httpx.Response | None]


def ids(text: str) -> list[int]:
    """The tokens of a text of letters, or of numbers."""
    return [LETTERS.index(c) for c in text] if text.isalpha() else [int(t) for t in text.split()]


class ToyServer:
    """OpenAI's API over a toy engine. speaks: how much it says. refuses: fields it does not take. first: may answer before it."""

    def __init__(
        self,
        engine: ToyEngine,
        *,
        ids: bool = True,
        logprobs: bool = True,
        refuses: tuple[str, ...] = (),
        first: Answer | None = None,
    ) -> None:
        self.engine, self.ids, self.logprobs, self.refuses, self.first = engine, ids, logprobs, refuses, first
        self.requests = list[dict[str, Any]]()
        self.owner, self.switch = "", "off"
        self.ended, self.streams, self.refuses_speculating, self.reads_otherwise = False, True, False, 0
        self.spoil: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda events: events
        self.last = ["data: [DONE]", ""]
        self.grammar: str | None = None  # what follows a text that a grammar allows; None refuses grammars

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy", "owned_by": self.owner}]})
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(LETTERS[t] for t in body["tokens"])})
        if request.url.path == "/tokenize" and "add_special_tokens" in body:
            return httpx.Response(200, json={"tokens": [t + self.reads_otherwise for t in ids(body["prompt"])]})
        if request.url.path not in ("/v1/completions", "/v1/chat/completions"):
            return httpx.Response(404, text="not here")
        if self.ended:
            raise httpx.ConnectError("refused")
        self.requests.append(body)
        if request.url.path.startswith("/v1/chat"):
            return self.chat(body)
        return self.completion(body)

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        """The prompt is the token ids that the message names."""
        body["prompt"] = [int(t) for t in body["messages"][0]["content"].split()]
        body["logprobs"] = body.pop("top_logprobs", None)
        found = self.completion({**body, "stream": False})
        if found.status_code != 200:
            return found
        answer = found.json()
        for choice in answer["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            values = (choice.pop("logprobs", None) or {}).get("token_logprobs", [])
            choice["logprobs"] = {"content": [{"logprob": v} for v in values]}
        answer["prompt_token_ids"] = body["prompt"]
        return self.streamed(answer) if body.get("stream") else httpx.Response(200, json=answer)

    def streamed(self, answer: dict[str, Any]) -> httpx.Response:
        """Two tokens an event. The text comes with the first."""
        events = list[dict[str, Any]]()
        for choice in answer["choices"]:
            tokens, text = (
                choice.get("token_ids", []),
                choice.get("text") or choice.get("message", {}).get("content", ""),
            )
            for at in range(0, max(len(tokens), 1), 2):
                piece = {"index": choice["index"], "token_ids": tokens[at : at + 2], "finish_reason": None}
                shown = text if at == 0 else ""
                events.append(
                    {"choices": [piece | ({"delta": {"content": shown}} if "message" in choice else {"text": shown})]}
                )
            events.append(
                {"choices": [{"index": choice["index"], "text": "", "finish_reason": choice["finish_reason"]}]}
            )
        events = self.spoil(events)
        lines = [f"data: {json.dumps(e)}" for e in [*events, {"choices": [], "usage": answer["usage"]}]]
        content = "\n\n".join([": a comment", *lines, *self.last])
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)

    def completion(self, body: dict[str, Any]) -> httpx.Response:
        if self.first is not None and (found := self.first(body)) is not None:
            return found
        if self.grammar is not None and "structured_outputs" in body:
            text = body["structured_outputs"]["choice"][0] + self.grammar
            return httpx.Response(200, json={"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]})
        wrong = [name for name in (*self.refuses, "structured_outputs", "response_format") if name in body]
        if wrong and not (self.refuses_speculating and body.get("off")):
            return httpx.Response(400, json={"error": {"message": f"{wrong[0]} is not supported"}})
        answer = self.answer(body)
        if body.get("stream") and self.streams:
            return self.streamed(answer)
        return httpx.Response(200, json=answer)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        known = {"temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "n", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs"}  # fmt: skip
        params = SamplingParams(**{k: v for k, v in body.items() if k in known and v is not None})
        bias = {int(t): b for t, b in body.get("logit_bias", {}).items()}
        request = TextRequest(tuple(body["prompt"]), replace(params, logit_bias=bias or None))
        if body.get("bad_words"):
            words = [ids(word) for word in body["bad_words"]]
            request = request.with_(bad_words=words)
        texts = (
            self.engine.plain([request])
            if body.get(self.switch)
            else self.engine.generate([request], SpeculationVariant("own"))
        )
        choices = []
        for index, text in enumerate(texts):
            choice: dict[str, Any] = {"index": index, "text": text.text, "finish_reason": text.finish}
            if self.ids:
                choice["token_ids"] = text.tokens
            if text.logprobs is not None and self.logprobs:
                choice["logprobs"] = {"token_logprobs": [next(iter(x.values())) for x in text.logprobs]}
            if body.get("prompt_logprobs") and self.logprobs:
                choice["prompt_logprobs"] = self.read(body["prompt"], body["prompt_logprobs"])
            choices.append(choice)
        drafted = sum(sum(t.drafted) for t in texts)
        usage = {"completion_tokens": len(texts[0].tokens)}
        return {"choices": choices, "usage": usage, "timings": {"draft_n": drafted}}

    def read(self, tokens: list[int], count: int) -> list[Any]:
        rows = self.engine.distributions(
            TextRequest(tuple(tokens[:2]), SamplingParams(max_tokens=1)),
            GeneratedText(tokens=tokens[2:], prompt=tokens[:2]),
        )
        out: list[Any] = [None, None]
        for row, token in zip(rows, tokens[2:], strict=True):
            kept = {*np.argsort(-row.probs)[:count].tolist(), token}
            out.append({str(t): {"logprob": float(np.log(row.probs[t]))} for t in kept})
        return out


def subject(toy: ToyServer, **options: Any) -> ServerSubject:
    options = {"off_body": {"off": True}, **options}
    return ServerSubject("http://toy:8000", PROMPTS, transport=httpx.MockTransport(toy), **options)


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part
