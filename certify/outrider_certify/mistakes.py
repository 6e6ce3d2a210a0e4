"""Known mistakes, as the distribution of the token that an engine with the mistake writes.

Each is a real incident. A mistake is a distribution of the next token, made from what is known before that token: the target's
distribution p and the drafter's q. The audit bets on each; the bet that wins names the mistake. Arrays are float64 [vocab].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider_certify.sampling import point_mass, sampled_distribution, softmax
from outrider_certify.subject import SamplingParams, TokenDistribution

_MOST_SIMULATED = 64  # likeliest tokens among which the shared noise is simulated
_DRAWS = 400


@dataclass(frozen=True)
class TokenContext:
    """What is known before a token is written.

    p: the target's. q: the drafter's as it draws, None if not known. before: q of the token before, if there is one.
    params: of the request. tokens: the text so far, of which `prompt` tokens are the prompt. step: tokens that were committed
    when the step of this token began; None if not known. bonus: whether it follows draft tokens of its step, all of
    which were accepted.
    """

    p: TokenDistribution
    q: TokenDistribution | None
    before: TokenDistribution | None
    params: SamplingParams
    tokens: Sequence[int]
    prompt: int
    end_ids: tuple[int, ...] = ()
    step: int | None = None
    bonus: bool = False

    def resampled(self, params: SamplingParams, tokens: Sequence[int]) -> np.ndarray | None:
        """The target's distribution with other parameters, or after other tokens; None if its logits are not known."""
        if self.p.logits is None:
            return None
        return sampled_distribution(self.p.logits, params, tokens, self.prompt, self.end_ids)


Predict = Callable[[TokenContext], np.ndarray | None]


# Its name in the certificate, and the distribution of the next token: None where it changes nothing, or is not known.
Mistake = tuple[str, Predict]


# -- mistakes of a verifier -------------------------------------------------------------------------------------------------


def acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(p / q, 1): the probability with which each token is accepted if it is drafted."""
    return np.minimum(np.divide(p, q, out=(p > 0).astype(float), where=q > 0), 1.0)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What a token is drawn from after a rejection: the positive part of p - q; p where that is empty."""
    rest = np.maximum(p - q, 0)
    return rest / rest.sum() if rest.sum() > 0 else p


def judged(p: np.ndarray, drawn: np.ndarray, q: np.ndarray, after: np.ndarray | None = None) -> np.ndarray:
    """The token of one step: a draft token drawn from `drawn`, judged by p/q; after a rejection from `after`.

    after: None for the residual of p and q.
    """
    kept = drawn * acceptance(p, q)
    return kept + (1 - kept.sum()) * (residual(p, q) if after is None else after)


def _raw_q(context: TokenContext) -> np.ndarray | None:
    """q before the sampling parameters; None if they change nothing, or it is not known."""
    if context.q is None or context.q.logits is None:
        return None
    raw = softmax(context.q.logits)
    return None if np.abs(raw - context.q.probs).max() < 1e-6 else raw


def _low_q_dropped(least: float) -> Callable[[np.ndarray, np.ndarray, TokenContext], np.ndarray | None]:
    """A draft token with less q than this is dropped after it was drawn, and the token comes from p."""

    def predict(p: np.ndarray, q: np.ndarray, context: TokenContext) -> np.ndarray | None:
        low = q[q < least].sum()
        if not 0 < low < 1:
            return None
        judged_tokens, accept = np.where(q < least, 0, q), acceptance(p, q)
        rejected = (judged_tokens * (1 - accept)).sum()
        return judged_tokens * accept + rejected * residual(p, q) + low * p

    return predict


def _half_of_q(p: np.ndarray, q: np.ndarray, context: TokenContext) -> np.ndarray | None:
    """Drawn from the first half of the vocabulary, judged by q on all of it."""
    half = np.where(np.arange(len(q)) < len(q) / 2, q, 0)
    return judged(p, half / half.sum(), q) if half.sum() > 0 else None


def _shared_noise(p: np.ndarray, q: np.ndarray, context: TokenContext) -> np.ndarray | None:
    """Draft token and residual are drawn with the same noise. Simulated among the tokens that count."""
    kept = np.argsort(-np.maximum(p, q), kind="stable")[:_MOST_SIMULATED]
    few_p, few_q = p[kept] / p[kept].sum(), q[kept] / q[kept].sum()
    race = np.random.default_rng(len(context.tokens)).exponential(size=(_DRAWS, len(kept)))
    with np.errstate(divide="ignore", invalid="ignore"):
        drafted = (race / few_q).argmin(1)
        second = (race / residual(few_p, few_q)).argmin(1)
    keep = acceptance(few_p, few_q)[drafted]
    counts = np.bincount(drafted, keep, len(kept)) + np.bincount(second, 1 - keep, len(kept))
    predicted = 0.02 * p  # so that a rare token does not end the bet
    predicted[kept] += 0.98 * counts / _DRAWS
    return predicted


def _by_q(predict: Callable[[np.ndarray, np.ndarray, TokenContext], np.ndarray | None]) -> Predict:
    """A prediction that needs the whole of p, and q."""
    return lambda context: (
        predict(context.p.probs, context.q.probs, context) if context.q is not None and context.p.whole else None
    )


