"""Checks that every model must pass: trees and batches, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.params import SamplingParams
from outrider.core.tree import tree
from outrider.core.types import Budget, Draft
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter
from outrider.models.base import LanguageModel
from outrider.models.nodes import Nodes
from tests.support.architectures import VOCAB, prompts
from tests.support.helpers import decoder, request

NEW = 10  # tokens written
TEXT = 20  # tokens of the text that is cut in every way


class Guided(BaseDrafter):
    """Trees with the known continuation among decoys, wrong from some depth on: what is accepted lies out of order.

    Args:
        texts: prompt and continuation.
        vocab_size: of the model.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int = VOCAB) -> None:
        self.texts, self.vocab_size = texts, vocab_size

    def propose(self, context: DraftContext) -> Draft:
        rows = []
        for tokens, budget in zip(context.tokens, context.budgets, strict=True):
            text = next((t for t in self.texts if list(t[: len(tokens)]) == list(tokens)), ())
            nodes, parent = [(tokens[-1], -1)], 0
            for level, right in enumerate(text[len(tokens) :][: budget.depth]):
                wrong = level == 1 + len(tokens) % 3
                drafted = [right + 1, right + 7 if wrong else right, right + 2][: budget.width]
                nodes += [(token % self.vocab_size, parent) for token in drafted]
                parent = len(nodes) - len(drafted) + min(1, len(drafted) - 1)
            rows.append(nodes)
        return Draft(*tree(rows))


def outputs(
    model: LanguageModel, texts: list[list[int]], drafter: Drafter | None = None, new: int = NEW
) -> list[list[int]]:
    """The greedy continuations of texts without their last `new` tokens."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    run = decoder(model, drafter, rows=len(texts), budget=Budget(4, 3, 12), end_ids=())
    return [row.tokens for row in run.generate([request(t[:-new], params) for t in texts])]


def one_at_a_time(model: LanguageModel, text: list[int]) -> np.ndarray:
    """[token, vocab]: the definition of what every row must be."""
    cache = model.new_cache(1, 64)
    out = []
    for token in text:
        out.append(model.forward(Nodes(np.array([[token]]), cache, [0])).logits[0, 0])
        cache.commit([0], [[0]])
    return np.stack(out)


def assert_rows_do_not_depend_on_their_neighbours(model: LanguageModel) -> None:
    size = model.vocab_size
    text, other = ([token % size for token in one] for one in prompts(TEXT, TEXT + 16))
    alone, beside = one_at_a_time(model, text), one_at_a_time(model, other)

    for chunks in ([TEXT], [1, 16, 3], [7, 2, 11]):  # prefill, cut anyhow
        cache, at = model.new_cache(1, 64), 0
        for n in chunks:
            logits = model.forward(Nodes(np.array([text[at : at + n]]), cache, [0])).logits[0]
            assert np.array_equal(logits, alone[at : at + n]), f"prefill in chunks of {chunks}, from {at}"
            cache.commit([0], [range(n)])
            at += n

    # A tree whose path is text[9:14], beside a long chain and a lone root, in rows out of order.
    cache = model.new_cache(4, 64)
    for row, tokens in ((2, text[:9]), (0, other[:3]), (3, other[:17])):
        model.forward(Nodes(np.array([tokens]), cache, [row]), want="none")
        cache.commit([row], [range(len(tokens))])
    nodes, path = [(text[9], -1)], [0]
    for token in text[10:14]:
        nodes += [((token + i) % size, path[-1]) for i in (1, 0, 2)]
        path.append(len(nodes) - 2)
    long = [(token, i - 1) for i, token in enumerate(other[3:])]
    tokens, parents = tree([nodes, long, [(other[17], -1)]])
    logits = model.forward(Nodes(tokens, cache, [2, 0, 3], parents)).logits
    assert np.array_equal(logits[0, path], alone[9:14]), "a tree"
    assert np.array_equal(logits[1, : len(long)], beside[3:]), "a chain beside it"
    assert np.array_equal(logits[2, 0], beside[17]), "a root beside it"
    last = model.forward(Nodes(tokens, cache, [2, 0, 3], parents), want="last").logits[:, 0]
    assert np.array_equal(last, np.stack([logits[0, len(nodes) - 1], beside[-1], beside[17]])), "the last of each row"

    cache.commit([2], [path])
    logits = model.forward(Nodes(np.array([text[14:]]), cache, [2])).logits[0]
    assert np.array_equal(logits, alone[14:]), "after the path was committed"
