"""Traces: what is written is what was run, what is read adds up, and every step can be computed again."""

from __future__ import annotations

import json
import random
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import VOCAB, RandomTree, decoder, request, toy_drafters
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SpeculativeConfig
from outrider.decode import Decoder, Request, Row
from outrider.models.toy import ToyModel
from outrider.outputs import SpeculativeMetrics
from outrider.params import SamplingParams
from outrider.trace import Detail, Recorder, Replay, Trace, describe, read, replay
from outrider.types import Budget

TARGET = ToyModel(VOCAB, seed=0, max_length=200)
LOADED = SimpleNamespace(name="toy", weights="float64")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=20, ignore_eos=True)
RICH = SamplingParams(
    temperature=0.8, top_k=6, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2,
    logit_bias={3: 1.5, 5: -2.0}, stop_token_ids=[4], min_tokens=3, max_tokens=30, bad_words=[[2, 5]], logprobs=2,
)  # fmt: skip


def loop(drafter: str = "draft_model", verifier: str = "match", width: int = 1, rows: int = 3) -> Decoder:
    made = RandomTree(VOCAB, 3) if drafter == "random" else toy_drafters(TARGET, rows)[drafter]()
    return decoder(TARGET, made, rows=rows, verifier=verifier, budget=Budget(4, width))


def record(path: Path, run: Decoder, requests: list[Request], detail: Detail = Detail.TOKENS) -> list[Row]:
    """Run the requests with a trace; the finished rows in the order of the requests."""
    done: dict[int, Row] = {}
    with Recorder(path, detail) as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        for step, rows in run.steps(requests):
            if step is not None:
                trace.keep(step, rows)
                done.update({row.request.id: row for row in rows if row.end is not None})
        assert trace.problem is None
    return [done[r.id] for r in requests]


def traced(path: Path, run: Decoder, requests: list[Request], seen=lambda rows: rows) -> str | None:
    """Run the requests with a trace that may fail; why it did."""
    with Recorder(path) as trace:
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        for step, rows in run.steps(requests):
            assert step is not None
            trace.keep(step, seen(rows))
    return trace.problem


def three(params: SamplingParams = SAMPLED) -> list[Request]:
    return [request([1, 2, 3, n], params.with_(max_tokens=12 + 4 * n), seed=n) for n in range(3)]


def replays(trace: Trace, run: Decoder) -> Iterator[Replay]:
    for text in trace.texts.values():
        for step in range(len(text.steps)):
            yield replay(trace, run, step, text.id)


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


def test_a_round_counts_once_whatever_its_rows(tmp_path: Path) -> None:
    record(tmp_path / "t", loop(), three(GREEDY))
    trace = read(tmp_path / "t")
    rounds = {step.round: step for step in trace.steps}
    assert max(step.rows for step in trace.steps) == 3
    assert trace.seconds["target"] == pytest.approx(sum(step.seconds[1] for step in rounds.values()))
    assert [s.round for s in trace.steps] == sorted(s.round for s in trace.steps)