def _by_raw_q(predict: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> Predict:
    """A prediction from p, q, and q before the sampling parameters."""
    return _by_q(lambda p, q, context: None if (raw := _raw_q(context)) is None else predict(p, q, raw))


VERIFIER_MISTAKES = (
    ("draft tokens are accepted without regard to the target", _by_q(lambda p, q, _: q)),
    (
        "wrong q: the likeliest draft token is taken, but judged as one that was drawn",
        _by_q(lambda p, q, _: judged(p, point_mass(int(q.argmax()), len(q)), q)),
    ),
    (
        "no residual: after a rejection the token is drawn from p itself",
        _by_q(lambda p, q, _: judged(p, q, q, after=p)),
    ),
    (
        "wrong q: draft tokens are drawn with the sampling parameters, but judged by the raw q",
        _by_raw_q(lambda p, q, raw: judged(p, q, raw)),
    ),
    (
        "the draft ignores temperature: its tokens are drawn from the raw q, but judged by the processed one",
        _by_raw_q(lambda p, q, raw: judged(p, raw, q)),
    ),
    (
        "stale q: a draft token is judged by the q of the position before",
        _by_q(lambda p, q, context: None if context.before is None else judged(p, q, context.before.probs)),
    ),
    *(("a drawn draft token is dropped where its own q is low", _by_q(_low_q_dropped(least))) for least in (0.1, 0.3)),
    ("truncated q: drawn from a part of the vocabulary, judged by q on all of it", _by_q(_half_of_q)),
    (
        "the bonus token, after a step that is accepted whole, is drawn from the draft",
        _by_q(lambda p, q, context: q if context.bonus else None),
    ),
    ("shared noise: the draft token and the residual are drawn with the same random numbers", _by_q(_shared_noise)),
)

# -- mistakes of sampling parameters and numbers ----------------------------------------------------------------------------


def _not_applied(**off: float) -> Predict:
    """p as it is if sampling parameters are off."""

    def predict(context: TokenContext) -> np.ndarray | None:
        params = replace(context.params, **off)
        return None if params == context.params else context.resampled(params, context.tokens)

    return predict


def _late_penalties(context: TokenContext) -> np.ndarray | None:
    """Penalties that count the tokens of a step only after it. Needs to know where steps begin."""
    p = context.params
    neutral = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)
    return None if neutral or context.step is None else context.resampled(p, context.tokens[: context.step])


def at_other_temperature(p: np.ndarray, factor: float) -> np.ndarray:
    """p at `factor` times its temperature."""
    with np.errstate(divide="ignore"):
        return softmax(np.log(p) / factor)


def _hotter(factor: float) -> Predict:
    return lambda context: (
        at_other_temperature(context.p.probs, factor) if context.p.whole and context.params.temperature > 0 else None
    )


def _likeliest(context: TokenContext) -> np.ndarray | None:
    """Almost always the likeliest token."""
    p = context.p.probs
    return None if context.params.temperature == 0 else 0.99 * point_mass(int(p.argmax()), len(p)) + 0.01 * p


def _uniform(context: TokenContext) -> np.ndarray | None:
    """Any token. Where some are known only: those get half of their mass, and the others the rest."""
    p = context.p.probs
    return np.full(len(p), 1 / len(p)) if context.p.whole else 0.5 * p


SAMPLING_MISTAKES = (
    ("temperature is not applied", _not_applied(temperature=1.0)),
    ("top_k is not applied to the target", _not_applied(top_k=0)),
    ("top_p is not applied to the target", _not_applied(top_p=1.0)),
    ("min_p is not applied to the target", _not_applied(min_p=0.0)),
    (
        "penalties are not applied",
        _not_applied(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    ),
    ("penalties count the tokens of a step only after it", _late_penalties),
    ("the texts look like a higher temperature than the one asked for", _hotter(1.4)),
    ("the texts look like a lower temperature than the one asked for", _hotter(0.7)),
    ("the likeliest token is taken, as if temperature were 0", _likeliest),
    ("tokens look random, or like those of another context: they do not follow from the text before them", _uniform),
)

# -- deviations without a name ----------------------------------------------------------------------------------------------


def _tilted(factor: float, *, drafted: bool) -> Predict:
    """p, with `factor` times the mass where the drafter (or the target itself) is most confident."""

    def predict(context: TokenContext) -> np.ndarray | None:
        p, q = context.p.probs, context.q
        if drafted and (q is None or not context.p.whole):
            return None
        preferred = q.probs > p if drafted and q is not None else point_mass(int(p.argmax()), len(p)) > 0
        if context.p.whole:
            tilted = np.where(preferred, factor * p, p)
            return tilted / tilted.sum() if tilted.sum() > 0 else tilted
        share = p[preferred].sum()
        if not 0 < share < 1:
            return None
        grown = (1 + share) / 2 if factor > 1 else share / 2
        return np.where(preferred, p * grown / share, p * (1 - grown) / (1 - share))

    return predict


UNNAMED = (
    ("the tokens that the drafter prefers come too often", _tilted(2.0, drafted=True)),
    ("the tokens that the drafter prefers come too rarely", _tilted(0.5, drafted=True)),
    ("the likeliest tokens come too often", _tilted(2.0, drafted=False)),
    ("the likeliest tokens come too rarely", _tilted(0.5, drafted=False)),
)

MISTAKES = VERIFIER_MISTAKES + SAMPLING_MISTAKES + UNNAMED
