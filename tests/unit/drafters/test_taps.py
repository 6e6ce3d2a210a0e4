"""Drafters that read the target's layers: each committed position's features come once, in order, and right."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
from crossed import crossed
from engines import read, run, submit
from helpers import Loop, RandomTree, TargetTree, plain_texts, planned, request
from light import torch

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.types import Budget, Commit, Draft
from outrider.drafters import BaseDrafter, DraftContext, Drafter, NgramDrafter, NoDraft, TargetPass
from outrider.engine import Engine
from outrider.engine.prefix_cache import BLOCK
from outrider.engine.request import Sequence as Text
from outrider.models.load import load
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Wrong

BUILTIN = load("builtin:code", dtype="float32", device="cpu")
TAPS = (0, 3, -1)
PROMPT = [*range(40, 140)]


class Tapped(BaseDrafter):
    """Another drafter with the taps of a trained head. Asserts that it sees what a head needs.

    Each committed position's features must come exactly once and in order, through `start` and `update`, from the first
    position on that no prefix cache held; and they must be what the target gives for the whole text.
    """

    def __init__(self, wrapped: Drafter, taps: tuple[int, ...] = TAPS) -> None:
        self.wrapped, self.taps = wrapped, taps
        self.seen: dict[int, int] = {}  # slot -> the position after the last one whose features came
        self.held = defaultdict[int, list[torch.Tensor]](list)  # slot -> its features since the slot was free
        self.texts: dict[int, Sequence[int]] = {}
        self.positions = 0  # checked so far, over all sequences

    def start(self, slot: int, tokens: Sequence[int], first: int, features: np.ndarray) -> None:
        assert len(tokens) > first + len(features), "a token must follow each chunk"
        self._take(slot, tokens, first, features)

    def propose(self, context: DraftContext) -> Draft:
        for slot, tokens, prompt in zip(context.slots, context.tokens, context.prompt_lengths, strict=True):
            seen = self.seen.get(slot, 0)
            assert seen == len(tokens) - 1 or (not seen and len(tokens) == prompt), (
                f"slot {slot}: features up to position {seen}, {len(tokens) - 1} are committed"
            )
        return self.wrapped.propose(context)

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            assert commit.features is not None, "a step without features"
            first = len(tokens) - 1 - len(commit.features)
            self._take(slot, tokens, first, commit.features)
        self.wrapped.update(context, commits, target)

    def release(self, slot: int) -> None:
        """The values are compared at the end of a text: those of a position depend on the tokens up to it alone."""
        stop = self.seen.pop(slot, None)
        if stop is not None:
            held, nodes = np.concatenate(self.held.pop(slot)), np.array([self.texts[slot][:stop]])
            alone = Nodes(nodes, BUILTIN.model.new_cache(1, stop), [0])
            want = BUILTIN.model.forward(alone, taps=self.taps, want="none").features
            assert want is not None
            assert np.array_equal(held, want[0, stop - len(held) :]), f"slot {slot}: other features than the target's"
        self.wrapped.release(slot)

    def _take(self, slot: int, tokens: Sequence[int], first: int, features: np.ndarray) -> None:
        next_position = self.seen.get(slot, first)
        assert first == next_position, f"slot {slot}: position {first} comes where {next_position} was next"
        self.seen[slot] = first + len(features)
        self.positions += len(features)
        self.held[slot].append(features.copy())
        self.texts[slot] = tokens


def requests(count: int = 4) -> list:
    lengths = itertools.cycle([1, 2, 17, 70])
    return [
        request(PROMPT[i : i + n], SamplingParams(max_tokens=14, seed=i, temperature=i % 2))
        for i, n in zip(range(count), lengths, strict=False)
    ]


class Sometimes(Wrong):
    """Drafts in every second step only."""

    def propose(self, context):
        self.step = getattr(self, "step", 0) + 1
        return super().propose(context) if self.step % 2 else NoDraft().propose(context)


DRAFTERS = {
    "nothing": NoDraft,
    "wrong": Wrong,
    "sometimes": Sometimes,
    "trees": lambda: RandomTree(BUILTIN.model.vocab_size),
    "good trees": lambda: TargetTree(BUILTIN.model),
}


@pytest.mark.parametrize(("chunk", "name"), crossed([1, 5, 256], DRAFTERS, share=0.0))
def test_each_position_is_seen_once_in_order(name: str, chunk: int) -> None:
    drafter = Tapped(DRAFTERS[name]())
    run_ = Loop(BUILTIN.model, drafter, controller=Fixed(3, 2, 5), num_slots=3, max_length=128)
    run_.chunk = chunk
    asked = requests()
    rows = run_.generate(asked)
    assert [row.output for row in rows] == plain_texts(BUILTIN.model, asked)
    assert 0 <= unseen(drafter, rows) <= len(rows), "the last token of a text allows no draft"


def unseen(drafter: Tapped, rows: Sequence[Text]) -> int:
    return sum(len(row.tokens) - 1 for row in rows) - drafter.positions


class Rarely(Fixed):
    """Allows a draft in every fifth step."""

    def __init__(self) -> None:
        super().__init__(3)
        self.step = 0

    def budgets(self, slots: list[int]) -> list[Budget]:
        self.step += 1
        return super().budgets(slots) if self.step % 5 == 0 else [Budget(0)] * len(slots)


def test_steps_that_may_not_draft_call_no_drafter_and_are_seen_before_the_next_draft() -> None:
    drafter, controller, calls = Tapped(Wrong()), Rarely(), []
    update = drafter.update
    drafter.update = lambda *given: calls.append(controller.step % 5) or update(*given)  # type: ignore[method-assign]
    rows = Loop(BUILTIN.model, drafter, controller=controller, num_slots=1, max_length=128).generate(requests())
    assert {*calls} == {0}
    assert unseen(drafter, rows) <= 4 * len(rows)


@pytest.mark.parametrize("kind", ["together", "per request"])
def test_two_heads_side_by_side_get_their_own_layers(kind: str) -> None:
    first, second = Tapped(TargetTree(BUILTIN.model), (1, -1)), Tapped(Wrong(), (3, 1, 0))
    drafters = {"first": first, "text": NgramDrafter(), "second": second}
    default = None if kind == "together" else "first"
    combined = planned(drafters, ["text"], Budget(3, 3, 9), True, BUILTIN.model.vocab_size, default=default)
    run_ = Loop(BUILTIN.model, combined, controller=combined.planner, num_slots=2, max_length=128)
    asked = requests(2)
    seats = [run_.start(r) for r in asked]
    if kind == "per request":
        for row, name in zip(seats, ["first", "second"], strict=True):
            combined.assigned[row.slot] = name
    while any(row.finish is None for row in seats):
        run_.step()
    assert [row.output for row in seats] == plain_texts(BUILTIN.model, asked)
    positions = [len(row.tokens) - 1 for row in seats]
    expected = [sum(positions)] * 2 if kind == "together" else positions
    for drafter, count in zip([first, second], expected, strict=True):
        assert count - len(seats) <= drafter.positions <= count, "the last token of a text allows no draft"


def test_prefix_cache_and_preemption() -> None:
    """Prompts that start alike bring features from the prefix cache. A preempted sequence is read again."""
    drafter = Tapped(Wrong())
    llm = LLM(BUILTIN, drafter=drafter, max_num_seqs=3, max_model_len=160)
    with closing(Engine(llm.runtime, kv_tokens=240, prefill_chunk=16)) as eng:
        params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
        jobs = [read(request(PROMPT[:n], params)) for n in (48, 64, 50, 70)]
        texts = run(eng, jobs)
        assert eng.scheduler.preemptions > 0
        assert eng.stats.prefix_hits > 0
        assert eng.roster.failures == 0
    assert not drafter.seen
    assert [t.output for t in texts] == plain_texts(BUILTIN.model, [j.request for j in jobs])


def test_the_next_turn_of_a_conversation_reads_only_what_is_new() -> None:
    """Answers bring their features to the prefix cache, too: those that ended, and those that a reader stopped."""
    drafter = Tapped(Wrong())
    llm = LLM(BUILTIN, drafter=drafter, max_num_seqs=1)
    with closing(Engine(llm.runtime)) as eng:
        assert eng.prefixes is not None
        said, cached, known = PROMPT[:21], [], [0]
        for turn in range(4):
            stopped = turn == 1
            limit = 400 if stopped else 30
            job = read(request(said, SamplingParams(max_tokens=limit, seed=turn, temperature=0.8, ignore_eos=True)))
            submit(eng, [job])
            if stopped:
                while len(job.tokens) < 30:
                    job.next()
                eng.cancel([job.sequence])
            cached.append(job.result().counts.cached)
            held = len(job.sequence.tokens) - 1
            known.append(held - held % BLOCK)
            said = [*job.sequence.tokens, *PROMPT[30 : 35 + turn]]
            assert eng.prefixes.parting(said) == known[-1]
        assert eng.roster.failures == 0
    assert cached == known[:-1]
