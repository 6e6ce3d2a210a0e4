"""The tree's functions against their definitions, on random trees, and what `validate` refuses and says."""

import random

import numpy as np
import pytest
from helpers import path_to

from outrider.core.tree import ancestor_mask, chain, child_table, depth, tree, validate
from outrider.core.types import Draft, Siblings

#        0
#      / | \
#     1  2  3        and a row of its root alone, and a chain
#     |     |\
#     4     5 6
PARENTS = np.array([[-1, 0, 0, 0, 1, 3, 3], [-1, -2, -2, -2, -2, -2, -2], [-1, 0, 1, 2, -2, -2, -2]])


def random_parents(rng, batch=4, nodes=9):
    rows = []
    for _ in range(batch):
        n = rng.randint(1, nodes)
        rows.append([(rng.randrange(5), -1)] + [(rng.randrange(5), rng.randrange(i)) for i in range(1, n)])
    return tree(rows)[1]


def test_children_of_a_known_tree():
    table = child_table(PARENTS, 3)
    none = [-1, -1, -1]
    assert table[0].tolist() == [[1, 2, 3], [4, -1, -1], none, [5, 6, -1], none, none, none]
    assert table[1].tolist() == [none] * 7
    assert child_table(PARENTS, 2)[0].tolist()[:4] == [[1, 2], [4, -1], [-1, -1], [5, 6]]  # beyond the width: left out
    assert child_table(PARENTS, 0).shape == (3, 7, 0)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 17])
def test_functions_of_parents_equal_their_definitions(nodes):
    rng = random.Random(nodes)
    parents = random_parents(rng, 8, nodes)
    mask, level, table = ancestor_mask(parents), depth(parents), child_table(parents, parents.shape[1])
    for b, row in enumerate(parents.tolist()):
        for n, parent in enumerate(row):
            path = path_to(row, n) if parent >= -1 else [n]
            assert mask[b, n].nonzero()[0].tolist() == sorted(path)
            assert level[b, n] == len(path) - 1
            children = [m for m, up in enumerate(row) if up == n]
            assert table[b, n].tolist() == children + [-1] * (len(row) - len(children))


def test_a_long_chain_reaches_its_root():
    parents = chain([list(range(100)), [7]])[1]
    assert np.array_equal(ancestor_mask(parents)[0], np.tril(np.ones((100, 100), bool)))
    assert depth(parents)[0].tolist() == list(range(100))


def test_chains_are_ragged_and_padded():
    tokens, parents = chain([[5, 6, 7], [8], [9, 4]])
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0], [9, 4, 0]]
    assert parents.tolist() == [[-1, 0, 1], [-1, -2, -2], [-1, 0, -2]]
    assert tokens.dtype == parents.dtype == np.int64
    assert [x.shape for x in chain([])] == [(0, 1), (0, 1)]


def test_trees_are_ragged_and_padded():
    tokens, parents = tree([[(5, -1), (6, 0), (7, 0), (8, 1)], [(1, -1)]])
    assert tokens.tolist() == [[5, 6, 7, 8], [1, 0, 0, 0]]
    assert parents.tolist() == [[-1, 0, 0, 1], [-1, -2, -2, -2]]
    validate(Draft(tokens, parents), 9)


def test_a_row_needs_its_root():
    with pytest.raises(ValueError, match=r"row 1 has no node.*return the root alone"):
        chain([[1, 2], []])


def drafted(tokens, parents, probs=None, siblings=Siblings.POINT):
    return Draft(np.array(tokens), np.array(parents), probs, siblings)


def distributions(*rows):
    return np.array([rows], np.float32)


def test_good_drafts_are_valid():
    validate(drafted([[1, 2, 2]], [[-1, 0, 0]]), 3)
    validate(drafted([[1, 0], [2, 0]], [[-1, 0], [-1, -2]]), 3)
    probs = distributions(
        [0.5, 0.5, 0.0], [float("nan")] * 3, [9.0, 9.0, 9.0]
    )  # rows of childless nodes are never read
    validate(drafted([[2, 0, 1]], [[-1, 0, 0]], probs, Siblings.WITHOUT_REPLACEMENT), 3)
    validate(drafted([[2, 0, 0]], [[-1, 0, 0]], probs, Siblings.IID), 3)


BROKEN = {
    "shapes": (drafted([[1, 2]], [[-1]]), r"\[batch, node\].*\[1, 2\] and \[1, 1\]"),
    "one dimension": (drafted([1, 2], [-1, 0]), r"\[batch, node\]"),
    "no node": (Draft(np.zeros((1, 0), int), np.zeros((1, 0), int)), "at least the root"),
    "dtype": (Draft(np.zeros((1, 1), np.float32), np.array([[-1]])), "int64, got float32"),
    "no root": (drafted([[1, 2]], [[0, 0]]), "row 0: node 0 is the root"),
    "padding in front": (drafted([[1, 2]], [[-2, -1]]), "row 0: node 0 is the root"),
    "two roots": (drafted([[1, 2], [1, 2]], [[-1, 0], [-1, -1]]), "row 1: node 1 has parent -1"),
    "parent later": (drafted([[1, 2, 2]], [[-1, 2, 0]]), "node 1 has parent 2; a parent comes before"),
    "own parent": (drafted([[1, 2]], [[-1, 1]]), "node 1 has parent 1"),
    "padding between": (drafted([[1, 0, 2]], [[-1, -2, 0]]), "padding .* only at the end"),
    "below padding": (drafted([[1, 2]], [[-1, -3]]), "node 1 has parent -3"),
    "token beyond": (drafted([[1, 3]], [[-1, 0]]), "node 1 proposes token 3, outside the target's 3"),
    "token negative": (drafted([[1, -1]], [[-1, 0]]), "proposes token -1"),
    "probs missing": (drafted([[1, 2]], [[-1, 0]], None, Siblings.IID), "probs must hold the distributions"),
    "another vocabulary": (
        drafted([[1]], [[-1]], distributions([1.0, 0.0]), Siblings.IID),
        r"= \[1, 1, 3\], got \[1, 1, 2\]",
    ),
    "probs rounded": (
        drafted([[1]], [[-1]], distributions([0.0, 1.0, 0.0]).astype(np.float16), Siblings.IID),
        "float16.*must not be rounded",
    ),
    "sum of 1.5": (
        drafted([[1, 2]], [[-1, 0]], distributions([0.5] * 3, [0.0] * 3), Siblings.IID),
        "is no distribution: its sum is 1.5",
    ),
    "negative mass": (
        drafted([[1, 2]], [[-1, 0]], distributions([-0.5, 0.5, 1], [0] * 3), Siblings.IID),
        "is no distribution",
    ),
    "NaN": (
        drafted([[1, 2]], [[-1, 0]], distributions([float("nan")] * 3, [0] * 3), Siblings.IID),
        "is no distribution",
    ),
    "drawn without mass": (
        drafted([[1, 2]], [[-1, 0]], distributions([0.5, 0.5, 0], [0] * 3), Siblings.IID),
        "no mass",
    ),
    "drawn twice": (
        drafted([[1, 0, 0]], [[-1, 0, 0]], distributions(*[[0.5, 0.5, 0]] * 3), Siblings.WITHOUT_REPLACEMENT),
        "node 2 repeats a sibling's token 0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_drafts_are_refused_with_their_reason(case):
    draft, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        validate(draft, 3)