@settings(max_examples=25, deadline=None)
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
            guesses, kept = int(step.draft.drafted[0]), step.kept[0]
            drafted.append(guesses)
            accepted.append(kept.drafted)
            parents = step.draft.parents[0].tolist()
            last = int(step.verdict.path[0][int(step.verdict.accepted[0])])
            letters += ("a" * kept.drafted + ("p" if not guesses else "c" if last in parents else "b"))[
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
        row = run.admit(request([1, 2, 3], GREEDY))
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
        rows = [run.admit(request([1, 2, n], GREEDY)) for n in range(2)]
        while run.waiting:
            run.prefill(run.waiting[0])
        trace.keep(run.round(rows), rows)
        run.round(rows[:1])  # nobody is told
        trace.keep(run.round(rows), rows)
        trace.keep(run.round(rows), rows)
    found = read(tmp_path / "t")
    assert found.problem is None
    one, other = found.texts.values()
    assert (one.finish, len(one.steps), other.finish, len(other.steps)) == ("abort", 1, None, 3)
    assert other.tokens == rows[1].output


def test_a_header_names_what_was_given_and_tells_no_text(tmp_path: Path) -> None:
    config = SpeculativeConfig(
        method=["draft_model", "suffix", "prediction"], model=TARGET, corpus={"text": "secret"}, prediction="secret"
    )
    header = describe(LOADED, config, loop())  # type: ignore[arg-type]
    assert header.speculative_config == {"method": ["draft_model", "suffix", "prediction"], "model": "ToyModel"}
    assert (header.drafter, header.verifier, header.rows_equal) == ("ModelDrafter", "match", True)


def test_one_recorder_holds_one_run(tmp_path: Path) -> None:
    recorder, run = Recorder(tmp_path / "t"), loop()
    recorder.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a Recorder of its own"):
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


@pytest.mark.parametrize(("drafter", "verifier", "width"), RUNS, ids=lambda v: str(v))
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RICH], ids=["greedy", "sampled", "rich"])
def test_every_step_is_computed_again_in_company(tmp_path: Path, drafter, verifier, width, params) -> None:
    rows = record(tmp_path / "t", loop(drafter, verifier, width), three(params), Detail.PROBS)
    trace, fresh = read(tmp_path / "t"), loop(drafter, verifier, width)
    assert trace.problem is None
    written: dict[int, list[int]] = {}
    for again in replays(trace, fresh):
        assert again.differs == ()
        assert again.path == tuple(again.step.path or ())
        assert [n.node for n in again.nodes] == list(range(again.step.drafted + 1))
        assert [n.node for n in again.nodes if n.kept] == list(again.path)
        words = [n.why() for n in again.nodes]
        assert all(word.startswith(("kept", "refused", "never judged", "the last token")) for word in words)
        for node, word in zip(again.nodes[1:], words[1:], strict=True):
            assert word.startswith("kept") == node.kept
            if node.coin is not None and verifier == "rejection":
                assert node.coin.kept == node.kept
        written.setdefault(again.text.id, []).extend(again.written)
    assert list(written.values()) == [row.output for row in rows]
    assert not fresh.rows
    assert sum(fresh.cache.length) == 0


def test_a_replay_says_what_the_noise_chose(tmp_path: Path) -> None:
    """The reason holds in numbers: log p + noise of what was drawn is the largest."""
    import math

    record(tmp_path / "t", loop("random", width=3), three())
    refused = 0
    for again in replays(read(tmp_path / "t"), loop("none")):
        for node in again.nodes[1:]:
            if node.judged and node.rival is not None and node.p > 0:
                _, p, noise = node.rival
                assert math.log(p) + noise >= math.log(node.p) + node.noise - 1e-5  # type: ignore[operator]
                refused += 1
    assert refused > 10


def test_another_model_is_told_apart(tmp_path: Path) -> None:
    record(tmp_path / "t", loop(), three(), Detail.PROBS)
    trace = read(tmp_path / "t")
    other = decoder(ToyModel(VOCAB, seed=5, max_length=200))
    found = list(replays(trace, other))
    assert any("recorded is" in why for again in found for why in again.differs)
    assert all(any("the target's law differs" in why for why in again.differs) for again in found)
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

    asked = Request(123, [1, 2], SAMPLED, 0, mask=Odd())
    record(tmp_path / "g", loop(), [asked], Detail.PROBS)
    held = read(tmp_path / "g")
    with pytest.raises(ValueError, match="grammar"):
        replay(held, run, 0)
    assert all(replay(held, loop(), n, mask=Odd()).same for n in range(len(held.text().steps)))
    assert not run.rows


# -- files that are not as they should be -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "t"
    record(path, loop(width=2), three(RICH), Detail.PROBS)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00\x01\xff\xfe" * 50, "no trace of outrider"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "line 1: this is no trace of outrider (it is not text)"),
        (b'{"a": 1}\n', "line 1: this is no trace"),
        (b"[1, 2]\n", "line 1: this is no trace"),
        (b"hello\nworld\n", "line 1: this is no trace"),
        (b'{"line": "header", "kind": "outrider-trace", "format": 99, "new": true}\n', "format 99, this outrider reads format 1"),
        (b'{"line": "end", "request": 0, "finish": "stop", "output_tokens": 0, "steps": 0}\n', "begins with its header"),
    ],
)  # fmt: skip
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "--trace" in str(error.value)


def test_a_trace_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "t"
    borders = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    draw = random.Random(0)
    for cut in [*draw.sample(range(borders[0], len(whole)), 40), *borders[:5]]:
        path.write_bytes(whole[:cut])
        trace = read(path)
        lines = whole[:cut].count(b"\n")
        if cut in borders:
            assert trace.problem is None
        else:
            assert trace.problem == f"{path}, line {lines + 1}: it is cut off in the middle"
        held = 1 + len(trace.texts) + len(trace.steps) + sum(t.end is not None for t in trace.texts.values())
        assert held == lines
        assert [len(t.origins) for t in trace.texts.values()] == [t.output_tokens for t in trace.texts.values()]


