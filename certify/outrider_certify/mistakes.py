"""Known mistakes, as the distribution of the token that an engine with the mistake writes.

Each is a real incident. A mistake is a distribution of the next token, made from what is known before that token: the target's
distribution p and the drafter's q. The audit bets on each; the bet that wins names the mistake. Arrays are float64 [vocab].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from outrider_certify.sampling import point_mass, sampled_distribution, softmax
from outrider_certify.subject import SamplingParams, TokenDistribution


@dataclass(frozen=True)
class TokenContext:
    """What is known before a token is written."""

    p: TokenDistribution  # the target's
    q: TokenDistribution | None  # the drafter's as it draws, None if not known
    before: TokenDistribution | None  # q of the token before, if there is one
    params: SamplingParams  # of the request
    tokens: Sequence[int]  # the text so far
    prompt: int  # how many of these are the prompt
    end_ids: tuple[int, ...] = ()
    step: int | None = None  # tokens that were committed when the step of this token began; None if not known
    bonus: bool = False  # whether it follows draft tokens of its step, all of which were accepted

    @cached_property
    def rule(self) -> Rule | None:
        """The right `rule` of p and q; None if one of them is not known."""
        return rule(self.p.probs, self.q.probs) if self.q is not None and self.p.whole else None

    @cached_property
    def raw_q(self) -> np.ndarray | None:
        """q before the sampling parameters; None if they change nothing, or it is not known."""
        if self.q is None or self.q.logits is None:
            return None
        raw = softmax(self.q.logits)
        return None if np.abs(raw - self.q.probs).max() < 1e-6 else raw

    def resampled(self, params: SamplingParams, tokens: Sequence[int]) -> np.ndarray | None:
        """The target's distribution with other parameters, or after other tokens; None if its logits are not known."""
        if self.p.logits is None:
            return None
        return sampled_distribution(self.p.logits, params, tokens, self.prompt, self.end_ids)


Predict = Callable[[TokenContext], np.ndarray | None]
Rule = tuple[np.ndarray, np.ndarray]


# Its name in the certificate, and the distribution of the next token: None where it changes nothing, or is not known.
Mistake = tuple[str, Predict]


# -- mistakes of a verifier -------------------------------------------------------------------------------------------------


def rule(p: np.ndarray, q: np.ndarray) -> Rule:
    """(min(p / q, 1), the residual): how often each draft token is accepted, and what a token is drawn from after a rejection.

    The residual is the positive part of p - q; p where that is empty.
    """
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    accept = np.minimum(np.divide(p, q, out=(p > 0).astype(float), where=q > 0), 1.0)
    return accept, rest / total if total > 0 else p


def judged(drawn: np.ndarray, accept: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The token of one step: a draft token drawn from `drawn`, accepted so often; after a rejection one drawn from `rest`."""
    accepted = drawn * accept
    return accepted + (1 - accepted.sum()) * rest


def _low_q_dropped(least: float) -> Callable[[TokenContext, np.ndarray, Rule], np.ndarray | None]:
    """A draft token with less q than this is dropped after it was drawn, and the token comes from p."""

    def predict(context: TokenContext, q: np.ndarray, right: Rule) -> np.ndarray | None:
        low = q[q < least].sum()
        if not 0 < low < 1:
            return None
        accept, rest = right
        accepted = np.where(q < least, 0, q) * accept
        return accepted + (1 - low - accepted.sum()) * rest + low * context.p.probs

    return predict


def _half_of_q(context: TokenContext, q: np.ndarray, right: Rule) -> np.ndarray | None:
    """Drawn from the first half of the vocabulary, judged by q on all of it."""
    half = np.where(np.arange(len(q)) < len(q) / 2, q, 0)
    total = half.sum()
    return judged(half / total, *right) if total > 0 else None


def _shared_noise(context: TokenContext, q: np.ndarray, right: Rule) -> np.ndarray | None:
    """Draft token and residual r are drawn with the same exponential noise e: the least of e / q, and then of e / r.

    A rejected token x has no residual, so token j follows it with q_x r_j times the integral of S(u)^-2 from q_j / r_j on. There
    S(u) is the sum of max(q_i, r_i u) over all i, which is linear between two ratios q_i / r_i.
    """
    accept, r = right
    accepted, rest = q * accept, np.flatnonzero(r)
    u = q[rest] / r[rest]
    order = np.argsort(u, kind="stable")
    rest, u = rest[order], u[order]
    # After the k-th ratio S(u) = constant[k] + slope[k] u.
    slope, constant = np.cumsum(r[rest]), q.sum() - np.cumsum(q[rest])
    start, end = constant + slope * u, constant + slope * np.append(u[1:], np.inf)
    pieces = (1 / start - 1 / end) / slope
    predicted = accepted.copy()
    predicted[rest] += (1 - accepted.sum()) * r[rest] * np.cumsum(pieces[::-1])[::-1]
    return predicted


def _by_q(predict: Callable[[TokenContext, np.ndarray, Rule], np.ndarray | None]) -> Predict:
    """A prediction that needs the whole of p, and q. It has q and the right rule."""
    return lambda context: predict(context, context.q.probs, context.rule) if context.q and context.rule else None


VERIFIER_MISTAKES = (
    ("draft tokens are accepted without regard to the target", _by_q(lambda context, q, right: q)),
    (
        "wrong q: the likeliest draft token is taken, but judged as one that was drawn",
        _by_q(lambda context, q, right: judged(point_mass(int(q.argmax()), len(q)), *right)),
    ),
    (
        "no residual: after a rejection the token is drawn from p itself",
        _by_q(lambda context, q, right: judged(q, right[0], context.p.probs)),
    ),
    (
        "wrong q: draft tokens are drawn with the sampling parameters, but judged by the raw q",
        _by_q(
            lambda context, q, right: (
                None if context.raw_q is None else judged(q, *rule(context.p.probs, context.raw_q))
            )
        ),
    ),
    (
        "the draft ignores temperature: its tokens are drawn from the raw q, but judged by the processed one",
        _by_q(lambda context, q, right: None if context.raw_q is None else judged(context.raw_q, *right)),
    ),
    (
        "stale q: a draft token is judged by the q of the position before",
        _by_q(
            lambda context, q, right: (
                None if context.before is None else judged(q, *rule(context.p.probs, context.before.probs))
            )
        ),
    ),
    *(("a drawn draft token is dropped where its own q is low", _by_q(_low_q_dropped(least))) for least in (0.1, 0.3)),
    ("truncated q: drawn from a part of the vocabulary, judged by q on all of it", _by_q(_half_of_q)),
    (
        "the bonus token, after a step that is accepted whole, is drawn from the draft",
        _by_q(lambda context, q, right: q if context.bonus else None),
    ),
    ("shared noise: the draft token and the residual are drawn with the same random numbers", _by_q(_shared_noise)),
)

# -- mistakes of sampling parameters and numbers ----------------------------------------------------------------------------


def _not_applied(**off: float) -> Predict:
    """p as it is if sampling parameters are off."""

    def predict(context: TokenContext) -> np.ndarray | None:
        if all(getattr(context.params, name) == value for name, value in off.items()):
            return None
        return context.resampled(replace(context.params, **off), context.tokens)

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
    """Where some tokens are known only, the others count as one. That is right for a colder text, which has few of them."""

    def predict(context: TokenContext) -> np.ndarray | None:
        p = context.p.probs
        if context.params.temperature == 0 or (factor > 1 and not context.p.whole):
            return None
        return at_other_temperature(np.append(p, max(1 - p.sum(), 0)), factor)[: len(p)]

    return predict


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
