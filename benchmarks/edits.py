"""Edits of real files: the prompt holds a file and asks for it with one change, so most of the answer is in the prompt.

    python -m benchmarks.edits --size 0.5B --methods plain suffix:16 prediction:16
    python -m benchmarks.edits --size 15M --texts 24 --methods ngram:16 suffix:16 prediction:16 prediction:16x2x24

The files are parts of the modules of this Python's own standard library. The models made here cannot follow an
instruction, so the answer is *forced*: the target pays for the forward of a real model and then its logits are raised at
the known answer (`ForcedTarget`). What is measured is what a model that does as it is told would gain: cost is real,
acceptance is that of the right answer, the text is not the model's own.

A method is NAME:DEPTH, or NAME:DEPTHxWIDTHxNODES for a tree.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import re
import statistics
from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import headline
from benchmarks.known_text import force_text
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import NgramDrafter, NoDraft, PredictionDrafter, SuffixDrafter, TokenRecyclingDrafter
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.models.base import LanguageModel, Output
from outrider.models.nodes import Nodes

MODULES = (
    "bisect", "heapq", "textwrap", "shlex", "fnmatch", "string", "colorsys", "sched", "queue", "copy", "contextlib",
    "calendar", "statistics", "difflib", "csv", "configparser", "getopt", "glob", "gettext", "linecache", "netrc",
    "pprint", "reprlib", "shelve", "stat", "tabnanny", "timeit", "tokenize", "zipapp",
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """kind: rename | insert | delete. before, after: the file; asked: the instruction."""

    kind: str
    before: str
    after: str
    asked: str

    @property
    def prompt(self) -> str:
        return f"{self.before}\n\n# {self.asked} The whole file after the change:\n\n"


def make_edit(kind: str, source: str, draw: random.Random) -> Edit | None:
    """One change of a source, None where it offers no place for it."""
    lines, parsed = source.splitlines(keepends=True), ast.parse(source)
    functions = [n for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef) and n.end_lineno]
    if kind == "rename":
        names = {n.id for n in ast.walk(parsed) if isinstance(n, ast.Name)} | {f.name for f in functions}
        often = sorted(n for n in names if len(n) > 3 and 3 <= len(re.findall(rf"\b{n}\b", source)) <= 12)
        if not often:
            return None
        name = draw.choice(often)
        new = draw.choice(["current", "item_list", "payload", "new_value"])
        return Edit(kind, source, re.sub(rf"\b{name}\b", new, source), f"Rename {name} to {new}.")
    if not functions:
        return None
    f = draw.choice(functions)
    if kind == "delete":
        first = min([f.lineno, *(d.lineno for d in f.decorator_list)]) - 1
        after = "".join(lines[:first] + lines[f.end_lineno :])
        return Edit(kind, source, after, f"Delete the function {f.name}.") if len(functions) > 1 else None
    at, indent = f.body[0].lineno - 1, " " * f.body[0].col_offset
    new = f"{indent}logger.debug('entering {f.name}')\n"
    return Edit(kind, source, "".join([*lines[:at], new, *lines[at:]]), f"Log when {f.name} is entered.")


def part_of_file(module: str, size: int, draw: random.Random) -> str | None:
    """Whole definitions of a module that follow each other, about `size` characters."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    body = [n for n in ast.parse(text).body if n.end_lineno]
    first = draw.randrange(len(body))
    start, end = body[first].lineno - 1, 0
    lines = text.splitlines(keepends=True)
    for node in body[first:]:
        if len("".join(lines[start : node.end_lineno])) > 1.3 * size:
            break
        end = node.end_lineno or end
    part = "".join(lines[start:end])
    return part if len(part) > 0.6 * size and not part.lstrip().startswith("@") else None


def edits(count: int, seed: int = 0, size: int = 1400) -> list[Edit]:
    """Edits in turn of each kind, of files of about `size` characters. The same for the same Python and seed."""
    draw, out, seen = random.Random(seed), list[Edit](), set[str]()
    kinds = ("rename", "insert", "delete")
    while len(out) < count:
        source = part_of_file(draw.choice(MODULES), size, draw)
        if source is None or source in seen:
            continue
        try:
            edit = make_edit(kinds[len(out) % 3], source, draw)
        except SyntaxError:
            continue
        if edit is not None and edit.before != edit.after and 2 * len(edit.after) > len(edit.before):
            seen.add(source)
            out.append(edit)
    return out


def edit_workload(
    tokenizer: Any, count: int, seed: int = 0, size: int = 1400
) -> list[tuple[list[int], list[int], str]]:
    """(prompt ids, ids of the expected answer, the file before the change: the prediction) of `count` edits.

    The answer is encoded behind its prompt, as a model would write it, not apart from it as the prediction is.
    """
    out = []
    for edit in edits(count, seed, size):
        prompt = list(tokenizer(edit.prompt)["input_ids"])
        whole = list(tokenizer(edit.prompt + edit.after)["input_ids"])
        common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        out.append((whole[:common], whole[common:], edit.before))
    return out


