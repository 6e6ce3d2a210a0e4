"""llama.cpp's server as a subject: what it tells of its own numbers, on a server over a toy engine."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from broken import ToyEngine

from outrider_certify.conditions import SEVERAL
from outrider_certify.seeded import Seeded
from outrider_certify.subject import GeneratedText, SamplingParams, TextRequest
from outrider_certify.subjects.server import ServerSubject
from outrider_certify.trials import TrialJournal, run_kinds

PROMPTS = [(3, 4), (2, 2, 7)]


def numbers(text: str) -> list[int]:
    return [int(word.strip("()")) for word in text.split()]


class ToyLlama:
    """llama.cpp over a toy engine: ids come with log-probabilities, `/completion` tells the likeliest tokens of a prompt.

    wobble: added to the score of a token that is read anew. swap: speculation writes the second token at this position.
    streams: in streams only. Its chat template puts two tokens before a message. A token is a number in a text, with brackets or
    without. splits: a text is not encoded as it was written.
    """

    splits = False

    def __init__(self, wobble: float, swap: int | None, *, streams: bool = False) -> None:
        self.engine, self.wobble, self.swap, self.streams = ToyEngine(vocab=8), wobble, swap, streams

    def scores(self, tokens: list[int]) -> np.ndarray:
        [row] = self.engine.distributions(
            TextRequest(tuple(tokens), SamplingParams(max_tokens=1)), GeneratedText(tokens=[0], prompt=tokens)
        )
        best = np.sort(row.probs)[::-1]
        order = np.argsort(-row.probs)
        scores = np.log(np.maximum(best, 1e-9))
        scores[1] = scores[0] - 0.05  # the second is always near
        return scores[np.argsort(order)] - np.log(np.exp(scores).sum())

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        path, speculates = request.url.path, request.url.host == "fast"
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        if path == "/props":
            return httpx.Response(200, json={"default_generation_settings": {}, "build_info": "b1"})
        if path == "/completion":
            scores = self.scores(body["prompt"])
            if not body["cache_prompt"]:
                scores[int(scores.argmax())] -= self.wobble
            top = [{"id": int(t), "prob": float(np.exp(scores[t]))} for t in np.argsort(-scores)]
            return httpx.Response(200, json={"completion_probabilities": [{"top_probs": top}]})
        if path == "/apply-template":
            return httpx.Response(200, json={"prompt": f"7 7 {body['messages'][0]['content']}"})
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": numbers(body["content"])[:: -1 if self.splits else 1]})
        if path not in ("/v1/completions", "/v1/chat/completions") or "return_token_ids" in body:
            return httpx.Response(400, text="no")
        chat = "messages" in body
        tokens = [7, 7, *numbers(body["messages"][0]["content"])] if chat else list(body["prompt"])
        content, start, n, stream = [], len(tokens), body.get("n", 1), bool(body.get("stream"))
        speculates = speculates and (stream or not self.streams)
        for at in range(body["max_tokens"]):
            scores = self.scores(tokens)
            token = int(np.argsort(-scores)[1 if speculates and at == self.swap else 0])
            content.append({"id": token, "logprob": float(scores[token])})
            tokens.append(token)
        # The log-probabilities of accepted draft tokens are left out of a stream, and with them the ids.
        shown = {"content": content[:: 2 if stream else 1]} if body.get("logprobs") else None
        text = " ".join(map(str, tokens[start:]))
        said = {"message": {"content": text}, "delta": {"content": text}} if chat else {"text": text}
        answer = {
            "choices": [{**said, "index": i, "finish_reason": "length", "logprobs": shown} for i in range(n)],
            "usage": {"completion_tokens": n * len(content)},
            "timings": {"draft_n": 7 * (request.url.host == "fast")},
        }
        if stream:
            events = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return httpx.Response(200, text=events, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=answer)


@pytest.mark.parametrize("streams", [False, True], ids=["everywhere", "in streams"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(("wobble", "kind"), [(0.04, "tie"), (0.0, "error")])
def test_llama_cpp_tells_ties_from_errors_by_its_own_numbers(
    wobble: float, kind: str, endpoint: str, *, streams: bool
) -> None:
    """Penalties of llama.cpp count the prompt, so only its own server knows the margin of a penalised token."""
    toy = ServerSubject(
        "http://fast:1",
        [" ".join(map(str, p)) for p in PROMPTS] if endpoint == "chat" else PROMPTS,
        plain_url="http://plain:2",
        endpoint=endpoint,
        transport=httpx.MockTransport(ToyLlama(wobble, swap=6, streams=streams)),
    )
    assert toy.properties["speculation"].startswith("seen: 14")
    assert toy.noise() == pytest.approx(wobble, abs=1e-6)
    [part] = run_kinds([Seeded(toy, length=16, rounds=1)], TrialJournal(None, {}), 1e9)
    seen = {d["variant"] for n in range(2) for d in Seeded(toy, length=16).trial(n, 0.0, "the defaults")["differences"]}
    assert "as a stream" in seen
    assert part.figures["unclear"] == 0  # a stream's tokens are those of the same text in one piece
    assert (part.figures["ties"] > 0, part.figures["errors"] > 0) == (kind == "tie", kind == "error"), part.sentence


def test_a_stream_of_the_same_text_is_right_however_its_letters_are_split() -> None:
    llama = ToyLlama(0.0, swap=None)
    toy = ServerSubject("http://fast:1", PROMPTS, plain_url="http://plain:2", transport=httpx.MockTransport(llama))
    llama.splits = True
    trial = Seeded(toy, length=16).trial(0, 0.0, SEVERAL)
    assert trial["texts"] == 3 * 2 * len(PROMPTS)
    assert not trial["differences"]
    [part] = run_kinds([Seeded(toy, length=16, rounds=1)], TrialJournal(None, {}), 1e9, most=4)
    assert "as a stream" in part.tested["ways to speculate"]
    assert part.figures["errors"] == part.figures["unclear"] == 0
