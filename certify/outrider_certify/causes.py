"""Known mistakes, as the distribution of the token that an engine with the mistake writes.

Each is a real incident. A mistake is a distribution over the next token, made from what is known before that token: the target's
distribution p and the drafter's q. The audit bets on each; the bet that wins names the mistake. Numbers are arrays of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider_certify.subjects.base import Row

_MOST_SIMULATED = 64  # tokens of a vocabulary in which the shared noise is simulated
_DRAWS = 400


@dataclass(frozen=True)
class TokenPlace:
    """What is known before a token is written.

    p: the target's. q: the drafter's as it draws, None if not known. before: q of the token before, if there is one.
    params: of the request. tokens: the text so far, of which `prompt` tokens are the prompt. step: tokens that were committed
    when the step of this token began; None if not known.
    """

    p: Row
    q: Row | None
    before: Row | None
    params: SamplingParams
    tokens: Sequence[int]
    prompt: int
    end_ids: tuple[int, ...] = ()
    step: int | None = None


Law = Callable[[TokenPlace], np.ndarray | None]


@dataclass(frozen=True)
class Cause:
    """A mistake. name: in the certificate. law: its distribution at a place; None where it changes nothing or is not known."""

    name: str
    law: Law


def warped(
    logits: np.ndarray, params: SamplingParams, tokens: Sequence[int], prompt: int, ends: tuple[int, ...]
) -> np.ndarray:
    """float64 [vocab]: the distribution that sampling parameters make of logits."""
    state = SequenceState(params, ends, (), list(tokens), prompt)
    scores = LogitsWarper([state]).scores(torch.from_numpy(np.asarray(logits)).float()[None], [[]])
    return scores.double().softmax(-1)[0].numpy()


def normalized(x: np.ndarray) -> np.ndarray:
    """x with sum 1; unchanged where it is all zero."""
    total = x.sum()
    return x / total if total > 0 else x


def judged(p: np.ndarray, drawn: np.ndarray, q: np.ndarray, after: np.ndarray | None = None) -> np.ndarray:
    """The token of one step: a draft token drawn from `drawn`, judged by p/q; after a rejection from `after`.

    after: None for the residual of p and q.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        keep = np.where(q > 0, np.minimum(p / q, 1.0), (p > 0).astype(float))
    kept = drawn * keep
    if after is None:
        rest = np.maximum(p - q, 0)
        after = normalized(rest) if rest.sum() > 0 else p
    return kept + (1 - kept.sum()) * after


def powered(p: np.ndarray, exponent: float) -> np.ndarray:
    """p at another temperature."""
    with np.errstate(divide="ignore"):
        logs = exponent * np.log(p)
    return normalized(np.exp(logs - logs.max()))


def point(token: int, size: int) -> np.ndarray:
    return (np.arange(size) == token).astype(float)


# -- mistakes of a verifier -------------------------------------------------------------------------------------------------


def _with_q(law: Callable[[np.ndarray, np.ndarray, TokenPlace], np.ndarray | None]) -> Law:
    """A law that needs the whole of p, and q."""

    def found(at: TokenPlace) -> np.ndarray | None:
        return law(at.p.probs, at.q.probs, at) if at.q is not None and at.p.whole else None

    return found


