"""Twins: the batched verifiers decide as the references do, decision for decision, given the same noise."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.noise import Noise, Stream
from outrider.core.tree import depth, tree
from outrider.core.types import Draft, Siblings
from outrider.verify import VERIFIERS, FixedDistribution

TREES = [name for name, rule in VERIFIERS.items() if rule.trees]

MASK = 0xFFFFFFFF


def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 once more, in whole numbers: a twin of the noise and of where coins are read."""
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


class NoiseChoices:
    """Choices of a reference made from one row's noise, read where the batched forms read it."""

    def __init__(self, noise, position, coupled):
        self.noise, self.position, self.coupled = noise, position, coupled

    def coin(self, part, whole, *, depth, node):
        seed, step, position = int(self.noise.seed[0]), int(self.noise.step[0]), int(self.position[0]) + depth - 1
        word = philox(node // 4, position, Stream.ACCEPT.value, step, seed & MASK, (seed >> 32) & MASK)[node % 4]
        u = min(float(np.float32((word + 0.5) * 2.0**-32)), 1 - 2**-24)
        return u * whole < part

    def token(self, distribution, *, depth):
        stream, dtype = (Stream.TOKEN, np.float32) if self.coupled else (Stream.RESIDUAL, np.float64)
        gumbel = self.noise.gumbel(stream, self.position + depth - 1, len(distribution))[0]
        with np.errstate(divide="ignore"):
            return int((np.log(np.array(distribution, dtype)) + gumbel).argmax())


def expected(name, draft, distributions, noise, position):
    """[(path, token)] of the reference, row by row, each row alone and without its padding."""
    outcomes = []
    for b in range(len(position)):
        nodes = int((draft.parents[b] >= -1).sum())
        tokens, parents = draft.tokens[b, :nodes].tolist(), draft.parents[b, :nodes].tolist()
        p = distributions[b].tolist()
        choose = NoiseChoices(Noise(noise.seed[b : b + 1], noise.step[b : b + 1]), position[b : b + 1], name == "match")
        if draft.siblings is Siblings.POINT:
            hot = [[float(v == t) for v in range(len(p[0]))] for t in tokens]
            children = [[n for n, up in enumerate(parents) if up == node] for node in range(nodes)]
            q = [hot[c[0]] if c else hot[0] for c in children]  # of chains; with siblings it is not looked at
        else:
            q = draft.probs[b].tolist()
        outcomes.append(
            VERIFIERS[name].reference(tokens, parents, p.__getitem__, q.__getitem__, choose, draft.siblings)
        )
    return outcomes


def check(name, draft, distributions, noise, position):
    verdict = VERIFIERS[name](FixedDistribution(distributions), draft, noise, position)
    outcomes = expected(name, draft, distributions, noise, position)
    levels = verdict.path.shape[1]
    assert verdict.path.tolist() == [path + [-1] * (levels - len(path)) for path, _ in outcomes]
    assert verdict.accepted.tolist() == [len(path) - 1 for path, _ in outcomes]
    assert verdict.token.tolist() == [token for _, token in outcomes]
    assert verdict.path.dtype == verdict.accepted.dtype == verdict.token.dtype == np.int64
    return verdict


def random_distributions(rng, batch, nodes, vocab):
    """float32 [batch, node, vocab]: peaked, flat, with zeros, and one-hot."""
    distributions = np.array(
        [
            [[rng.choice([0, 0, 1, 2, rng.random(), 9]) for _ in range(vocab)] for _ in range(nodes)]
            for _ in range(batch)
        ],
        np.float32,
    )
    distributions[..., 0] += distributions.sum(-1) == 0
    return distributions / distributions.sum(-1, keepdims=True)


def random_case(rng, trees):
    """(draft, distributions, noise, position): ragged rows, some without a draft token, all kinds of siblings.

    Half of the drafts are close to the target, so that deep nodes are reached too.
    """
    batch, nodes, vocab = rng.randint(1, 5), rng.randint(1, 7), rng.randint(2, 5)
    distributions = random_distributions(rng, batch, nodes, vocab)
    q = distributions.copy() if rng.random() < 0.3 else random_distributions(rng, batch, nodes, vocab)
    if rng.random() < 0.3:
        q = (q + distributions) / 2
    siblings = rng.choice(list(Siblings))
    rows = []
    for b in range(batch):
        row = [(rng.randrange(vocab), -1)]
        for n in range(1, rng.randint(1, nodes)):
            parent = rng.randrange(n) if trees else n - 1
            distribution = q[b, parent].tolist()
            if siblings in (Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED):
                distribution = [
                    0 if any(s == (v, parent) for s in row) else mass for v, mass in enumerate(distribution)
                ]
            if sum(distribution):
                row.append((rng.choices(range(vocab), distribution)[0], parent))
            elif not trees:
                break
            else:
                row.append((rng.randrange(vocab), parent))  # a broken contract decides the same in both, too
        rows.append(row)
    tokens, parents = tree(rows)
    width = tokens.shape[1]
    probs = None if siblings is Siblings.POINT else q[:, :width]
    draft = Draft(tokens, parents, probs, siblings)
    noise = Noise(
        np.array([rng.randrange(-(2**63), 2**63) for _ in range(batch)], np.int64),
        np.array([rng.randrange(1000) for _ in range(batch)]),
    )
    return (
        draft,
        distributions[:, :width],
        noise,
        np.array([rng.randrange(1, 100_000) for _ in range(batch)]),
    )


@pytest.mark.parametrize("name", [*VERIFIERS, *(f"{name} on trees" for name in TREES)])
def test_twins_agree_on_random_batches(name):
    rng = random.Random(name)
    accepted, refused, alone, complete = 0, 0, 0, 0
    for _ in range(100):
        draft, distributions, noise, position = random_case(rng, trees="trees" in name)
        verdict = check(name.split()[0], draft, distributions, noise, position)
        accepted += int(verdict.accepted.sum())
        refused += int((verdict.accepted < draft.num_draft_tokens).sum())
        complete += int(((verdict.accepted == depth(draft.parents).max(1)) & (draft.num_draft_tokens > 1)).sum())
        alone += int((draft.num_draft_tokens == 0).sum())
    # the cases reach every branch: chains kept in part and whole, and rows that had no draft token
    assert min(accepted, refused, alone) > 50
    assert complete >= 3


def test_match_alone_and_in_an_empty_batch():
    """Nothing to judge, and distributions of NaN."""
    none = np.zeros(0, np.int64)
    verdict = VERIFIERS["match"](
        FixedDistribution(np.zeros((0, 1, 3), np.float32)), Draft(*tree([])), ManyRows(none, none), none
    )
    assert [x.shape for x in (verdict.path, verdict.accepted, verdict.token)] == [(0, 1), (0,), (0,)]
    assert {x.dtype for x in (verdict.path, verdict.accepted, verdict.token)} == {np.dtype(np.int64)}
    nan = FixedDistribution(np.full((1, 2, 3), np.nan, np.float32))
    one = np.array([1])
    verdict = VERIFIERS["match"](nan, Draft(*tree([[(0, -1), (0, 0)]])), Noise(one, one), one)
    assert (verdict.path[0, 0], verdict.accepted[0], verdict.token[0]) == (0, 0, -1)


class ManyRows(Noise):
    """Noise by tensor operations, for any number of rows."""

    def gumbel(self, stream, position, n):
        return -np.log(-np.log1p(-self.uniform(stream, position, n)))


@st.composite
def cases(draw, trees):
    """Like `random_case`, with every number open to hypothesis, so that a failure shrinks."""
    batch, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    weights = st.lists(st.sampled_from([0.0, 1.0, 3.0, 1e-30]), min_size=vocab, max_size=vocab).filter(sum)
    table = st.lists(st.lists(weights, min_size=nodes, max_size=nodes), min_size=batch, max_size=batch)
    p, q = (
        x / x.sum(-1, keepdims=True) for x in (np.array(draw(table), np.float32), np.array(draw(table), np.float32))
    )
    siblings = draw(st.sampled_from(Siblings))
    rows = []
    for b in range(batch):
        row = [(0, -1)]
        for n in range(1, draw(st.integers(1, nodes))):
            parent = draw(st.integers(0, n - 1)) if trees else n - 1
            used = [t for t, up in row if up == parent and siblings is not Siblings.IID]
            possible = [t for t in range(vocab) if q[b, parent, t] > 0 and t not in used]
            row.append((draw(st.sampled_from(possible or [0])), parent))
        rows.append(row)
    tokens, parents = tree(rows)
    width = tokens.shape[1]
    draft = Draft(tokens, parents, None if siblings is Siblings.POINT else q[:, :width], siblings)
    numbers = st.lists(st.integers(0, 2**31), min_size=batch, max_size=batch).map(np.array)
    return draft, p[:, :width], Noise(draw(numbers), draw(numbers)), draw(numbers)


@given(case=cases(trees=True), name=st.sampled_from(TREES))
@settings(max_examples=150, derandomize=True)
def test_tree_twins_agree(case, name):
    check(name, *case)


@given(case=cases(trees=False), name=st.sampled_from(list(VERIFIERS)))
@settings(max_examples=100, derandomize=True)
def test_chain_twins_agree(case, name):
    check(name, *case)


def test_traversal_of_a_chain_is_block():
    rng = random.Random(11)
    kept = 0
    for _ in range(100):
        draft, distributions, noise, position = random_case(rng, trees=False)
        one, other = (
            VERIFIERS[name](FixedDistribution(distributions), draft, noise, position) for name in ("block", "traversal")
        )
        assert np.array_equal(one.accepted, other.accepted)
        assert np.array_equal(one.token, other.token)
        assert np.array_equal(one.path[:, : other.path.shape[1]], other.path)
        kept += int(one.accepted.sum())
    assert kept > 50


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_row_is_decided_alone(name):
    """No neighbour effect: a row's verdict is the same alone, in another order, and beside longer drafts."""
    rng = random.Random(5)
    for _ in range(15):
        draft, distributions, noise, position = random_case(rng, trees=name in TREES)
        whole = VERIFIERS[name](FixedDistribution(distributions), draft, noise, position)
        for b in range(len(position)):
            nodes = int((draft.parents[b] >= -1).sum())
            probs = None if draft.probs is None else draft.probs[b : b + 1, :nodes]
            one = Draft(draft.tokens[b : b + 1, :nodes], draft.parents[b : b + 1, :nodes], probs, draft.siblings)
            alone = VERIFIERS[name](
                FixedDistribution(distributions[b : b + 1, :nodes]),
                one,
                Noise(noise.seed[b : b + 1], noise.step[b : b + 1]),
                position[b : b + 1],
            )
            assert alone.token[0] == whole.token[b]
            assert [n for n in alone.path[0].tolist() if n >= 0] == [n for n in whole.path[b].tolist() if n >= 0]
