"""`outrider export`: commands on the screen, files in a folder, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from light import Late
from typer.testing import CliRunner, Result

from outrider.cli.main import app
from outrider.drafters.heads.eagle import EagleConfig
from outrider.drafters.heads.files import head_kind
from outrider.models.load import load
from outrider_lab.heads.writers import write_eagle

head_modules = Late("outrider_lab.heads.modules")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["export", *words])


def test_all_engines_from_a_file_of_tune(tmp_path: Path) -> None:
    file = tmp_path / "speculative_config.json"
    file.write_text('{"method": "suffix", "num_speculative_tokens": 8, "controller": "adaptive"}')
    done = run(str(file), "-m", "my-model", "--lengths", "1:8,4:2")
    assert done.exit_code == 0
    for words in (
        "vllm serve my-model",
        "sglang.launch_server",
        "llama-server -m my-model.gguf",
        "trtllm-serve my-model",
    ):
        assert words in done.stdout
    assert "[[1, 3, 8], [4, 4096, 2]]" in done.stdout


def test_json_and_files(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    done = run('{"method": "ngram"}', "--to", "vllm", "--to", "trt-llm", "-o", str(out), "--json")
    assert done.exit_code == 0
    vllm, trt = json.loads(done.stdout)
    assert vllm["engine"] == "vLLM"
    assert trt["serve"] == f"trtllm-serve MODEL --config {out}/trt-llm.yaml"
    assert sorted(p.name for p in out.iterdir()) == ["trt-llm.yaml", "vllm.yaml"]
    assert (out / "vllm.yaml").read_text() == vllm["files"]["vllm.yaml"]


def test_a_head_is_written_for_the_engine(tmp_path: Path) -> None:
    head = write_eagle(
        tmp_path / "head",
        head_modules.Eagle(head_modules.config_for(EagleConfig, load("builtin:code").config)).weights(),
    )
    config = json.dumps({"method": "eagle", "model": str(head)})
    told = run(config, "--to", "sglang")
    assert "--out FOLDER and -m MODEL write it so" in told.stdout
    done = run(config, "--to", "sglang", "-m", "builtin:code", "-o", str(tmp_path / "out"))
    assert done.exit_code == 0
    assert f"--speculative-draft-model-path {tmp_path}/out/head-sglang " in done.stdout
    assert head_kind(tmp_path / "out" / "head-sglang") == "eagle3"


def test_no_engine_can_run_it() -> None:
    done = run('{"method": "token_recycling"}')
    assert done.exit_code == 1
    assert "this engine has no such method" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (['{"method": "suffix"}', "--to", "sglan"], "did you mean 'sglang'"),
        (['{"method": "sufix"}'], "did you mean 'suffix'"),
        (["no-such-file.json"], "names no file"),
        (['{"method": "suffix"}', "--lengths", "1=4"], "1:4,4:2,8:0"),
        (['{"method": "suffix"}', "--lengths", "1:4,1:5"], "comes twice"),
        (['{"method": "suffix"}', "--lengths", "0:4"], "1:4,4:2,8:0"),
        (['{"method": "suffix"}', "-o", __file__], "is a file"),
        (['{"method": "eagle", "model": "tests"}'], "config.json"),
    ],
)
def test_what_a_user_gets_wrong(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.exit_code not in (0, None)
    assert said in done.output.replace("\n", " ")
    assert "Traceback" not in done.output
