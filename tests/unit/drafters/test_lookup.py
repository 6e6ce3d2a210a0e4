"""Drafts from the text itself: trees weighed by counts, chains of width one, and what other answers add."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import VOCAB, counts, decoder, path_to, plain_texts, request, toy_drafters
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from suffixes import PythonTextEnds, SuffixAutomaton

from outrider.core.infill import in_order
from outrider.core.params import SamplingParams
from outrider.core.tree import validate
from outrider.core.types import Budget
from outrider.drafters import Drafter, NgramDrafter, SuffixDrafter, TokenRecyclingDrafter
from outrider.drafters.lookup.corpus import Corpus
from outrider.drafters.lookup.mixture import Context, TextSource, grow
from outrider.drafters.lookup.suffix import PlainTextEnds, TextEnds
from outrider.kernels import cpu as native
from outrider.models.nodes import Nodes
from outrider.testing.contract import check_drafter, context
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def proposed(drafter: Drafter, tokens: list[int], budget: Budget) -> list[tuple[int, int]]:
    return drafter.propose(context([0], [tokens], [budget], SamplingParams())).host[0]


def chain_of(drafter: Drafter, tokens: list[int], depth: int = 8) -> list[int]:
    nodes = proposed(drafter, tokens, Budget(depth))
    assert [p for _, p in nodes] == list(range(-1, len(nodes) - 1)), "width 1 is a chain"
    return [t for t, _ in nodes[1:]]


def test_prompt_lookup_takes_the_longest_match_and_the_latest_place() -> None:
    for tokens, depth, expected in (
        ([1, 2, 3, 4, 9, 2, 3], 3, [4, 9, 2]),
        ([5, 6, 1, 7, 6, 2, 5, 6], 3, [1, 7, 6]),  # "5 6" beats the later "6"
        ([1, 2, 3, 9, 2, 4, 9, 2, 4, 9, 2, 4, 8, 1, 2], 2, [3, 9]),  # "1 2" once beats "2" four times
        ([6, 1, 6, 2, 6], 3, [2, 6]),  # the latest of two
        ([6, 1, 6, 1, 6, 2, 6], 2, [1, 6]),  # the more frequent of two
        ([1, 2, 3], 3, []),
        ([1, 2, 3, 1], 0, []),
    ):
        assert chain_of(NgramDrafter(1, 3), tokens, depth) == expected
    with pytest.raises(ValueError, match="1 <= min <= max"):
        NgramDrafter(3, 2)


def test_prompt_lookup_with_width_offers_the_other_continuations() -> None:
    nodes = proposed(NgramDrafter(1, 2), [1, 2, 3, 9, 1, 2, 4, 8, 7, 2, 5, 1, 2], Budget(2, 3, 6))
    assert [t for t, p in nodes if p == 0] == [4, 3, 5]  # after "1 2", the latest first; then after "2"
    assert {t for t, p in nodes if p > 0} == {8, 9, 1}


@given(texts)
@settings(max_examples=150)
def test_the_automaton_counts_every_substring(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for cut in range(len(tokens) + 1):
        automaton.extend(tokens[:cut])
    expected = Counter(tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1))
    for word, count in expected.items():
        at = 0
        for token in word:
            at = automaton.states[at].next[token]
        assert automaton.states[at].count == count
    for state, length in automaton.suffixes():
        end = tokens[-length:]
        places = [i + length for i in range(len(tokens) - length) if tokens[i : i + length] == end]
        total, options = automaton.following(state)
        assert total == len(places) > 0
        assert {t: n for t, n, _ in options} == Counter(tokens[p] for p in places)


@given(
    texts, st.integers(0, 6), st.integers(0, 3), st.none() | st.integers(0, 9), st.floats(0.02, 0.5), st.floats(0, 3)
)
@settings(max_examples=150)
def test_grown_trees_keep_the_budget_and_come_best_first(
    tokens: list[int], depth: int, width: int, nodes: int | None, least: float, doubt: float
) -> None:
    automaton, budget = SuffixAutomaton(), Budget(depth, width, nodes)
    least *= 1.0000123  # masses are simple fractions: on the border itself rounding decides
    automaton.extend(tokens)
    found = [Context(automaton, state, n**2, n) for state, n in automaton.suffixes()]
    grown = grow(tokens[-1], found, budget, least=least, doubt=doubt).nodes
    parents = [p for _, p in grown]
    assert len(grown) - 1 <= budget.max_nodes
    assert max(Counter(parents[1:]).values(), default=0) <= width
    assert all(len(path_to(parents, n)) - 1 <= depth for n in range(len(grown)))
    assert len(set(grown)) == len(grown), "siblings differ"
    order = [_mass(tokens, found, grown, n, doubt) for n in range(1, len(grown))]
    assert order == pytest.approx(_best(tokens, found, budget, least, doubt))


@pytest.mark.skipif(not native.available(), reason="no native kernels")
@given(st.integers(0, 2**32))
@settings(max_examples=150)
def test_native_lookups_grow_the_trees_of_the_reference(seed: int) -> None:
    rnd = random.Random(seed)
    words, least, doubt = rnd.choice([1, 2, 12, 40]), rnd.choice([0.0, 0.02, 0.1, 0.3]), rnd.choice([0.5, 2.0])

    def text(most: int) -> list[int]:
        length = rnd.choice([1, 3, 20, most])
        piece = [rnd.randrange(words) for _ in range(length)]
        return [t if rnd.random() < 0.97 else rnd.randrange(words) for t in piece * (most // length + 1)][:most]

    corpora, corpus = list[Corpus](), Corpus(rnd.choice([60, 4000]))
    fast, slow = TextEnds(least, doubt), PythonTextEnds(least, doubt)
    for _ in range(8):
        if rnd.random() < 0.4:
            corpus.add(*(text(rnd.choice([2, 90, 300])) for _ in range(rnd.randrange(3))))
            corpora = rnd.choice([[corpus], [corpus, Corpus(50)], [Corpus(9), corpus]])
        new = text(rnd.choice([1, 2, 80])) if rnd.random() < 0.8 or not slow.read else []
        if rnd.random() < 0.3 and len(corpus):
            held = rnd.choice(corpus.segments).tokens.tolist()
            at = rnd.randrange(len(held))
            new += [t for t in held[at : at + rnd.choice([2, 9, 90])] if t < words]
        forced = text(rnd.randrange(1, 9)) if rnd.random() < 0.2 else []
        budget = Budget(rnd.choice([0, 1, 3, 16]), rnd.choice([0, 1, 2, 9]), rnd.choice([None, 0, 1, 7, 40]))
        mine, expected = fast.offer(new, corpora, forced, budget), slow.offer(new, corpora, forced, budget)
        assert (mine.nodes, mine.match) == (expected.nodes, expected.match)
        assert mine.masses == expected.masses, "the same bits"


@given(texts, st.integers(1, 30), st.booleans())
@settings(max_examples=150)
def test_lookups_without_the_kernels_find_the_same_matches(tokens: list[int], at: int, stored: bool) -> None:
    plain, automaton, corpus = PlainTextEnds(0.02, 2.0), PythonTextEnds(0.02, 2.0), Corpus(100)
    corpus.add(tokens[at:] * stored)
    for new in (tokens[:at], tokens[at:]):
        mine, expected = (ends.offer(new, [corpus], [], Budget(4, 2, 9)) for ends in (plain, automaton))
        assert (mine.nodes, mine.match) == (expected.nodes, expected.match)
        assert mine.masses == pytest.approx(expected.masses)
    assert PlainTextEnds(0.1, 2.0).offer(tokens * 99, [], [], Budget(8)).match == 64


def _best(tokens: list[int], found: list[Context], budget: Budget, least: float, doubt: float) -> list[float]:
    """The masses of the best nodes there could be, by trying every token at every node."""
    nodes, masses, levels, used = [(tokens[-1], -1)], list[float](), [0], Counter[int]()
    while len(masses) < budget.max_nodes:
        some = [
            (_mass(tokens, found, [*nodes, (token, at)], len(nodes), doubt), token, at)
            for at in range(len(nodes))
            for token in set(tokens)
            if levels[at] < budget.depth and used[at] < budget.width and (token, at) not in nodes
        ]
        mass, token, at = max(some, default=(0.0, 0, 0))
        if mass < max(least, 1e-12):
            break
        rivals = sum(abs(m - mass) < 1e-9 and a == at for m, _, a in some)
        assume(rivals == 1 or budget.width >= len(set(tokens)))  # equal siblings for one place: either may be taken
        nodes.append((token, at))
        masses.append(mass)
        levels.append(levels[at] + 1)
        used[at] += 1
    return masses


def _mass(tokens: list[int], found: list[Context], grown: list[tuple[int, int]], node: int, doubt: float) -> float:
    """The definition, by counting in the text: what each context gives to the path, weighed."""
    path, total = [grown[n][0] for n in path_to([p for _, p in grown], node)[1:]], 0.0
    for _, _, weight, length in found:
        mass, word = weight / sum(c.weight for c in found), tokens[-length:]
        for at, token in enumerate(path):
            places = [i + len(word) for i in range(len(tokens) - len(word)) if tokens[i : i + len(word)] == word]
            right = sum(tokens[p] == token for p in places)
            mass *= right / (len(places) + doubt / _longer(found, path[:at], tokens, length)) if places else 0.0
            word = [*word, token]
        total += mass
    return total


def _longer(found: list[Context], path: list[int], tokens: list[int], length: int) -> int:
    """The match's length on the way down; contexts that have come to mean the same places share the longest's."""

    def ends(n: int) -> list[int]:
        word = [*tokens[-n:], *path]
        return [i + len(word) for i in range(len(tokens) - len(word) + 1) if tokens[i : i + len(word)] == word]

    same = [c.length for c in found if ends(c.length) == ends(length)] if path else [length]
    return max(same) + len(path)


def test_a_text_as_a_source_groups_its_places() -> None:
    source = TextSource([1, 2, 1, 3, 9, 1, 2], end=9)
    assert source.following((1, 3, 6)) == (3, [(2, 2, (2, 7)), (3, 1, (4,))])
    assert source.following((4,)) == source.following((7,)) == (0, [])


def test_suffix_drafts_follow_the_counts() -> None:
    def guess(tokens: list[int], depth: int = 8) -> list[int]:
        return chain_of(SuffixDrafter(), tokens, depth)

    assert guess([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2])[0] == 3  # 3 followed twice, 4 once
    assert guess([7, 8, 9, 1, 2, 3, 4, 7, 8, 9])[:4] == [1, 2, 3, 4]
    assert (
        guess([*range(40), *range(30)], 100)
        == [*range(30, 40), *range(30)][: len(guess([*range(40), *range(30)], 100))]
    )
    assert len(guess([*range(40), *range(30)], 100)) > 25  # long matches draft far
    assert len(guess([7, 8, 9, 1, 2, 3, 4, 5, 6, 7])) <= 3  # one token proves little
    assert guess([1, 2, 3, 4, 5]) == []
    draw = random.Random(0)
    assert guess([draw.randrange(10**6) for _ in range(300)]) == []
    with pytest.raises(ValueError, match="0 <= least <= 1"):
        SuffixDrafter(least=2)


def test_suffix_finds_what_other_requests_said_and_forgets_the_oldest() -> None:
    said = [*range(100, 140)]
    drafter = SuffixDrafter(shared=4096)
    drafter.propose(context([3], [[1, *said]], [Budget(4)], SamplingParams()))
    assert chain_of(drafter, [1, *said[:5]]) == []  # still running, and short
    drafter.release(3)
    assert chain_of(drafter, [5, *said[:6]], 6) == said[6:12]
    assert chain_of(SuffixDrafter(shared=0), [5, *said[:6]]) == []
    for n in range(60):
        drafter.propose(context([3], [[1, *[300 + n] * 150]], [Budget(4)], SamplingParams()))
        drafter.release(3)
    assert drafter.store is not None
    assert len(drafter.store) <= drafter.store.limit
    assert chain_of(drafter, [5, *said[:6]]) == []


def test_suffix_sees_a_long_answer_while_it_runs() -> None:
    drafter, said = SuffixDrafter(), [*range(100, 400)]
    drafter.propose(context([3], [[1, *said]], [Budget(4)], SamplingParams()))
    assert chain_of(drafter, [5, *said[200:206]], 6) == said[206:212]


def test_suffix_drafts_from_a_corpus() -> None:
    corpus = Corpus()
    corpus.add([*range(50, 90)], [7, 7, 60, 61, 62, 1])
    drafter = SuffixDrafter(corpus, shared=0)
    assert chain_of(drafter, [2, *range(50, 60)], 5) == [60, 61, 62, 63, 64]
    drafter.release(0)
    both = proposed(drafter, [2, 60, 61, 62], Budget(2, 2, 4))
    assert {t for t, p in both if p == 0} == {63, 1}
    for seed in range(2):
        check_drafter(lambda: SuffixDrafter(corpus, shared=0), 100, seed, draws=False)


GAP = (90, 91, 92)
BEFORE, AFTER = [*range(10, 40), 1, 2, 3, 4, 5, 6, *range(40, 60), 1, 2, 3], [70, 71, 1, 2, 8]


def filled(drafter: SuffixDrafter, prompt: list[int], answer: list[int], slot: int = 0) -> list[int]:
    """The chain that is drafted for the answer to a gap."""
    asked = context([slot], [prompt + answer], [Budget(3)], SamplingParams())
    return [t for t, _ in drafter.propose(replace(asked, prompt_lengths=[len(prompt)])).host[0][1:]]


def test_an_answer_in_a_gap_is_drafted_as_what_follows_the_text_before_it() -> None:
    prompt = [7, 90, *BEFORE, 91, *AFTER, 92]
    assert in_order(prompt, GAP) == [7, 91, *AFTER, 92, 90, *BEFORE]
    assert in_order([*prompt, 4, 5], GAP) == [7, 91, *AFTER, 92, 90, *BEFORE, 4, 5]
    assert in_order(prompt, None) == prompt
    assert in_order([90, 1, 92, 2], GAP) == [90, 1, 92, 2]
    assert filled(SuffixDrafter(gap=GAP), prompt, []) == [4, 5, 6]
    assert filled(SuffixDrafter(), prompt, []) == []
    assert filled(SuffixDrafter(gap=GAP), prompt, [80, 70]) == [71, 1, 2]  # the text after the gap is met
    drafter, said = SuffixDrafter(gap=GAP), [*range(60, 70)]
    assert filled(drafter, prompt, [], 1) == [4, 5, 6]
    filled(drafter, prompt, said, 1)
    drafter.release(1)  # the same place again, after two tokens of the answer were typed
    assert filled(drafter, [7, 90, *BEFORE, *said[:2], 91, *AFTER, 92], []) == said[2:5]


def test_long_texts_stay_cheap() -> None:
    draw = random.Random(1)
    tokens = [draw.choice([1, 1, 1, 2]) for _ in range(3000)] + [1] * 2000  # the automaton's worst kind
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    assert len(automaton.states) <= 2 * len(tokens)
    assert len(automaton.suffixes()) <= 13  # halving
    assert chain_of(SuffixDrafter(), tokens) == [1] * 8


def test_recycled_candidates_are_the_targets_own() -> None:
    drafter = TokenRecyclingDrafter(VOCAB, 3)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine = decoder(ToyModel(VOCAB, order=1), drafter, budget=Budget(3, 3, 9))
    steps = [s for s, _ in engine.steps([request([1, 2], params)]) if s]
    assert counts(steps)[1] > 100  # an order-1 target goes in circles, and the table knows the way
    seen = [t for t in range(VOCAB) if drafter.table[t, 0] >= 0]
    model = ToyModel(VOCAB, order=1)
    for token in seen:
        logits = model.forward(Nodes(np.array([[token]]), model.new_cache(1, 8), [0])).logits[0, 0]
        assert drafter.table[token].tolist() == np.argsort(-logits)[:3].tolist()
    with pytest.raises(ValueError, match=r"k must be in 1\.\.11"):
        TokenRecyclingDrafter(VOCAB, 12)


def test_recycled_trees_have_the_shape_of_the_budget() -> None:
    drafter = TokenRecyclingDrafter(50, 4)
    drafter.table = np.arange(200).reshape(50, 4) % 50
    for budget in (Budget(4, 3, 10), Budget(5), Budget(1, 4), Budget(0), Budget(3, 8, 100)):
        draft = drafter.propose(context([0, 1], [[1], [2, 3]], [budget] * 2, SamplingParams()))
        validate(draft, 50)
        most = min(budget.max_nodes, sum(min(budget.width, 4) ** d for d in range(1, budget.depth + 1)))
        assert draft.nodes - 1 == most
    drafter.table[:] = -1
    assert drafter.propose(context([0], [[1]], [Budget(4, 3)], SamplingParams())).nodes == 1


@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix_shared", "prediction", "token_recycling"])
@pytest.mark.parametrize("budget", [Budget(4, 0), Budget(9, 1, 1), Budget(6, 4, 0), Budget(40, 8, 10_000)])
def test_odd_budgets_write_the_same_text(name: str, budget: Budget) -> None:
    requests = [request([1, 2], SamplingParams(max_tokens=8, ignore_eos=True), s) for s in range(2)]
    rows = decoder(TARGET, toy_drafters(TARGET)[name](), budget=budget).generate(requests)
    assert [r.output for r in rows] == plain_texts(TARGET, requests)
