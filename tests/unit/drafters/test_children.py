"""Children of a node: each kind has the distribution it says, at any batch, and shares or splits its noise as it says."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from helpers import noise as rows_noise
from scipy.stats import chi2

from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.types import Siblings
from outrider.drafters.model.children import child_scores, children
from outrider.kernels.probabilities import log_softmax, softmax

LAW = np.array([0.4, 0.0, 0.3, 0.2, 0.1], np.float32)
LOG_LAW = np.log(LAW, where=LAW > 0, out=np.full(5, -np.inf, np.float32))
MANY = 60_000


class ManyRows(Noise):
    """The same noise by operations on arrays, for tens of thousands of rows."""

    def gumbel(self, stream, position, n):
        return -np.log(-np.log1p(-self.uniform(stream, position, n)))


def draws(kind, width, node=0):
    """Counter of the children of MANY nodes with the same distribution."""
    noise = ManyRows(np.arange(MANY), np.full((MANY,), 3))
    scores = np.broadcast_to(LOG_LAW, (MANY, 5))
    nodes = np.full((MANY,), node)
    got = children(scores, width, kind, noise, Stream.DRAFT, np.full((MANY,), 7), node=nodes)
    return Counter(map(tuple, got.tokens.tolist()))


def fits(seen, distribution):
    """G-test at one in a million."""
    assert set(seen) <= set(distribution)
    g = 2 * sum(n * math.log(n / (MANY * distribution[x])) for x, n in seen.items())
    return g < chi2.ppf(1 - 1e-6, len(distribution) - 1)


def expected(kind):
    p = LAW.tolist()
    live = [t for t in range(5) if p[t]]
    if kind is Siblings.IID:
        return {(a, b): p[a] * p[b] for a in live for b in live}
    if kind is Siblings.TOP_THEN_SAMPLED:
        return {(0, b): p[b] / 0.6 for b in live if b}
    return {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in permutations(live, 2)}


@pytest.mark.parametrize("kind", [Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED])
def test_two_children_have_the_distribution_of_their_kind(kind):
    seen = draws(kind, 2)
    assert fits(seen, expected(kind))
    wrong = Siblings.IID if kind is not Siblings.IID else Siblings.WITHOUT_REPLACEMENT
    assert not set(seen) <= set(expected(wrong)) or not fits(seen, expected(wrong))  # the test can tell


@pytest.mark.parametrize("kind", [Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED])
def test_two_nodes_of_a_level_draw_apart(kind):
    noise = ManyRows(np.arange(MANY), np.full((MANY,), 3))
    scores, at = np.broadcast_to(LOG_LAW, (MANY, 5)), np.full((MANY,), 7)
    firsts = [
        children(scores, 1, kind, noise, Stream.DRAFT, at, node=np.full((MANY,), node)).tokens[:, 0].tolist()
        for node in (1, 2)
    ]
    p = LAW.tolist()
    assert fits(
        Counter(zip(*firsts, strict=True)), {(a, b): p[a] * p[b] for a in range(5) for b in range(5) if p[a] * p[b]}
    )


def test_nodes_of_a_level_share_the_token_noise_and_other_streams_do_not():
    noise = rows_noise([5, 5, 6], step=2)
    scores = np.zeros((3, 50), np.float32)
    at, node = np.array([9, 9, 9]), np.array([1, 2, 3])
    coupled = children(scores, 4, Siblings.POINT, noise, Stream.TOKEN, at, node=node).tokens
    assert coupled[0].tolist() == coupled[1].tolist() != coupled[2].tolist()
    assert coupled[0].tolist() == noise.gumbel(Stream.TOKEN, at, 50)[0].argsort()[:-5:-1].tolist()
    apart = children(scores, 4, Siblings.WITHOUT_REPLACEMENT, noise, Stream.DRAFT, at, node=node).tokens
    assert apart[0].tolist() != apart[1].tolist()
    root = children(scores[:1], 4, Siblings.WITHOUT_REPLACEMENT, noise.select([0]), Stream.DRAFT, at[:1]).tokens
    assert root[0].tolist() == noise.gumbel(Stream.DRAFT, at, 50)[0].argsort()[:-5:-1].tolist()


def test_the_first_coupled_child_is_the_token_the_noise_would_choose():
    scores = np.random.default_rng(1).standard_normal((6, 30), np.float32)
    noise, at = rows_noise([1, 2, 3, 4, 5, 6]), np.arange(6)
    got = children(scores, 3, Siblings.POINT, noise, Stream.TOKEN, at)
    assert np.array_equal(got.tokens[:, 0], (scores + noise.gumbel(Stream.TOKEN, at, 30)).argmax(1))
    assert (got.keys[:, :-1] >= got.keys[:, 1:]).all()
    assert np.allclose(got.log_q, np.take_along_axis(log_softmax(scores), got.tokens, 1), atol=1e-6)
    assert got.probs is None


@pytest.mark.parametrize("kind", [Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED])
def test_the_distribution_returned_is_the_distribution_drawn_from_down_to_its_zeros(kind):
    """A token whose mass float32 cannot hold is not drawn: a verifier that divides by the mass would be lost."""
    scores = np.array([[0.0, -120.0, -50.0, -np.inf]], np.float32)
    got = children(scores, 3, kind, rows_noise([1]), Stream.DRAFT, np.array([4]))
    assert np.array_equal(got.probs, softmax(scores))
    assert got.probs[0, 1] == 0
    expected = [0, 0, 0] if kind is Siblings.IID else [0, 2, -1]
    assert got.tokens[0].tolist() == expected
    assert got.log_q[0].tolist() == [np.log(got.probs[0, t]) if t >= 0 else -math.inf for t in expected]


@pytest.mark.parametrize("kind", list(Siblings))
def test_fewer_children_where_the_distribution_has_fewer_tokens(kind):
    scores = np.array([[-math.inf, 0.0, -math.inf, 1.0], [-math.inf, 0.0, -math.inf, -math.inf]], np.float32)
    got = children(scores, 3, kind, rows_noise([1, 2]), Stream.DRAFT, np.array([4, 4]))
    if kind is Siblings.IID:
        assert got.tokens[1].tolist() == [1, 1, 1]
        assert set(got.tokens[0].tolist()) <= {1, 3}
    else:
        assert sorted(got.tokens[0].tolist()) == [-1, 1, 3]
        assert got.tokens[1].tolist() == [1, -1, -1]
        assert got.log_q[1].tolist() == [0, -math.inf, -math.inf]
    assert got.tokens.shape == got.log_q.shape == got.keys.shape == (2, 3)


@pytest.mark.parametrize("kind", list(Siblings))
def test_rows_without_a_distribution_have_no_children_and_disturb_no_other(kind):
    scores = np.array([[math.nan] * 4, [-math.inf] * 4, [0.0, 1.0, 2.0, 3.0]], np.float32)
    noise, at = rows_noise([1, 2, 3]), np.array([4, 4, 4])
    got = children(scores, 2, kind, noise, Stream.DRAFT, at).tokens
    assert got[:2].tolist() == [[-1, -1]] * 2
    alone = children(scores[2:], 2, kind, noise.select([2]), Stream.DRAFT, at[2:]).tokens
    assert got[2].tolist() == alone[0].tolist()


def test_more_children_than_tokens():
    got = children(np.zeros((1, 2), np.float32), 5, Siblings.POINT, rows_noise([1]), Stream.TOKEN, np.array([4]))
    assert sorted(got.tokens[0].tolist()) == [-1, -1, -1, 0, 1]


def test_a_node_without_children_is_not_asked_for():
    with pytest.raises(ValueError, match="width=0; leave it out"):
        children(np.zeros((1, 2), np.float32), 0, Siblings.POINT, rows_noise([1]), Stream.TOKEN, np.array([4]))


def test_greedy_rows_take_the_best_of_q_and_no_noise():
    histories = [
        SequenceState(SamplingParams(temperature=t, logit_bias={3: -100.0}), (), (), [1], 1) for t in (0.0, 0.7)
    ]
    warp, logits = LogitsWarper(histories), np.array([[1.0, 3.0, 2.0, 9.0]] * 2, np.float32)
    scores = child_scores(warp, logits, [(), ()])
    noise, at = rows_noise([1, 2]), np.array([4, 4])
    got = children(scores, 3, Siblings.POINT, noise, Stream.TOKEN, at, greedy=warp.greedy)
    assert got.tokens[0].tolist() == [1, 2, 0]  # the bias has moved token 3 to the end
    drawn = warp.draw(logits, [(), ()], noise, Stream.TOKEN, at)
    assert got.tokens[:, 0].tolist() == drawn.tolist()
    quiet = children(scores[:1], 3, Siblings.POINT, noise.select([0]), Stream.TOKEN, at[:1], greedy=[True])
    assert quiet.tokens.tolist() == got.tokens[:1].tolist()
