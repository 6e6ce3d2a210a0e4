"""Starts vLLM with exported command lines, asks it, and compares texts and counters with ours.

    python -m benchmarks.handover.started --vllm VENV/bin/python --heads FOLDER --json FILE

The model is builtin:code in float32, all requests are greedy, one at a time. Exits with 1 if a server does not start or a text
differs from ours. vLLM must be able to serve on a CPU; docs/guides/handover.md has the versions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks import RESULTS, headline
from benchmarks.handover.cases import DRAFT
from outrider import LLM, SamplingParams
from outrider.bench.prompts import read
from outrider.bench.tune.engine import engine_counters
from outrider.bench.tune.server import EngineServer, ServerFailed, free_port
from outrider.integrations.engines.handover import hand_over

TARGET = "builtin:code"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
MORE = ["--max-model-len", "1024", "--max-num-seqs", "4", "--dtype", "float32", "--enforce-eager"]
TOKENS = 48


def settings(heads: Path | None) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 6},
        "draft_model": DRAFT,
    }
    if heads is not None:
        out["eagle3"] = {"method": "eagle", "model": str(heads / "head-eagle3"), "num_speculative_tokens": 3}
    return out


def ours(config: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
    """Our texts and draft tokens, with the length that does not change."""
    llm = LLM(TARGET, speculative_config={**config, "controller": "fixed"}, dtype="float32", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    found = [output.metrics.speculative_decoding for output in outputs if output.metrics is not None]
    known = [metrics for metrics in found if metrics is not None]
    return {
        "texts": [output.outputs[0].text for output in outputs],
        "draft_tokens": sum(sum(m.per_step_drafted) for m in known),
        "accepted_tokens": sum(m.num_accepted_draft_tokens for m in known),
    }


def theirs(python: str, config: dict[str, Any], prompts: list[str], folder: Path) -> dict[str, Any]:
    """The same from a server that the exported command starts. Raises ServerFailed."""
    command = hand_over(config, "vllm", model=TARGET, out=folder)
    words = shlex.split(command.serve)
    at = words.index("vllm")
    port = free_port()
    words[at : at + 1] = [python, "-m", "vllm.entrypoints.cli.main"]
    words += [*MORE, "--port", str(port), "--host", "127.0.0.1"]
    with EngineServer(words, port, folder / "log", ready=900, environment=ENVIRONMENT | command.environment) as server:
        with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            texts = [
                client.post("/v1/completions", json={**body, "prompt": p}).json()["choices"][0]["text"] for p in prompts
            ]
            refused = client.post("/v1/completions", json={**body, "prompt": "a", "min_p": 0.1})
        return {
            "command": command.serve,
            "notes": command.notes,
            "start_seconds": round(server.start_seconds),
            "texts": texts,
            "min_p": f"HTTP {refused.status_code}",
            **{name: int(value) for name, value in engine_counters(server.url).items()},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("--vllm", required=True, help="Python of vLLM's environment")
    parser.add_argument("--heads", type=Path, help="a folder with head-eagle3, trained for builtin:code")
    parser.add_argument("--only", nargs="*", help="names of settings")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS / "handover-started.json")
    args = parser.parse_args()
    prompts = [prompt.text for prompt in read("code", args.num_prompts)[0]]
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    wrong = 0
    for name, config in settings(args.heads and args.heads.absolute()).items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                engine = theirs(args.vllm, config, prompts, Path(folder))
            except ServerFailed as error:
                engine = {"failed": str(error)}
        mine = ours(config, prompts)
        equal = sum(a == b for a, b in zip(mine["texts"], engine.get("texts", []), strict=False))
        wrong += equal != len(prompts)
        result[name] = {"equal_texts": f"{equal} of {len(prompts)}", "outrider": mine, "vllm": engine}
        counts = " | ".join(
            f"{who}: {side.get('accepted_tokens', 0)} of {side.get('draft_tokens', 0)} draft tokens accepted"
            for who, side in (("outrider", mine), ("vLLM", engine))
        )
        print(f"{name}: {equal} of {len(prompts)} texts equal. {counts}. {engine.get('failed', '')}", flush=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
