"""Record the token ids of 184 requests over all drafters, verifiers, precisions and sampling parameters.

    python tests/support/record.py tests/exact/recorded.json

`tests/exact/test_recorded.py` compares the file: the same request must give the same tokens in every later version.
Record it again only where a version is meant to change tokens, and say so in the log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from outrider import LLM, SamplingParams
from outrider.models.load import Loaded, load

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\ndef walk(folder):\n    for name in",
    "class Stack:\n    def __init__(self):\n",
    "# count the words of a text\n",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.1, "min_tokens": 8},
    {"temperature": 1.0, "logit_bias": {5: 3.0, 17: -100.0}},
    {"temperature": 0.6, "bad_words": ["return", "self"]},
    {"temperature": 1.0, "stop": ["\n\n"], "min_tokens": 3},
    {"temperature": 0.8, "allowed_token_ids": list(range(0, 2000, 3))},
]
PREDICTION = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
DRAFT_MODEL = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "draft_model": DRAFT_MODEL,
    "draft_tree": DRAFT_MODEL | {"tree_width": 3, "tree_nodes": 9},
    "quantized_self": {"method": "quantized_self", "quantization": "int4", "num_speculative_tokens": 3},
    "layer_skip": {"method": "layer_skip", "layers": [0, 1, 3], "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "tree_width": 2},
    "ngram": {"method": "ngram", "num_speculative_tokens": 6},
    "prediction": {"method": "prediction", "prediction": PREDICTION},
    "token_recycling": {"method": "token_recycling", "num_speculative_tokens": 4, "tree_width": 4, "tree_nodes": 12},
    "several": {"method": ["suffix", "draft_model"], "model": "builtin:code-draft", "num_speculative_tokens": 5},
}
SMALL_TREE = {"tree_width": 2, "tree_nodes": 6}
RATIO: dict[str, dict[str, Any]] = {
    "rejection-chain": DRAFT_MODEL | {"verifier": "rejection"},
    "rejection-tree": DRAFT_MODEL | {"verifier": "rejection"} | SMALL_TREE,
    "block-chain": DRAFT_MODEL | {"verifier": "block"},
    "traversal-chain": DRAFT_MODEL | {"verifier": "traversal"},
    "traversal-tree": DRAFT_MODEL | {"verifier": "traversal"} | SMALL_TREE,
    "rejection-suffix": {"method": "suffix", "num_speculative_tokens": 6, "verifier": "rejection"},
    "rejection-layer_skip": {
        "method": "layer_skip",
        "layers": [0, 2, 5],
        "verifier": "rejection",
        "num_speculative_tokens": 3,
    },
}


@dataclass(frozen=True)
class Group:
    """Requests that run side by side. number: which prompts, parameters and seeds; another number, other ones."""

    weights: str
    config: str
    number: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.weights}/{self.config}"

    def run(self) -> list[list[int]]:
        """The token ids of each request."""
        config = CONFIGS[self.config] if self.config in CONFIGS else RATIO[self.config]
        slots = 3 if self.config in CONFIGS else 2
        llm = LLM(target(self.weights), speculative_config=config, max_num_seqs=slots, max_model_len=256)
        numbers = range(self.number * self.size, (self.number + 1) * self.size)
        params = [SamplingParams(max_tokens=24 + n % 9, seed=1000 + n, **PARAMS[n % len(PARAMS)]) for n in numbers]
        done = llm.generate([PROMPTS[n % len(PROMPTS)] for n in numbers], params)
        return [one.outputs[0].token_ids for one in done]


@cache
def target(weights: str) -> Loaded:
    """The built-in target at one precision, loaded once."""
    if weights in ("int8", "int4"):
        return load("builtin:code", quantization=weights, kv_cache_dtype="float32")
    return load("builtin:code", dtype=weights, kv_cache_dtype="float32")


def groups() -> Iterator[Group]:
    """All groups, in the order of the file. The order decides their numbers."""
    number = 0
    for weights in ("float32", "bfloat16", "int8", "int4"):
        for config in CONFIGS:
            if (config, weights) != ("quantized_self", "int4"):  # it needs a lower precision than int4
                yield Group(weights, config, number, size=4)
                number += 1
        if weights in ("float32", "int8"):
            for config in RATIO:
                yield Group(weights, config, number, size=2)
                number += 1


if __name__ == "__main__":
    texts = {group.name: group.run() for group in groups()}
    with open(sys.argv[1], "w") as file:
        lines = (f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in texts.items())
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    print(
        sum(map(len, texts.values())), "requests,", sum(len(ids) for text in texts.values() for ids in text), "tokens"
    )
