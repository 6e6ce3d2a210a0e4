"""A recorded coding session of ten turns with tools, today and the next day: `python -m benchmarks.session MODEL -d DRAFT`.

The session is `data/agent.json`: what was said before each turn is recorded, and each side writes the turn anew, as many tokens
as plain decoding does. Each side is a process of its own. `plain` decodes plainly. `first` drafts by `auto`, with empty folders
for starts and texts. `again` is the next day: the same folders after a restart. `full` has a folder with a million tokens of the
standard library, and writes the first turn only. `llama.cpp` reuses prompts, as is its default.

    python -m benchmarks.session MODEL.gguf -d DRAFT.gguf --program PYTHON_WITH_XLLAMACPP
    python -m benchmarks.session MODEL.gguf -d DRAFT.gguf --folder F --side first       # one side alone, then another
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import facts
from benchmarks.peers.llama_server import LlamaServer
from outrider import LLM, SamplingParams
from outrider.core.files import write_whole
from outrider.models.load import load
from outrider.models.tokenizer import complete

DATA = ROOT / "benchmarks" / "data" / "agent.json"
SIDES = ("plain", "first", "again", "full", "llama.cpp", "llama.cpp draft")
MOST, LENGTH, FILLED = 320, 6144, 10**6


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


def ours(side: str, args: argparse.Namespace, counts: list[int]) -> Iterator[dict[str, Any]]:
    """The turns of a side of outrider: tokens, and seconds of each."""
    folder = args.folder / ("day" if side in ("first", "again") else side)
    config: dict[str, Any] = {"method": "none"} if side == "plain" else {"method": "auto", "model": args.draft}
    texts = {} if side == "plain" else {"memory_dir": folder / "texts"}
    options = {"speculative_config": config, "max_model_len": LENGTH, "max_num_seqs": 1, **texts}
    if side == "full" and not (folder / "texts").exists():
        fill(LLM(args.model, **options))
        print("the memory is filled; start again", flush=True)
        return
    llm = LLM(args.model, prefix_dir=folder / "starts", **options)
    for prompt in prompts(llm.tokenizer)[: 1 if side == "full" else None]:
        began = perf_counter()
        out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=MOST))[0]
        took, first = perf_counter() - began, out.metrics.time_to_first_token or 0.0
        tokens, found = out.outputs[0].token_ids, out.metrics.speculative_decoding
        steps = found.num_spec_steps if found else len(tokens)
        yield {
            "prompt": len(prompt), "tokens": tokens, "seconds": took, "first": first, "steps": steps,
            "text": out.outputs[0].text,
        }  # fmt: skip


def theirs(side: str, args: argparse.Namespace, counts: list[int]) -> Iterator[dict[str, Any]]:
    """The turns of llama.cpp: as many tokens as plain decoding wrote."""
    known = prompts(complete(load(args.model).tokenizer))
    draft = args.draft if side.endswith("draft") else None
    with LlamaServer(args.program, args.model, draft, longest=8, length=LENGTH) as server:
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
    if "full" in found and "first" in found:
        print(
            f"first turn: {found['full'][0]['seconds']:.2f} s with a full memory, {found['first'][0]['seconds']:.2f} s without"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", "-d", required=True)
    parser.add_argument("--program", type=Path, help="a llama-server, or a Python that has xllamacpp")
    parser.add_argument("--folder", type=Path, help="where results and folders are kept; without it they go")
    parser.add_argument("--side", choices=SIDES, help="this one alone")
    args = parser.parse_args()
    if args.side is None:
        print(facts())
        with tempfile.TemporaryDirectory() as made:
            for side in ("plain", "first", "again", "full", "full", *(SIDES[4:] if args.program else ())):
                given = [*sys.argv[1:], "--folder", str(args.folder or made), "--side", side]
                subprocess.run([sys.executable, "-m", "benchmarks.session", *given], check=True)
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
