"""lm-eval over tiny tasks: the numbers that it gets from the server are those of our own `prompt_logprobs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from lm_eval_client import CHOICES, LENGTH, TEXTS, Score, computed, loglikelihood, multiple_choice, rolling, served
from lm_eval_client import write_tasks as written
from patience import PATIENCE
from serving import Live, builtin, serving

from outrider.models.builtin.shipped import builtin_folder

CODE = builtin_folder("builtin:code")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin(2)) as live:
        yield live


def numbers(tokenizer, score: Score) -> dict[str, dict[str, float]]:
    return {
        "tiny_choice": multiple_choice(CHOICES, tokenizer, score),
        "tiny_last": loglikelihood(CHOICES, tokenizer, score),
        "tiny_text": rolling(TEXTS, tokenizer, score),
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, float]]:
    plain = builtin(1, None)
    return numbers(plain.tokenizer, computed(plain))


def test_the_numbers_are_those_of_the_librarys_prompt_logprobs(live: Live, expected: dict) -> None:
    tokenizer = live.service.prompts.tokenizer
    found = numbers(tokenizer, served(live.url))
    assert found == {task: pytest.approx(values, rel=1e-9) for task, values in expected.items()}
    # the tasks tell right from wrong: no number is one that empty lists would give
    assert 0 < expected["tiny_choice"]["acc"] < 1
    assert expected["tiny_choice"]["acc"] != expected["tiny_choice"]["acc_norm"]
    assert 0 < expected["tiny_last"]["acc"] < 1
    assert expected["tiny_text"]["word_perplexity"] > 10
    assert len(tokenizer(TEXTS[1])["input_ids"]) > LENGTH  # type: ignore[misc]


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs: pip install 'lm-eval[api]==0.4.13'")
def test_lm_eval_itself_reports_them(live: Live, expected: dict, tmp_path: Path) -> None:
    tasks = written(tmp_path)
    model = f"model=code,base_url={live.url}/v1/completions,tokenizer={CODE},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", str(tmp_path)]
    command += ["--model_args", f"{model},max_length={LENGTH + 1}", "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--tasks", ",".join(tasks)], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [file] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    found = {task: {m: results[task][f"{m},none"] for m in values} for task, values in expected.items()}
    assert found == {task: pytest.approx(values, rel=1e-6) for task, values in expected.items()}
