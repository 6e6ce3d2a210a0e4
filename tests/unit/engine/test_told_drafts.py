"""What is told of drafts: to the reader of a text, to the planner, and to a later process."""

from __future__ import annotations

from pathlib import Path

from outrider import LLM, SamplingParams

PAIR = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4, "controller": "fixed"}
PROMPT = "def quicksort(xs):\n"


def test_a_draft_model_finds_what_an_earlier_process_has_read(tmp_path: Path) -> None:
    text, missing = "def f(a, b):\n    return a + b\n\n" * 24, list[int]()
    for _ in range(2):
        llm = LLM("builtin:code", speculative_config=PAIR, prefix_dir=tmp_path)
        missing.append(llm.drafters["draft_model"].missing(0, llm.encode(text)))
        llm.drafters["draft_model"].release(0)
        llm.generate(text, SamplingParams(max_tokens=8, temperature=0))
        assert llm.runtime.files is not None
        llm.runtime.files.folder.flush()
    assert missing[0] > 240
    assert missing[1] < missing[0] - 200


def test_a_stream_says_which_tokens_were_draft_tokens() -> None:
    llm, seen = LLM("builtin:code", speculative_config=PAIR), 0
    for delta in llm.stream(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)):
        if delta.pieces and len(delta.pieces) == len(delta.token_ids):
            assert [drafted for _, drafted in delta.pieces] == [n < delta.accepted for n in range(len(delta.pieces))]
            seen += delta.accepted
    assert seen > 10


def test_a_draft_is_charged_with_what_its_drafter_had_missed() -> None:
    llm = LLM("builtin:code", speculative_config=PAIR)
    [sequence] = llm.scheduler.add(llm.requests(llm.encode(PROMPT), SamplingParams(max_tokens=20, temperature=0)))
    steps = [step for step, _ in llm.scheduler.run([sequence]) if step is not None]
    first, *later = [(s.positions[0], charge.read) for s in steps for note in s.draft.notes for charge in note.charges]
    assert first[1] == first[0] - 2  # all but the root, and the token before it, which any step reads
    assert later
    assert all(read <= 1 for _, read in later)
