"""The benchmark on real models, with the built-in one and a stub of llama.cpp's server. Nothing is timed here."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf_files import write_file
from light import Late, torch
from serving import server_here

from benchmarks import serve
from benchmarks.machine import cores
from benchmarks.peers.llama_server import Missing, about, command
from benchmarks.peers.requantize import requantize
from benchmarks.real import report, start
from benchmarks.real.__main__ import main
from benchmarks.real.journal import Journal, identity
from benchmarks.real.served import served
from benchmarks.real.sides import Peer
from benchmarks.shapes import FAMILIES, cut, write
from outrider.core.params import SamplingParams
from outrider.drafters.heads.eagle import EagleConfig
from outrider.models.load import load
from outrider_lab.heads.writers import write_eagle

head_modules = Late("outrider_lab.heads.modules")

STUB = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--version" in sys.argv:
    sys.exit(print("stub 1"))
options = [a for a in sys.argv[1:] if a != "--run-time-repack"]
given = dict(zip(options[::2], options[1::2]))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({log!r}, "a") as log:
            log.write(json.dumps({{"given": given, "body": body}}) + "\\n")
        clock = {{"prompt_n": len(body["prompt"]), "prompt_ms": 30.0, "predicted_ms": 200.0}}
        if "--spec-draft-model" in given:
            clock |= {{"draft_n": 8, "draft_n_accepted": 6, "predicted_ms": 100.0}}
        self.answer({{"tokens": list(range(body["n_predict"])), "timings": clock}})
    def answer(self, what):
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> tuple[Path, Path]:
    """A program that answers as llama-server does, and the file with what it was asked."""
    program, log = tmp_path / "llama-server", tmp_path / "asked.jsonl"
    program.write_text(STUB.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    return program, log


def test_every_method_writes_the_plain_text_and_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    command = shlex.split("--target builtin:code --draft builtin:code-draft --methods plain suffix 'draft_model 4'")
    command += ["--workloads", "code", "chat", "--texts", "1", "--tokens", "16", "--length", "512"]
    command += ["--journal", str(tmp_path / "real.jsonl"), "--out", str(tmp_path)]
    made = main([*command, "--temperatures", "0"])
    assert [(r["workload"], r["setting"]) for r in made["records"]] == [
        (w, m) for w in ("code", "chat") for m in ("plain", "suffix", "draft_model 4")
    ]
    before = (tmp_path / "real.jsonl").read_text().splitlines()
    made = main([*command, "--temperatures", "0", "0.8"])
    after = (tmp_path / "real.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    rounds = [json.loads(line) for line in after if '"kind": "round"' in line]
    assert [(r["workload"], r["temperature"]) for r in rounds] == [(w, t) for t in (0, 0.8) for w in ("code", "chat")]
    for r in made["records"]:
        assert (r["differing_tokens"], r["texts"]) == (0, 1)
        assert r["tokens"] >= 8
        assert r["ms_per_token"] > 0
        assert (r["setting"] == "plain") == ("speedup" not in r)
        assert r["setting"] != "plain" or r["acceptance_length"] == 1
    [result] = tmp_path.glob("*-real.json")
    written = json.loads(result.read_text())
    assert written["files"]["builtin:code"] == identity("builtin:code")
    assert written["files"]["builtin:code"]["bytes"] > 2**20
    assert written["threads"] == written["machine"]["cores"]
    assert str(tmp_path) not in result.read_text()
    assert "differing tokens | 0 | 0 | 0 | 0 |" in report.tables(written)
    assert f"{written['threads']} threads on all sides" in report.conditions(written)
    assert report.short(written) == ""


def test_a_head_sees_the_prompts_and_is_in_the_record(tmp_path: Path) -> None:
    """A made head that repeats the last token: it drafts from the first step on, and its file is named by its hash."""
    target = load("builtin:code")
    config = head_modules.config_for(EagleConfig, target.config, norm_output=True, fc_norm=True)
    head = head_modules.Eagle(config).initialise_(torch.from_numpy(target.model.embedding_rows(np.arange(8192))))
    write_eagle(tmp_path / "made-head", head.weights())
    command = ["--target", "builtin:code", "--head", str(tmp_path / "made-head"), "--methods", "plain", "head 2"]
    command += ["--workloads", "code", "--texts", "1", "--tokens", "12", "--length", "512", "--temperatures", "0"]
    made = main([*command, "--journal", str(tmp_path / "real.jsonl"), "--out", str(tmp_path)])
    [round_] = [r for r in Journal(tmp_path / "real.jsonl").lines if r["kind"] == "round"]
    assert round_["head"] == made["files"]["made-head"]["sha256"]
    timing = round_["timings"]["head 2"]
    assert timing["drafted"] >= timing["steps"]
    assert timing["differing"] == 0
    assert sum(timing["depths"]) == timing["accepted"]
    assert str(tmp_path) not in next(tmp_path.glob("*-real.json")).read_text()


def test_shares_of_steps_by_depth() -> None:
    assert report.by_depth([[5, 2], [3], []], 10) == [0.8, 0.2]


def test_llama_cpp_reads_the_same_tokens_and_its_own_clock_counts(stub: tuple[Path, Path]) -> None:
    program, log = stub
    assert about(program) == "stub 1"
    with Peer(program, "t.gguf", "d.gguf", [4, 2], 64) as side:
        found = side.write([5, 6, 7], SamplingParams(temperature=0.8, max_tokens=11, seed=3))
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert list(found) == ["llama.cpp", "llama.cpp draft 4", "llama.cpp draft 2"]
    assert [a["given"].get("--spec-draft-n-max") for a in asked] == [None, "4", "2"]
    for a in asked:
        body = a["body"]
        assert (body["prompt"], body["n_predict"], body["temperature"], body["seed"]) == ([5, 6, 7], 11, 0.8, 3)
        assert body["cache_prompt"] is False
        assert body["samplers"] == ["temperature"]
    plain, fast = found["llama.cpp"], found["llama.cpp draft 4"]
    assert (plain.tokens, plain.seconds, plain.steps) == (10, 0.2, 10)
    assert (fast.tokens, fast.seconds, fast.steps, fast.drafted, fast.accepted, fast.differing) == (10, 0.1, 4, 8, 6, 0)
    with Peer(program, "t.gguf", "d.gguf", [3], 64, peer="ik_llama.cpp") as side:
        found = side.write([5, 6, 7], SamplingParams(temperature=0.8, max_tokens=11, seed=3))
    assert list(found) == ["ik_llama.cpp", "ik_llama.cpp draft 3", "ik_llama.cpp lookup"]
    own = [json.loads(line)["given"] for line in log.read_text().splitlines()[3:]]
    assert [a.get("--spec-type", "").partition(":")[0] for a in own] == ["", "draft", "ngram-mod"]
    assert all(a["--flash-attn"] == "on" for a in own)
    with pytest.raises(Missing, match="pip install openvino-genai"):
        command(Path("nowhere/python"), "openvino")
    with pytest.raises(Missing, match="pip install --no-deps xllamacpp"):
        command(Path("nowhere/llama-server"))


def timing(seconds: float, tokens: int = 10, differing: int = 0) -> dict[str, Any]:
    return {
        "tokens": tokens, "seconds": seconds, "written": tokens + 1, "prompt_seconds": 1.0, "steps": tokens, "drafted": 0,
        "accepted": 0, "differing": differing,
    }  # fmt: skip


def test_ratios_are_medians_over_texts_and_the_best_of_the_peer_counts() -> None:
    key = {"target": "t", "draft": None, "weights": "file", "workload": "code", "temperature": 0.0, "commit": "abc"}
    rounds = [
        {
            **key, "prompt_tokens": 4,
            "timings": {
                "plain": timing(1.0), "ngram": timing(1 / gain, differing=3), "llama.cpp": timing(2.0),
                "llama.cpp draft 4": timing(1.6), "ik_llama.cpp": timing(1.2), "ik_llama.cpp lookup": timing(1.1),
            },
        }
        for gain in (1.0, 2.0, 9.0)
    ]  # fmt: skip
    rounds.append({**key, "prompt_tokens": 4, "timings": {"plain": timing(1.0, tokens=3), "ngram": timing(0.1)}})
    by = {r["setting"]: r for r in report.records(rounds)}
    assert by["ngram"]["speedup"] == {"value": 2.0, "low": 1.0, "high": 9.0}
    assert by["ngram"]["differing_tokens"] == 9
    assert (by["plain"]["texts"], by["plain"]["short_texts"], by["plain"]["prompt_ms_per_token"]) == (3, 1, 250.0)
    assert by["plain"]["over_llama_plain"]["value"] == 2.0
    assert by["plain"]["over_llama_best"] == {"value": 1.6, "low": 1.6, "high": 1.6, "best": "llama.cpp draft 4"}
    assert by["llama.cpp draft 4"]["speedup"]["value"] == 1.25
    assert by["plain"]["over_ik_llama_plain"]["value"] == 1.2
    assert by["plain"]["over_ik_llama_best"]["best"] == "ik_llama.cpp lookup"
    assert by["ik_llama.cpp lookup"]["speedup"]["value"] == 1.091
    table = report.tables({"records": [*by.values()], "start": [], "served": []})
    assert "| plain over llama.cpp's plain | 2.00 (2.00-2.00) |" in table
    assert "| differing tokens | 9 |" in table
    short = report.short({"records": [*by.values()], "files": {"t": {"bytes": 1}}})
    assert "| code | 5.0 | 6.2 | 10.0 |" in short


def test_a_journal_drops_a_torn_line_and_refuses_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path).add("round", {"text": "a"}, {"seconds": 1})
    with path.open("a") as file:
        file.write('{"kind": "round", "text": "b", "sec')
    again = Journal(path)
    assert [r["text"] for r in again.of("round")] == ["a"]
    again.add("round", {"text": "c"}, {})
    assert Journal(path).has("round", {"text": "c"})
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "cpu": "another"}) + "\n" + rest)
    with pytest.raises(ValueError, match="--journal FILE"):
        Journal(path)


def test_files_are_known_by_their_hash(tmp_path: Path) -> None:
    parts = [tmp_path / f"a-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part, data in zip(parts, (b"ab", b"c"), strict=True):
        part.write_bytes(data)
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert identity(str(parts[1])) == {"name": parts[1].name, "bytes": 3, "sha256": sha}
    assert identity(str(tmp_path)) == {"name": tmp_path.name, "bytes": 3, "sha256": sha}
    assert identity("nobody/absent") == {"name": "nobody/absent"}


def test_a_start_says_its_first_token_and_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the measured process does, in this one: a new process imports for seconds."""
    monkeypatch.setattr(sys, "argv", ["start", "builtin:code-draft", "--tokens", "2"])
    start.main()
    first, told = capsys.readouterr().out.splitlines()
    assert first == "first token"
    made = json.loads(told)
    assert 0 < made["imports_bytes"] <= made["peak_bytes"] > made["anonymous_bytes"]


