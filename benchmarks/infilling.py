"""Fill-in-the-middle: `python -m benchmarks.infilling MODEL.gguf`. Speed over plain decoding, and whether the texts are equal.

The cases are functions of the standard library. From each, the middle lines are cut out, and the model writes them again.
Plain decoding and `auto`, with a draft model if one is given, run in turns in one process. With `--suffix` the text after the
gap is also given as the prediction of the answer.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import shlex
import textwrap
from statistics import geometric_mean
from time import perf_counter

from outrider import LLM, SamplingParams
from outrider.core.infill import Infilling

CASES = [
    heapq.nlargest, textwrap.indent, json.dumps, textwrap.dedent, json.load, heapq.merge, inspect.cleandoc, json.loads,
    inspect.getmodule, textwrap.shorten, shlex.split, heapq.nsmallest,
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", "-d", help="a draft model for auto")
    parser.add_argument("--suffix", action="store_true", help="predict that the answer meets the text after the gap")
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    sides = {
        "plain": LLM(args.model, max_num_seqs=1),
        "auto": LLM(args.model, speculative_config={"method": "auto", "model": args.draft}, max_num_seqs=1),
    }
    form = Infilling.of(sides["plain"].tokenizer)
    assert form is not None, "this model has no tokens for a gap"
    ratios, differ, hits, written, steps = list[float](), 0, 0, 0, 0
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=list(form.ends))
    for case in CASES[: args.cases]:
        lines = inspect.getsource(case).splitlines(keepends=True)
        a, b = len(lines) // 3, len(lines) - len(lines) // 4
        ids = form.prompt("".join(lines[:a]), "".join(lines[b:]))
        asked = params.with_(prediction="".join(lines[b:])) if args.suffix else params
        took, texts = dict[str, float](), dict[str, str]()
        for name, llm in sides.items():
            begun = perf_counter()
            out = llm.generate({"prompt_token_ids": ids}, asked)[0]
            first = out.metrics.time_to_first_token or 0.0
            took[name], texts[name] = perf_counter() - begun - first, out.outputs[0].text
            count = len(out.outputs[0].token_ids)
        found = out.metrics.speculative_decoding
        written, steps = written + count, steps + (found.num_spec_steps if found else count)
        differ += texts["plain"] != texts["auto"]
        hits += texts["plain"].strip() == "".join(lines[a:b]).strip()
        if count > 8:
            ratios.append(took["plain"] / took["auto"])
            print(f"{case.__module__}.{case.__name__}: {count} tokens, {ratios[-1]:.2f} of plain", flush=True)
    print(
        f"{len(ratios)} cases: {geometric_mean(ratios):.2f} times plain, {written / steps:.2f} tokens a step, {differ} texts "
        f"differ, {hits} are the library's own"
    )


if __name__ == "__main__":
    main()
