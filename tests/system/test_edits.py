"""The edit workload: real changes of real files, and a target that writes the known answer whatever drafts."""

from __future__ import annotations

import ast

import pytest
from helpers import VOCAB, Loop, plain_texts, request

from benchmarks.edits import MODULES, ForcedTarget, edit_workload, edits, measure, run
from outrider.core.params import SamplingParams
from outrider.models.load import load
from outrider.testing.toy import ToyModel


def test_edits_are_what_they_say_and_always_the_same() -> None:
    made = edits(9, seed=4)
    assert made == edits(9, seed=4) != edits(9, seed=5)
    assert [e.kind for e in made] == ["rename", "insert", "delete"] * 3
    assert len(set(MODULES)) == len(MODULES)
    for edit in made:
        ast.parse(edit.after)
        assert edit.asked in edit.prompt
        assert edit.before in edit.prompt
        before, after = edit.before.splitlines(), edit.after.splitlines()
        if edit.kind == "insert":
            [new] = [line for line in after if "logger.debug('entering" in line]
            after.remove(new)
            assert after == before
        elif edit.kind == "delete":
            assert len(after) < len(before)
            assert set(after) <= set(before)
        else:
            assert len(after) == len(before)
            old, new = edit.asked.removeprefix("Rename ").removesuffix(".").split(" to ")
            assert old in edit.before.replace(new, "")
            assert new in edit.after


def test_the_workload_gives_prompt_and_answer_as_one_text() -> None:
    tokenizer = load("builtin:code-draft").tokenizer
    assert tokenizer is not None
    for edit, (prompt, answer, prediction) in zip(edits(3), edit_workload(tokenizer, 3), strict=True):
        assert tokenizer.decode(prompt + answer) == edit.prompt + edit.after
        assert prediction == edit.before


def test_a_forced_target_writes_the_answer_and_pays_for_its_forwards() -> None:
    loaded = load("builtin:code-draft")
    [(prompt, answer, prediction)] = edit_workload(loaded.tokenizer, 1, size=500)
    methods = ["plain", "ngram:8", "suffix:8", "prediction:8", "prediction:8x2x12", "token_recycling:3x2x6"]
    target = ForcedTarget(loaded.model)
    for method in methods:
        total = run(target, loaded.tokenizer, method, prompt, answer, prediction)
        assert total["tokens"] == len(answer)
        assert total["seconds"] > 0
        if method.startswith(("suffix", "prediction")):
            assert total["steps"] < len(answer) / 2.5
    records = measure(target, loaded.tokenizer, ["plain", "prediction:8"], [(prompt, answer, prediction)], 16)
    assert [r["method"] for r in records] == ["plain", "prediction:8"]
    assert records[0]["speedup"] == 1.0
    with pytest.raises(ValueError, match="no method 'prophet' here; there are plain"):
        run(target, loaded.tokenizer, "prophet:3", prompt, answer, prediction)


def test_a_target_without_a_text_to_write_writes_its_own() -> None:

    model = ToyModel(VOCAB)
    one = request([1, 2], SamplingParams(max_tokens=12, ignore_eos=True), 3)
    assert Loop(ForcedTarget(model), num_slots=1).generate([one])[0].output == plain_texts(model, [one])[0]
