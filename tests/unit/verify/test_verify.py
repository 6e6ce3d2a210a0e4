"""The verifiers' surface: registry, refusals that teach, known answers, corners, and which noise is read where."""

import numpy as np
import pytest

from outrider.core.noise import Noise, Stream
from outrider.core.tree import chain, tree
from outrider.core.types import Draft, Guarantee, Siblings
from outrider.verify import VERIFIERS, FixedDistribution, block, match, rejection, traversal

ALL = list(VERIFIERS)
RATIO = ["rejection", "block", "traversal"]
TREES = [v.name for v in VERIFIERS.values() if v.trees]


def noise(batch=1, seed=0, step=0):
    return Noise(np.arange(batch) + seed, np.full((batch,), step))


def at(*positions):
    return np.array(positions)


def hot(*tokens, vocab=5):
    """float32 [1, node, vocab]: a target that says tokens[n] after node n, and nothing else."""
    return np.eye(vocab, dtype=np.float32)[[tokens]]


def random_distributions(seed, *shape):
    """float32: distributions over the last dimension."""
    weights = np.random.default_rng(seed).random(shape, np.float32)
    return weights / weights.sum(-1, keepdims=True)


class Still(Noise):
    """Every uniform is the same number: coins that always fall one way."""

    value = 0.5

    def uniform(self, stream, position, n):
        return np.full((len(self.seed), n), self.value, np.float32)

    def gumbel(self, stream, position, n):
        return np.zeros((len(self.seed), n), np.float32)


# Registry.


def test_what_each_verifier_says_of_itself():
    facts = {name: (v.guarantee, v.draft_stream, v.needs_probs, v.trees) for name, v in VERIFIERS.items()}
    assert facts == {
        "match": (Guarantee.EXACT_TOKENS, Stream.TOKEN, False, True),
        "rejection": (Guarantee.EXACT_DISTRIBUTION, Stream.DRAFT, True, True),
        "block": (Guarantee.EXACT_DISTRIBUTION, Stream.DRAFT, True, False),
        "traversal": (Guarantee.EXACT_DISTRIBUTION, Stream.DRAFT, True, True),
    }
    assert [VERIFIERS[n].function for n in ALL] == [match, rejection, block, traversal]
    assert all(v.name == name and v.help and "\n" not in v.help for name, v in VERIFIERS.items())


# Refusals.


def test_block_refuses_trees_with_the_line_that_would_work():
    draft = Draft(*tree([[(0, -1)], [(0, -1), (1, 0), (2, 0)]]))
    with pytest.raises(ValueError, match=r"two children.*verifier='block' accepts chains(.|\n)*verifier='traversal'"):
        block(FixedDistribution(np.full((2, 3, 5), 0.2, np.float32)), draft, noise(2), at(1, 1))


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("siblings", [s for s in Siblings if s is not Siblings.POINT])
def test_drawn_draft_tokens_need_their_distribution(name, siblings):
    draft = Draft(*chain([[0, 1]]), None, siblings)
    with pytest.raises(
        ValueError, match=rf"{siblings.name}.*verifier='{name}' needs the distribution(.|\n)*verifier='match'"
    ):
        VERIFIERS[name](FixedDistribution(hot(1, 2)), draft, noise(), at(1))
    assert match(FixedDistribution(hot(1, 2)), draft, noise(), at(1)).accepted.tolist() == [1]  # match asks for none


@pytest.mark.parametrize("name", RATIO)
def test_a_distribution_of_another_vocabulary_is_refused(name):
    draft = Draft(*chain([[0, 1]]), np.full((1, 2, 4), 0.25, np.float32), Siblings.IID)
    with pytest.raises(ValueError, match="have 4 tokens, the target's vocabulary has 5"):
        VERIFIERS[name](FixedDistribution(hot(1, 2)), draft, noise(), at(1))


# Known answers.


