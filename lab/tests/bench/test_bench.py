"""outrider bench in this process: what is recorded of a text, turns, interruption, and what a user is told."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli import main as cli
from outrider_lab.bench import stats
from outrider_lab.bench.local import Local
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.report.analysis import summary
from outrider_lab.bench.run import Run, Sample, Setting
from outrider_lab.bench.schedule import measure, plan
from outrider_lab.cli.bench import SettingOptions

SMALL = "builtin:code-draft"
PAIR = {"method": "draft_model", "model": SMALL, "num_speculative_tokens": 3, "controller": "fixed"}
PROMPTS = [
    Prompt("loop", "x", "for i in range(10):\n    print(i)\nfor j in range(10):"),
    Prompt("class", "y", "class Stack:\n    def __init__(self):\n        self"),
    Prompt("one", "y", "def one(", max_tokens=1),
]
SAMPLING = {"temperature": 0.0, "max_tokens": 20, "seed": 0, "ignore_eos": True}


def local(*configs: dict | None, model: str = "builtin:code", rows: int = 1, **sampling: object) -> tuple[Local, Run]:
    settings = [Setting(name=str(n), speculative_config=c) for n, c in enumerate(configs)]
    run = Run(
        date="", command="", model=model, machine={}, sampling={**SAMPLING, **sampling}, settings=settings,
        repeats=2, concurrency=rows, prompts=[{"id": a.id, "category": a.category, "text": a.text} for a in PROMPTS],  # type: ignore[list-item]
    )  # fmt: skip
    return Local.load(settings, model, run.sampling, rows), run


def bench(*words: str):
    return CliRunner().invoke(cli.app, ["bench", "-m", SMALL, "-n", "4", "--num-prompts", "2", *words])


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (2, 0.8)])
def test_every_token_is_accounted_for(rows: int, temperature: float) -> None:
    side, run = local(None, PAIR, rows=rows, temperature=temperature)
    list(measure(run, side, PROMPTS))
    assert run.complete
    assert {s.error for s in run.samples} == {None}
    assert len({s.turn for s in run.samples}) == len(run.samples) / (1 if rows == 1 else 1.5)
    for s in run.samples:
        assert s.token_ids is not None
        assert s.origins is not None
        assert s.drafted is not None
        assert s.accepted is not None
        assert s.pieces is not None
        assert s.output_tokens == len(s.token_ids) == len(s.origins) == len(s.pieces)
        assert "".join(s.pieces) == s.text
        first = s.output_tokens - sum(n for _, n in s.gaps)
        assert 1 <= first <= 4
        assert s.origins.count("a") == sum(s.accepted)
        assert s.ttft == pytest.approx(s.seconds - sum(t for t, _ in s.gaps))
        assert sum(s.phases.values()) == pytest.approx(s.seconds, rel=0.01)
        if s.setting == "0":
            assert set(s.origins) == {"p"}
        else:
            full = sum(d == a > 0 for d, a in zip(s.drafted, s.accepted, strict=True))
            assert full - 1 <= s.origins.count("b") <= full  # the last one may be cut off
    assert {s.output_tokens for s in run.samples if s.prompt == "one"} == {1}
    assert stats.identity_promised(run, "1")
    assert stats.differing(stats.answered(run, "1"), stats.answered(run, "0")) == ([], 6)
    assert Counter(s.seed for s in run.samples) == {0: 6, 1: 6}


def test_settings_take_turns() -> None:
    turns = plan(groups=3, settings=2, repeats=4)
    assert len({(t.repeat, t.group, t.setting) for t in turns}) == len(turns) == 24
    assert [t.number for t in turns] == list(range(24))
    assert [t.setting for t in turns[:8]] == [0, 1, 1, 0, 0, 1, 1, 0]
    for group in range(3):  # each is as often the first
        firsts = [t.setting for t in turns[::2] if t.group == group]
        assert firsts.count(0) == firsts.count(1)


def test_a_repeat_does_not_find_the_answers_of_the_last() -> None:
    """Of one lookup, the same tokens are accepted again. A router remembers what its drafters are worth, but no text."""
    for method in ("suffix", ["suffix", "token_recycling"]):
        side, run = local(None, {"method": method, "controller": "fixed"}, model=SMALL)
        list(measure(run, side, PROMPTS))
        first, second = ([sum(s.accepted or []) for s in stats.answered(run, "1") if s.repeat == r] for r in (0, 1))
        assert first == second or isinstance(method, list)
        again = side.answer(run.settings[1], PROMPTS[:1], 1, 0)  # it would, were it not told to forget
        assert sum(again[0].accepted or []) > 1.5 * max(first[0], second[0])


def test_a_prompt_that_does_not_fit_is_named() -> None:
    side, _ = local(None, model=SMALL, max_tokens=5000)
    with pytest.raises(ValueError, match=r"prompt loop: .*use max_tokens="):
        side.num_tokens(PROMPTS[0])


def test_fields_are_those_of_vllm(tmp_path: Path) -> None:
    side, run = local(None, PAIR)
    list(measure(run, side, PROMPTS))
    run.samples.append(Sample(prompt="loop", setting="1", repeat=2, turn=99, seconds=1, error="lost"))
    found = summary(run)
    fast = found["1"]
    assert (fast["completed"], fast["failed"], found["0"]["failed"]) == (6, 1, 0)
    assert fast["total_output_tokens"] == 2 * 41
    assert fast["output_throughput"] == pytest.approx(82 / fast["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert all(fast[f"{p}_{name}_ms"] >= 0 for p in ("mean", "median", "std", "p50", "p90", "p99"))
    kept, steps = fast["spec_decode_accepted_tokens"], fast["spec_decode_num_drafts"]
    assert fast["spec_decode_acceptance_length"] == pytest.approx(1 + kept / steps)
    assert fast["spec_decode_acceptance_rate"] == pytest.approx(100 * kept / fast["spec_decode_draft_tokens"])
    assert "spec_decode_num_drafts" not in found["0"]
    assert (fast["texts_compared"], fast["texts_differing"], fast["identity_promised"]) == (6, 0, True)
    assert fast["speedup"]["low"] < fast["speedup"]["value"] < fast["speedup"]["high"]
    assert fast["by_category"]["x"]["speedup"]["low"] is None  # one prompt
    run.summary = found
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run


def test_the_command_measures_and_tells(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = bench("--method", "suffix", "--method", "ngram", "-k", "2", "-r", "1", "--json", str(file))
    assert done.exit_code == 0, done.output
    words = "suffix k=2|ngram k=2|plain|tokens/s|interval|By category|2 of 2|Identical texts"
    assert all(word in done.stdout for word in words.split("|"))
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert "\x1b" not in done.stdout
    run = Run.load(file)
    assert run.complete
    assert [s.name for s in run.settings] == ["plain", "suffix k=2", "ngram k=2"]
    assert run.settings[1].guarantee == "exact-tokens"
    assert len(run.samples) == 6
    assert run.summary["plain"]["completed"] == 2
    assert all(p.tokens for p in run.prompts)


def test_other_draws_of_the_same_law_are_told_and_no_error() -> None:
    config = '{"method": "draft_model", "model": "builtin:code-draft", "verifier": "rejection"}'
    done = bench("--speculative-config", config, "-r", "1", "-t", "1.5", "-n", "12")
    assert done.exit_code == 0, done.output
    told = " ".join(done.stdout.split())
    assert "of 2 texts of" in told
    assert "the distribution is the same, the random draws are others" in told


def test_a_broken_promise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Local.answer

    def spoiled(self, setting, prompts, repeat, turn):
        samples = true(self, setting, prompts, repeat, turn)
        if turn == 3:
            samples[0].token_ids[-1] += 1
        return samples

    monkeypatch.setattr(Local, "answer", spoiled)
    done = bench("--method", "suffix", "-r", "2")
    assert done.exit_code == 1
    assert "1 of 4 texts of suffix differ" in " ".join(done.stdout.split())
    assert "although the guarantee is exact-tokens" in " ".join(done.stdout.split())


def impatient(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    true = Local.answer

    def answer(self, setting, prompts, repeat, turn):
        if turn >= turns:
            raise KeyboardInterrupt
        return true(self, setting, prompts, repeat, turn)

    monkeypatch.setattr(Local, "answer", answer)


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ("--method", "suffix", "-r", "2", "--json", str(file))
    with pytest.MonkeyPatch.context() as patch:
        impatient(patch, turns=3)
        done = bench(*words)
    assert done.exit_code == 130
    assert "interrupted after 3 measurements, kept in" in done.stderr
    assert "Continue with: outrider" in done.stderr
    assert "--resume" in done.stderr
    assert "as fast as plain" in " ".join(done.stdout.split())  # what there is, is shown
    half = Run.load(file)
    assert (half.complete, len(half.samples)) == (False, 3)

    lost = bench(*words)
    assert lost.exit_code == 2
    assert "interrupted measurement. Continue it with --resume" in lost.stderr
    other = bench("--method", "ngram", "-r", "2", "--json", str(file), "--resume")
    assert other.exit_code == 2
    assert "another measurement (different settings)" in other.stderr
    warmer = bench(*words, "-t", "1", "--resume")
    assert "(different sampling)" in warmer.stderr

    done = bench(*words, "--resume")
    assert done.exit_code == 0, done.output
    whole = Run.load(file)
    assert whole.complete
    assert whole.samples[:3] == half.samples
    assert sorted(s.turn for s in whole.samples) == list(range(8))


def test_interrupted_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch, turns=0)
    done = bench("--method", "suffix")
    assert done.exit_code == 130
    assert "interrupted after 0 measurements. With --json RUN.json" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "name it: --json RUN.json --resume"),
        (["--json", "/no/such/run.json"], "there is no folder /no/such"),
        (["--html", "/no/such/run.html"], "there is no folder /no/such"),
        (["--method", "sufix"], "did you mean 'suffix'"),
        (["--method", "ngram", "-d", "x"], "--draft-model x is for --method draft_model"),
        (["--speculative-config", "nowhere.json"], "and names no file"),
        (["--speculative-config", "{method"], "is not JSON"),
        (["--speculative-config", "[]"], "must be a JSON object, got"),
        (["--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--base-url", "a", "--base-url", "b", "--method", "suffix"], "two servers are compared as they are"),
        (["--base-url", "a", "--base-url", "b", "--base-url", "c"], "once or twice"),
        (["--base-url", "a", "--off-body", "no"], "--off-body no is not JSON"),
        (["--base-url", "a", "--speculative-config", '{"model": "x"}'], "a running server already has its models"),
        (["-n", "5000"], "prompt binary-search: "),
    ],
)
def test_errors_are_one_readable_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "-m", SMALL, *words])
    if message.startswith("no server"):  # without a name the server is asked for its models first
        done = CliRunner().invoke(cli.app, ["bench", *words])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_no_run_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text("{}")
    done = bench("--json", str(file))
    assert done.exit_code == 2
    assert "is not a measurement" in done.stderr
    assert file.read_text() == "{}"


def test_configurations_and_their_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"method": "suffix"}')
    texts = ['{"method": ["suffix", "ngram"], "tree_width": 2}', '{"model": "x", "verifier": "block"}']
    assert SettingOptions(model="m", speculative_config=[str(file), *texts, str(file)]).configs(False) == [
        ("mine", {"method": "suffix"}),
        ("suffix+ngram width=2", {"method": ["suffix", "ngram"], "tree_width": 2}),
        ("draft_model block", {"model": "x", "verifier": "block"}),
        ("mine #2", {"method": "suffix"}),
    ]
    assert SettingOptions(model="builtin:code").configs(False)[0][1]["model"] == SMALL
    assert SettingOptions(model="m", draft_model="d", num_speculative_tokens=3).configs(False)[0] == (
        "draft_model k=3", {"method": "draft_model", "model": "d", "num_speculative_tokens": 3},
    )  # fmt: skip
    assert SettingOptions(model="m").configs(False) == [("auto", {"method": "auto"})]
    assert SettingOptions(model="m").configs(True) == []


def test_two_versions_of_a_drafter(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = bench("--before", "builtin:code", "--after", SMALL, "-k", "2", "-r", "1", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "after, tokens per second: " in done.stdout
    assert "2 of 2 texts are equal before and after." in done.stdout
    run = Run.load(file)
    config = {"method": "draft_model", "num_speculative_tokens": 2}
    assert [(s.name, s.speculative_config) for s in run.settings] == [
        ("plain", None), ("before", {**config, "model": "builtin:code"}), ("after", {**config, "model": SMALL}),
    ]  # fmt: skip
    assert run.summary["after"]["over_before"]["texts_differing"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--after", "b"], "give both: --before OLD --after NEW"),
        (["-d", "c", "--before", "a", "--after", "b"], "leave out --draft-model"),
        (["--base-url", "http://x", "--before", "a", "--after", "b"], "--base-url ONE --base-url TWO"),
    ],
)
def test_two_versions_stand_alone(words: list[str], said: str) -> None:
    done = bench(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_nobody_answers() -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.send_error(503, "gone fishing")

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = CliRunner().invoke(cli.app, ["bench", "--base-url", f"127.0.0.1:{server.server_port}", "--num-prompts", "2"])
    server.shutdown()
    assert done.exit_code == 1
    assert "error: none of 4 requests succeeded: HTTP 503:" in done.stderr


def test_without_httpx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "outrider_lab.bench.remote", raising=False)
    with pytest.raises(ValueError, match=r"pip install \./lab"):
        importlib.import_module("outrider_lab.bench.remote")


def test_a_page_and_a_file_are_written(tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    words = ("--speculative-config", json.dumps(PAIR), "--method", "suffix", "-r", "1", "-n", "12")
    done = bench(*words, "--json", str(file), "--html", str(page))
    assert done.exit_code == 0, done.output
    assert f"The measurement is in {file}" in done.stdout
    assert [s.name for s in Run.load(file).settings] == ["plain", "suffix", "draft_model k=3 fixed"]
    assert "<html" in page.read_text()[:200]
