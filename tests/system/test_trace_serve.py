"""Traces and spans of the server: every job written down, nobody's prompt told, the names that collectors know."""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from pathlib import Path

import httpx
import pytest
from engines import LONG, TARGET, engine, mixed, run, settled, submit
from engines import read as reader
from helpers import decoder, request
from serving import PAIR, builtin, serving
from traces import LOADED
from typer.testing import CliRunner

from outrider.cli import main as cli
from outrider.core.params import SamplingParams
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.trace import Detail, Recorder, describe
from outrider_lab.replay import replay
from outrider_lab.traces import read


def test_every_job_is_written_down_and_can_be_computed_again(tmp_path: Path) -> None:
    """Jobs that join, leave, give way and come back: one text each, whole, and equal to what was answered."""
    trace = Recorder(tmp_path / "t")
    eng = engine(kv_tokens=420, rows=4, trace=trace)
    trace.begin(describe(LOADED, SpeculativeConfig(), eng.decoder))  # type: ignore[arg-type]
    jobs = [reader(r) for r in mixed(14, 4)]
    results = run(eng, jobs)
    gone = reader(request([1, 2, 3], LONG))
    submit(eng, [gone])
    gone.next()
    eng.cancel([gone.sequence])
    assert gone.result().finish.finish == "abort"
    settled(eng)
    trace.close()
    found = read(tmp_path / "t")
    assert found.problem is None
    assert trace.problem is None
    assert sum(r.counts.preemptions for r in results) > 0
    for asked, result in zip(jobs, results, strict=True):
        text = found.text(asked.sequence.id)
        assert text.tokens == result.output
        assert text.finish == result.finish.finish
        assert result.counts.method != "none"
        assert text.metrics.per_step_accepted == result.counts.speculative.per_step_accepted
        assert text.metrics.per_step_drafted == result.counts.speculative.per_step_drafted
    assert found.text(gone.sequence.id).finish == "abort"
    again = decoder(TARGET, rows=1, depth=4)
    for text in list(found.texts.values())[::4]:
        assert all(replay(found, again, n, text.id).same for n in range(0, len(text.steps), 3))


