"""Asks the parsers of vLLM, SGLang and llama.cpp about every exported command line and file.

    python -m benchmarks.handover.parsers --vllm VENV/bin/python --sglang VENV/bin/python --llama-server PATH \\
        --heads FOLDER --json benchmarks/results/DATE-handover-parsers.json

An engine that is not given is left out. Exits with 1 if an engine refuses what was exported to it. What it refuses for the
want of a GPU alone is counted apart: all words were understood then.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS, headline
from outrider_lab.handover import EngineCommand, exports

HERE = Path(__file__).resolve().parent
TARGET = "builtin:code"
RECORDED = RESULTS / "2026-11-23-handover-parsers.json"
"""What the parsers said. lab/tests/test_handover.py compares the tables with it."""
# What the engines say to settings that they run on a GPU only.
NEEDS_GPU = ("Model Runner V2 requires Triton", "is not supported by", "only supports CUDA, NPU or XPU")


class Case(NamedTuple):
    """config: a speculative_config. lengths: draft tokens by batch size. other_tokens: as `exports` takes it."""

    config: dict[str, Any]
    lengths: dict[int, int] | None = None
    other_tokens: bool = False


DRAFT = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
LENGTHS = {1: 4, 4: 2, 8: 0}


def cases(heads: Path | None) -> dict[str, Case]:
    """By name. heads: a folder of trained heads of builtin:code, each in a folder `head-KIND`; None leaves them out."""
    out = {
        "none": Case({"method": "none"}),
        "draft_model": Case(DRAFT),
        "draft_model rejection": Case({**DRAFT, "verifier": "rejection"}),
        "draft_model block": Case({**DRAFT, "verifier": "block"}),
        "draft_model tree": Case({**DRAFT, "tree_width": 3, "tree_nodes": 10}),
        "draft_model int8": Case({**DRAFT, "quantization": "int8"}),
        "draft_model lengths": Case(DRAFT, LENGTHS),
        "draft_model lengths from 2": Case(DRAFT, {2: 6, 4: 3}),
        "draft_model no lengths": Case(DRAFT, {1: 0, 2: 0}),
        "draft_model other tokens": Case(DRAFT, None, True),
        "ngram": Case({"method": "ngram"}),
        "ngram lengths": Case({"method": "ngram", "num_speculative_tokens": 5}, LENGTHS),
        "ngram tree": Case({"method": "ngram", "num_speculative_tokens": 5, "tree_width": 3, "tree_nodes": 10}),
        "ngram lookup": Case({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}),
        "suffix": Case({"method": "suffix"}),
        "suffix long": Case({"method": "suffix", "num_speculative_tokens": 32, "suffix_shared_tokens": 0}),
        "suffix corpus": Case({"method": "suffix", "corpus": "texts.jsonl"}),
        "suffix lengths from 2": Case({"method": "suffix", "num_speculative_tokens": 6}, {2: 6, 4: 3}),
        "suffix and draft_model": Case({**DRAFT, "method": ["suffix", "draft_model"]}),
        "layer_skip": Case({"method": "layer_skip"}),
        "auto": Case({"method": "auto"}),
    }
    for method, kind in (("eagle", "eagle3"), ("medusa", "medusa"), ("dflash", "dflash"), ("dspark", "dspark")):
        if heads is not None and (heads / f"head-{kind}").is_dir():
            config = {"method": method, "model": str(heads / f"head-{kind}"), "num_speculative_tokens": 4}
            out[kind] = Case(config)
            out[f"{kind} lengths"] = Case(config, LENGTHS)
    return out


def ask(python: str, script: str, questions: dict[str, list[str]]) -> dict[str, Any]:
    """The answers of a script that runs in another environment."""
    done = subprocess.run(
        [python, str(HERE / script)], input=json.dumps(questions), capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"{script} failed in {python}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def vllm_words(command: EngineCommand, folder: Path) -> dict[str, list[str]]:
    """The words after `vllm serve`, by how they are said: on the command line and by --config."""
    words = shlex.split(command.serve)
    given = [f"{name}={value}" for name, value in command.environment.items()]
    more = ["--max-model-len", "512", "--dtype", "float32"]
    return {
        "command": [*given, *words[words.index("serve") + 1 :], *more],
        "file": [*given, "--config", str(folder / "vllm.yaml"), *more],
    }


def sglang_words(command: EngineCommand, folder: Path) -> dict[str, list[str]]:
    """The words after `python -m sglang.launch_server`."""
    return {"command": shlex.split(command.serve)[3:], "file": ["--config", str(folder / "sglang.yaml")]}


def ask_llama_server(program: str, questions: dict[str, list[str]]) -> dict[str, Any]:
    """llama-server parses, then finds that the model's file is not there: that is the proof that it parsed."""
    known = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stderr
    options = sorted({w.strip(",") for w in known.split() if w.startswith("--spec-")})
    out: dict[str, Any] = {"version": version.splitlines()[0].removeprefix("version: "), "options": options}
    for name, words in questions.items():
        words[words.index("-m") + 1] = "no-such-file.gguf"
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
        said = done.stderr + done.stdout
        parsed = "failed to load model, 'no-such-file.gguf'" in said
        out[name] = {"parsed": True} if parsed else {"refused": " ".join(said.split())[-600:]}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=headline(__doc__))
    parser.add_argument("--vllm", help="Python of vLLM's environment")
    parser.add_argument("--sglang", help="Python of SGLang's environment")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument(
        "--heads", type=Path, help="a folder of trained heads of builtin:code: head-eagle3, head-medusa, ..."
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "handover-parsers.json")
    args = parser.parse_args()
    engines: dict[str, tuple[Any, Callable[..., dict[str, list[str]]]]] = {}
    if args.vllm:
        engines["vllm"] = (lambda q: ask(args.vllm, "ask_vllm.py", q), vllm_words)
    if args.sglang:
        engines["sglang"] = (lambda q: ask(args.sglang, "ask_sglang.py", q), sglang_words)
    if args.llama_server:
        engines["llama.cpp"] = (
            lambda q: ask_llama_server(args.llama_server, q),
            lambda command, folder: {"command": shlex.split(command.serve)[1:]},
        )
    result: dict[str, Any] = {}
    refused = 0
    with tempfile.TemporaryDirectory() as temporary:
        for engine, (asked, words) in engines.items():
            questions: dict[str, list[str]] = {}
            for at, (name, case) in enumerate(cases(args.heads and args.heads.absolute()).items()):
                folder = Path(temporary) / engine / str(at)
                # of other tokens it is said, and not found out: the pair at hand has the same
                [command] = exports(
                    case.config,
                    case.lengths,
                    model=TARGET,
                    engines=[engine],
                    other_tokens=case.other_tokens or None,
                    out=folder,
                )
                if command.supported:
                    questions |= {f"{name}, {how}": w for how, w in words(command, folder).items()}
            result[engine] = answers = asked(questions)
            wrong = {name: why for name in questions if (why := answers[name].get("refused"))}
            gpu = [name for name, why in wrong.items() if any(words in why for words in NEEDS_GPU)]
            refused += len(wrong) - len(gpu)
            taken = f"{len(questions) - len(wrong)} of {len(questions)} accepted"
            print(f"{engine} {answers['version']}: {taken}, {len(gpu)} of the rest for want of a GPU")
            for name, why in wrong.items():
                if name not in gpu:
                    print(f"  {name}: {why}")
    args.json.write_text(json.dumps(result, indent=1, default=str).replace(temporary, "TEMPORARY") + "\n")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