def test_a_start_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one new cache folder, with the threads of all sides."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint('first token', flush=True)\n"
        "told = dict.fromkeys(('imports_bytes', 'peak_bytes', 'anonymous_bytes'), 1 << 20) | {'given': sys.argv[1:]}\n"
        "print(json.dumps(told | {n: os.environ[n] for n in ('XDG_CACHE_HOME', 'OMP_NUM_THREADS')}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    command = [
        "--target",
        "builtin:code-draft",
        "--only",
        "start",
        "--journal",
        str(tmp_path / "j"),
        "--out",
        str(tmp_path),
    ]
    made = main(command)
    assert [s["start"] for s in made["start"]] == ["first", "second"]
    for s in made["start"]:
        assert s["seconds"] > 0
        assert s["given"] == [
            "-m",
            "benchmarks.real.start",
            "builtin:code-draft",
            "--weights",
            "file",
            "--tokens",
            "32",
        ]
        assert s["OMP_NUM_THREADS"] == str(cores())
    assert len({s["XDG_CACHE_HOME"] for s in made["start"]} - {os.environ["XDG_CACHE_HOME"]}) == 1
    assert main(command)["start"] == made["start"]


def test_a_prompt_is_read_by_all_sides_and_none_is_read_twice(stub: tuple[Path, Path], tmp_path: Path) -> None:
    program, log = stub
    target = tmp_path / "a.gguf"
    write(replace(cut(FAMILIES["qwen3-0.6b"], 1), vocab=300), target)
    command = ["--target", str(target), "--ik", str(program), "--only", "prompt", "--texts", "2"]
    command += ["--journal", str(tmp_path / "j"), "--out", str(tmp_path)]
    made = main(command)
    assert [sorted(line["seconds"]) for line in made["prompt"]] == 2 * [["ik_llama.cpp", "plain"]]
    prompts = [tuple(json.loads(line)["body"]["prompt"]) for line in log.read_text().splitlines()]
    assert [len(p) for p in prompts] == 3 * [512]
    assert len(set(prompts)) == 3
    assert "| a.gguf | ik_llama.cpp | 17067 |" in report.tables(made)
    assert main(command)["prompt"] == made["prompt"]


