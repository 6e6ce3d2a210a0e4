"""The demo: the same texts written by plain and by speculative decoding, timed side by side, compared by token."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from outrider.core.types import Guarantee
from outrider.decode import Decoder, Request
from outrider.kernels.machine import machine
from outrider.llm import LLM, len_drafted
from outrider.params import SamplingParams

SEED = 20261121
PROMPTS = {
    "binary search": '''
def binary_search(items, target):
    """Return the index of target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
''',
    "a class": '''
class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self._items = []

    def push(self, item):
''',
    "command line": """
import argparse
import sys


def main():
    parser = argparse.ArgumentParser(description="Count the words of a file")
    parser.add_argument("path", help="the file to read")
""",
    "unit tests": """
import unittest


class TestParser(unittest.TestCase):
    def setUp(self):
        self.parser = Parser()

    def test_empty(self):
        self.assertEqual(self.parser.parse(""), [])

""",
    "file reading": '''
def read_config(path):
    """Read key = value lines from a file into a dict."""
    result = {}
    with open(path, encoding="utf-8") as f:
        for line in f:
''',
    "dataclass": """
from dataclasses import dataclass


@dataclass
class Point:
    x: float
    y: float

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
""",
}
PROMPTS = {  # a prompt that ends in a newline hides the indentation, which is one token with it: the model would end the file
    name: text.strip("\n") for name, text in PROMPTS.items()
}


@dataclass(frozen=True)
class Run:
    """One text, written once. seconds: from the request to the last token. steps: target forwards that gave tokens."""

    tokens: list[int]
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """One prompt at one temperature, both ways."""

    name: str
    temperature: float
    plain: list[Run] = field(default_factory=list)
    fast: list[Run] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Every run, plain or speculative, wrote the same tokens."""
        return all(run.tokens == self.plain[0].tokens for run in (*self.plain, *self.fast))

    @property
    def speedup(self) -> float:
        return rate(self.fast) / rate(self.plain)

    def report(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "identical": self.identical,
            "plain_tokens_per_second": rate(self.plain),
            "speculative_tokens_per_second": rate(self.fast),
            "speedup": self.speedup,
            "mean_acceptance_length": acceptance_length(self.fast),
        }


def rate(runs: list[Run]) -> float:
    """Tokens divided by time, over all runs together."""
    return sum(len(r.tokens) for r in runs) / sum(r.seconds for r in runs)


def acceptance_length(runs: list[Run]) -> float:
    """Committed tokens per step, the bonus token counted."""
    return 1 + sum(r.accepted for r in runs) / sum(r.steps for r in runs)


def write(decoder: Decoder, prompt: list[int], params: SamplingParams) -> Run:
    """Continue a prompt to its end, timed."""
    request = Request(0, prompt, params, params.seed or 0)
    row, steps, drafted, accepted = None, 0, 0, 0
    for step, moved in decoder.steps([request]):
        if step is not None:  # None: a chunk of the prompt
            row, steps = moved[0], steps + 1
            drafted, accepted = drafted + len_drafted(step, 0), accepted + step.commits[0].num_accepted
    assert row is not None
    assert row.done is not None
    return Run(row.output, row.done - row.arrived, steps, drafted, accepted)


def compare(llm: LLM, tokens: int, repeats: int) -> Iterator[tuple[Comparison, Run]]:
    """Every prompt greedily and sampled; plain and speculative take turns. Yields after each run."""
    limit = llm.decoder.max_length
    plain = Decoder(llm.loaded.model, rows=1, max_length=limit, end_ids=llm.loaded.end_ids, tokenizer=llm.tokenizer)
    warm = SamplingParams(temperature=0, max_tokens=min(8, tokens))
    for decoder in (plain, llm.decoder):
        write(decoder, llm.encode(PROMPTS["binary search"]), warm)
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=SEED)
        for name, text in PROMPTS.items():
            comparison, prompt = Comparison(name, temperature), llm.encode(text)
            for turn in range(repeats):
                both = [(plain, comparison.plain), (llm.decoder, comparison.fast)]
                for decoder, runs in both if turn % 2 == 0 else both[::-1]:
                    runs.append(write(decoder, prompt, params))
                    yield comparison, runs[-1]


def run(
    llm: LLM,
    console: Console,
    show: Callable[[LLM, str, SamplingParams], None],
    *,
    tokens: int = 128,
    repeats: int = 3,
    file: Path | None = None,
    command: str = "",
) -> int:
    """Show one text, measure all, print the table and what it means. Returns 1 if an exact text differs, else 0."""
    show(llm, PROMPTS["a class"], SamplingParams(temperature=0, max_tokens=tokens, seed=SEED))
    results: dict[int, Comparison] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=console.color_system is None) as progress:
        task = progress.add_task("measuring", total=len(PROMPTS) * 4 * repeats)
        for comparison, last in compare(llm, tokens, repeats):
            results[id(comparison)] = comparison
            doing = f"{_kind(comparison.temperature)} · {comparison.name} · {last.rate:.0f} tokens/s"
            progress.update(task, advance=1, description=f"{doing:44.44}")
    comparisons = list(results.values())
    host = machine()
    console.print(table(comparisons))
    for line in conclusion(comparisons, llm.decoder.guarantee, llm.config.budget.depth):
        console.print(line, highlight=False)
    console.print(
        f"Measured on {host['cores']} cores of {host['cpu']}; kernels: {host['kernels']}.", highlight=False, style="dim"
    )
    if file is not None:
        report = {"command": command, "machine": host, "model": llm.loaded.name, "speculative_config": _plain(llm)}
        report |= {"totals": totals(comparisons), "texts": [c.report() for c in comparisons]}
        file.write_text(json.dumps(report) + "\n")
        console.print(f"The numbers are in {file}.", highlight=False, style="dim")
    exact = llm.decoder.guarantee is Guarantee.EXACT_TOKENS
    return int(exact and not all(c.identical for c in comparisons))


def totals(comparisons: list[Comparison]) -> dict[str, Any]:
    """Both sides over the whole set."""
    plain = [r for c in comparisons for r in c.plain]
    fast = [r for c in comparisons for r in c.fast]
    return {
        "plain_tokens_per_second": rate(plain),
        "speculative_tokens_per_second": rate(fast),
        "speedup": rate(fast) / rate(plain),
        "median_speedup": statistics.median(c.speedup for c in comparisons),
        "mean_acceptance_length": acceptance_length(fast),
        "draft_acceptance_rate": sum(r.accepted for r in fast) / max(1, sum(r.drafted for r in fast)),
        "identical": sum(c.identical for c in comparisons),
        "texts": len(comparisons),
    }


def table(comparisons: list[Comparison]) -> Table:
    """A row per text, and the sums."""
    title = "The same texts, plain and speculative"
    out = Table(title=title, title_justify="left", show_footer=True, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    total = totals(comparisons)
    out.add_column("text", footer="all, tokens ÷ time", no_wrap=True)
    for head, foot in (
        ("plain\ntokens/s", f"{total['plain_tokens_per_second']:.0f}"),
        ("speculative\ntokens/s", f"{total['speculative_tokens_per_second']:.0f}"),
        ("speedup", f"{total['speedup']:.2f} x"),
        ("acceptance\nlength", f"{total['mean_acceptance_length']:.2f}"),
        ("identical\ntext", f"{total['identical']} of {total['texts']}"),
    ):
        out.add_column(head, footer=foot, justify="right", no_wrap=True)
    kind = None
    for c in comparisons:
        if c.temperature != kind:
            kind = c.temperature
            out.add_section()
            out.add_row(f"[bold]{_kind(kind)}[/bold]")
        speedup = f"[{'green' if c.speedup > 1 else 'yellow'}]{c.speedup:.2f} x[/]"
        same = "[green]yes[/]" if c.identical else "[bold red]NO[/]"
        out.add_row(
            f"  {c.name}",
            f"{rate(c.plain):.0f}",
            f"{rate(c.fast):.0f}",
            speedup,
            f"{acceptance_length(c.fast):.2f}",
            same,
        )
    return out


def conclusion(comparisons: list[Comparison], guarantee: Guarantee, guesses: int) -> Iterator[str]:
    """What the table means, in sentences."""
    total = totals(comparisons)
    median, length = total["median_speedup"], total["mean_acceptance_length"]
    numbers = (
        f"{total['speculative_tokens_per_second']:.0f} against {total['plain_tokens_per_second']:.0f} tokens/s in all"
    )
    texts = total["texts"]
    if median >= 1:
        yield f"[bold]Speculative decoding was {median:.2f} times as fast (median of {texts} texts): {numbers}.[/bold]"
    elif length < 1.2:
        yield (
            f"[bold yellow]No gain here: {median:.2f} times plain speed (median of {texts} texts): {numbers}.[/bold yellow] "
            "The first guesses cost more than they saved, so guessing was mostly left out: this model is too small, or "
            "its drafter is wrong too often."
        )
    else:
        yield (
            f"[bold yellow]Speculative decoding was slower here: {median:.2f} times plain speed (median of {texts} "
            f"texts): {numbers}.[/bold yellow] The guesses cost more than they saved; fewer of them "
            "(--num-speculative-tokens 2) or a better draft may help."
        )
    yield (
        f"A drafter guesses up to {guesses} tokens and the model checks them in one pass, which gave {length:.1f} "
        "tokens a pass (acceptance length, the model's own token counted). Every token is the model's own choice."
    )
    if total["identical"] == texts:
        yield f"All {texts} texts were compared token by token: identical to plain decoding ({guarantee.value})."
        return
    for c in comparisons:
        if not c.identical:
            other = next(r.tokens for r in (*c.plain, *c.fast) if r.tokens != c.plain[0].tokens)
            pairs = enumerate(zip(c.plain[0].tokens, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(other), len(c.plain[0].tokens)))
            yield f"[bold red]{_kind(c.temperature)} · {c.name} differs from plain decoding at token {at}.[/bold red]"
    if guarantee is Guarantee.EXACT_TOKENS:
        yield (
            "That breaks the guarantee (exact-tokens). Without the native kernels rounding can turn a near-tie between "
            "two tokens; with them it is a bug: please report it with the output of --json."
        )
    else:
        yield f"The guarantee in force, {guarantee.value}, allows other tokens of the same law."


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _plain(llm: LLM) -> dict[str, Any]:
    return {
        k: v if isinstance(v, (str, int, float, type(None))) else str(v) for k, v in llm.config.model_dump().items()
    }
