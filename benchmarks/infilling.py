"""Fill-in-the-middle: `python -m benchmarks.infilling MODEL.gguf`. Speed over plain decoding, and whether the texts are equal.

The cases are cut from functions of the standard library, chosen by a seed. The prompt is the file around the gap, as an editor
sends it. Each case is asked twice: at first, and again after a part of the first answer has been typed, as editors do.
Plain decoding and `auto` write each text in turns, in one process. The time is that after the first token.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from outrider import LLM, SamplingParams
from outrider.core.infill import Infilling
from outrider.core.intervals import interval

BEFORE, AFTER = 1200, 800  # characters around the gap


def cases(seed: int) -> Iterator[tuple[str, str, str]]:
    """(name, text before the gap, text after it), without end."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    draw = random.Random(seed)
    while True:
        file = draw.choice(files)
        text = file.read_text(encoding="utf-8")
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        found = [node for node in found if 8 <= (node.end_lineno or 0) - node.lineno < 40]
        if not found:
            continue
        node = draw.choice(found)
        end, start = node.end_lineno or 0, node.body[ast.get_docstring(node) is not None].lineno - 1
        size = draw.randint(2, (end - node.lineno) // 3 + 1)
        if start + size < end:
            at = draw.randint(start, end - size - 1)
            lines = text.splitlines(keepends=True)
            yield f"{file.stem}.{node.name}", "".join(lines[:at])[-BEFORE:], "".join(lines[at + size :])[:AFTER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", "-d", help="a draft model for auto")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--skip", type=int, default=0, help="cases to leave out, for a run in parts")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    starts = tempfile.TemporaryDirectory()  # each prompt is read once
    config = {"method": "auto", "model": args.draft}
    llm = LLM(args.model, speculative_config=config, max_num_seqs=1, prefix_dir=starts.name)
    form = Infilling.of(llm.tokenizer)
    assert form is not None, "this model has no tokens for a gap"
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=list(form.ends))
    logs, differ = defaultdict[str, list[float]](list), 0
    written, steps = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, before, after in islice(cases(args.seed), args.skip, args.skip + args.cases):
        typed = ""
        for what in ("at first", "typed on"):
            ids = form.prompt(before + typed, after)
            sides = [llm.scheduler.generate(llm.requests(ids, params, method=m))[0] for m in ("none", None)]
            plain, auto = (one.clock.total - (one.clock.time_to_first_token or 0.0) for one in sides)
            count = len(sides[0].tokens) - len(ids)
            differ += sides[0].tokens != sides[1].tokens
            typed = sides[0].text[: len(sides[0].text) // 4]
            if count > 8:
                logs[what].append(float(np.log(plain / auto)))
                written[what] += count
                steps[what] += sides[1].counts.speculative.num_spec_steps
                print(f"{name}, {what}: {count} tokens, {plain / auto:.2f} of plain", flush=True)
    for what, some in logs.items():
        mean = interval(np.array([[one, 1] for one in some]), lambda sums: np.exp(sums[..., 0] / sums[..., 1]))
        print(
            f"{what}, {len(some)} texts: {mean.value:.2f} times plain ({mean.low:.2f} to {mean.high:.2f}), "
            f"{written[what] / steps[what]:.2f} tokens a step"
        )
    print(f"{differ} texts differ")


if __name__ == "__main__":
    main()
