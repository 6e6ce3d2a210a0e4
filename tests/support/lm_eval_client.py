"""The requests and the arithmetic of lm-eval 0.4.13 (`local-completions`), for tests without its forty packages.

`multiple_choice`, `loglikelihood` and `rolling` give the numbers of a task of that output type. They ask a `Score` for each text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from outrider import LLM, SamplingParams

# token ids of a context and its continuation, length of the context -> log-probability, is it the greedy continuation?
Score = Callable[[list[int], int], tuple[float, bool]]

CHOICES = [
    {"text": "for i in", "choices": ["range(10):", "banana split:", "the dark of night:"], "gold": 0},
    {"text": "import numpy as", "choices": ["np", "pandas_frame", "x"], "gold": 0},
    {"text": "def __init__(self):\n    self.x =", "choices": ["[]", "None", "lambda lambda lambda"], "gold": 1},
    {"text": "if __name__ ==", "choices": ["'__main__':", "42:", "\"__main__\":"], "gold": 2},
    {"text": "try:\n    import json\nexcept", "choices": ["ImportError:", "that it rained:", "E:"], "gold": 0},
    {"text": "return", "choices": ["None", "zebra zebra zebra", "self"], "gold": 1},
    {"text": "for key, value in", "choices": ["d", "mapping.items():", "x"], "gold": 1},
]  # fmt: skip
TEXTS = [
    "import os\nimport sys\n\n\ndef main():\n    print(os.getcwd())\n    return 0",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()",
    "Grüße, 世界: a text that is no code.",
]
LENGTH = 31  # tokens of a window, so the longer texts take several; lm-eval keeps one more for the output


def computed(llm: LLM) -> Score:
    """The same scores from the library's own `prompt_logprobs`."""

    def score(tokens: list[int], context: int) -> tuple[float, bool]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        [out] = llm.generate({"prompt_token_ids": tokens}, params)
        assert out.prompt_logprobs is not None
        told = [(x[t], max(x.values())) for t, x in zip(tokens, out.prompt_logprobs, strict=True) if x is not None]
        told = told[context - 1 :]
        assert len(told) == len(tokens) - context
        return sum(own for own, _ in told), all(own == best for own, best in told)

    return score


def multiple_choice(docs: Sequence[dict[str, Any]], tokenizer: Any, score: Score) -> dict[str, float]:
    """acc: the likeliest choice is the right one. acc_norm: the likeliest by character."""
    right, right_by_length = list[bool](), list[bool]()
    for doc in docs:
        lls = [_pair(doc["text"], " " + choice, tokenizer, score)[0] for choice in doc["choices"]]
        by_length = [ll / len(choice) for ll, choice in zip(lls, doc["choices"], strict=True)]
        right.append(lls.index(max(lls)) == doc["gold"])
        right_by_length.append(by_length.index(max(by_length)) == doc["gold"])
    return {"acc": mean(right), "acc_norm": mean(right_by_length)}


def loglikelihood(docs: Sequence[dict[str, Any]], tokenizer: Any, score: Score) -> dict[str, float]:
    """The right choice alone. acc: it is what greedy decoding writes."""
    found = [_pair(doc["text"], " " + doc["choices"][doc["gold"]], tokenizer, score) for doc in docs]
    return {"perplexity": math.exp(-mean(ll for ll, _ in found)), "acc": mean(greedy for _, greedy in found)}


def rolling(texts: Sequence[str], tokenizer: Any, score: Score, length: int = LENGTH) -> dict[str, float]:
    """Whole texts in windows of `length` tokens, the first after the end token."""
    total = sum(
        score(context + predicted, len(context))[0]
        for text in texts
        for context, predicted in _windows(tokenizer(text)["input_ids"], tokenizer.eos_token_id, length - 1)
    )
    words, size = sum(len(re.split(r"\s+", t)) for t in texts), sum(len(t.encode()) for t in texts)
    return {
        "word_perplexity": math.exp(-total / words),
        "byte_perplexity": math.exp(-total / size),
        "bits_per_byte": -total / size / math.log(2),
    }


def write_tasks(folder: Path) -> list[str]:
    """The same tasks as files for lm-eval itself; returns their names."""
    docs, texts = folder / "docs.jsonl", folder / "texts.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in CHOICES))
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
    tasks: dict[str, dict[str, Any]] = {
        "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"},
        "tiny_last": {"output_type": "loglikelihood", "doc_to_target": "{{' ' + choices[gold]}}"},
        "tiny_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    }
    metrics = {
        "tiny_choice": ["acc", "acc_norm"],
        "tiny_last": ["perplexity", "acc"],
        "tiny_text": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    }
    for name, task in tasks.items():
        file = texts if name == "tiny_text" else docs
        task |= {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}}
        task["metric_list"] = [{"metric": metric} for metric in metrics[name]]
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))  # JSON is YAML, too
    return list(tasks)


def _pair(context: str, continuation: str, tokenizer: Any, score: Score) -> tuple[float, bool]:
    """Encoded together, cut where the context alone would end."""
    whole, before = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
    tokens = whole[-LENGTH:]
    return score(tokens, len(before) - (len(whole) - len(tokens)))


def _windows(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Contexts and the tokens to predict after them, at most `length` of each, every token predicted once."""
    first = tokens[:length]
    windows = [([prefix], first)]
    for done in range(length, len(tokens), length):
        end = min(done + length, len(tokens))
        windows.append((tokens[end - length - 1 : done], tokens[done:end]))
    return windows
