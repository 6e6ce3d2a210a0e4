"""The audit: it stops in time on broken samplers, and bounds of statistics hold."""

from __future__ import annotations

import numpy as np
import pytest
from broken import ToyEngine
from toy_server import certified

from outrider_certify import bounds
from outrider_certify.audit import Audit
from outrider_certify.certificate import Conclusion
from outrider_certify.mistakes import MISTAKES, TokenContext, at_other_temperature, judged, rule
from outrider_certify.statistical import Statistical, rank
from outrider_certify.subject import GeneratedText, SamplingParams, TextRequest, TokenDistribution

VOCAB = 300
# Tokens until the evidence is 10^6 (algorithms.md 4.3), for the sampler's mistake.
WITHIN = {"argmax as drawn": 190, "no residual": 690, "low q dropped": 620, "raw q": 1600}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def tokens_until_alarm(fault: str, seed: int, most: int = 6000) -> int:
    """A sampler over a Zipf-like vocabulary, whose draft has noise of one nat. The draft's mistakes are drawn, not computed."""
    rng, audit = np.random.default_rng(seed), Audit(1e-6)
    temperature = 0.7 if fault == "raw q" else 1.0
    params, text = SamplingParams(temperature=temperature), [0]
    zipf = -1.1 * np.log(np.arange(1, VOCAB + 1))
    while audit.tokens < most:
        logits = rng.permutation(zipf) * 1.5
        drafted = logits + rng.standard_normal(VOCAB)
        p, q = softmax(logits / temperature), softmax(drafted / temperature)
        used = softmax(drafted) if fault == "raw q" else q
        x = int(q.argmax()) if fault == "argmax as drawn" else int(rng.choice(VOCAB, p=q))
        if fault == "low q dropped" and q[x] < 0.1:
            y = int(rng.choice(VOCAB, p=p))
        elif rng.random() * used[x] < p[x]:
            y = x
        else:
            rest = np.maximum(p - used, 0)
            y = int(rng.choice(VOCAB, p=p if fault == "no residual" else rest / rest.sum()))
        place = TokenContext(
            TokenDistribution(p, logits=logits), TokenDistribution(q, logits=drafted), None, params, text, 1
        )
        if audit.see(place, y):
            break
        text.append(y)
    return audit.tokens


@pytest.mark.parametrize("fault", list(WITHIN))
def test_the_audit_stops_in_time(fault: str) -> None:
    """Within twice the tokens that a simulation of the method needed."""
    found = sorted(tokens_until_alarm(fault, seed) for seed in range(3))
    assert found[1] <= 2 * WITHIN[fault], found


def test_the_audit_is_silent_on_a_right_sampler() -> None:
    rng, audit = np.random.default_rng(1), Audit(0.01)
    for _ in range(1500):
        p, q = softmax(2 * rng.standard_normal(12)), softmax(2 * rng.standard_normal(12))
        context = TokenContext(TokenDistribution(p), TokenDistribution(q), None, SamplingParams(), [0], 1)
        audit.see(context, int(rng.choice(12, p=p)))
    assert audit.crossed is None
    assert audit.log_wealth < 2


def test_recorded_texts_of_a_broken_sampler() -> None:
    broken, honest = ToyEngine("no residual", error=2.0), ToyEngine(error=2.0)
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)

    def recorded(engine: ToyEngine) -> list[tuple[TextRequest, GeneratedText]]:
        requests = [TextRequest((i % 8, 1), params).with_(seed=i) for i in range(12)]
        return list(zip(requests, engine.generate(requests, engine.variants()[0]), strict=True))

    bad = certified(Statistical(honest, recorded=recorded(broken)))
    assert bad.conclusion is Conclusion.DIFFERS
    assert "no residual" in bad.findings[0].cause
    assert certified(Statistical(honest, recorded=recorded(honest))).conclusion is Conclusion.CANNOT_TELL


def test_tokens_that_are_not_known_count_as_one() -> None:
    """A server names its best five tokens only. Random tokens are found all the same, right ones are not."""
    rng = np.random.default_rng(2)
    right, wrong = Audit(0.01), Audit(0.01)
    for _ in range(400):
        p = softmax(3 * rng.standard_normal(40))
        best = np.argsort(-p)[:5]
        place = TokenContext(TokenDistribution(p[best], best), None, None, SamplingParams(), [0], 1)
        right.see(place, int(rng.choice(40, p=p)))
        wrong.see(place, int(rng.integers(40)))
    assert right.crossed is None
    assert wrong.crossed is not None
    assert "random" in wrong.ranking()[0][0]


def test_a_colder_text_is_named_although_some_tokens_are_not_known() -> None:
    rng, audit = np.random.default_rng(6), Audit(0.01)
    for _ in range(400):
        x = 2 * rng.standard_normal(40)
        p = softmax(x)
        best = np.argsort(-p)[:8]
        context = TokenContext(TokenDistribution(p[best], best), None, None, SamplingParams(), [0], 1)
        audit.see(context, int(rng.choice(40, p=softmax(x / 0.6))))
    assert "lower temperature" in audit.ranking()[0][0]


