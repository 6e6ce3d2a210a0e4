"""What llama.cpp's server tells of its own numbers: how far apart two tokens are, and how exact that is.

Its penalties count the prompt too, so a model with the same weights elsewhere cannot tell the margin of a penalised token.
All functions raise ConnectionError, and KeyError for an answer of another form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from outrider_certify.subjects.transport import ServerClient

SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")
_KNOWN = 40  # likeliest tokens that are asked for
_PLACES = (2, 5, 8, 11, 14)  # tokens of a text whose number is computed again


def logprobs(client: ServerClient, tokens: Sequence[int], body: dict[str, Any], *, cached: bool) -> dict[int, float]:
    """Log-probabilities of the likeliest next tokens after penalties and biases.

    Args:
        body: Fields of the request.
        cached: Whether to use the keys and values that the server has kept. Else the text is read anew.
    """
    names = ("presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias", "ignore_eos")
    asked = {name: body[name] for name in names if name in body}
    asked |= {"prompt": list(tokens), "n_predict": 1, "temperature": 1.0, "samplers": ["penalties", "temperature"]}
    asked |= {"n_probs": _KNOWN, "post_sampling_probs": True, "cache_prompt": cached}
    [first] = client.post("/completion", asked)["completion_probabilities"]
    return {int(t["id"]): math.log(t["prob"]) for t in first["top_probs"] if t["prob"] > 0}


def chat_prompt(client: ServerClient, message: str) -> list[int]:
    """The token ids that the server reads for one message of a user."""
    asked = {"messages": [{"role": "user", "content": message}]}
    return encoded(client, client.post("/apply-template", asked)["prompt"], special=True)


def encoded(client: ServerClient, text: str, *, special: bool = False) -> list[int]:
    """Token ids of a text. special: it is a whole prompt, with the texts of special tokens."""
    body = {"content": text, "add_special": special, "parse_special": special}
    return [int(t) for t in client.post("/tokenize", body)["tokens"]]


def margin(client: ServerClient, tokens: Sequence[int], body: dict[str, Any], one: int, other: int) -> float | None:
    """How far apart the server scores two next tokens, in nats: the smaller of two ways to compute it.

    None if one of the tokens is not among the likeliest.
    """
    gaps = list[float]()
    for cached in (True, False):
        scores = logprobs(client, tokens, body, cached=cached)
        if one in scores and other in scores:
            gaps.append(abs(scores[one] - scores[other]))
    return min(gaps, default=None)


def noise(client: ServerClient, prompts: Sequence[Sequence[int]]) -> float | None:
    """The largest difference of a log-probability between a text that is written and the same text read as a prompt."""
    gaps = list[float]()
    for prompt in prompts:
        body = {
            "prompt": list(prompt),
            "max_tokens": max(_PLACES) + 1,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        written = client.post("/v1/completions", body)["choices"][0]["logprobs"]["content"]
        for at in _PLACES:
            scores = logprobs(client, [*prompt, *(t["id"] for t in written[:at])], {"ignore_eos": True}, cached=False)
            if written[at]["id"] in scores:
                gaps.append(abs(scores[written[at]["id"]] - written[at]["logprob"]))
    return max(gaps, default=None)
