"""Trace files that are not as they should be: other files, other versions, cut off, on a full disk."""

from __future__ import annotations

import json
import random
import re
import resource
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import request
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GREEDY, LOADED, RICH, SAMPLED, loop, record, three, traced

from outrider.drafters.config import SpeculativeConfig
from outrider.engine.request import Sequence
from outrider.engine.trace import Detail, EndRecord, Recorder, RequestRecord, RunRecord, StepRecord, describe
from outrider_lab.replay import replay
from outrider_lab.traces import read


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
        (b'{"line": "header", "kind": "outrider-trace", "format": 99, "new": true}\n', "reads format 2"),
        (b'{"line": "end", "request": 0, "finish": "stop", "output_tokens": 0, "steps": 0}\n', "first line of a trace is its"),
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


def test_the_guide_describes_each_field_under_its_name() -> None:
    """The names in the file are those of the table in docs/guides/trace.md, and those of the records."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "trace.md").read_text()
    rows = re.findall(r"^\| (?:`(\w+)` )?\| (`\w+`(?:, `\w+`)*) \| .* \|$", guide.split("## The file")[1], re.M)
    table, line = dict[str, set[str]](), ""
    for kind, cell in rows:
        line = kind or line
        table.setdefault(line, set()).update(re.findall(r"`(\w+)`", cell))
    records = {kind.model_fields["line"].default: kind for kind in (RunRecord, RequestRecord, StepRecord, EndRecord)}
    assert table == {name: {*kind.model_fields} - {"line"} for name, kind in records.items()}


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
    assert "does not follow the tree" in broken({"path": [0, 1, 1]})
    assert "never joined" in broken({"request": 424242})
    assert "is due" in broken({"step": 7})
    assert "Extra inputs" in broken({"surprise": 1})
    assert "need one entry for each node" in broken({"confidence": [0.5]})
    assert "temperature" in broken({"params": {"temperature": -1}}, "request")
    assert "cannot be read" in broken({"params": {"warmth": 1}}, "request")
    assert "prompt has" in broken({"prompt": [1]}, "request")
    assert "line" in broken({"line": "surprise"})
    path.write_bytes(b"".join([lines[0], lines[0]]))
    assert "second header" in str(read(path).problem)
    path.write_bytes(b"".join([*lines[:2], lines[1]]))
    assert "joins a second time" in str(read(path).problem)


@settings(max_examples=60)
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
                assert not run.sequences


# -- disks and other troubles -------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_trace_and_not_the_text() -> None:
    run, plain = loop(), loop("none")
    asked = request([1, 2, 3], SAMPLED, 5)
    with Recorder("/dev/full") as trace, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trace.begin(describe(LOADED, SpeculativeConfig(), run))  # type: ignore[arg-type]
        rows = list[Sequence]()
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
    with pytest.warns(RuntimeWarning, match="a step could not be written"):
        problem = traced(tmp_path / "t", run, [asked], broken)
    assert "AttributeError" in str(problem)
    assert read(tmp_path / "t").steps == []