@pytest.mark.parametrize("name", ALL)
def test_greedy_targets_are_followed_as_far_as_the_draft_tokens_are_right(name):
    target = FixedDistribution(hot(1, 2, 3, 4))
    for drafted, accepted, token in (([1, 2, 3], 3, 4), ([1, 2, 0], 2, 3), ([1, 0, 3], 1, 2), ([0, 2, 3], 0, 1)):
        verdict = VERIFIERS[name](target, Draft(*chain([[0, *drafted]])), noise(), at(9))
        assert verdict.accepted.tolist() == [accepted]
        assert verdict.token.tolist() == [token]
        assert verdict.host == [([*range(accepted + 1)], token)]


@pytest.mark.parametrize("name", ALL)
def test_no_draft_token_is_plain_decoding(name):
    distribution = random_distributions(1, 6, 1, 5)
    draft = Draft(*chain([[0]] * 6))
    verdict = VERIFIERS[name](FixedDistribution(distribution), draft, noise(6), at(1, 2, 3, 4, 5, 6))
    assert verdict.path.tolist() == [[0]] * 6
    assert verdict.accepted.tolist() == [0] * 6
    stream = Stream.TOKEN if name == "match" else Stream.RESIDUAL
    expected = (np.log(distribution[:, 0]) + noise(6).gumbel(stream, at(1, 2, 3, 4, 5, 6), 5)).argmax(-1)
    assert np.array_equal(verdict.token, expected)


def test_match_walks_trees_out_of_order_and_takes_the_lowest_of_equals():
    #  0 -> 1 (3), 2 (1), 3 (1);  2 -> 4 (0);  3 -> 5 (2);  the target says 1 after the root, and 2 after node 2
    draft = Draft(*tree([[(0, -1), (3, 0), (1, 0), (1, 0), (0, 2), (2, 3)]]))
    verdict = match(FixedDistribution(hot(1, 0, 2, 2, 0, 4)), draft, noise(), at(1))
    assert verdict.host == [([0, 2], 2)]
    verdict = match(FixedDistribution(hot(1, 0, 0, 2, 3, 4)), draft, noise(), at(1))
    assert (verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist()) == ([[0, 2, 4]], [2], [3])


