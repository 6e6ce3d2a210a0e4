"""What sampling parameters make of a target's scores, in the order of vLLM and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from outrider_certify.subject import GeneratedText, SamplingParams, TextRequest, TokenDistribution


def sampled_distribution(
    logits: np.ndarray, params: SamplingParams, tokens: Sequence[int], prompt_length: int, end_ids: Sequence[int]
) -> np.ndarray:
    """float64 [vocab]: the distribution of the next token.

    logits: [vocab]. tokens: prompt and output so far. end_ids: tokens that may not come before `min_tokens`.
    """
    x, output = np.array(logits, dtype=np.float64), list(tokens[prompt_length:])
    if params.allowed_token_ids is not None:
        x[np.isin(np.arange(len(x)), params.allowed_token_ids, invert=True)] = -np.inf
    for word in params.bad_words:
        if not isinstance(word, str) and list(tokens[len(tokens) - len(word) + 1 :]) == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.repetition_penalty != 1:
        seen = sorted(set(tokens))
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    if output:
        written, counts = np.unique(output, return_counts=True)
        x[written] -= params.presence_penalty + params.frequency_penalty * counts
    if params.temperature == 0:
        return point_mass(int(x.argmax()), len(x))
    x /= params.temperature
    if 0 < params.top_k < len(x):
        x[x < np.partition(x, -params.top_k)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        p, order = softmax(x), np.argsort(-x, kind="stable")
        ahead = np.cumsum(p[order]) - p[order]
        x[order[ahead >= params.top_p]] = -np.inf
    if params.min_p > 0:
        x[x < x.max() + np.log(params.min_p)] = -np.inf
    return softmax(x)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def point_mass(token: int, size: int) -> np.ndarray:
    """float64 [size]: all mass on one token."""
    return (np.arange(size) == token).astype(float)


def distributions_of(
    logits: Iterable[np.ndarray], request: TextRequest, text: GeneratedText, end_ids: Sequence[int]
) -> list[TokenDistribution]:
    """The distribution of each token of a text, from the target's logits before it."""
    tokens, start = [*text.prompt, *text.tokens], len(text.prompt)
    return [
        TokenDistribution(sampled_distribution(x, request.params, tokens[:at], start, end_ids), logits=x)
        for at, x in enumerate(logits, start)
    ]
