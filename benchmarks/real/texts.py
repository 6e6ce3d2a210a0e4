"""The prompts by workload. A chat model gets an instruction, a base model the beginning of a text."""

from __future__ import annotations

import json

from benchmarks import DATA
from benchmarks.edits import edits
from benchmarks.prompts import humaneval
from outrider_lab.bench.prompts import Prompt

CATEGORIES = {"qa": "qa", "summary": "summarization", "translation": "translation", "retrieval": "rag"}
WORKLOADS = ("code", "chat", "talk", "maths", *CATEGORIES, "edit")
CODE = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
EDIT = "```python\n{}```\n\n{} Answer with the whole file after the change and nothing else."


def texts(workload: str, chat: bool, count: int = 12) -> list[Prompt]:
    """At most `count` prompts of a workload, always the same ones. chat: as messages, not as text.

    `code` is HumanEval, `maths` is GSM8K, `edit` changes parts of Python's standard library (benchmarks.edits). `chat` and `talk`
    were written for this project and have answers of a paragraph or more; nothing was tuned to `talk` and `maths`. `qa`, whose
    answers have a few words, and the others are Spec-Bench.
    Raises ValueError for an unknown workload.
    """
    if workload == "code":
        found = [(str(n), prompt, CODE.format(prompt)) for n, prompt in enumerate(humaneval(count))]
    elif workload == "edit":
        found = [(str(n), e.prompt, EDIT.format(e.before, e.asked)) for n, e in enumerate(edits(count, size=900))]
    elif workload == "maths":  # GSM8K; the first twelve are in the recordings that the planner was made with
        lines = (DATA / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()[12 : 12 + count]
        found = [(line["id"], line["question"], line["question"]) for line in map(json.loads, lines)]
    elif workload in ("chat", "talk"):
        lines = (DATA / f"{workload}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        found = [(line["id"], line["prompt"], line["prompt"]) for line in map(json.loads, lines)]
    elif workload in CATEGORIES:
        lines = map(json.loads, (DATA / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines())
        kept = [line for line in lines if line["category"] == CATEGORIES[workload]][:count]
        found = [(str(line["question_id"]), line["turns"][0], line["turns"][0]) for line in kept]
    else:
        raise ValueError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)}")
    return [
        Prompt(f"{workload} {name}", workload, [{"role": "user", "content": asked}] if chat else text)
        for name, text, asked in found
    ]
