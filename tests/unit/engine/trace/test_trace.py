"""Traces: what is written is what was run, what is read adds up, and every step can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from crossed import crossed
from helpers import VOCAB, decoder, planned, request, toy_drafters
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GREEDY, LOADED, RICH, SAMPLED, TARGET, loop, record, replays, three

from outrider.core.outputs import SpeculativeMetrics
from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.engine.request import Request
from outrider.engine.trace import Detail, Recorder, describe, read
from outrider.testing.toy import ToyModel
from outrider_lab.replay import replay

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
            assert text.request.sampling == asked.params
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
            run.prefill(row)
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
            run.prefill(run.waiting[0])
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


# -- computed again -----------------------------------------------------------------------------------------------------

RUNS = [
    ("none", "match", 1), ("draft_model", "match", 1), ("draft_model", "match", 3), ("random", "match", 3),
    ("target_tree", "match", 3), ("suffix", "match", 1), ("draft_model", "rejection", 1), ("draft_model", "rejection", 3),
    ("random", "rejection", 3), ("draft_model", "block", 1), ("ngram", "block", 1), ("draft_model", "traversal", 1),
    ("draft_model", "traversal", 3), ("random", "traversal", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "chosen"), crossed({"greedy": GREEDY, "sampled": SAMPLED, "rich": RICH}.items(), RUNS, share=0.1), ids=str
)
def test_every_step_is_computed_again_in_company(tmp_path: Path, kind, chosen) -> None:
    (_, params), (drafter, verifier, width) = kind, chosen
    rows = record(tmp_path / "t", loop(drafter, verifier, width), three(params), Detail.PROBS)
    trace, fresh = read(tmp_path / "t"), loop(drafter, verifier, width)
    assert trace.problem is None
    written: dict[int, list[int]] = {}
    for again in replays(trace, fresh):
        assert again.differs == ()
        assert again.path == tuple(again.step.path or ())
        assert [n.node for n in again.nodes] == list(range(again.step.drafted + 1))
        assert [n.node for n in again.nodes if n.accepted] == list(again.path)
        words = [n.why() for n in again.nodes]
        assert all(word.startswith(("accepted", "rejected", "never judged", "the last token")) for word in words)
        for node, word in zip(again.nodes[1:], words[1:], strict=True):
            assert word.startswith("accepted") == node.accepted
            if node.evidence and node.evidence.coin and verifier == "rejection":
                assert node.evidence.coin.accepts == node.accepted
        written.setdefault(again.text.id, []).extend(again.written)
    assert list(written.values()) == [row.output for row in rows]
    assert not fresh.sequences
    assert sum(fresh.cache.length) == 0


def test_a_replay_says_what_the_noise_chose(tmp_path: Path) -> None:
    """The reason holds in numbers: log p + noise of what was drawn is the largest."""
    import math

    record(tmp_path / "t", loop("random", width=3), three())
    refused = 0
    for again in replays(read(tmp_path / "t"), loop("none")):
        for node in again.nodes[1:]:
            if node.evidence and node.evidence.rival is not None and node.p > 0:
                _, p, noise = node.evidence.rival
                assert math.log(p) + noise >= math.log(node.p) + node.evidence.noise - 1e-5  # type: ignore[operator]
                refused += 1
    assert refused > 10


def test_another_model_is_detected(tmp_path: Path) -> None:
    record(tmp_path / "t", loop(), three(), Detail.PROBS)
    trace = read(tmp_path / "t")
    other = decoder(ToyModel(VOCAB, seed=5, max_length=200))
    found = list(replays(trace, other))
    assert any("recorded is" in why for again in found for why in again.differs)
    assert all(any("the target's probabilities differ" in why for why in again.differs) for again in found)
    with pytest.raises(ValueError, match="Load toy"):
        replay(trace, decoder(ToyModel(VOCAB + 1, max_length=200)), 0, next(iter(trace.texts)))


def test_what_cannot_be_computed_is_said(tmp_path: Path) -> None:
    requests = three()
    record(tmp_path / "t", loop(verifier="rejection"), requests)
    trace, run = read(tmp_path / "t"), loop(verifier="rejection")
    with pytest.raises(ValueError, match="holds 3 requests; name one of them"):
        replay(trace, run, 0)
    with pytest.raises(ValueError, match="has no request 99"):
        replay(trace, run, 0, 99999999)
    with pytest.raises(ValueError, match=r"steps 0 to \d+, not step 500"):
        replay(trace, run, 500, requests[0].id)
    with pytest.raises(ValueError, match="proposes another tree now"):
        replay(trace, loop("ngram"), 0, requests[0].id)
    record(tmp_path / "c", loop(), [asked := request([1, 2], GREEDY)], Detail.COUNTS)
    with pytest.raises(ValueError, match="--trace-detail tokens"):
        replay(read(tmp_path / "c"), run, 0)

    class Odd:
        def allowed(self, tokens, start, extra):
            import torch

            return torch.arange(VOCAB) % 2 == 1

        def expected(self, tokens, start):
            return []

    asked = Request(123, [1, 2], SAMPLED, 0, mask=Odd())
    record(tmp_path / "g", loop(), [asked], Detail.PROBS)
    held = read(tmp_path / "g")
    with pytest.raises(ValueError, match="grammar"):
        replay(held, run, 0)
    assert all(replay(held, loop(), n, mask=Odd()).same for n in range(len(held.text().steps)))
    assert not run.sequences
