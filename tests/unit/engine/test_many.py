"""Many requests in one call: what waits and what has ended is small, slots are full, and texts are those of each alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from engines import LONG, TARGET, mixed
from helpers import decoder, plain_texts, request

from outrider.core.params import SamplingParams
from outrider.core.types import Step
from outrider.engine.llm import LLM
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.testing.toy import ToyModel

SLOTS, ASKED = 3, 900
SHORT = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)


class Watch:
    """An observer that looks around at some steps. sizes: objects that the garbage collector knows; sequences among them."""

    def __init__(self, steps: range) -> None:
        self.at, self.steps, self.sizes = steps, 0, list[tuple[int, int]]()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        if self.steps in self.at:
            gc.collect()
            every = gc.get_objects()
            self.sizes.append((len(every), sum(type(one) is Sequence for one in every)))
        self.steps += 1

    def finished(self, sequence: Sequence) -> None: ...


def test_the_garbage_collector_has_little_to_look_through() -> None:
    """A request that waits is a record and its prompt, and one that has ended is an output of six objects."""
    llm = LLM("builtin:code", max_num_seqs=SLOTS, max_model_len=64)
    toy = ToyModel(llm.loaded.model.vocab_size)
    llm.decoder.target, llm.decoder.cache = toy, toy.new_cache(SLOTS, 64)
    prompts = [{"prompt_token_ids": [1 + n % SLOTS, 2]} for n in range(ASKED)]
    llm.generate(prompts[: 2 * SLOTS], SHORT)
    steps = 2 * ASKED // SLOTS  # of two tokens each
    llm.scheduler.watch(watch := Watch(range(steps // 20, steps, steps // 20)))
    gc.collect()
    before = len(gc.get_objects())
    outputs = llm.generate(prompts, SHORT)
    assert len(outputs) == ASKED
    assert len(watch.sizes) >= 18
    (first, _), (last, _) = watch.sizes[0], watch.sizes[-1]
    assert first - before < 3 * ASKED  # nearly all wait: two each
    assert last - before < 7 * ASKED  # nearly all have ended: six each
    assert max(sequences for _, sequences in watch.sizes) <= 4 * SLOTS


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_texts_come_in_the_order_of_their_requests(slots: int) -> None:
    asked = [request([1, 2], LONG.with_(max_tokens=90), 1), *mixed(30, 4)]
    scheduler = Scheduler(decoder(TARGET, rows=slots), raises=True)
    done = scheduler.generate(asked)
    assert [one.request for one in done] == asked
    assert [one.output for one in done] == plain_texts(TARGET, asked)
    assert len({one.clock.arrived for one in done}) == 1  # all have come with the call
    assert scheduler.idle
    assert not scheduler.problems()


def test_a_slot_is_never_empty_because_a_request_was_not_made_yet() -> None:
    """Also where all slots are free in the same step, and where the one that is next in order is long."""
    scheduler = Scheduler(decoder(TARGET, rows=SLOTS), raises=True)
    scheduler.watch(watch := Watch(range(0)))
    asked = [request([1, 2], SHORT.with_(max_tokens=50 if n == SLOTS else 1), n) for n in range(60)]
    assert len(scheduler.generate(asked)) == 60
    assert watch.steps == 1 + 50  # the others run beside the long one


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"params": SHORT.with_(stop="x")}, "stop strings need a tokenizer"),
        ({"params": SHORT, "continued": (3, 3, 3)}, "the text ends at token 2 of the 3 to continue"),
    ],
)
def test_a_bad_request_is_refused_before_any_runs(fields: dict[str, Any], words: str) -> None:
    scheduler = Scheduler(decoder(TARGET, rows=1), raises=True)
    scheduler.watch(watch := Watch(range(0)))
    asked = [request([1, 2], SHORT, n) for n in range(20)]
    with pytest.raises(ValueError, match=words):
        scheduler.generate([*asked, replace(asked[0], **fields)])
    assert watch.steps == 0
    assert scheduler.idle


def test_two_calls_share_the_slots_and_one_may_leave() -> None:
    """The second call need not wait for all that the first one asked."""
    scheduler = Scheduler(decoder(TARGET, rows=SLOTS), raises=True)
    many = [request([1, n % 9], SHORT, n) for n in range(90)]
    reader = scheduler.each(many)
    got = [next(reader).output]
    few = mixed(3, 7)
    assert [one.output for one in scheduler.generate(few)] == plain_texts(TARGET, few)
    assert scheduler.accepted <= 3 * SLOTS + len(few)
    got += [next(reader).output for _ in range(40)]
    assert got == plain_texts(TARGET, many[:41])
    reader.close()
    assert scheduler.idle
    assert not scheduler.problems()
