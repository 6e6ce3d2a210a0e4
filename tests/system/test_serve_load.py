"""The load client: what it sends, what it counts, and what it says of servers that do not answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Live, builtin, serving

from benchmarks import serve


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2)) as live:
        yield live


def test_arms_take_turns_and_the_fields_are_vllms(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = f"--base-url {live.url} --model code --num-prompts 3 --output-len 12 --max-concurrency 1 2".split()
    options += ["--arm", 'off={"disable_spec_decode": true}', "--arm", "on={}", "--save-result", str(out)]
    monkeypatch.setattr(sys, "argv", ["serve", *options])
    serve.main()
    assert "texts that differ between arms: 0 of 6" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [(r["arm"], r["max_concurrency"]) for r in result["runs"]] == [("off", 1), ("on", 1), ("on", 2), ("off", 2)]
    for run in result["runs"]:
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (3, 0, 36)
        assert run["output_throughput"] == pytest.approx(36 / run["duration"])
        assert 0 < run["median_ttft_ms"] <= run["p99_ttft_ms"] <= run["p99_e2el_ms"]
        assert ("spec_decode_num_drafts" in run) == (run["arm"] == "on")


def test_an_arm_sends_its_fields_and_a_server_that_is_away_is_a_failure(live: Live) -> None:
    options = argparse.Namespace(endpoint="/v1/completions", output_len=5, temperature=0.0, seed=1, request_rate=1e9)
    there = serve.Endpoint(live.url, "code", {"max_tokens": 7})
    [sample], _ = asyncio.run(serve.load(options, there, ["x = 1\n"], 1))
    assert (sample.tokens, sample.error) == (7, "")
    for away in (serve.Endpoint("http://127.0.0.1:9", "code"), serve.Endpoint(live.url, "another")):
        samples, seconds = asyncio.run(serve.load(options, away, ["x"], 1))
        assert samples[0].error
        assert serve.summary(samples, seconds, {})["failed"] == 1
