"""Starts vLLM with exported command lines and llama.cpp with exported presets, asks them, and compares with ours.

    python -m benchmarks.handover.started --vllm VENV/bin/python --heads FOLDER --json FILE
    python -m benchmarks.handover.started --llama-server PROGRAM --gguf FOLDER --json FILE

The model is builtin:code in float32, all compared requests are greedy, one at a time. Texts and draft tokens are compared.
Exits with 1 if a server does not start or a text differs from ours. vLLM must be able to serve on a CPU;
docs/guides/handover.md has the versions. The folder of GGUF files has the same models as code.gguf and code-draft.gguf.
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
from benchmarks.engine_server import EngineServer, ServerFailed, engine_counters, free_port
from benchmarks.handover.cases import DRAFT
from outrider import LLM, SamplingParams
from outrider.drafters.heads.files import open_head
from outrider.integrations.engines.handover import hand_over, write_files, write_head
from outrider.lab.bench.prompts import read
from outrider.models.load import load

TARGET = "builtin:code"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
MORE = ["--max-model-len", "1024", "--max-num-seqs", "4", "--dtype", "float32", "--enforce-eager"]
TOKENS = 48


ASKED = {
    "min_p": {"min_p": 0.1},
    "min_p at temperature 0.8": {"min_p": 0.1, "temperature": 0.8},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "logit_bias at temperature 0.8": {"logit_bias": {"5": 1.0}, "temperature": 0.8},
    "temperature 0.8": {"temperature": 0.8},
}


def settings(heads: Path | None, folder: Path) -> dict[str, dict[str, Any]]:
    """By name. heads: where trained heads are. folder: for an EAGLE-3 head in the flat layout, which is also that of SGLang."""
    out: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 6},
        "draft_model": DRAFT,
    }
    if heads is not None:
        flat = write_head(open_head(heads / "head-eagle3"), "sglang", TARGET, folder)
        for name, head in (("eagle3", heads / "head-eagle3"), ("eagle3, flat", flat)):
            out[name] = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
        if (heads / "head-medusa").exists():
            out["medusa"] = {"method": "medusa", "model": str(heads / "head-medusa"), "num_speculative_tokens": 3}
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
    with EngineServer(
        words, port, folder / "log", ready=900, environment={**ENVIRONMENT, **command.environment}
    ) as server:
        with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            texts = [
                client.post("/v1/completions", json={**body, "prompt": p}).json()["choices"][0]["text"] for p in prompts
            ]
            counted = engine_counters(server.url)
            asked = {
                name: client.post("/v1/completions", json={**body, "prompt": "a", "max_tokens": 4, **more})
                for name, more in ASKED.items()
            }
        return {
            "command": command.serve,
            "notes": command.notes,
            "start_seconds": round(server.start_seconds),
            "texts": texts,
            "asked": {name: f"HTTP {response.status_code}" for name, response in asked.items()},
            **{name: int(value) for name, value in counted.items()},
        }


def preset(program: str, config: dict[str, Any], prompts: list[str], folder: Path, gguf: Path) -> dict[str, Any]:
    """The same from llama.cpp's router, which reads the exported preset. Raises ServerFailed."""
    if config["method"] == "draft_model":
        config = {**config, "model": str(gguf / "code-draft.gguf")}
    command = hand_over(config, "llama.cpp", model=str(gguf / "code.gguf"), out=folder)
    [name] = write_files(command, folder)
    port, tokenizer = free_port(), load(TARGET).tokenizer
    assert tokenizer is not None
    words = [program, "--models-preset", str(folder / name), "--port", str(port), "--host", "127.0.0.1"]
    threads = {"LLAMA_ARG_THREADS": "1"}  # the router hands it on; more spin where cores are shared
    with EngineServer(words, port, folder / "log", ready=120, environment=threads) as server:
        with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client:
            body = {"model": "code", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]  # a GGUF file may split words in another way
            found = [client.post("/v1/completions", json={**body, "prompt": p}).json() for p in ids]
        if wrong := [answer["error"] for answer in found if "error" in answer]:
            raise ServerFailed(f"{wrong[0]}\n{(folder / 'log').read_text()[-1000:]}")
    return {
        "preset": command.files[name].replace(str(gguf), "GGUF"),
        "texts": [answer["choices"][0]["text"] for answer in found],
        "draft_tokens": sum(answer["timings"].get("draft_n", 0) for answer in found),
        "accepted_tokens": sum(answer["timings"].get("draft_n_accepted", 0) for answer in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("--vllm", help="Python of vLLM's environment")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="a folder with code.gguf and code-draft.gguf")
    parser.add_argument(
        "--heads", type=Path, help="a folder with head-eagle3, and perhaps head-medusa, trained for builtin:code"
    )
    parser.add_argument("--only", nargs="*", help="names of settings")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS / "handover-started.json")
    args = parser.parse_args()
    if args.llama_server and not args.gguf:
        parser.error("--llama-server needs the models: --gguf FOLDER")
    prompts = [prompt.text for prompt in read("code", args.num_prompts)[0]]
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    wrong = 0
    heads = tempfile.TemporaryDirectory()
    for name, config in settings(args.heads and args.heads.absolute(), Path(heads.name)).items():
        if args.only and name not in args.only:
            continue
        mine = ours(config, prompts)
        engines = (
            {"vllm": lambda folder, config=config: theirs(args.vllm, config, prompts, folder)} if args.vllm else {}
        )
        if args.llama_server and name in ("none", "ngram", "suffix", "draft_model"):
            gguf = args.gguf.absolute()
            engines["llama.cpp"] = lambda folder, config=config: preset(
                args.llama_server, config, prompts, folder, gguf
            )
        for engine, started in engines.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    answers = started(Path(folder))
                except ServerFailed as error:
                    answers = {"failed": str(error)}
            equal = sum(a == b for a, b in zip(mine["texts"], answers.get("texts", []), strict=False))
            wrong += equal != len(prompts)
            row = {"equal_texts": f"{equal} of {len(prompts)}", "outrider": mine, "engine": answers}
            result.setdefault(engine, {})[name] = row
            counts = " | ".join(
                f"{who}: {side.get('accepted_tokens', 0)} of {side.get('draft_tokens', 0)} draft tokens accepted"
                for who, side in (("outrider", mine), (engine, answers))
            )
            print(f"{name}: {equal} of {len(prompts)} texts equal. {counts}. {answers.get('failed', '')}", flush=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    heads.cleanup()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
