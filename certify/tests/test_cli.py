"""The command line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider_certify import Certificate
from outrider_certify.cli import app, duration
from outrider_certify.prompts import SETS, read_prompts

ROOT = Path(__file__).parents[2]


def certify(*words: str, code: int) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_a_run_that_the_user_stops_goes_on_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stopped_for_certify.py").write_text(
        "calls, last = 0, 60\n"
        "def generate(prompt, params, speculate):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == last:\n"
        "        raise KeyboardInterrupt\n"
        "    return [3] * params.max_tokens\n"
    )
    words = ("stopped_for_certify:generate", "--kind", "seeded", "--budget", "1s", "-o", "a.html")
    assert "the same command goes on from here" in certify(*words, code=130)
    assert not Certificate.load(tmp_path / "a.json").complete
    before = (tmp_path / "a.journal").read_text().splitlines()[1:]
    assert before
    said = certify(*words, code=0)
    assert f"{len(before)} trials of an earlier run are kept" in said
    assert Certificate.load(tmp_path / "a.json").complete
    assert not (tmp_path / "a.journal").exists()
    sys.modules.pop("stopped_for_certify", None)


def test_wrong_options_are_explained() -> None:
    assert "name what to certify" in certify(code=2)
    assert "such as 90s" in certify("x:y", "--budget", "soon", code=2)
    assert "for a server" in certify("json:loads", "--plain-url", "http://a", code=2)
    assert "for a server" in certify("json:loads", "--endpoint", "chat", code=2)
    assert "no folder" in certify("x:y", "-o", "/nowhere/at/all.html", code=2)
    assert "no server answers" in certify("http://127.0.0.1:9", "--budget", "1s", code=2)
    assert "no module:name" in certify("./my-model", code=2)
    assert "give http://localhost:8000/v1" in certify("localhost:8000/v1", code=2)
    assert "--off-body is not JSON" in certify("http://127.0.0.1:9", "--off-body", "{", code=2)
    assert duration("90s") == duration("1.5m") == 90
    assert duration("2h") == 7200


def test_a_kind_that_does_not_suit_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kinds_for_certify.py").write_text("def generate(prompt, params, speculate):\n    return [3]\n")
    assert "unknown kind" in certify("kinds_for_certify:generate", "--kind", "fast", code=2)
    several = certify("kinds_for_certify:generate", "--kind", "exact,contract", code=2)
    assert "given as --kind exact --kind contract" in several
    assert "cannot have the kind 'exact'" in certify("kinds_for_certify:generate", "--kind", "exact", code=2)
    sys.modules.pop("kinds_for_certify", None)


def test_prompts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "text", "text": "b"}]
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": parts}]}, {"body": {"prompt": "c"}}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(str(tmp_path / "p.jsonl"), 9) == ["a", "b", "c"]
    assert read_prompts(str(tmp_path / "p.txt"), 1) == ["one"]
    (tmp_path / "chat").mkdir()  # a folder of that name does not hide the set
    monkeypatch.chdir(tmp_path)
    assert read_prompts("chat", 1) == ["Why is the sky blue?"]
    assert all(len(read_prompts(name, 99)) == 8 for name in SETS)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: .* a correct line is"):
        read_prompts(str(tmp_path / "p.jsonl"), 9)
    with pytest.raises(FileNotFoundError, match="code, chat"):
        read_prompts("cod", 9)


@pytest.mark.parametrize("page", ["certify/README.md", "docs/guides/certify.md"])
def test_command_lines_of_the_pages_parse(page: str) -> None:
    lines = re.findall(r"^outrider-certify (.*)$", (ROOT / page).read_text(), re.M)
    assert lines
    for line in lines:
        typer.main.get_command(app).make_context("outrider-certify", shlex.split(line, comments=True))


def test_nothing_large_is_imported_before_a_run() -> None:
    code = "import sys, outrider_certify.cli; print([m for m in ('numpy', 'httpx', 'pydantic', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "certify", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
