"""Monte Carlo through the batched verifiers with real noise: what enumeration cannot see is how noise is shared.

320,000 sequences and a G-test on the joint of several tokens: sees a total variation of 0.01 with near certainty
(algorithms.md 4.2). Seeds are fixed, so nothing here is flaky.
"""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from oracles import RULES, judging
from scipy.special import chdtrc

from outrider.core.noise import Noise, Stream
from outrider.core.types import Draft, Siblings
from outrider.drafters.model.children import children
from outrider.testing.oracle import Toy, by_level, distribution, drawn_chain, grown_tree, plain
from outrider.verify import VERIFIERS, FixedDistribution
from outrider.verify.batched import draw

VOCAB, GAMMA, SAMPLES, CHUNK = 4, 2, 320_000, 40_000


class Markov(Toy):
    """A toy whose distributions look at the last token only (0 before the first), so that a table holds them all."""

    def __init__(self, seed):
        super().__init__(seed, vocab=VOCAB)
        self.rows = [Toy(seed, "zeros" if t == 3 else "random", VOCAB).p((t,)) for t in range(VOCAB)]
        self.drafted = [Toy(seed + 1, "random", VOCAB).q((t,)) for t in range(VOCAB)]

    def _at(self, text):
        last = text[-1] if text else 0
        return self.rows[last], self.drafted[last]

    def tables(self):
        """p, q: float32 [vocab, vocab], a row for each last token."""
        return (np.array([[float(x) for x in row] for row in rows], np.float32) for rows in (self.rows, self.drafted))


class ManyRows(Noise):
    """The same noise by operations on arrays: for tens of thousands of rows, where the native kernel's loop is slow."""

    def gumbel(self, stream, position, n):
        return -np.log(-np.log1p(-self.uniform(stream, position, n)))


def simulate(toy, name, steps, stream=None, ragged=False, seed=0, samples=SAMPLES, noise_type=ManyRows):
    """int64 [samples, steps]: the first tokens, which after `steps` steps every row has; and the first step's verdicts."""
    texts, firsts = [], []
    for start in range(0, samples, CHUNK):
        text, first = _simulate(toy, name, steps, stream, ragged, np.arange(start, start + CHUNK) + seed, noise_type)
        texts.append(text)
        firsts.append(first)
    return np.concatenate(texts), np.concatenate(firsts)


def _simulate(toy, name, steps, stream, ragged, seeds, noise_type):
    p, q = toy.tables()
    rule = VERIFIERS[name]
    batch, every = len(seeds), np.arange(len(seeds))
    text = np.zeros((batch, steps * (GAMMA + 1) + 1), np.int64)  # token 0 is the prompt
    position, first = np.ones_like(seeds), np.empty(0)
    for step in range(steps):
        noise = noise_type(seeds, np.full_like(seeds, step))
        tokens = text[every, position - 1][:, None]
        for level in range(GAMMA):
            guess = draw(q[tokens[:, -1]], noise, stream or rule.draft_stream, position + level)
            tokens = np.concatenate([tokens, guess[:, None]], 1)
        parents = np.broadcast_to(np.arange(GAMMA + 1) - 1, (batch, GAMMA + 1))
        if ragged:  # lengths 0 to gamma, by row and step
            parents = np.where(np.arange(GAMMA + 1) <= ((seeds + step) % (GAMMA + 1))[:, None], parents, -2)
        verdict = rule(FixedDistribution(p[tokens]), Draft(tokens, parents, q[tokens], Siblings.IID), noise, position)
        new = np.where(verdict.path[:, 1:] >= 0, tokens[:, 1:], 0)
        for level in range(GAMMA):
            text[every, position + level] = new[:, level]
        position = position + verdict.accepted
        text[every, position] = verdict.token
        position = position + 1
        if step == 0:
            first = np.stack([verdict.accepted, *new.T, verdict.token], 1)
    return text[:, 1 : steps + 1], first