def _argmax_as_drawn(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray:
    return judged(p, point(int(q.argmax()), len(q)), q)


def _no_residual(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray:
    return judged(p, q, q, after=p)


def _raw(at: TokenPlace) -> np.ndarray | None:
    """q before the sampling parameters; None if they change nothing, or it is not known."""
    if at.q is None or at.q.logits is None:
        return None
    raw = np.exp(at.q.logits - at.q.logits.max())
    raw = raw / raw.sum()
    return None if np.abs(raw - at.q.probs).max() < 1e-6 else raw


def _judged_raw(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
    raw = _raw(at)
    return None if raw is None else judged(p, q, raw)


def _drawn_raw(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
    raw = _raw(at)
    return None if raw is None else judged(p, raw, q)


def _stale(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
    return None if at.before is None else judged(p, q, at.before.probs)


def _dropped(least: float) -> Callable[[np.ndarray, np.ndarray, TokenPlace], np.ndarray | None]:
    def law(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
        low = np.where(q < least, q, 0)
        if not 0 < low.sum() < 1:
            return None
        return judged(p, q, q) - low * np.where(q > 0, np.minimum(p / np.where(q > 0, q, 1), 1), 0) + _share(p, q, low)

    return law


def _share(p: np.ndarray, q: np.ndarray, low: np.ndarray) -> np.ndarray:
    """What comes of dropped draft tokens: a draw from p, in place of acceptance and residual."""
    rest = np.maximum(p - q, 0)
    residual = normalized(rest) if rest.sum() > 0 else p
    refused = low * np.where(q > 0, 1 - np.minimum(p / np.where(q > 0, q, 1), 1), 0)
    return low.sum() * p - refused.sum() * residual


def _truncated(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
    """Drawn from q on a part of the vocabulary, judged by q on all of it. The part: the first ids, by halves."""
    part = np.where(np.arange(len(q)) < len(q) / 2, q, 0)
    return judged(p, normalized(part), q) if part.sum() > 0 else None


def _shared_noise(p: np.ndarray, q: np.ndarray, at: TokenPlace) -> np.ndarray | None:
    """Draft token and residual are drawn with the same noise. Simulated, so for small vocabularies only."""
    if len(q) > _MOST_SIMULATED:
        return None
    rng = np.random.default_rng(len(at.tokens))
    race = rng.exponential(size=(_DRAWS, len(q)))
    with np.errstate(divide="ignore", invalid="ignore"):
        drafted = (race / q).argmin(1)
        rest = np.maximum(p - q, 0)
        second = (race / (rest if rest.sum() > 0 else p)).argmin(1)
        keep = np.minimum(p[drafted] / q[drafted], 1)
    law = np.bincount(drafted, keep, len(q)) + np.bincount(second, 1 - keep, len(q))
    return 0.98 * law / _DRAWS + 0.02 * p  # so that a rare token does not end the bet


VERIFIER_CAUSES = (
    Cause("draft tokens are accepted without regard to the target", _with_q(lambda p, q, at: q)),
    Cause("wrong q: the likeliest draft token is taken, but judged as one that was drawn", _with_q(_argmax_as_drawn)),
    Cause("no residual: after a rejection the token is drawn from p itself", _with_q(_no_residual)),
    Cause(
        "wrong q: draft tokens are drawn with the sampling parameters, but judged by the raw q", _with_q(_judged_raw)
    ),
    Cause(
        "the draft ignores temperature: its tokens are drawn from the raw q, but judged by the processed one",
        _with_q(_drawn_raw),
    ),
    Cause("stale q: a draft token is judged by the q of the position before", _with_q(_stale)),
    Cause("a drawn draft token is dropped where its own q is low", _with_q(_dropped(0.1))),
    Cause("a drawn draft token is dropped where its own q is low", _with_q(_dropped(0.3))),
    Cause("truncated q: drawn from a part of the vocabulary, judged by q on all of it", _with_q(_truncated)),
    Cause(
        "shared noise: the draft token and the residual are drawn with the same random numbers", _with_q(_shared_noise)
    ),
)

# -- mistakes of sampling parameters and numbers ----------------------------------------------------------------------------


def _without(**neutral: float) -> Law:
    """p as it is if sampling parameters are not applied."""

    def law(at: TokenPlace) -> np.ndarray | None:
        if at.p.logits is None or all(getattr(at.params, name) == value for name, value in neutral.items()):
            return None
        return warped(at.p.logits, at.params.with_(**neutral), at.tokens, at.prompt, at.end_ids)

    return law


def _last_of_step(at: TokenPlace) -> np.ndarray | None:
    """Penalties that count only the last token of each step. Needs to know where steps begin."""
    neutral = (at.params.repetition_penalty, at.params.presence_penalty, at.params.frequency_penalty) == (1, 0, 0)
    if at.p.logits is None or neutral or at.step is None:
        return None
    tokens = [*at.tokens[: at.step]]
    return warped(at.p.logits, at.params, tokens, at.prompt, at.end_ids)


def _hotter(factor: float) -> Law:
    def law(at: TokenPlace) -> np.ndarray | None:
        return powered(at.p.probs, 1 / factor) if at.p.whole and at.params.temperature > 0 else None

    return law


def _likeliest(at: TokenPlace) -> np.ndarray | None:
    """Almost always the likeliest token."""
    if at.params.temperature == 0:
        return None
    return 0.99 * point(int(at.p.probs.argmax()), len(at.p.probs)) + 0.01 * at.p.probs


def _uniform(at: TokenPlace) -> np.ndarray | None:
    return np.full(len(at.p.probs), 1 / len(at.p.probs)) if at.p.whole else None


def _unknown_tokens(at: TokenPlace) -> np.ndarray | None:
    """Tokens outside the known ones. The law gives the known ones half of their mass."""
    return None if at.p.whole else 0.5 * at.p.probs


RANDOM = "tokens look random, or like those of another context: they do not follow from the text before them"
SAMPLING_CAUSES = (
    Cause("temperature is not applied", _without(temperature=1.0)),
    Cause("top_k is not applied to the target", _without(top_k=0)),
    Cause("top_p is not applied to the target", _without(top_p=1.0)),
    Cause("min_p is not applied to the target", _without(min_p=0.0)),
    Cause("penalties are not applied", _without(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)),
    Cause("penalties count the tokens of a step only after it", _last_of_step),
    Cause("the texts look like a higher temperature than the one asked for", _hotter(1.4)),
    Cause("the texts look like a lower temperature than the one asked for", _hotter(0.7)),
    Cause("the likeliest token is taken, as if temperature were 0", _likeliest),
    Cause(RANDOM, _uniform),
    Cause(RANDOM, _unknown_tokens),
)

CAUSES = VERIFIER_CAUSES + SAMPLING_CAUSES