def test_a_draft_model_of_openvino_and_limits_are_in_the_record(
    stub: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, log = stub
    target = tmp_path / "a.gguf"
    write(replace(cut(FAMILIES["qwen3-0.6b"], 1), vocab=300), target)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    command = ["--target", str(target), "--openvino", str(program), "--openvino-draft", "d", "--methods", "plain"]
    command += ["--workloads", "code", "--temperatures", "0", "--texts", "1", "--tokens", "9", "--llama-draft", "2"]
    made = main([*command, "--ignore-eos", "--journal", str(tmp_path / "j"), "--out", str(tmp_path)])
    assert {r["setting"] for r in made["records"]} == {"plain", "openvino", "openvino draft 2", "openvino lookup"}
    given = [json.loads(line)["given"] for line in log.read_text().splitlines()]
    assert {g.get("--spec-draft-model") for g in given} == {None, "d"}
    assert made["commands"][0].startswith("ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.real ")


def test_blocks_of_five_bits_get_eight(tmp_path: Path) -> None:
    q5, q8 = GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0
    values = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    metadata = {"general.architecture": "qwen2", "qwen2.block_count": 2, "a.b": True, "a.c": 0.5, "a.d": ["x", "y"]}
    tensors = {"five": (quants.quantize(values, q5), "Q5_0"), "eight": (quants.quantize(values, q8), "Q8_0")}
    write_file(tmp_path / "a.gguf", metadata, tensors | {"bias": (values[0], "F32")})
    assert requantize(tmp_path / "a.gguf", tmp_path / "b.gguf") == 1
    old, new = (GGUFReader(tmp_path / f"{name}.gguf") for name in "ab")
    assert {n: f.contents() for n, f in new.fields.items() if "." in n[4:]} == {
        n: f.contents() for n, f in old.fields.items() if "." in n[4:]
    }
    by = [{t.name: t for t in reader.tensors} for reader in (old, new)]
    assert {n: t.tensor_type.name for n, t in by[1].items()} == {"five": "Q8_0", "eight": "Q8_0", "bias": "F32"}
    for name in ("eight", "bias"):
        np.testing.assert_array_equal(by[1][name].data, by[0][name].data)
    five = [quants.dequantize(side["five"].data, side["five"].tensor_type) for side in by]
    np.testing.assert_allclose(five[1], five[0], atol=np.abs(values).max() / 250)


def test_clients_are_served_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "own_server", server_here)
    lines = served("builtin:code", "builtin:code-draft", "file", None, clients=[1, 2], count=4, tokens=6, llama_draft=4)
    arms = {(line["arm"], line["max_concurrency"], line["failed"]) for line in lines}
    assert arms == {(arm, n, 0) for n in (1, 2) for arm in ("plain", "auto")}
    assert {line["differing_texts"] for line in lines} == {0}
