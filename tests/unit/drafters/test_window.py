"""A draft model holds a bounded end of a text. Where that begins follows from the length alone, and no text changes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import VOCAB, decoder, plain_texts, request
from vocabularies import pairing

from outrider.core.params import SamplingParams
from outrider.core.store import PREFIXES, Store
from outrider.core.types import Budget, Draft
from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter, Way
from outrider.drafters.model.draft_model import WINDOW, ModelDrafter
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.prefix_files import SEGMENT, PrefixFiles
from outrider.models.load import load
from outrider.testing.contract import context
from outrider.testing.toy import ToyModel

SIZE, KEPT = 48, 12  # tokens of a window here, and the first ones of a text in it; half of it goes when it is full
TARGET, DRAFT = load("builtin:code").model, load("builtin:code-draft")
TREE = Budget(3, 2, 8)
KINDS = {"chain": (Budget(4), False), "tree": (TREE, False), "drawn": (Budget(3), True), "drawn tree": (TREE, True)}


def text(count: int, seed: int = 0) -> list[int]:
    """Token ids of a program."""
    ids = DRAFT.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    return ids[seed * 7 :][:count]


def small() -> ModelDrafter:
    return ModelDrafter(DRAFT.model, 3, SIZE)


def same(one: Draft, other: Draft) -> bool:
    """The same nodes, and the same distributions to the last bit."""
    probs = one.probs is None or (other.probs is not None and np.array_equal(one.probs, other.probs))
    return one.host == other.host and probs


@pytest.mark.parametrize(
    ("length", "out"),
    [(20, 0), (SIZE - 1, 0), (SIZE, 24), (SIZE + 1, 24), (SIZE + 23, 24), (SIZE + 24, 48), (300, 264)],
)
def test_the_window_begins_where_the_length_says(length: int, out: int) -> None:
    """What a draft reads is a text of its own: a drafter that is given no more drafts the same."""
    ids = text(length)
    drafter, whole = small(), ModelDrafter(DRAFT.model, 3, 400)
    assert drafter.missing(0, ids) == length - out - 1
    params = SamplingParams(temperature=0)
    for budget, drawn in KINDS.values():
        room = budget.clipped(min(budget.depth, SIZE - (length - out)))  # the last drafts before the border are short
        made = drafter.propose(context([0], [ids], [budget], params, needs_probs=drawn))
        assert same(
            made,
            whole.propose(
                context([0], [ids[:KEPT] + ids[KEPT + out :] if out else ids], [room], params, needs_probs=drawn)
            ),
        )
        drafter.release(0)
        whole.release(0)


@pytest.mark.parametrize(("kind", "temperature"), [("chain", 0.0), *((kind, 0.8) for kind in KINDS)])
def test_a_draft_does_not_depend_on_how_its_text_was_read(kind: str, temperature: float) -> None:
    """Three texts cross the border, together and at their own times, some after steps without a draft. Each draft is that of a
    drafter that sees the text for the first time, alone."""
    budget, drawn = KINDS[kind]
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    verifier = "match" if not drawn else "rejection" if budget.width == 1 else "traversal"
    drafter, crossed = small(), set[bool]()
    propose = drafter.propose

    def compared(asked: Any) -> Draft:
        made = propose(asked)
        for b, tokens in enumerate(asked.tokens):
            alone, ask = small(), asked.select([b])
            alone.error = deepcopy(drafter.error)  # what was learned of the texts ranks the nodes of a tree
            fresh = alone.propose(ask)
            count = fresh.nodes
            assert made.host[b] == fresh.host[0]
            assert made.probs is None or np.array_equal(made.probs[b, :count], fresh.probs[0])  # pyright: ignore[reportOptionalSubscript]
            crossed.add(drafter.levels.cache.length[asked.slots[b]] < len(tokens) - 5)
        return made

    drafter.propose = compared
    loop = decoder(TARGET, drafter, budget=budget, rows=3, verifier=verifier)
    asked = [request(text(length, n), params, n) for n, length in enumerate((10, 40, 100))]
    found = [s.output for s in loop.generate(asked)]
    assert crossed == {False, True}
    if verifier == "match":
        assert found == plain_texts(TARGET, asked)
    else:  # a text depends on its own drafts, and not on the other texts
        again = decoder(TARGET, small(), budget=budget, rows=1, verifier=verifier)
        assert found == [s.output for one in asked for s in again.generate([one])]


def test_the_window_of_a_text_is_found_in_files(tmp_path: Path) -> None:
    """By another process, for a text that is a little longer, and where a text goes on in the next window. Of a window that was
    not read before, only the first tokens are there."""
    ids, missing = text(700), list[int]()
    for lengths in ((500,), (510, 600), (500, 620)):
        folder = Store.open(tmp_path, 10**9, PREFIXES)
        drafter = ModelDrafter(DRAFT.model, 1, 512, prefixes=PrefixCache(0, PrefixFiles(folder, DRAFT)))
        for length in lengths:
            missing.append(drafter.missing(0, ids[:length]))
            drafter.read(0, ids[:length], missing[-1])
        folder.flush()
    assert missing[0] == 500 - 1
    assert missing[1] < 100
    assert missing[2] == 600 - 256 - 1 - SEGMENT
    assert missing[3] < 100
    assert missing[4] < 100


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_a_draft_with_other_tokens_has_a_window_too(way: Way) -> None:
    target = ToyModel(VOCAB, max_length=400)
    params = SamplingParams(temperature=0.8 if way == "tli" else 0, max_tokens=45, ignore_eos=True)

    def made() -> CrossTokenizerDrafter:
        return CrossTokenizerDrafter(ToyModel(12, seed=3, error=0.5, max_length=32), pairing(), 3, way)

    drafter, drafted = made(), 0
    propose = drafter.propose

    def compared(asked: Any) -> Draft:
        nonlocal drafted
        draft = propose(asked)
        for b in range(len(asked.slots)):
            assert draft.host[b] == made().propose(asked.select([b])).host[0]
            drafted += len(draft.host[b]) - 1
        return draft

    drafter.propose = compared
    asked = [request([1, 2, n + 1] * (5 + 20 * n), params, n) for n in range(3)]
    loop = decoder(target, drafter, budget=Budget(4), rows=3)
    assert [s.output for s in loop.generate(asked)] == plain_texts(target, asked)
    assert drafted > 50
    assert max(drafter.levels.cache.length) <= 32


def test_a_window_is_bounded_and_a_short_text_is_read_whole() -> None:
    assert ModelDrafter(DRAFT.model, 1, 10**5).levels.cache.max_length == min(WINDOW, DRAFT.model.max_length)
    assert ModelDrafter(ToyModel(VOCAB, max_length=10**5), 1, 10**5).levels.cache.max_length == WINDOW
    assert small().missing(0, text(SIZE - 1)) == SIZE - 2
