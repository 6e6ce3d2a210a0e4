"""Traces of the server: every job written down, and nobody's prompt told."""

from __future__ import annotations

import json
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
    jobs = [reader(r) for r in mixed(20, 8)]
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


def test_a_server_writes_counts_and_no_text(tmp_path: Path) -> None:
    trace, secret = Recorder(tmp_path / "t", Detail.COUNTS), "def secret_sauce(xs):"
    with serving(builtin(trace=trace), trace=trace) as live, httpx.Client(base_url=live.url) as client:
        client.post("/v1/completions", json={"prompt": secret, "max_tokens": 12, "n": 2, "ignore_eos": True})
        chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 6, "stream": True, "ignore_eos": True}
        client.post("/v1/chat/completions", json=chat)
    found = read(tmp_path / "t")
    assert found.problem is None
    assert len(found.texts) == 3
    assert sum(t.output_tokens for t in found.texts.values()) == 24 + 6
    assert all(t.request.prompt is None and t.finish == "length" for t in found.texts.values())
    assert "secret" not in (tmp_path / "t").read_text()
    assert found.header.speculative_config == {"method": "draft_model", **PAIR}


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
