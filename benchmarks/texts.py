"""The prompts by workload. A chat model gets an instruction, a base model the beginning of a text."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import DATA
from benchmarks.edits import edits
from outrider_lab.bench.prompts import Prompt

CATEGORIES = {"qa": "qa", "summary": "summarization", "translation": "translation", "retrieval": "rag"}
WORKLOADS = ("code", "chat", "talk", "maths", *CATEGORIES, "edit")
CODE = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
EDIT = "```python\n{}```\n\n{} Answer with the whole file after the change and nothing else."


def lines(name: str) -> list[dict[str, Any]]:
    """The lines of a data file: humaneval, gsm8k, spec_bench, chat or talk."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def humaneval(count: int) -> list[str]:
    """The first `count` functions of HumanEval to complete (openai/human-eval, MIT; see data/LICENSE-human-eval).

    They have no newline at their ends: it would hide the indentation that follows, which is one token with it.
    Raises ValueError for more than there are.
    """
    problems = lines("humaneval")
    if not 0 < count <= len(problems):
        raise ValueError(f"there are {len(problems)} prompts, asked for {count}")
    return [problem["prompt"].rstrip() for problem in problems[:count]]


def spec_bench(*categories: str) -> list[dict[str, Any]]:
    """The questions of some categories of Spec-Bench, in the order of the file."""
    return [line for line in lines("spec_bench") if line["category"] in categories]


def texts(workload: str, chat: bool, count: int = 12) -> list[Prompt]:
    """At most `count` prompts of a workload, always the same ones.

    `code` is HumanEval, `maths` is GSM8K, `edit` changes parts of Python's standard library (benchmarks.edits). `chat` and
    `talk` were written for this project and have answers of a paragraph or more; nothing was tuned to `talk` and `maths`. `qa`,
    whose answers have a few words, and the others are Spec-Bench. Raises ValueError for an unknown workload.

    Args:
        workload: one of `WORKLOADS`.
        chat: as messages, not as text.
        count: at most so many.
    """
    if workload == "code":
        prompts = [(str(n), prompt, CODE.format(prompt)) for n, prompt in enumerate(humaneval(count))]
    elif workload == "edit":
        prompts = [(str(n), e.prompt, EDIT.format(e.before, e.asked)) for n, e in enumerate(edits(count, size=900))]
    elif workload == "maths":  # the first twelve are in the recordings that the planner was made with
        prompts = [(line["id"], line["question"], line["question"]) for line in lines("gsm8k")[12 : 12 + count]]
    elif workload in ("chat", "talk"):
        prompts = [(line["id"], line["prompt"], line["prompt"]) for line in lines(workload)[:count]]
    elif workload in CATEGORIES:
        questions = spec_bench(CATEGORIES[workload])[:count]
        prompts = [(str(line["question_id"]), line["turns"][0], line["turns"][0]) for line in questions]
    else:
        raise ValueError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)}")
    return [
        Prompt(f"{workload} {name}", workload, [{"role": "user", "content": asked}] if chat else text)
        for name, text, asked in prompts
    ]