def test_a_line_that_is_wrong_ends_what_is_read(tmp_path: Path, whole: bytes) -> None:
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "t"

    def broken(change: dict, kind: str = "step") -> str:
        at = next(n for n, raw in enumerate(lines) if json.loads(raw)["line"] == kind)
        body = {**json.loads(lines[at]), **change}
        path.write_bytes(b"".join([*lines[:at], json.dumps(body).encode() + b"\n", *lines[at + 1 :]]))
        trace = read(path)
        assert trace.problem is not None
        assert trace.problem.startswith(f"{path}, line {at + 1}: ")
        assert 1 + len(trace.texts) + len(trace.steps) == at
        return trace.problem

    assert "drafted" in broken({"drafted": "many"})
    assert "accepted <= depth" in broken({"accepted": 99})
    assert "parent" in broken({"parents": [-1, 5, 0, 0, 0, 0, 0, 0, 0]})
    assert "walk down the tree" in broken({"path": [0, 1, 1]})
    assert "never joined" in broken({"request": 424242})
    assert "is due" in broken({"step": 7})
    assert "Extra inputs" in broken({"surprise": 1})
    assert "one law for each node" in broken({"chances": [0.5]})
    assert "temperature" in broken({"params": {"temperature": -1}}, "request")
    assert "cannot be read" in broken({"params": {"warmth": 1}}, "request")
    assert "prompt has" in broken({"prompt": [1]}, "request")
    assert "line" in broken({"line": "surprise"})
    path.write_bytes(b"".join([lines[0], lines[0]]))
    assert "second header" in str(read(path).problem)
    path.write_bytes(b"".join([*lines[:2], lines[1]]))
    assert "joins a second time" in str(read(path).problem)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_file_makes_the_reader_stumble(tmp_path_factory, whole: bytes, data) -> None:
    """Bytes changed, dropped and doubled at random: read, or a ValueError; a replay likewise."""
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from("cdx"))
        if kind == "c":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "d":
            del content[at : at + data.draw(st.integers(1, 50))]
        else:
            content[at:at] = content[at : at + data.draw(st.integers(1, 50))]
    path = tmp_path_factory.mktemp("odd") / "t"
    path.write_bytes(bytes(content))
    try:
        trace = read(path)
    except ValueError:
        return
    _ = trace.metrics, trace.seconds, trace.acceptance, [t.origins for t in trace.texts.values()]
    run = loop()
    for text in trace.texts.values():
        for step in range(min(len(text.steps), 2)):
            try:
                replay(trace, run, step, text.id)
            except ValueError:
                assert not run.rows


# -- disks and other troubles -------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_trace_and_not_the_text() -> None:
    run, plain = loop(), loop("none")
    asked = request([1, 2, 3], SAMPLED, 5)
    with Recorder("/dev/full") as trace, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        rows = list[Row]()
        for step, moved in run.steps([asked]):
            assert step is not None
            trace.keep(step, moved)
            rows = moved
    assert [str(w.message) for w in told] == [
        "the trace /dev/full ends here (No space left on device); the texts are not affected"
    ]
    assert trace.problem == "No space left on device"
    assert rows[0].output == plain.generate([request([1, 2, 3], SAMPLED, 5)])[0].output


def test_what_a_full_disk_cut_off_is_taken_back(tmp_path: Path, whole: bytes) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limit[1]))
        with pytest.warns(RuntimeWarning, match="the texts are not affected"):
            traced(tmp_path / "t", loop(), three())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    held = read(tmp_path / "t")
    assert held.problem is None
    assert 0 < len(held.steps) < 20
    assert (tmp_path / "t").stat().st_size <= 4000


def test_a_step_that_cannot_be_written_down_ends_the_trace_alone(tmp_path: Path) -> None:
    run, asked = loop(), request([1, 2, 3], GREEDY)
    broken = lambda rows: [SimpleNamespace(request=asked)] * len(rows)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="a step could not be written down"):
        problem = traced(tmp_path / "t", run, [asked], broken)
    assert "AttributeError" in str(problem)
    assert read(tmp_path / "t").steps == []