class ForcedTarget(LanguageModel):
    """A model that pays for its forward and then writes `text` (prompt and answer), whatever it would have said.

    The logit of the known next token is raised above all others at each node, by the node's place in the text; where a
    guess has left the text, that is of no account. For measurements: costs are the model's, the words are not.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.text = model, list[int]()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.device, self.batch_invariant = model.device, model.batch_invariant

    def new_cache(self, num_slots: int, max_length: int) -> Any:
        return self.model.new_cache(num_slots, max_length)

    def forward(self, nodes: Nodes, **options: Any) -> Output:
        out = self.model.forward(nodes, **options)
        if options.get("want", "all") != "all" or nodes.parents is None:
            return out
        logits = out.logits.clone()
        force_text(logits, nodes.parents, nodes.lengths, self.text)
        return out._replace(logits=logits)


def drafter_of(name: str, vocab_size: int) -> Any:
    """A fresh drafter. suffix sees the prompt and the answer alone, no other text."""
    made = {
        "plain": NoDraft,
        "ngram": NgramDrafter,
        "suffix": lambda: SuffixDrafter(shared=0),
        "prediction": PredictionDrafter,
        "token_recycling": lambda: TokenRecyclingDrafter(vocab_size),
    }
    if name not in made:
        raise ValueError(f"there is no method {name!r} here; there are {', '.join(made)}")
    return made[name]()


def run(
    target: ForcedTarget, tokenizer: Any, method: str, prompt: list[int], answer: list[int], prediction: str
) -> dict[str, float]:
    """Writes one answer: tokens, steps, guesses, seconds without the prompt's, and seconds of the drafter."""
    name, _, shape = method.partition(":")
    target.text = prompt + answer
    told = tuple(tokenizer(prediction, add_special_tokens=False)["input_ids"])
    numbers = [int(n) for n in shape.split("x")] if shape else [0]
    decoder = Decoder(
        target, drafter_of(name, target.vocab_size), controller=Fixed(*numbers), num_slots=1, max_length=None
    )
    params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    row = decoder.start(Request(0, prompt, params, prediction=told))
    total = {"tokens": 0.0, "steps": 0.0, "drafted": 0.0, "seconds": 0.0, "drafting": 0.0}
    for step in decoder.run([row]):
        spent = sum(step.seconds.values())
        for key, value in zip(
            total,
            (len(step.commits[0].tokens), 1, int(step.draft.num_draft_tokens), spent, step.seconds["draft"]),
            strict=True,
        ):
            total[key] += value
    assert row.output == answer, "the forced answer was not written"
    return total


def measure(
    target: ForcedTarget,
    tokenizer: Any,
    methods: abc.Sequence[str],
    work: abc.Sequence[tuple[list[int], list[int], str]],
    plain: int,
) -> list[dict[str, Any]]:
    """One record a method. plain: tokens of each answer that plain decoding writes; all its tokens cost the same."""
    runs: dict[str, list[dict[str, float]]] = {m: [] for m in methods}
    for prompt, answer, prediction in work:
        for method in methods:
            cut = answer[:plain] if method == "plain" else answer
            runs[method].append(run(target, tokenizer, method, prompt, cut, prediction))
    base = [r["seconds"] / r["tokens"] for r in runs.get("plain", [])]
    records = []
    for method, done in runs.items():
        total = {k: sum(r[k] for r in done) for k in done[0]}
        gains = [b * r["tokens"] / r["seconds"] for b, r in zip(base, done, strict=True)] if base else []
        records.append(
            {
                "method": method,
                "tokens_per_second": round(total["tokens"] / total["seconds"], 1),
                "speedup": round(statistics.median(gains), 2) if gains else None,
                "least_speedup": round(min(gains), 2) if gains else None,
                "acceptance_length": round(total["tokens"] / total["steps"], 2),
                "acceptance_rate": round((total["tokens"] - total["steps"]) / max(total["drafted"], 1), 2),
                "draft_ms": round(1e3 * total["drafting"] / total["steps"], 3),
            }
        )
    return records


def main() -> None:
    from benchmarks.pairs import PRECISIONS, pair
    from benchmarks.report import console, rich_table
    from outrider.models.load import load

    parser = argparse.ArgumentParser(prog="python -m benchmarks.edits", description=headline(__doc__))
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--source", default="builtin:code-draft", help="whose function the target computes")
    parser.add_argument("--methods", nargs="+", default=["plain", "suffix:16", "prediction:16"])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--chars", type=int, default=1400, help="length of a file")
    parser.add_argument("--plain-tokens", type=int, default=32, help="tokens of each answer written plainly")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    how = PRECISIONS[args.precision]
    folder = pair(args.size, how["stored"], args.source).target
    loaded = load(str(folder), dtype=how["dtype"], quantization=how["quantization"])
    work = edit_workload(loaded.tokenizer, args.texts, args.seed, args.chars)
    records = measure(ForcedTarget(loaded.model), loaded.tokenizer, args.methods, work, args.plain_tokens)
    head = list(records[0])
    body = [[str(r[k]) if r[k] is not None else "-" for k in head] for r in records]
    tokens = sum(len(answer) for _, answer, _ in work)
    console.print(
        rich_table(f"edits, {args.size} {args.precision}: {args.texts} answers, {tokens} tokens, forced", head, body)
    )


if __name__ == "__main__":
    main()
