"""Traces: what is written is what was run, what is read adds up, and every step can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import decoder, planned, request, toy_drafters
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GREEDY, LOADED, RICH, TARGET, loop, record, three

from outrider.core.outputs import SpeculativeMetrics
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.engine.trace import Detail, Recorder, describe
from outrider_lab.traces import read, sampling

# -- written and read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", Detail)
def test_what_is_read_is_what_was_run(tmp_path: Path, detail: Detail) -> None:
    requests = three()
    rows = record(tmp_path / "t", loop(width=2), requests, detail)
    trace = read(tmp_path / "t")
    assert trace.problem is None
    assert trace.header.detail is detail
    assert list(trace.texts) == [r.id for r in requests]
    for asked, row in zip(requests, rows, strict=True):
        text = trace.text(asked.id)
        assert (text.output_tokens, text.finish, len(text.steps)) == (len(row.output), "length", row.steps)
        assert text.end is not None
        assert 0 < text.end.first <= text.end.seconds  # type: ignore[operator]
        assert len(text.origins) == len(row.output)
        if detail is Detail.COUNTS:
            with pytest.raises(ValueError, match="counts only"):
                _ = text.tokens
        else:
            assert text.prompt == asked.prompt
            assert text.tokens == row.output
            assert sampling(text.request) == asked.params
    assert set(trace.seconds) == {"draft", "target", "verify", "commit"}
    assert all(s > 0 for s in trace.seconds.values())
    assert sum(d.accepted for d in trace.acceptance) == trace.metrics.num_accepted_draft_tokens
    assert all(d.accepted <= d.drafted for d in trace.acceptance)


def test_counts_say_nothing_about_a_text(tmp_path: Path) -> None:
    asked = request([7, 9, 8], RICH, seed=3)
    record(tmp_path / "t", loop(), [asked], Detail.COUNTS)
    text = read(tmp_path / "t").text()
    assert text.request.prompt is None
    assert text.request.bad_words is None
    assert not {"logit_bias", "stop_token_ids", "stop", "prediction", "bad_words"} & set(text.request.params)
    assert all(step.tokens is None and step.path is None and step.token is None for step in text.steps)
    assert text.request.params["temperature"] == 0.8


def test_a_round_counts_once_for_any_number_of_rows(tmp_path: Path) -> None:
    record(tmp_path / "t", loop(), three(GREEDY))
    trace = read(tmp_path / "t")
    rounds = {step.round: step for step in trace.steps}
    assert max(step.rows for step in trace.steps) == 3
    assert trace.seconds["target"] == pytest.approx(sum(step.seconds["target"] for step in rounds.values()))
    assert [s.round for s in trace.steps] == sorted(s.round for s in trace.steps)


@settings(max_examples=25)
@given(
    drafter=st.sampled_from(
        ["none", "wrong", "noisy", "ngram", "suffix", "draft_model", "self", "random", "target_tree"]
    ),
    width=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    length=st.integers(1, 25),
    stop=st.booleans(),
)
def test_summaries_equal_the_metrics_of_the_outputs(tmp_path_factory, drafter, width, temperature, seed, length, stop):
    path = tmp_path_factory.mktemp("trace") / "t"
    params = SamplingParams(temperature=temperature, max_tokens=length, stop_token_ids=[4] if stop else [])
    run, asked = loop(drafter, width=width), request([1, 2, 3, 1, 2], params, seed)
    drafted, accepted, letters = list[int](), list[int](), ""
    with Recorder(path, Detail.COUNTS) as recorder:
        recorder.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        for step, rows in run.steps([asked]):
            assert step is not None
            recorder.keep(step, rows)
            proposed, kept = int(step.draft.num_draft_tokens[0]), step.commits[0]
            drafted.append(proposed)
            accepted.append(kept.num_accepted)
            parents = step.draft.parents[0].tolist()
            last = int(step.verdict.path[0][int(step.verdict.accepted[0])])
            letters += ("a" * kept.num_accepted + ("p" if not proposed else "c" if last in parents else "b"))[
                : len(kept.tokens)
            ]
    text = read(path).text()
    assert text.metrics == SpeculativeMetrics.of(drafted, accepted, text.metrics.num_spec_tokens)
    assert text.origins == letters
    assert text.origins.count("a") == sum(accepted)


def test_a_text_that_ends_outside_of_a_step_says_so(tmp_path: Path) -> None:
    run = loop()
    with Recorder(tmp_path / "t") as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        row = run.start(request([1, 2, 3], GREEDY))
        while row in run.waiting:
            run.prefill([row])
        trace.keep(run.round([row]), [row])
        trace.end(row, "abort")
        trace.end(row, "abort")
    text = read(tmp_path / "t").text()
    assert (text.finish, len(text.steps)) == ("abort", 1)


def test_a_row_that_moved_without_a_step_is_left_there(tmp_path: Path) -> None:
    run = loop("none")
    with Recorder(tmp_path / "t") as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        rows = [run.start(request([1, 2, n], GREEDY)) for n in range(2)]
        while run.waiting:
            run.prefill(run.waiting)
        trace.keep(run.round(rows), rows)
        run.round(rows[:1])  # the recorder is not called
        trace.keep(run.round(rows), rows)
        trace.keep(run.round(rows), rows)
    found = read(tmp_path / "t")
    assert found.problem is None
    one, other = found.texts.values()
    assert (one.finish, len(one.steps), other.finish, len(other.steps)) == ("abort", 1, None, 3)
    assert other.tokens == rows[1].output


def test_a_header_names_what_was_given_and_contains_no_text(tmp_path: Path) -> None:
    config = SpeculativeConfig(
        method=["draft_model", "suffix", "prediction"], model=TARGET, corpus={"text": "secret"}, prediction="secret"
    )
    header = describe(LOADED, config, loop())  # type: ignore[arg-type]
    assert header.speculative_config == {"method": ["draft_model", "suffix", "prediction"], "model": "ToyModel"}
    assert header.method == "draft_model+suffix+prediction"
    assert (header.verifier, header.batch_invariant) == ("match", True)


def test_a_header_names_the_method_and_not_a_class() -> None:
    router = planned({"ngram": NgramDrafter(1), "draft": toy_drafters(TARGET)["draft_model"]()}, ["ngram"], Budget(4))
    both = ["ngram", "draft"]
    for config, drafter, method, drafters in (
        ({"method": "auto"}, router, "auto", both),
        ({}, router, "ngram+draft", both),
        ({}, None, "none", []),
        ({}, NgramDrafter(1), "NgramDrafter", []),
    ):
        header = describe(LOADED, SpeculativeConfig.of(config), decoder(TARGET, drafter))  # type: ignore[arg-type]
        assert (header.method, header.drafters) == (method, drafters)


def test_a_trace_holds_the_words_of_a_note(tmp_path: Path) -> None:
    """A plan's note is an object. The file holds its words."""
    router = planned({"ngram": NgramDrafter(1), "draft": toy_drafters(TARGET)["draft_model"]()}, ["ngram"], Budget(4))
    record(tmp_path / "t", decoder(TARGET, router, rows=1, budget=Budget(4)), [request([1, 2, 3], GREEDY)])
    trace = read(tmp_path / "t")
    assert trace.problem is None
    assert trace.text().end is not None
    notes = {step.note for step in trace.text().steps}
    assert any(str(note).startswith("draft drafts; ") for note in notes), notes


def test_one_recorder_holds_one_run(tmp_path: Path) -> None:
    recorder, run = Recorder(tmp_path / "t"), loop()
    recorder.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its own Recorder"):
        recorder.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
    recorder.close()
    with pytest.raises(ValueError, match="one of counts, tokens, probs, got 'all'"):
        Recorder(tmp_path / "t", "all")
    with pytest.raises(FileNotFoundError):
        Recorder(tmp_path / "no" / "t")
