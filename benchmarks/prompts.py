"""The prompts of the benchmark: functions of HumanEval to complete (openai/human-eval, MIT; see data/LICENSE-human-eval)."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import DATA


def humaneval(count: int) -> list[str]:
    """The first `count` prompts of the subset kept here, without the newline at their ends: it would hide the indentation that
    follows, which is one token with it."""
    lines = (DATA / "humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    if not 0 < count <= len(lines):
        raise ValueError(f"there are {len(lines)} prompts, asked for {count}")
    return [json.loads(line)["prompt"].rstrip() for line in lines[:count]]


def encoded(model: Path, count: int) -> list[list[int]]:
    """The same prompts as token ids of this model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(p)["input_ids"] for p in humaneval(count)]  # pyright: ignore[reportCallIssue]