@pytest.fixture(scope="module")
def spans_of():
    """A server with a trace and spans in memory; what it was asked, and the spans."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.serve.spans import Spans

    exporter = InMemorySpanExporter()
    return Spans("http://nowhere", exporter), exporter


def test_a_server_sends_spans_and_writes_counts(tmp_path: Path, spans_of) -> None:
    spans, exporter = spans_of
    trace = Recorder(tmp_path / "t", Detail.COUNTS)
    llm = builtin(trace=trace)
    secret = "def secret_sauce(xs):"
    with serving(llm, spans=spans, trace=trace) as live, httpx.Client(base_url=live.url) as client:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"prompt": secret, "max_tokens": 12, "seed": 5, "temperature": 0.5, "top_k": 9, "n": 2, "stop": ["zz"]}
        answer = client.post("/v1/completions", json=body, headers={"traceparent": parent}).json()
        chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 6, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=chat) as stream:
            assert b"[DONE]" in stream.read()
        assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    first, second = sorted(exporter.get_finished_spans(), key=lambda s: s.start_time)
    told = dict(first.attributes)
    assert first.name == "text_completion code"
    assert first.kind.name == "SERVER"
    assert format(first.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(first.parent.span_id, "016x") == "b7ad6b7169203331"
    assert first.end_time > first.start_time
    assert first.resource.attributes["service.name"] == "outrider"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "code",
        "gen_ai.response.model": "code",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.seed": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 9.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": tuple(c["finish_reason"] for c in answer["choices"]),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "server.address": "127.0.0.1",
        "server.port": live.port,
        "outrider.guarantee": "exact-tokens",
        "outrider.verifier": "match",
        "outrider.speculation.method": "draft_model",
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["outrider.speculation.draft_tokens"] >= told["outrider.speculation.accepted_tokens"] > 0
    assert told["outrider.speculation.mean_acceptance_length"] > 1
    assert dict(second.attributes)["gen_ai.operation.name"] == "chat"
    assert dict(second.attributes)["gen_ai.request.stream"] is True
    assert dict(second.attributes)["gen_ai.response.time_to_first_chunk"] > 0
    assert "secret" not in str([dict(s.attributes) for s in exporter.get_finished_spans()])
    assert "zz" not in str(told.values())
    found = read(tmp_path / "t")
    assert found.problem is None
    assert len(found.texts) == 3
    assert sum(t.output_tokens for t in found.texts.values()) == 24 + 6
    assert all(t.request.prompt is None and t.finish == "length" for t in found.texts.values())
    assert "secret" not in (tmp_path / "t").read_text()
    assert found.header.speculative_config == {"method": "draft_model", **PAIR}


def test_a_client_that_leaves_and_a_model_that_fails_are_told(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.serve.spans import Spans

    exporter = InMemorySpanExporter()
    spans = Spans("http://nowhere", exporter)
    with serving(builtin(), spans=spans) as live, httpx.Client(base_url=live.url) as client:
        body = {"prompt": "def f(x):", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
        while not exporter.get_finished_spans():
            spans.flush()
        live.service.engine.decoder.target.forward = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
        try:
            assert client.post("/v1/completions", json={"prompt": "def g(x):"}).status_code == 500
        finally:
            del live.service.engine.decoder.target.forward
    gone, failed = sorted(exporter.get_finished_spans(), key=lambda s: s.start_time)
    assert (gone.attributes["error.type"], failed.attributes["error.type"]) == ("cancelled", "generation_failed")
    assert failed.status.status_code.name == gone.status.status_code.name == "ERROR"


def test_without_the_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args, **kwargs):
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "outrider.serve.spans", raising=False)
    monkeypatch.delattr(importlib.import_module("outrider.serve"), "spans", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    said = CliRunner().invoke(
        cli.app, ["serve", "builtin:code", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]
    )
    assert said.exit_code == 2
    assert "pip install '.[otel]'" in said.output


def test_a_bad_endpoint_and_a_detail_without_a_file_are_refused() -> None:
    said = CliRunner().invoke(cli.app, ["serve", "builtin:code", "--otlp-traces-endpoint", "localhost"])
    assert said.exit_code == 2
    assert "http://127.0.0.1:4318/v1/traces" in said.output
    said = CliRunner().invoke(cli.app, ["serve", "builtin:code", "--trace-detail", "tokens"])
    assert said.exit_code == 2
    assert "needs a file" in said.output


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    config = {**PAIR, "controller": "fixed", "tree_width": 2, "tree_nodes": 6}
    options = ["-n", "24", "--seed", "7", "-t", "0.8", "--ignore-eos", "--speculative-config", json.dumps(config)]
    said = CliRunner().invoke(cli.app, ["generate", "class Stack:\n    def push", *options, "--trace", str(path)])
    assert said.exit_code == 0, said.output
    return path


def test_replay_sums_up(written: Path) -> None:
    said = CliRunner().invoke(cli.app, ["replay", str(written)])
    assert said.exit_code == 0, said.output
    assert "builtin:code, float32 on cpu" in said.output
    assert "accepted by depth of the draft token" in said.output
    assert "time in steps   draft" in said.output
    assert f"Next: outrider replay {written} --step" in said.output
    one = CliRunner().invoke(cli.app, ["replay", str(written), "--request", "0"])
    letters = next(line for line in one.output.splitlines() if "|" in line and set(line) <= set("abcp|"))
    assert len(letters.replace("|", "")) == 24


def test_replay_explains_a_step(written: Path) -> None:
    trace = read(written)
    step = max(trace.steps, key=lambda s: s.accepted).step
    said = CliRunner().invoke(cli.app, ["replay", str(written), "--step", str(step)])
    assert said.exit_code == 0, said.output
    assert "✓" in said.output
    assert "accepted: the target drew it too (p " in said.output
    assert "likeliest next: " in said.output
    assert "computed again: the same draft, verdict and tokens as recorded" in said.output
    other = CliRunner().invoke(cli.app, ["replay", str(written), "--step", str(step), "-m", "builtin:code-draft"])
    assert other.exit_code == 1
    assert "differs: " in other.output


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda raw: b"", (), "is empty"),
        (lambda raw: b"\x00\xff" * 9, (), "no trace of outrider"),
        (lambda raw: raw, ("--step", "999"), "not step 999"),
        (lambda raw: raw, ("--request", "9"), "has no request 9"),
    ],
)
def test_replay_says_what_is_wrong(tmp_path: Path, written: Path, change, words, message) -> None:
    path = tmp_path / "odd"
    path.write_bytes(change(written.read_bytes()))
    said = CliRunner().invoke(cli.app, ["replay", str(path), *words])
    assert said.exit_code == 2
    assert said.output.count("\n") == 1
    assert message in said.output


def test_replay_shows_what_is_whole_of_a_trace_that_was_cut(tmp_path: Path, written: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(written.read_bytes()[:-200])
    said = CliRunner().invoke(cli.app, ["replay", str(path)])
    assert said.exit_code == 0
    assert f"{path}, line " in said.output
    assert "cut off in the middle" in said.output
    assert "not seen" in said.output


def test_a_full_disk_is_a_note_and_the_text_goes_on(written: Path) -> None:
    words = ["generate", "def f(x):", "-n", "8", "--seed", "1", "-m", "builtin:code-draft"]
    plain, full = CliRunner().invoke(cli.app, words), CliRunner().invoke(cli.app, [*words, "--trace", "/dev/full"])
    assert full.exit_code == 0
    assert full.stdout == plain.stdout
    assert full.stderr.count("the trace /dev/full ends here (No space left on device)") == 1


def test_the_python_interface_takes_a_path(tmp_path: Path) -> None:
    llm = builtin(trace=tmp_path / "t")
    out = llm.generate(["def f(x):", "import os\n"], SamplingParams(max_tokens=10, n=2, seed=1))
    list(llm.stream("def g(y):", SamplingParams(max_tokens=5, temperature=0)))
    texts = list(read(tmp_path / "t").texts.values())
    assert [t.tokens for t in texts[:4]] == [o.token_ids for r in out for o in r.outputs]
    assert len(texts) == 5
    assert texts[0].metrics.num_spec_steps == len(texts[0].steps)
