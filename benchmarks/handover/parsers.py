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
from typing import Any

from benchmarks import RESULTS, headline
from benchmarks.handover.cases import Case, cases
from outrider.integrations.engines import EngineCommand, exports
from outrider.integrations.engines.handover import hand_over, write_files

HERE = Path(__file__).resolve().parent
TARGET = "builtin:code"
OPTIONS = HERE.parent / "data" / "engine-options.json"
"""The options that each engine knows; tests/unit/integrations compares every export with them."""
# What the engines say to settings that they run on a GPU only.
NEEDS_GPU = ("Model Runner V2 requires Triton", "is not supported by", "only supports CUDA, NPU or XPU")


def exported(case: Case, engine: str, folder: Path) -> EngineCommand:
    """The export of a case, with its files and its head in `folder`."""
    if case.other_tokens:  # said, and not found out: the pair at hand has the same tokens
        [command] = exports(case.config, model=TARGET, engines=[engine], other_tokens=True, folder=str(folder))
    else:
        command = hand_over(case.config, engine, case.lengths, model=TARGET, out=folder)
    write_files(command, folder)
    return command


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
    parser.add_argument(
        "--options", action="store_true", help=f"write {OPTIONS.name}, the options that the engines know"
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
                command = exported(case, engine, folder)
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
    if args.options:
        known = {engine: {key: result[engine][key] for key in ("version", "options")} for engine in result}
        OPTIONS.write_text(json.dumps(known, indent=1) + "\n")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
