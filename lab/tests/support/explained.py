"""Runs for the tests of the explainer."""

from __future__ import annotations

import json
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.engine.trace import Detail, Recorder

TREE = {
    "model": "builtin:code-draft", "num_speculative_tokens": 4, "tree_width": 3, "tree_nodes": 7, "controller": "fixed",
}  # fmt: skip


def small_run(file: Path) -> tuple[Path, LLM]:
    """A trace of the small built-in pair with trees, and the models that wrote it."""
    llm = LLM("builtin:code", speculative_config=TREE, max_num_seqs=1, trace=Recorder(file, Detail.TOKENS))
    llm.generate("def binary_search(items, target):\n", SamplingParams(temperature=0.8, seed=5, max_tokens=40))
    return file, llm


HOSTILE = {
    1: "</script><script>document.body.dataset.hit='1'</script>",
    2: "<img src=x onerror=\"document.body.dataset.hit='1'\">",
    3: "\u202egnihtyreve sesrever\u202c",
    4: "\x00\x07\x1b[31m\x7f\u2028",
    5: "مرحبا بالعالم",
    6: "`${alert(1)}` --> <!-- &lt; \\ ' \"",
    7: "\ud800",
    8: "x" * 5000,
}


class HostileTokenizer:
    """Decodes tokens to texts that would do harm as markup."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(HOSTILE.get(t, f" w{t}") for t in tokens)


def long_trace(file: Path, steps: int) -> None:
    """A trace of many steps, whose tokens are those of `HOSTILE` and others."""
    header = {
        "line": "header", "kind": "outrider-trace", "format": 2, "outrider": "0", "date": "2026-01-01T00:00:00+00:00",
        "detail": "tokens", "model": "<b>model</b>", "dtype": "float32", "device": "cpu", "vocab_size": 100,
        "max_length": 10**6, "batch_invariant": True, "end_ids": [], "method": "</script>", "verifier": "match",
        "guarantee": "exact-tokens", "machine": {},
    }  # fmt: skip
    request = {
        "line": "request",
        "request": 0,
        "prompt_tokens": 9,
        "seed": 2**63 - 1,
        "params": {},
        "prompt": [*range(1, 10)],
    }
    position, lines = 9, [json.dumps(header), json.dumps(request)]
    for n in range(steps):
        a, b, c = (1 + (n + k) % 40 for k in range(3))
        right = n % 3 > 0
        lines.append(json.dumps({
            "line": "step", "request": 0, "round": n, "step": n, "position": position, "drafted": 3, "depth": 2,
            "accepted": 2 * right, "refused": 0 if right else 2, "committed": 1 + 2 * right, "rows": 1,
            "seconds": {"draft": 0.001, "target": 0.01, "verify": 0.001, "commit": 0.001}, "tokens": [c, a, b, c],
            "parents": [-1, 0, 0, 1], "siblings": "POINT",
            "path": [0, 1, 3] if right else [0], "token": b, "budget": {"depth": 2, "width": 2, "nodes": 3},
            "note": HOSTILE[2],
        }))  # fmt: skip
        position += 1 + 2 * right
    file.write_text("\n".join(lines) + "\n")
