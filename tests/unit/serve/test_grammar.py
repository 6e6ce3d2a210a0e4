"""Grammars: what is asked of a guess never changes what is known of the text, and illegal guesses are cut off."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from helpers import Loop, RandomTree, planned
from serving import PAIR

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.grammar import MAX_DEPTH, Grammars
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.types import Budget
from outrider.decode import Sequence
from outrider.drafters.base import DraftContext, NoDraft
from outrider.drafters.combine.guard import legal

PATTERN = r"[a-d]{2}(-[0-9]+){1,3}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin:code", speculative_config=PAIR, max_num_seqs=2)


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, 8192, llm.loaded.end_ids)


@pytest.mark.parametrize("trial", range(10))
def test_questions_about_guesses_leave_no_trace(grammars: Grammars, trial: int) -> None:
    draw = random.Random(trial)
    compiled, text = grammars.regex(PATTERN), [5, 6, 7]
    asked = grammars.mask(compiled)
    for _ in range(8):
        for _ in range(draw.randrange(4)):  # guesses, legal or not, some of them long
            extra = [draw.randrange(8192) for _ in range(draw.randrange(1, 4))]
            if draw.random() < 0.7:
                extra[0] = int(draw.choice(asked.allowed(text, 3, []).nonzero().flatten().tolist()))
            asked.allowed(text, 3, extra)
        fresh = grammars.mask(compiled)  # has read nothing but the committed tokens
        here = asked.allowed(text, 3, [])
        assert torch.equal(here, fresh.allowed(text, 3, []))
        choice = int(draw.choice(here.nonzero().flatten().tolist()))
        after = asked.allowed(text, 3, [choice])
        text.append(choice)
        assert torch.equal(after, grammars.mask(compiled).allowed(text, 3, []))
        assert torch.equal(after, asked.allowed(text, 3, []))
        if choice == 0:
            break


def test_text_under_a_grammar_is_plain_decodings_for_random_trees(llm: LLM, grammars: Grammars) -> None:
    target = llm.decoder.target

    def write(drafter, budget: Budget) -> list[list[int]]:
        options = {"rows": 2, "end_ids": llm.loaded.end_ids, "tokenizer": llm.tokenizer}
        decoder = Loop(target, drafter, controller=Fixed(*budget.parts), **options)
        compiled = grammars.regex(PATTERN)
        requests = [
            Sequence(
                i, llm.encode("x = "), SamplingParams(temperature=t, max_tokens=20), i, mask=grammars.mask(compiled)
            )
            for i, t in enumerate([0, 1, 1.5])
        ]
        rows = decoder.generate(requests)
        assert all(re.fullmatch(PATTERN, row.checker.text) or row.finish.finish == "length" for row in rows)  # type: ignore[union-attr]
        return [row.output for row in rows]

    expected = write(NoDraft(), Budget(0))
    for drafter in (
        RandomTree(8192),
        planned({"tree": RandomTree(8192)}, (), Budget(3, 2, 6), True, 8192),
        llm.decoder.drafter,
    ):
        assert write(drafter, Budget(3, 2, 6)) == expected


def test_illegal_guesses_are_cut_with_what_hangs_on_them(llm: LLM, grammars: Grammars) -> None:
    a, b, dash, no = (llm.tokenizer(x)["input_ids"][0] for x in ("a", "b", "-", "zebra"))  # type: ignore[misc]
    history = SequenceState(SamplingParams(), (0,), (), [1, 2], 2, grammars.mask(grammars.regex(r"[ab]{2}-x")))
    noise = Noise(torch.tensor([0]), torch.tensor([0]))
    batch = DraftContext([0], [[1, 2]], [Budget(5)], LogitsWarper([history]), noise, Stream.TOKEN, False, [2])
    nodes = [(2, -1), (a, 0), (no, 0), (b, 1), (a, 2), (dash, 3), (no, 3), (dash, 1)]
    assert legal(batch, 0, nodes) == [(2, -1), (a, 0), (b, 1), (dash, 2)]


def test_what_cannot_be_compiled_says_why(grammars: Grammars) -> None:
    deep: dict = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    for ask, words in (
        (lambda: grammars.schema(json.dumps(deep)), "nested deeper than 32"),
        (lambda: grammars.schema("{"), "is not JSON"),
        (lambda: grammars.schema({"type": "nothing"}), 'Unsupported type "nothing"'),
        (lambda: grammars.regex("(" * 70_000), "bytes and may have"),
        (lambda: grammars.choice([]), "1 to 1000 strings"),
        (lambda: Grammars(None, 10, [0]), "needs a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            ask()
        assert ".cc" not in str(refused.value)
