"""The demo: plain and speculative decoding write the same texts in turns. Speeds and texts are compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from outrider.bench import stats
from outrider.bench.local import Local
from outrider.bench.prompts import Prompt
from outrider.bench.run import PromptRecord, Run, Sample, Setting
from outrider.bench.schedule import measure
from outrider.core.types import Guarantee
from outrider.kernels.machine import machine
from outrider.llm import LLM
from outrider.params import SamplingParams

SEED = 20261121
# The first text on the screen. Greedy texts of the small built-in model repeat themselves; with this seed it reads like code.
FIRST_PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without the newline at the end."""'''
FIRST_SAMPLING = {"temperature": 0.7, "top_p": 0.85, "seed": 20}
PLAIN, SPECULATIVE = "plain", "speculative"
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
# For models with a chat template.
FIRST_QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it."
FIRST_CHAT_SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 20}
QUESTIONS = {
    "chat: a plant": "Explain in simple words how a plant makes its food.",
    "chat: a letter": "Write a short letter that thanks a colleague for her help with a project.",
    "chat: advice": "What are three good habits for someone who wants to sleep better?",
    "code: a class": "Write a Python class for a stack with push, pop and peek.",
    "code: a file": "Write a Python function that reads a CSV file and returns a list of dictionaries.",
    "code: a loop": "Write a Python function that counts how often each word occurs in a text.",
}
# A newline at the end of a prompt hides the indentation: the two are one token. The model would then end the file.
PROMPTS = {name: text.strip("\n") for name, text in PROMPTS.items()}


@dataclass(frozen=True)
class DemoText:
    """One prompt at one temperature: the samples of both settings, one for each repeat."""

    name: str
    temperature: float
    plain: list[Sample]
    fast: list[Sample]

    @property
    def title(self) -> str:
        return f"{_kind(self.temperature)} · {self.name}"

    @property
    def identical(self) -> bool:
        """In every repeat, both settings wrote the same tokens."""
        return not stats.differing(self.fast, self.plain)[0]

    @property
    def speedup(self) -> float:
        return speed(self.fast) / speed(self.plain)

    def report(self) -> dict[str, Any]:
        """For the file of --json."""
        return {
            "name": self.name,
            "temperature": self.temperature,
            "plain": [_numbers(s) for s in self.plain],
            "fast": [_numbers(s) for s in self.fast],
            "identical": self.identical,
            "plain_tokens_per_second": speed(self.plain),
            "speculative_tokens_per_second": speed(self.fast),
            "speedup": self.speedup,
            "mean_acceptance_length": acceptance_length(self.fast),
        }


def speed(samples: list[Sample]) -> float:
    """Tokens per second of all samples together."""
    return sum(s.output_tokens for s in samples) / sum(s.seconds for s in samples)


def acceptance_length(samples: list[Sample]) -> float:
    """Tokens per step, the target's own token included. 1 if nothing was drafted."""
    found = stats.acceptance(samples)
    return found.length if found else 1.0


def _numbers(sample: Sample) -> dict[str, Any]:
    drafted, accepted = sample.drafted or [], sample.accepted or []
    return {
        "tokens": sample.token_ids,
        "seconds": sample.seconds,
        "steps": len(drafted),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
    }


def talks(llm: LLM) -> bool:
    """Whether the model has a chat template. The demo then asks it questions."""
    return bool(getattr(llm.loaded.tokenizer, "chat_template", None))


def prompts_for(llm: LLM) -> list[Prompt]:
    if talks(llm):
        return [Prompt(name, "all", [{"role": "user", "content": text}]) for name, text in QUESTIONS.items()]
    return [Prompt(name, "all", text) for name, text in PROMPTS.items()]


def compare(llm: LLM, tokens: int, repeats: int) -> Iterator[tuple[Run, list[Sample]]]:
    """Every prompt greedily and sampled, in turns. Yields the run of the temperature and the samples of each turn."""
    plain = LLM(llm.loaded, max_num_seqs=1, max_model_len=llm.decoder.max_length)
    prompts = prompts_for(llm)
    for temperature in (0.0, 0.8):
        sampling = {"temperature": temperature, "max_tokens": tokens, "seed": SEED}
        run = Run(
            date="",
            command="",
            model=llm.loaded.name,
            machine={},
            sampling=sampling,
            repeats=repeats,
            settings=[Setting(name=PLAIN), Setting(name=SPECULATIVE, guarantee=llm.decoder.guarantee.value)],
            prompts=[PromptRecord(id=p.id, text=p.text) for p in prompts],
        )
        for samples in measure(run, Local({PLAIN: plain, SPECULATIVE: llm}, sampling), prompts):
            if samples[0].error:
                raise RuntimeError(samples[0].error)
            yield run, samples


def texts_of(runs: list[Run]) -> list[DemoText]:
    """The samples of the runs by temperature and prompt."""
    texts = list[DemoText]()
    for run in runs:
        for prompt in run.prompts:
            mine = [s for s in run.samples if s.prompt == prompt.id]
            plain, fast = ([s for s in mine if s.setting == name] for name in (PLAIN, SPECULATIVE))
            texts.append(DemoText(prompt.id, run.sampling["temperature"], plain, fast))
    return texts


def run(
    llm: LLM,
    console: Console,
    show: Callable[[LLM, str, SamplingParams, bool], None],
    *,
    tokens: int = 128,
    repeats: int = 3,
    file: Path | None = None,
    command: str = "",
) -> int:
    """Show one text, measure all texts, print the table and its meaning. Returns 1 if an exact text differs, else 0.

    show: gets the model, the prompt, the parameters, and whether the prompt is a question of a chat.
    """
    chat = talks(llm)
    first, sampling = (FIRST_QUESTION, FIRST_CHAT_SAMPLING) if chat else (FIRST_PROMPT, FIRST_SAMPLING)
    console.print(first, style="dim", markup=False, highlight=False, end="\n\n" if chat else "")
    show(llm, first, SamplingParams(max_tokens=tokens, **sampling), chat)
    runs = list[Run]()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=console.color_system is None) as progress:
        task = progress.add_task("measuring", total=len(prompts_for(llm)) * 4 * repeats)
        for measured, samples in compare(llm, tokens, repeats):
            if not runs or runs[-1] is not measured:
                runs.append(measured)
            kind = _kind(measured.sampling["temperature"])
            status = f"{kind} · {samples[0].prompt} · {speed(samples):.0f} tokens/s"
            progress.update(task, advance=1, description=f"{status:44.44}")
    texts = texts_of(runs)
    host = machine()
    console.print(table(texts))
    for line in conclusion(texts, llm.decoder.guarantee, llm.config.budget.depth):
        console.print(line, highlight=False)
    console.print(
        f"Measured on {host['cores']} cores of {host['cpu']}; kernels: {host['kernels']}.", highlight=False, style="dim"
    )
    if file is not None:
        report = {"command": command, "machine": host, "model": llm.loaded.name, "speculative_config": _plain(llm)}
        report |= {"totals": totals(texts), "texts": [t.report() for t in texts]}
        file.write_text(json.dumps(report) + "\n")
        console.print(f"The numbers are in {file}.", highlight=False, style="dim")
    exact = llm.decoder.guarantee is Guarantee.EXACT_TOKENS
    return int(exact and not all(t.identical for t in texts))


def totals(texts: list[DemoText]) -> dict[str, Any]:
    """Both settings, all texts together."""
    plain, fast = ([s for t in texts for s in samples(t)] for samples in (lambda t: t.plain, lambda t: t.fast))
    found = stats.acceptance(fast)
    return {
        "plain_tokens_per_second": speed(plain),
        "speculative_tokens_per_second": speed(fast),
        "speedup": speed(fast) / speed(plain),
        "median_speedup": statistics.median(t.speedup for t in texts),
        "mean_acceptance_length": acceptance_length(fast),
        "draft_acceptance_rate": (found.rate or 0.0) if found else 0.0,
        "identical": sum(t.identical for t in texts),
        "texts": len(texts),
    }


def table(texts: list[DemoText]) -> Table:
    """A row for each text, and the totals."""
    title = "The same texts, plain and speculative"
    out = Table(title=title, title_justify="left", show_footer=True, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    total = totals(texts)
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
    for t in texts:
        if t.temperature != kind:
            kind = t.temperature
            out.add_section()
            out.add_row(f"[bold]{_kind(kind)}[/bold]")
        speedup = f"[{'green' if t.speedup > 1 else 'yellow'}]{t.speedup:.2f} x[/]"
        same = "[green]yes[/]" if t.identical else "[bold red]NO[/]"
        out.add_row(
            f"  {t.name}",
            f"{speed(t.plain):.0f}",
            f"{speed(t.fast):.0f}",
            speedup,
            f"{acceptance_length(t.fast):.2f}",
            same,
        )
    return out


def conclusion(texts: list[DemoText], guarantee: Guarantee, depth: int) -> Iterator[str]:
    """The meaning of the table, in sentences. depth: draft tokens of a step, at most."""
    total = totals(texts)
    median, length, count = total["median_speedup"], total["mean_acceptance_length"], total["texts"]
    numbers = (
        f"{total['speculative_tokens_per_second']:.0f} against {total['plain_tokens_per_second']:.0f} tokens/s in all"
    )
    if median >= 1:
        yield f"[bold]Speculative decoding was {median:.2f} times as fast (median of {count} texts): {numbers}.[/bold]"
    elif length < 1.2:
        yield (
            f"[bold yellow]No gain here: {median:.2f} times plain speed (median of {count} texts): {numbers}.[/bold yellow] "
            "The first draft tokens cost more than they saved, so most steps had none. This model is too small, or its "
            "drafter is wrong too often."
        )
    else:
        yield (
            f"[bold yellow]Speculative decoding was slower here: {median:.2f} times plain speed (median of {count} "
            f"texts): {numbers}.[/bold yellow] The draft tokens cost more than they saved. Fewer of them "
            "(--num-speculative-tokens 2) or a better draft can help."
        )
    yield (
        f"A drafter proposes up to {depth} tokens and the model checks them in one pass. That gave {length:.1f} tokens a "
        "pass (acceptance length, the model's own token included). Every token is the model's own choice."
    )
    if total["identical"] == count:
        yield f"All {count} texts were compared token by token: identical to plain decoding ({guarantee.value})."
        return
    for t in texts:
        for a, b in zip(t.plain, t.fast, strict=True):
            if a.token_ids != b.token_ids:
                pairs = enumerate(zip(a.token_ids or [], b.token_ids or [], strict=False))
                at = next((i for i, (x, y) in pairs if x != y), min(a.output_tokens, b.output_tokens))
                yield f"[bold red]{t.title} differs from plain decoding at token {at}.[/bold red]"
                break
    if guarantee is Guarantee.EXACT_TOKENS:
        yield (
            "That breaks the guarantee (exact-tokens). Without the native kernels, rounding can decide a near-tie of two "
            "tokens. With them it is a bug: report it with the output of --json."
        )
    else:
        yield f"The guarantee, {guarantee.value}, allows other tokens of the same distribution."


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _plain(llm: LLM) -> dict[str, Any]:
    return {
        k: v if isinstance(v, (str, int, float, type(None))) else str(v) for k, v in llm.config.model_dump().items()
    }
