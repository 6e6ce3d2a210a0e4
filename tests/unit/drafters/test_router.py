"""Several drafters at once: the text stays, the better one is taken, and the reason is told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import VOCAB, decoder, plain_texts, request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.tree import tree, validate
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters import Echo, ModelDrafter, NgramDrafter, SuffixDrafter, Wrong
from outrider.drafters.base import DraftContext, TargetPass
from outrider.drafters.combine.merge import NodeList, join, united
from outrider.drafters.combine.router import DrafterRouter, _Record
from outrider.params import SamplingParams
from outrider.testing.contract import context
from outrider.testing.toy import ToyModel

TARGET = ToyModel(VOCAB)


def model(error: float = 0.3) -> ModelDrafter:
    return ModelDrafter(ToyModel(VOCAB, error=error), 4, 512)


@pytest.mark.parametrize("budget", [Budget(4), Budget(3, 3, 7)])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_text_or_distribution_is_kept_with_any_company(budget: Budget, verifier: str) -> None:
    params = [SamplingParams(temperature=t, max_tokens=40, ignore_eos=True) for t in (0.0, 0.8, 1.2)]
    requests = [request([i, 1, 2], p, seed=i) for i, p in enumerate(params)]
    makers = {
        "texts": lambda: DrafterRouter({"suffix": SuffixDrafter(least=0.01), "ngram": NgramDrafter(1, 3)}),
        "mixed": lambda: DrafterRouter({"suffix": SuffixDrafter(least=0.01), "draft": model()}, {"draft": 0.1}),
        "hopeless": lambda: DrafterRouter({"wrong": Wrong(3), "draft": model(5.0)}, {"draft": 0.5}),
    }
    plain = plain_texts(TARGET, requests)
    for name, make in makers.items():
        rows = decoder(TARGET, make(), budget=budget, rows=3, verifier=verifier).generate(requests)
        if verifier == "match":
            assert [r.output for r in rows] == plain, name
        else:
            assert all(len(r.output) == 40 for r in rows), name
            assert rows[0].output == plain[0], name  # greedy: one distribution, one text


def test_the_useless_one_is_left_alone_and_asked_again() -> None:
    asked = []

    class Costly(Wrong):
        def propose(self, context: DraftContext) -> Draft:
            asked.append(context.slots)
            return super().propose(context)

    run = decoder(TARGET, DrafterRouter({"costly": Costly(1)}, {"costly": 0.2}), budget=Budget(4), rows=1)
    steps = [
        s
        for s, _ in run.steps([request([1, 2], SamplingParams(max_tokens=200, temperature=0.5, ignore_eos=True))])
        if s
    ]
    assert 5 < len(asked) < 40, "it never pays, so it is asked a few times, then now and then"
    assert "asked again" in "".join(str(note) for s in steps for note in s.draft.notes)


def test_one_that_costs_is_asked_for_what_it_lately_made_true() -> None:
    params = SamplingParams(max_tokens=120, temperature=0.5, ignore_eos=True)
    deepest: dict[float, list[int]] = {}
    for error in (0.0, 5.0):
        run = decoder(TARGET, DrafterRouter({"draft": model(error)}, {"draft": 0.01}), budget=Budget(16), rows=1)
        drafts = [s.draft.nodes - 1 for s, _ in run.steps([request([1, 2], params)]) if s]
        deepest[error] = [n for n in drafts if n]
    assert deepest[0.0][0] == deepest[5.0][0] == 5, "nothing is known of it"
    assert max(deepest[0.0]) == 16, "who is always right soon has the whole budget"
    assert max(deepest[5.0][8:]) <= 3, "who is mostly wrong does not get what others have earned"


def test_full_acceptance_does_not_show_where_a_run_ends() -> None:
    """Asked for two at a time, one that is right two times in three is known to be worth five."""
    record, draw, levels = _Record(), random.Random(0), list[int]()
    for _ in range(400):
        right = [draw.random() < 2 / 3 for _ in range(2)]
        record.learn(right.index(False) if False in right else 2, [(1, -1), (1, 0), (1, 1)], None)
        levels.append(record.levels)
    assert 4.5 < sum(levels) / len(levels) < 7


def test_a_new_row_does_not_forget_at_its_first_step_what_all_have_taught() -> None:
    """After many texts it is known how much one may be asked for; a bad first step of the next leaves a quarter at least."""
    router, own = (
        DrafterRouter({"wrong": Wrong(1)}, {"wrong": 0.01}),
        context([0], [[1, 2, 3]], [Budget(4)], SamplingParams()),
    )
    known = router._pooled["wrong"]
    for _ in range(40):
        known.learn(4, [(1, -1), (1, 0), (1, 1), (1, 2), (1, 3)], None)
    before = router._record(0, "wrong").levels
    router.propose(own)
    router.update(own, [Commit([9], [0], 0)], None)
    assert router._record(0, "wrong").levels > before / 4


def test_a_step_that_was_cut_teaches_nothing() -> None:
    """The end of the text does not count against the draft tokens after it."""
    router, own = DrafterRouter({"wrong": Wrong(1)}), context([0], [[1, 2, 3]], [Budget(4)], SamplingParams())
    for finish in ("length", None):
        router.propose(own)
        router.update(own, [Commit([9], [0], 0, finish)], None)
        assert router._pooled["wrong"].seen == (finish is None)


def test_one_unlucky_text_condemns_no_draft_model() -> None:
    """Three wrong proposals at the beginning of a text; the next text asks again at once. After many, it does not."""
    for proposals, asked in ((3, True), (60, False)):
        router = DrafterRouter({"draft": Wrong(2)}, {"draft": 0.8})
        for step in range(proposals):
            ask = context([0], [[1, 2, 3]], [Budget(4)], SamplingParams(), step=step)
            router._records.pop((0, "draft"), None)  # as if each proposal were made for a sequence of its own
            draft = router.propose(ask)
            if draft.nodes > 1:
                node = Commit([99], [0], 0)
                router.update(ask, [node], TargetPass(draft, torch.zeros(1, draft.nodes, VOCAB)))
            else:
                router._pooled["draft"].learn(0, [(3, -1), (99, 0)], None)
        router.release(0)
        draft = router.propose(context([1], [[4, 5, 6]], [Budget(4)], SamplingParams()))
        assert (draft.nodes > 1) is asked


@pytest.mark.parametrize(("length", "asked"), [(10, False), (400, True)])
def test_a_long_prompt_is_not_read_for_a_short_answer(length: int, asked: bool) -> None:
    """A draft model that gains a little: reading 400 tokens pays for long answers only."""
    router = DrafterRouter({"draft": Wrong(2)}, {"draft": 0.3})
    for _ in range(40):
        router._pooled["draft"].learn(2, [(3, -1), (99, 0), (99, 1)], None)
    for slot in range(1, 33):
        router._written[slot] = length
        router.release(slot)
    begun = replace(context([0], [[1] * 400], [Budget(4)], SamplingParams()), prompt_lengths=[400])
    draft = router.propose(begun)
    assert (draft.nodes > 1) is asked
    draft = router.propose(context([1], [[1, 2]], [Budget(4)], SamplingParams()))
    assert draft.nodes > 1, "a short prompt is soon read"


def test_the_better_one_is_taken() -> None:
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    [truth] = plain_texts(TARGET, [request([1, 2], params)])
    for names in (("wrong", "echo"), ("echo", "wrong")):
        drafters = {"wrong": Wrong(1), "echo": Echo({(1, 2): [1, 2, *truth]})}
        run = decoder(TARGET, DrafterRouter({n: drafters[n] for n in names}), budget=Budget(5), rows=1)
        steps = [s for s, _ in run.steps([request([1, 2], params)]) if s]
        assert len(steps) < 30
        assert str(steps[-1].draft.notes[0]).startswith("echo drafts: ")
        assert "wrong promises" in str(steps[-1].draft.notes[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_that_boasts_does_not_crowd_out_the_others(temperature: float) -> None:
    class Boasting(Wrong):
        def propose(self, context: DraftContext) -> Draft:
            draft = super().propose(context)
            return replace(draft, confidence=torch.full(draft.tokens.shape, 0.95))

    asked = request([1, 2], SamplingParams(max_tokens=300, temperature=temperature, ignore_eos=True))
    kept = []
    for drafter in (model(), DrafterRouter({"boasting": Boasting(3), "draft": model()}, {"draft": 0.01})):
        run = decoder(TARGET, drafter, budget=Budget(3, 2, 4), rows=1)
        steps = [s for s, _ in run.steps([asked.fresh()]) if s]
        kept.append(sum(s.commits[0].num_accepted for s in steps[30:]) / len(steps[30:]))
    assert kept[1] > 0.9 * kept[0] > 0.9


def test_a_row_that_drafts_nothing_says_so() -> None:
    router = DrafterRouter({"ngram": NgramDrafter(2, 3)})
    draft = router.propose(context([0], [[1, 2, 3]], [Budget(4)], SamplingParams()))
    assert draft.host[0] == [(3, -1)]
    assert [*map(str, draft.notes)] == ["none drafts: nothing to weigh"]


def test_what_a_router_cannot_hold() -> None:
    with pytest.raises(ValueError, match="needs drafters"):
        DrafterRouter({})


def _tree(shape: list[tuple[int, int]]) -> tuple[NodeList, list[float]]:
    """A tree from (token, a number that picks a parent), with falling chances."""
    nodes, confidence = [(9, -1)], [1.0]
    for token, pick in shape:
        parent = pick % len(nodes)
        nodes.append((token, parent))
        confidence.append(confidence[parent] * (1 + pick % 7) / 8)
    return nodes, confidence


def _paths(nodes: NodeList) -> dict[tuple[int, ...], int]:
    out = {(): 0}
    for n, (token, parent) in enumerate(nodes[1:], 1):
        up = next(path for path, at in out.items() if at == parent)
        out.setdefault((*up, token), n)
    return out


SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=7)


@given(st.lists(SHAPES, min_size=1, max_size=3), st.integers(0, 12))
@settings(max_examples=100)
def test_a_union_holds_the_likeliest_paths_of_all(shapes: list[list[tuple[int, int]]], most: int) -> None:
    trees = [_tree(s) for s in shapes]
    nodes, confidence = united(trees, most)
    assert len(nodes) == len(confidence) == min(most, len(set().union(*(_union(t) for t in trees)))) + 1
    validate(Draft(*tree([nodes])), 10)
    everywhere = set().union(*(_union(t) for t in trees))
    mine = _union((nodes, confidence))
    assert mine <= everywhere
    assert len(mine) == len(nodes) - 1
    if most >= len(everywhere):
        assert mine == everywhere
    for n, (_, parent) in enumerate(nodes[1:], 1):
        assert confidence[n] <= confidence[parent]


def _union(tree_: tuple[NodeList, list[float]]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in tree_[0][1:]:
        paths.append((*paths[parent], token))
    return set(paths[1:])


def test_rows_with_and_without_a_distribution_join() -> None:
    ask = context([0, 1, 2], [[1], [2], [3]], [Budget(2)] * 3, SamplingParams(), needs_probs=True)
    drawn = Draft(torch.tensor([[2, 5]]), torch.tensor([[-1, 0]]), torch.full((1, 2, VOCAB), 1 / VOCAB), Siblings.IID)
    chosen = Draft(torch.tensor([[3, 7, 8]]), torch.tensor([[-1, 0, 1]]))
    out = join(ask, [(1, drawn, 0), (2, chosen, 0)])
    validate(out, VOCAB)
    assert out.probs is not None
    assert out.siblings is Siblings.IID
    assert out.host[0] == [(1, -1)]
    assert out.host[1] == [(2, -1), (5, 0)]
    assert out.probs[2, 0, 7] == 1
    assert out.probs[2, 1, 8] == 1
    other = Draft(drawn.tokens, drawn.parents, drawn.probs, Siblings.WITHOUT_REPLACEMENT)
    with pytest.raises(ValueError, match="drawn in 2 ways"):
        join(ask, [(0, drawn, 0), (1, other, 0)])
