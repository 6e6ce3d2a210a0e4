"""A recorded coding session of ten turns with tools, today and the next day: `python -m benchmarks.session MODEL -d DRAFT`.

The session is `data/agent.json`: what was said before each turn is recorded, and each side writes the turn anew, as many tokens
as plain decoding does. Each side is a process of its own. `plain` decodes plainly. `first` drafts by `auto`, with empty folders
for starts and texts. `again` is the next day: the same folders after a restart. `full` writes the first turn only, in turns with
a memory of a million tokens of the standard library and with an empty one, each time as after a start. `llama.cpp` reuses
prompts, as is its default.

    python -m benchmarks.session MODEL.gguf -d DRAFT.gguf --program PYTHON_WITH_XLLAMACPP
    python -m benchmarks.session MODEL.gguf -d DRAFT.gguf --folder F --side first       # one side alone, then another
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import ROOT
from benchmarks.first_token import middle
from benchmarks.machine import facts
from benchmarks.peers.llama_server import LlamaServer
from outrider import LLM, SamplingParams
from outrider.core.files import write_whole
from outrider.models.load import load
from outrider.models.tokenizer import complete

DATA = ROOT / "benchmarks" / "data" / "agent.json"
SIDES = ("plain", "first", "again", "full", "llama.cpp", "llama.cpp draft")
MOST, FILLED = 320, 10**6
SHAPE: dict[str, Any] = {"max_model_len": 6144, "max_num_seqs": 1}


def prompts(tokenizer: Any) -> list[list[int]]:
    """The token ids before each turn."""
    session = json.loads(DATA.read_text(encoding="utf-8"))
    messages, tools = session["messages"], session["tools"]
    ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    options = {"tools": tools, "add_generation_prompt": True, "return_dict": True}
    return [list(tokenizer.apply_chat_template(messages[:at], **options)["input_ids"]) for at in ends]


def fill(llm: LLM) -> None:
    """Keep a million tokens of the standard library."""
    memory, left = llm.runtime.memory, FILLED
    assert memory is not None
    assert llm.tokenizer is not None
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens = llm.tokenizer(file.read_text(encoding="utf-8"), verbose=False)["input_ids"][:left]
        memory.keep("\n", tokens)
        memory.folder.flush()
        left -= len(tokens)
        if not left:
            return


def options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of an LLM that drafts, with its folders."""
    folders = {"prefix_dir": folder / "starts", "memory_dir": folder / "texts"}
    return {"speculative_config": {"method": "auto", "model": args.draft}, **SHAPE, **folders}


def ours(side: str, args: argparse.Namespace, counts: list[int]) -> Iterator[dict[str, Any]]:
    """The turns of a side of outrider: tokens, and seconds of each."""
    if side == "plain":
        llm = LLM(args.model, speculative_config={"method": "none"}, prefix_dir=args.folder / "plain", **SHAPE)
    else:
        llm = LLM(args.model, **options(args, args.folder / "day"))
    yield from (turn(llm, prompt) for prompt in prompts(llm.tokenizer))


def turn(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Write one."""
    began = perf_counter()
    out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=MOST))[0]
    took, first = perf_counter() - began, out.metrics.time_to_first_token or 0.0
    tokens, found = out.outputs[0].token_ids, out.metrics.speculative_decoding
    return {
        "prompt": len(prompt), "tokens": tokens, "seconds": took, "first": first,
        "steps": found.num_spec_steps if found else len(tokens), "text": out.outputs[0].text,
    }  # fmt: skip


def full(args: argparse.Namespace) -> None:
    """The first turn with a full memory over that with an empty one, as often as is asked."""
    kept, loaded = args.folder / "full", load(args.model)
    if not kept.exists():
        fill(LLM(loaded, **options(args, kept)))
    ratios, differ = list[float](), 0
    for n in range(args.pairs + 1):
        found = dict[str, dict[str, Any]]()
        for side in ("full", "empty") if n % 2 else ("empty", "full"):
            with tempfile.TemporaryDirectory() as made:
                if side == "full":
                    shutil.copytree(kept, made, dirs_exist_ok=True)
                llm = LLM(loaded, **options(args, Path(made)))
                found[side] = turn(llm, prompts(llm.tokenizer)[0])
                del llm
        if n:  # the first pair warms up
            ratios.append(found["full"]["seconds"] / found["empty"]["seconds"])
            differ += found["full"]["tokens"] != found["empty"]["tokens"]
            told = (f"{side} {one['seconds']:.2f} s in {one['steps']} steps" for side, one in sorted(found.items()))
            print("; ".join(told), flush=True)
    print(f"first turn with a full memory: {middle(ratios)} of the time with an empty one; {differ} texts differ")


def theirs(side: str, args: argparse.Namespace, counts: list[int]) -> Iterator[dict[str, Any]]:
    """The turns of llama.cpp: as many tokens as plain decoding wrote."""
    known = prompts(complete(load(args.model).tokenizer))
    draft = args.draft if side.endswith("draft") else None
    with LlamaServer(args.program, args.model, draft, longest=8, length=SHAPE["max_model_len"]) as server:
        server.complete(known[0][:8], 2)
        for prompt, count in zip(known, counts, strict=False):
            out = server.complete(prompt, count, ignore_eos=True, reuse=True)
            times = {"seconds": out.wall, "first": out.prompt_seconds}
            yield {"prompt": len(prompt), "tokens": out.tokens, "steps": out.written - out.accepted, **times}


def summary(found: dict[str, list[dict[str, Any]]]) -> None:
    plain = found["plain"]
    for side, turns in found.items():
        total = sum(one["seconds"] for one in turns)
        told = f"{side}: {len(turns)} turns in {total:.1f} s"
        for name in ("plain", "llama.cpp", "llama.cpp draft"):
            if name != side and len(found.get(name, ())) >= len(turns):
                other = sum(one["seconds"] for one in found[name][: len(turns)])
                told += f", {other / total:.2f} times as fast as {name}"
        if not side.startswith("llama"):
            told += f"; {sum(a['tokens'] != b['tokens'] for a, b in zip(turns, plain, strict=False))} texts differ"
        print(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", "-d", required=True)
    parser.add_argument("--program", type=Path, help="a llama-server, or a Python that has xllamacpp")
    parser.add_argument("--folder", type=Path, help="where results and folders are kept; without it they go")
    parser.add_argument("--side", choices=SIDES, help="this one alone")
    parser.add_argument("--pairs", type=int, default=10, help="first turns of `full`")
    args = parser.parse_args()
    if args.side is None:
        print(facts())
        with tempfile.TemporaryDirectory() as made:
            for side in SIDES if args.program else SIDES[:4]:
                given = [*sys.argv[1:], "--folder", str(args.folder or made), "--side", side]
                subprocess.run([sys.executable, "-m", "benchmarks.session", *given], check=True)
        return
    if args.side == "full":
        full(args)
        return
    results = args.folder / "results.json"
    found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    run = theirs if args.side.startswith("llama") else ours
    done = list[dict[str, Any]]()
    for one in run(args.side, args, [len(one["tokens"]) for one in found.get("plain", [])]):
        found[args.side] = [*done, one]
        done.append(one)
        write_whole(results, json.dumps(found))
        print(
            f"{args.side}, turn {len(done)}: {one['prompt']} tokens of prompt, {len(one['tokens'])} written in {one['steps']} "
            f"steps and {one['seconds']:.2f} s, the first after {one['first']:.2f} s",
            flush=True,
        )
    if done:
        summary(found)


if __name__ == "__main__":
    main()