def test_shared_noise_is_predicted_as_it_is_drawn() -> None:
    rng, runs = np.random.default_rng(7), 40_000
    p, q = softmax(rng.standard_normal(7)), softmax(rng.standard_normal(7))
    noise, (accept, rest) = rng.exponential(size=(runs, 7)), rule(p, q)
    with np.errstate(divide="ignore"):
        drafted, second = (noise / q).argmin(1), (noise / rest).argmin(1)
    tokens = np.where(rng.random(runs) < accept[drafted], drafted, second)
    predict = next(predict for name, predict in MISTAKES if "shared noise" in name)
    predicted = predict(TokenContext(TokenDistribution(p), TokenDistribution(q), None, SamplingParams(), [0], 1))
    assert predicted is not None
    assert bounds.p_value(np.bincount(tokens, minlength=7).astype(float), runs * predicted) > 1e-3
    assert bounds.p_value(np.bincount(tokens, minlength=7).astype(float), runs * p) < 1e-9


def test_predictions_are_distributions() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        p, q = softmax(2 * rng.standard_normal(9)), softmax(2 * rng.standard_normal(9))
        target, draft = TokenDistribution(p, logits=np.log(p)), TokenDistribution(q, logits=np.log(q) * 2)
        context = TokenContext(target, draft, target, SamplingParams(temperature=0.7), [0, 1], 1)
        for name, predict in MISTAKES:
            predicted = predict(context)
            assert predicted is None or (abs(predicted.sum() - 1) < 1e-9 and predicted.min() > -1e-12), name
        assert np.allclose(judged(q, *rule(p, q)), p)
        assert np.allclose(at_other_temperature(p, 1), p)


def test_ranks_are_uniform() -> None:
    rng = np.random.default_rng(4)
    p = softmax(rng.standard_normal(6))
    numbers = [rank(TokenDistribution(p), int(rng.choice(6, p=p)), float(rng.random())) for _ in range(4000)]
    counts = np.histogram(numbers, 16, (0, 1))[0].astype(float)
    assert bounds.p_value(counts, np.full(16, 250.0)) > 1e-4
    assert rank(TokenDistribution(np.array([0.5, 0.2]), np.array([7, 3])), 1, 0.5) == pytest.approx(0.85)
    assert rank(TokenDistribution(np.array([0.5, 0.2]), np.array([3, 7])), 7, 0.5) == pytest.approx(0.6)


def test_the_bound_holds_and_the_power_is_as_stated() -> None:
    rng = np.random.default_rng(5)
    cells, n = 16, 4000
    tilt = np.full(cells, 1 / cells)
    expected = np.full(cells, n / cells)
    above = sum(
        bounds.total_variation_at_most(rng.multinomial(n, tilt).astype(float), expected, 0.01) < 0 for _ in range(50)
    )
    assert above == 0
    deviation = bounds.smallest_deviation(cells, n, 0.01)
    tilt[::2] += 2 * deviation / cells
    tilt[1::2] -= 2 * deviation / cells
    draws = [rng.multinomial(n, tilt).astype(float) for _ in range(200)]
    assert sum(bounds.p_value(d, expected) < 0.01 for d in draws) >= 190
    assert all(bounds.total_variation_at_most(d, expected, 0.01) >= deviation for d in draws)
    needed = bounds.needed(cells, 0.05, 0.01)
    right = rng.multinomial(needed, np.full(cells, 1 / cells)).astype(float)
    assert bounds.total_variation_at_most(right, np.full(cells, needed / cells), 0.01) == pytest.approx(0.05, rel=0.15)


def test_texts_of_two_servers_are_compared() -> None:
    rng = np.random.default_rng(6)

    def texts(bias: float, count: int = 24) -> list[list[int]]:
        return [[int(rng.random() < 0.5 + bias) for _ in range(20)] for _ in range(count)]

    groups = [i // 8 for i in range(24)]
    assert bounds.two_sample_p_value(texts(0), texts(0), groups=groups, shuffles=300)[1] > 0.01
    assert bounds.two_sample_p_value(texts(0), texts(0.25), groups=groups, shuffles=300)[1] < 0.01


def test_shares() -> None:
    assert bounds.share_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)
    assert bounds.share_interval(0, 0) == (0.0, 1.0)
    assert bounds.sign_p_value(0, 8) == pytest.approx(2 / 256)
    assert bounds.smallest_rate(459) == pytest.approx(0.01, rel=0.01)


def test_the_discrepancy_of_all_splits_at_once_is_its_definition() -> None:
    rng = np.random.default_rng(3)
    kernel = rng.random((8, 8))
    kernel += kernel.T
    np.fill_diagonal(kernel, 0.0)
    signs = rng.permuted(np.tile([1.0] * 4 + [-1.0] * 4, (5, 1)), axis=1)
    for sign, found in zip(signs, bounds.discrepancies(kernel, signs), strict=True):
        a, b = np.flatnonzero(sign > 0), np.flatnonzero(sign < 0)
        same = sum(kernel[i, j] for side in (a, b) for i in side for j in side)
        assert found == pytest.approx(same / (4 * 3) - 2 * kernel[np.ix_(a, b)].sum() / (4 * 4))