def p_value(samples, expected):
    """G-test of rows of integers against a distribution {tuple: probability}. An outcome without probability gives 0."""
    shape = (int(samples.max()) + 1,) * samples.shape[1]  # a row as one number: rows take ten times as long to sort
    places, counts = np.unique(np.ravel_multi_index(tuple(samples.T), shape), return_counts=True)
    rows = np.stack(np.unravel_index(places, shape), 1)
    seen = {tuple(row.tolist()): int(n) for row, n in zip(rows, counts, strict=True)}
    if any(outcome not in expected for outcome in seen):
        return 0.0
    total = sum(seen.values())
    g = 2 * sum(n * np.log(n / (total * float(expected[outcome]))) for outcome, n in seen.items())
    return float(chdtrc(len(expected) - 1, g))


@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_joint_distribution_of_three_tokens(name, ragged):
    toy = Markov(1)
    texts, _ = simulate(toy, name, 3, ragged=ragged, samples=SAMPLES // 2 if ragged else SAMPLES)
    assert p_value(texts, plain(toy, 3)) > 1e-3


@pytest.mark.parametrize("name", ["rejection", "block", "match"])
def test_one_step_has_the_distribution_that_the_oracle_says(name):
    """Accepted count, accepted tokens and new token jointly: the batched form with noise against exact enumeration."""
    toy = Markov(2)

    def program(choose):
        tokens, parents, distributions = drawn_chain(GAMMA)(toy, (), choose)
        texts = [tuple(tokens[1 : n + 1]) for n in range(GAMMA + 1)]
        path, token = RULES[name](tokens, parents, lambda n: toy.p(texts[n]), lambda n: distributions[n], choose)
        kept = [tokens[n] for n in path[1:]]
        return (len(kept), *kept, *[0] * (GAMMA - len(kept)), token)

    _, first = simulate(toy, name, 1, stream=Stream.DRAFT, samples=SAMPLES // 2)
    assert p_value(first, distribution(program)) > 1e-3


@pytest.mark.parametrize("stream", [Stream.TOKEN, Stream.DRAFT], ids=["coupled", "independent"])
def test_match_writes_the_tokens_of_plain_decoding(stream):
    toy = Markov(3)
    texts, first = simulate(toy, "match", 3, stream=stream, ragged=True, samples=CHUNK)
    p, _ = toy.tables()
    seeds = np.arange(CHUNK)
    last, step = np.zeros_like(seeds), np.full_like(seeds, 77)  # another step: TOKEN does not look at it
    for i in range(3):
        last = draw(p[last], ManyRows(seeds, step), Stream.TOKEN, np.full_like(seeds, 1 + i))
        assert np.array_equal(last, texts[:, i])
    # draft tokens were accepted, coupled ones more often: the equality is not empty
    kept = (first[:, 0] > 0).mean()
    assert 0.4 < kept < 0.6 if stream is Stream.TOKEN else 0.1 < kept < 0.3


def test_plain_decoding_has_the_targets_distribution():
    """And so has match, whose tokens are these. Positions one after another share a seed."""
    toy = Markov(4)
    p, _ = toy.tables()
    seeds = np.arange(SAMPLES)
    noise, last, text = ManyRows(seeds, seeds), np.zeros_like(seeds), []
    for i in range(3):
        last = draw(p[last], noise, Stream.TOKEN, np.full_like(seeds, 1 + i))
        text.append(last)
    assert p_value(np.stack(text, 1), plain(toy, 3)) > 1e-3


TREE_TOY = Markov(4)


def simulate_trees(name, kind, seeds, apart=True):
    """int64 [samples, 3]: the first step over trees of two children with one each, as `children` draws them: tokens
    accepted, then the first two tokens (the second is 0 where only one was written)."""
    p, q = TREE_TOY.tables()
    batch = len(seeds)
    noise, position = ManyRows(seeds, np.zeros_like(seeds)), np.ones_like(seeds)
    tokens, parents = np.zeros((batch, 5), np.int64), np.broadcast_to([-1, 0, 0, 1, 2], (batch, 5))
    for node, below in enumerate(([1, 2], [3], [4])):
        probs, here = np.log(q[tokens[:, node]]), np.full_like(seeds, node if apart else 0)
        drawn = children(probs, len(below), kind, noise, Stream.DRAFT, position + min(node, 1), node=here)
        tokens[:, below] = drawn.tokens
    verdict = VERIFIERS[name](FixedDistribution(p[tokens]), Draft(tokens, parents, q[tokens], kind), noise, position)
    kept = np.take_along_axis(tokens, np.maximum(verdict.path, 0), 1)
    text = np.concatenate([np.where(verdict.path >= 0, kept, 0)[:, 1:], np.zeros((batch, 1), np.int64)], 1)
    text[np.arange(batch), verdict.accepted] = verdict.token
    return np.stack([verdict.accepted, *text[:, :2].T], 1)


@cache
def tree_distribution(name, kind):
    def program(choose):
        tokens, parents, distributions = grown_tree(by_level(2, 1), kind)(TREE_TOY, (), choose)
        texts = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            texts.append((*texts[parent], token))
        rule = judging(name, kind)
        path, token = rule(tokens, parents, lambda n: TREE_TOY.p(texts[n]), lambda n: distributions[n], choose)
        return len(path) - 1, *(*(tokens[n] for n in path[1:]), token, 0)[:2]

    return distribution(program)


DRAWN = [Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED]


@pytest.mark.parametrize("kind", DRAWN, ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_one_step_over_trees_has_the_distribution_that_the_oracle_says(name, kind):
    seen = simulate_trees(name, kind, np.arange(2 * CHUNK))
    assert p_value(seen, tree_distribution(name, kind)) > 1e-3


# Planted: noise that is shared or read again. Only a simulation sees these.


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_fault_draft_and_residual_share_their_noise(name):
    """vLLM #47386: the drafter drew from the stream that the residual is drawn from."""
    toy = Markov(1)
    texts, _ = simulate(toy, name, 2, stream=Stream.RESIDUAL, samples=SAMPLES // 4)
    assert (
        p_value(texts, plain(toy, 2)) < 1e-6
    )  # with its own stream: test_joint_distribution_of_three_tokens, the same toy


class OneCoin(ManyRows):
    """Coins that do not look at the node: one number per position, and none of the step's own."""

    def uniform(self, stream, position, n):
        if stream is not Stream.ACCEPT:
            return super().uniform(stream, position, n)
        coin = Noise(self.seed, np.zeros_like(self.step)).uniform(stream, position, 1)
        return np.broadcast_to(coin, (len(coin), n))


def test_fault_the_nodes_of_a_level_draw_with_one_noise():
    """Right under rejection, which looks below one child only; under traversal a refused subtree gives the next away."""
    kind = Siblings.WITHOUT_REPLACEMENT
    shared = {name: simulate_trees(name, kind, np.arange(CHUNK), apart=False) for name in ("rejection", "traversal")}
    assert p_value(shared["rejection"], tree_distribution("rejection", kind)) > 1e-3
    assert p_value(shared["traversal"], tree_distribution("traversal", kind)) < 1e-6


def test_fault_block_reads_its_coins_again():
    toy = Markov(5)
    texts, _ = simulate(toy, "block", 2, samples=SAMPLES // 2, noise_type=OneCoin)
    assert p_value(texts, plain(toy, 2)) < 1e-6


def test_the_test_itself_sees_a_hundredth():
    """The G-test refuses samples of a distribution 0.01 away, and accepts the distribution itself."""
    rng = np.random.default_rng(0)
    fair = {(i,): Fraction(1, 64) for i in range(64)}
    bent = np.array([1 / 64 * (1 + (0.02 if i % 2 else -0.02)) for i in range(64)])
    sample = rng.choice(64, SAMPLES, p=bent)[:, None]
    assert p_value(sample, fair) < 1e-6
    assert p_value(rng.choice(64, SAMPLES)[:, None], fair) > 1e-3
