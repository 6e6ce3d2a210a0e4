"""Fingerprints: a text is written again from its fingerprint alone, and what differs is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli.main import app
from outrider.engine import fingerprint as module
from outrider.engine.fingerprint import Fingerprint, fingerprint
from outrider.kernels import cpu as native
from outrider.models.builtin.shipped import builtin_folder
from outrider_lab.fingerprints import params_of, read_fingerprint, rewrite

SMALL = "builtin:code-draft"
PROMPT = "class Stack:\n"
RECORDED = sorted((Path(__file__).parents[2] / "tests" / "data" / "fingerprints").glob("*.json"))
GREEDY = SamplingParams(temperature=0, max_tokens=24, seed=0)
SAMPLED = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={17: 1.5},
    bad_words=["import"],
    stop=["return"],
    min_tokens=4,
    max_tokens=32,
    seed=2**64 - 5,
)
needs_native = pytest.mark.skipif(not native.available(), reason="the bits are promised on the native path")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(SMALL, max_num_seqs=2)


def made(llm: LLM, params: SamplingParams, index: int = 0) -> Fingerprint:
    [output] = llm.generate(PROMPT, params)
    return fingerprint(llm, output, params, index)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_is_written_again_from_its_file(llm: LLM, tmp_path: Path, params: SamplingParams) -> None:
    recorded = made(llm, params)
    recorded.write(tmp_path / "f.json")
    read = read_fingerprint(tmp_path / "f.json")
    assert read.json_line() == recorded.json_line()
    assert rewrite(read, LLM(SMALL, max_num_seqs=1)) == (recorded.tokens, None)


def test_bad_words_are_kept_as_tokens(llm: LLM) -> None:
    word = made(llm, GREEDY).tokens[3]
    recorded = made(llm, GREEDY.with_(bad_words=[[word]]))
    assert word not in recorded.tokens
    assert rewrite(recorded, llm) == (recorded.tokens, None)


def test_each_output_of_a_prompt_has_its_own(llm: LLM) -> None:
    second = made(llm, SAMPLED.with_(n=2, seed=None), 1)
    assert params_of(second).n == 1
    assert rewrite(second, llm) == (second.tokens, None)


def test_drafts_do_not_change_it(llm: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        drafts = LLM(SMALL, speculative_config={"method": "suffix", "num_speculative_tokens": 3}, max_num_seqs=1)
        [output] = drafts.generate(PROMPT, params)
        assert fingerprint(drafts, output, params) == made(llm, params)


def test_it_has_no_text_and_no_folder(llm: LLM, tmp_path: Path) -> None:
    copy = tmp_path / "folder-of-a-user" / "model"
    shutil.copytree(builtin_folder(SMALL), copy)
    recorded = made(LLM(str(copy), max_num_seqs=1), SAMPLED)
    assert recorded.model == "model"
    assert b"folder-of-a-user" not in recorded.json_line()
    assert recorded.sha256 == made(llm, SAMPLED).sha256
    assert rewrite(recorded, llm) == (recorded.tokens, None)


def test_it_says_where_a_text_differs(llm: LLM) -> None:
    recorded = made(llm, GREEDY)
    other = [*recorded.tokens[:5], recorded.tokens[5] + 1, *recorded.tokens[6:]]
    assert rewrite(recorded.model_copy(update={"tokens": other}), llm) == (recorded.tokens, 5)
    assert rewrite(recorded.model_copy(update={"tokens": recorded.tokens[:7]}), llm) == (recorded.tokens, 7)
    assert rewrite(recorded.model_copy(update={"finish": "stop"}), llm) == (recorded.tokens, len(recorded.tokens))


def changed(file: Path, change: dict[str, Any]) -> None:
    fields = json.loads(file.read_bytes())
    for name, value in change.items():
        (fields["request"] if name in fields["request"] else fields)[name] = value
    file.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"temperature": 0.7}},
        {"seed": 4},
        {"prompt": [1, 2], "prompt_tokens": 2},
        {"tokens": [3]},
        {"sha256": "0"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_file_is_refused(llm: LLM, tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "f.json"
    made(llm, SAMPLED).write(file)
    changed(file, {})
    read_fingerprint(file)  # another layout of the same JSON is no change
    changed(file, change)
    with pytest.raises(ValueError, match=r"f\.json was changed after it was written"):
        read_fingerprint(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{"kind": "outrider-trace"}')
    with pytest.raises(ValueError, match=r"no fingerprint that this outrider reads.*--fingerprint FILE"):
        read_fingerprint(file)


def test_other_weights_are_named(llm: LLM, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(builtin_folder(SMALL), copy)
    weights = copy / "model.safetensors"
    weights.chmod(0o600)
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"content of the model's files \(sha256\): recorded .*, here "):
        rewrite(made(llm, GREEDY), LLM(str(copy), max_num_seqs=1))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"dtype": "bfloat16"}, "precision of the weights: recorded float32, here bfloat16"),
        ({"kv_cache_dtype": "int8"}, "keys and values: recorded None, here int8"),
        ({"max_model_len": 64}, "max_model_len: recorded [0-9]+, here 64"),
    ],
)
@needs_native
def test_other_settings_are_named(llm: LLM, other: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rewrite(made(llm, GREEDY), LLM(SMALL, max_num_seqs=1, **other))


def test_another_version_of_the_arithmetic_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(llm, GREEDY)
    monkeypatch.setattr(module, "ARITHMETIC", recorded.arithmetic + 1)
    with pytest.raises(ValueError, match=f"version of the arithmetic: recorded {recorded.arithmetic}, here"):
        rewrite(recorded, llm)


def test_another_path_is_named(llm: LLM) -> None:
    recorded = made(llm, GREEDY).model_copy(update={"path": "masked"})
    with pytest.raises(ValueError, match="path of a forward: recorded masked, here"):
        rewrite(recorded, llm)


def test_a_text_that_depends_on_its_drafts_has_none() -> None:
    config = {"method": "draft_model", "model": SMALL, "verifier": "rejection", "num_speculative_tokens": 2}
    drafts = LLM(SMALL, speculative_config=config, max_num_seqs=1)
    with pytest.raises(ValueError, match=r"verifier 'rejection'.*use verifier='match'"):
        made(drafts, SAMPLED)


# -- the recorded ones --------------------------------------------------------------------------------------------------


def slower_sets() -> list[str]:
    """Two slower instruction sets, as far as this processor has them."""
    now = native.isa() if native.available() else ""
    has = [isa for isa in ("portable", "avx2") if isa in native.isas() and native.use_isa(isa)]
    if now:
        native.use_isa(now)
    return has


AGAIN = """
import sys
from typer.testing import CliRunner
from outrider.cli.main import app
done = [CliRunner().invoke(app, ["replay", "--fingerprint", file]) for file in sys.argv[1:]]
print(*(d.output for d in done))
sys.exit(max(d.exit_code for d in done))
"""


@needs_native
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_texts_of_another_machine_are_written_again(file: Path) -> None:
    """If this fails after a change that may change bits: raise `outrider.kernels.ARITHMETIC` and record the files again."""
    done = CliRunner().invoke(app, ["replay", "--fingerprint", str(file)])
    assert done.exit_code == 0, done.output
    assert f"the same {len(read_fingerprint(file).tokens)} tokens" in done.output


# A processor between the two runs kernels whose bits tests/unit/kernels compares.
@needs_native
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.long if isa == "avx2" else ()) for isa in slower_sets()]
)
def test_they_are_written_again_with_fewer_instructions(isa: str) -> None:
    """torch and the kernels read the choice when they are loaded, so it is a process of its own."""
    slower = {"OUTRIDER_ISA": isa, "ATEN_CPU_CAPABILITY": {"portable": "default"}.get(isa, isa)}
    command = [sys.executable, "-c", AGAIN, *map(str, RECORDED)]
    done = subprocess.run(command, env={**os.environ, **slower}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in RECORDED:
        assert f"the same {len(read_fingerprint(file).tokens)} tokens" in done.stdout


def test_there_are_recorded_ones() -> None:
    kinds = {(recorded.dtype, params_of(recorded).greedy) for recorded in map(read_fingerprint, RECORDED)}
    assert kinds == {("int8", True), ("float32", False)}