@pytest.mark.parametrize("kind", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("name", TREES)
def test_greedy_targets_are_followed_through_trees(name, kind):
    """A greedy row: all of p on one token. The walk is the same under every rule, for any q."""
    #  0 -> 1 (3), 2 (1);  1 -> 3 (2);  2 -> 4 (0), 5 (2);  5 -> 6 (4)
    draft = Draft(
        *tree([[(0, -1), (3, 0), (1, 0), (2, 1), (0, 2), (2, 2), (4, 5)], [(0, -1), (3, 0)]]),
        None if kind is Siblings.POINT else np.full((2, 7, 5), 0.2, np.float32),
        kind,
    )
    verdict = VERIFIERS[name](FixedDistribution(hot(1, 0, 2, 0, 0, 4, 3).repeat(2, 0)), draft, noise(2), at(9, 30))
    assert verdict.path.tolist() == [[0, 2, 5, 6], [0, -1, -1, -1]]
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([3, 0], [3, 1])
    verdict = VERIFIERS[name](FixedDistribution(hot(1, 0, 3, 0, 0, 4, 3).repeat(2, 0)), draft, noise(2), at(9, 30))
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([1, 0], [3, 1])
    assert [n for n in verdict.path[0].tolist() if n >= 0] == [0, 2]


@pytest.mark.parametrize("kind", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("name", ALL)
def test_a_distribution_of_nan_is_reported_as_minus_one_and_disturbs_no_other(name, kind):
    table = np.full((2, 4, 4), np.nan, np.float32)
    table[1] = 0.25
    draft = Draft(
        *tree([[(0, -1), (1, 0), (2, 0 if name in TREES else 1), (3, 1 if name in TREES else 2)]] * 2),
        None if kind is Siblings.POINT else np.full((2, 4, 4), 0.25, np.float32),
        kind,
    )
    verdict = VERIFIERS[name](FixedDistribution(table), draft, noise(2), at(1, 1))
    assert (verdict.token[0], verdict.accepted[0]) == (-1, 0)
    alone = VERIFIERS[name](FixedDistribution(table[1:]), one_row(draft, 1), noise(1, seed=1), at(1))
    assert verdict.token[1] == alone.token[0] >= 0
    assert verdict.path[1].tolist() == alone.path[0].tolist()


def one_row(draft, b):
    probs = None if draft.probs is None else draft.probs[b : b + 1]
    return Draft(draft.tokens[b : b + 1], draft.parents[b : b + 1], probs, draft.siblings)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch(name):
    none = np.zeros(0, np.int64)
    draft = Draft(*tree([]), np.zeros((0, 1, 3), np.float32), Siblings.IID)
    verdict = VERIFIERS[name](FixedDistribution(np.zeros((0, 1, 3), np.float32)), draft, Still(none, none), none)
    assert [len(x) for x in (verdict.path, verdict.accepted, verdict.token)] == [0, 0, 0]


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("coin", [0.0, 2**-33, 1 - 2**-24])
def test_what_the_target_never_says_is_never_kept(name, coin):
    """p(x) = 0: refused even by a coin that shows 0, and where u * q would underflow."""
    for q in (0.5, 1e-44):
        probs = np.array([[[1 - q, q, 0.0], [1.0, 0.0, 0.0]]], np.float32)
        p = np.array([[[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]], np.float32)
        still = type("Coin", (Still,), {"value": coin})(np.array([0]), np.array([0]))
        verdict = VERIFIERS[name](FixedDistribution(p), Draft(*chain([[0, 1]]), probs, Siblings.IID), still, at(1))
        assert verdict.accepted.tolist() == [0]
        assert verdict.token.tolist() != [1]


@pytest.mark.parametrize("name", RATIO)
def test_a_draft_token_without_mass_in_q_does_not_break_anything(name):
    """A broken contract: the drafter's distribution says it cannot have drawn this. No NaN, no crash; p decides."""
    p = np.array([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]], np.float32)
    probs = np.array([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]], np.float32)
    for guess, accepted in ((1, 1), (2, 0)):
        verdict = VERIFIERS[name](
            FixedDistribution(p), Draft(*chain([[0, guess]]), probs, Siblings.IID), noise(), at(1)
        )
        assert verdict.accepted.tolist() == [accepted]
        assert 0 <= int(verdict.token[0]) < 3


@pytest.mark.parametrize("name", RATIO)
def test_an_empty_residual_falls_back_to_p(name):
    """A draft token is rejected though p <= q everywhere. Only rounding, or probs that sum to less than 1, can do that."""
    p, q = (np.array([[row, row]], np.float32) for row in ([0.0, 0.3, 0.6], [0.0, 0.35, 0.65]))
    still = type("Coin", (Still,), {"value": 1 - 2**-24})(np.array([0]), np.array([0]))
    verdict = VERIFIERS[name](FixedDistribution(p), Draft(*chain([[0, 1]]), q, Siblings.IID), still, at(1))
    assert verdict.accepted.tolist() == [0]
    assert verdict.token.tolist() == [
        2
    ]  # the largest of p, as this noise adds nothing; token 0 would be an empty argmax


@pytest.mark.parametrize("name", RATIO)
def test_distributions_are_not_changed(name):
    p = random_distributions(3, 3, 4, 5)
    draft = Draft(*chain([[0, 1, 2, 3]] * 3), p[..., ::-1], Siblings.IID)
    before = [x.copy() for x in (p, draft.probs, draft.tokens, draft.parents)]
    first = VERIFIERS[name](FixedDistribution(p), draft, noise(3), at(1, 1, 1))
    second = VERIFIERS[name](FixedDistribution(p), draft, noise(3), at(1, 1, 1))
    assert all(np.array_equal(a, b) for a, b in zip(before, (p, draft.probs, draft.tokens, draft.parents), strict=True))
    assert np.array_equal(first.token, second.token)
    assert np.array_equal(first.path, second.path)


# Which noise is read, and what is asked of the target.


class Recorded(Noise):
    def __init__(self, seed, step):
        super().__init__(seed, step)
        object.__setattr__(self, "read", [])

    def uniform(self, stream, position, n):
        self.read.append((stream, *position.tolist()))
        return super().uniform(stream, position, n)

    def gumbel(self, stream, position, n):
        self.read.append((stream, *position.tolist()))
        return -np.log(-np.log1p(-Noise.uniform(self, stream, position, n)))


@pytest.mark.parametrize("name", RATIO)
def test_coins_and_residual_are_read_at_their_own_places(name):
    seen = Recorded(np.array([1]), np.array([4]))
    VERIFIERS[name](
        FixedDistribution(hot(1, 2, 3)), Draft(*chain([[0, 1, 2]])), seen, at(50)
    )  # everything accepted: bonus at 52
    coins = [(Stream.ACCEPT, 50), (Stream.ACCEPT, 51)]  # traversal begins at the leaf, which is kept
    assert seen.read == [*(coins[1:] if name == "traversal" else coins), (Stream.RESIDUAL, 52)]
    seen = Recorded(np.array([1]), np.array([4]))
    VERIFIERS[name](
        FixedDistribution(hot(0, 2, 3)), Draft(*chain([[0, 1]])), seen, at(50)
    )  # refused at once: residual at 50
    assert seen.read == [(Stream.ACCEPT, 50), (Stream.RESIDUAL, 50)]


@pytest.mark.parametrize("name", RATIO)
def test_the_coin_of_a_node_has_the_nodes_index(name):
    """A draft token with p = q / 2 stands exactly when its own coin is below one half."""
    p = np.full((1, 2, 2), 0.5, np.float32)
    draft = Draft(*chain([[0, 1]]))  # q is all mass on the draft token, so h = 1/2 under both rules
    for seed in range(40):
        coin = noise(seed=seed).uniform(Stream.ACCEPT, at(7), 2)[0, 1]
        assert VERIFIERS[name](FixedDistribution(p), draft, noise(seed=seed), at(7)).accepted.tolist() == [
            int(coin < 0.5)
        ]


def test_match_reads_token_noise_at_absolute_positions():
    target = Counted(hot(1, 2, 3).repeat(2, 0))
    match(target, Draft(*chain([[0, 1, 2], [0, 4]])), Noise(np.array([1, 2]), np.array([4, 4])), at(50, 80))
    assert target.keys == [(1, 0, 0, 50), (1, 0, 0, 51), (1, 0, 0, 52), (2, 0, 0, 80)]


class Counted(FixedDistribution):
    def __init__(self, probs):
        super().__init__(probs)
        self.asked, self.keys = [], []

    def sample_row(self, row, node, key):
        self.asked.append([node] if row == 0 else [0, node])
        self.keys.append(key)
        return self.table[row, node].argmax()

    def probs(self, node):
        self.asked.append(node.tolist())
        return super().probs(node)


def test_only_visited_nodes_are_asked_for():
    drafted = Draft(*chain([[0, 1, 2, 0, 0, 0]]))
    table = hot(1, 2, 3, 4, 0, 0)
    for name, asked in (
        ("match", [[0], [1], [2]]),
        ("rejection", [[0], [1], [2]]),
        ("block", [[n] for n in range(6)]),
        ("traversal", [[n] for n in range(6)]),
    ):
        target = Counted(table)
        VERIFIERS[name](target, drafted, noise(), at(1))
        assert target.asked == asked


def test_no_one_asks_beyond_the_end_of_a_row():
    target = Counted(hot(1, 2, 3, 4).repeat(2, 0))
    for name in ALL:
        VERIFIERS[name](target, Draft(*chain([[0, 1], [0, 1, 2, 3]])), noise(2), at(1, 1))
    assert max(first for first, *_ in target.asked) == 1
