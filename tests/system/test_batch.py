"""`outrider batch` as a user runs it: killed and continued, and the texts of one request at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from forked import Forked
from light import HAS_RAY
from patience import PATIENCE
from serving import builtin
from typer.testing import CliRunner

from outrider import SamplingParams
from outrider.cli.main import app
from outrider.serve.batch import line_seed

SUFFIX = ["--speculative-config", '{"method": "suffix"}', "--max-num-seqs", "2"]
CHAT = "def f(x):\n"


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy and sampled lines of both endpoints, with seeds and without."""
    lines = []
    for i in range(count):
        body: dict[str, Any] = {"model": "code", "max_tokens": max_tokens + i % 5, "temperature": (0, 0.8, 1.1)[i % 3]}
        body |= {"seed": i} if i % 2 else {}
        url = "/v1/completions" if i % 4 else "/v1/chat/completions"
        prompt = f"def add{i}(a, b):\n"
        body |= {"prompt": prompt} if i % 4 else {"messages": [{"role": "user", "content": prompt}]}
        lines.append({"custom_id": f"line {i}", "method": "POST", "url": url, "body": body})
    return lines


def expected(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Plain decoding, one at a time."""
    plain, texts = builtin(1, None), {}
    for line in lines:
        body, name = line["body"], line["custom_id"]
        prompt = body.get("prompt") or "".join(f"# {part}\n" for part in body["messages"][0]["content"].split("\n"))
        params = SamplingParams(
            temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body.get("seed", line_seed(0, name))
        )
        texts[name] = plain.generate(prompt, params)[0].outputs[0].text
    return texts


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    found = {}
    for row in rows:
        assert row["custom_id"] not in found
        choice = row["response"]["body"]["choices"][0]
        found[row["custom_id"]] = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


def test_killed_and_continued_nothing_is_lost_nothing_is_twice_and_every_text_is_the_same(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = requests(16, 40)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command, journal = ["batch", str(source), "-o", str(out), *SUFFIX], tmp_path / "out.jsonl.partial"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Forked(*command, environment=environment) as process:
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 6):
            sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    before = [json.loads(line)["row"] for line in journal.read_bytes().split(b"\n")[1:-1]]
    assert 5 <= len(before) < len(lines)
    assert not out.exists()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"{len(before)} lines were answered before, {len(lines) - len(before)} are left" in result.output
    rows = written(out)
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]  # in the order of the input
    assert all(row in rows for row in before)  # the very same answers, with their times: none was written again
    assert texts(rows) == expected(lines)
    assert not journal.exists()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "is there already" in " ".join(again.output.split())


def test_broken_and_refused_lines_are_errors_and_the_others_are_answered(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good, hot, other, stream, twice = requests(5, 4)
    hot["body"]["temperature"] = -1
    other["body"]["model"] = "gpt-9"
    stream["body"]["stream"] = True
    twice["custom_id"] = good["custom_id"]
    new = {"input": "# x\n", "max_output_tokens": 4, "temperature": 0.8, "seed": 5}
    after = {**new, "previous_response_id": "resp_1"}
    responses = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body}
        for name, body in (("new", new), ("after", after))
    ]
    told = [json.dumps(line) for line in (good, hot, other, stream, twice, *responses)]
    source.write_text("\n".join([*told[:2], '{"custom_id": "cut', *told[2:]]))
    result = CliRunner().invoke(app, ["batch", str(source), "-o", str(out), *SUFFIX])
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    for words in ("line 3: this is not JSON", "line 6: custom_id 'line 0' is that of line 1", "no model 'gpt-9'"):
        assert words in said
    assert "2 answers and 6 errors" in said
    rows = written(out)
    codes = [row["response"] and row["response"]["status_code"] for row in rows]
    assert codes == [200, 400, None, 404, 400, None, 200, 400]
    names = ["line 0", "line 1", None, "line 2", "line 3", "line 0", "new", "after"]
    assert [row["custom_id"] for row in rows] == names
    assert rows[1]["response"]["body"]["error"]["param"] == "temperature"
    assert "leave out stream" in rows[4]["response"]["body"]["error"]["message"]
    assert [row["error"] and row["error"]["code"] for row in rows[2:6:3]] == ["invalid_json", "duplicate_custom_id"]
    assert texts([rows[0]]) == expected([good])
    [message] = rows[6]["response"]["body"]["output"]
    same = {
        **good,
        "body": {"messages": [{"role": "user", "content": "# x\n"}], "max_tokens": 4, "temperature": 0.8, "seed": 5},
    }
    assert message["content"][0]["text"] == expected([same])["line 0"]
    assert "do not follow each other" in rows[7]["response"]["body"]["error"]["message"]


has_ray = pytest.mark.skipif(not HAS_RAY, reason="needs: pip install ./ray")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none.jsonl"], "there is no file none.jsonl"),
        (["empty.jsonl"], "has no lines"),
        (["in.jsonl", "--cpus", "2"], "add --ray ADDRESS"),
        (["in.jsonl", "-o", "in.jsonl"], "is the file of requests itself"),
        (["in.jsonl", "-o", "./link.jsonl"], "is the file of requests itself"),
        (["in.jsonl", "-o", "none/out.jsonl"], "there is no folder"),
        pytest.param(["in.jsonl", "--ray", "127.0.0.1:9"], "no Ray cluster answers at '127.0.0.1:9'", marks=has_ray),
        pytest.param(["in.jsonl", "--ray", "ray://no-such-host.invalid:10001"], "or take --ray local", marks=has_ray),
        (["in.jsonl", "-m", "builtin:cod"], "did you mean 'builtin:code'"),
    ],
)
def test_batch_mistakes_are_one_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "in.jsonl").write_text(json.dumps(requests(1, 1)[0]))
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    out = [] if "-o" in options else ["-o", "out.jsonl"]
    result = CliRunner().invoke(app, ["batch", *options, *out])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("pyarrow") is None, reason="needs: pip install ./ray"
)


@needs_ray
@pytest.mark.long
def test_actors_of_a_cluster_write_the_same_texts(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = requests(20, 8)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["batch", str(source), "-o", str(out), *SUFFIX, "--ray", "local"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *command], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert texts(written(out)) == expected(lines)
    command[command.index(str(out))] = str(tmp_path / "other.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *command, "-m", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "cannot load the model" in done.stderr
    assert "has no config.json" in done.stderr
    assert "Traceback" not in done.stderr
