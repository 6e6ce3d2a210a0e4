"""What all measurements share: options, turns, ratios with intervals, tables and result files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import RESULTS, machine
from outrider.core.files import sha256
from outrider.core.intervals import CONFIDENCE, DRAWS, Interval, interval
from outrider.models.builtin.shipped import builtin_folder

T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of options. Its help is the docstring of a module, and its program the first command there."""
    text = doc or ""
    command = re.search(r"python -m [\w.]+", text)
    return argparse.ArgumentParser(
        prog=command[0] if command else None, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def order(sides: Sequence[T], number: int) -> Sequence[T]:
    """The sides in the order of a round: reversed in each second one."""
    return sides if number % 2 == 0 else sides[::-1]


def turns(sides: Sequence[T], rounds: int, warm: int = 1) -> Iterator[tuple[int, T]]:
    """Each side once in a round, so that all have the same pace of the machine. The order is reversed with each round.

    Args:
        sides: what is compared.
        rounds: those that count, numbered from 0.
        warm: rounds before them, with negative numbers.
    """
    for number in range(-warm, rounds):
        for side in order(sides, number):
            yield number, side


def speedup(base: Sequence[float], other: Sequence[float]) -> Interval:
    """How many times as fast `other` is: a ratio of sums, with the interval over the pairs of seconds."""
    return interval(np.array([base, other]).T)


def median_interval(ratios: Sequence[float], seed: int = 0) -> Interval:
    """The median of a list and its bootstrap interval: the elements are drawn anew, with replacement."""
    values = np.asarray(ratios, float)
    picks = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(values)), float(low), float(high), len(values))


def shown(ratio: Interval) -> str:
    """A ratio with its interval, as the pages write it."""
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def differing(text: Sequence[int], plain: Sequence[int]) -> int:
    """Tokens that are not those of plain decoding. A token that is missing counts, too."""
    return sum(a != b for a, b in zip(text, plain, strict=False)) + abs(len(text) - len(plain))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def command(module: str, arguments: Sequence[str] | None = None) -> str:
    """The command that runs now, without the folders of this machine."""
    words = sys.argv[1:] if arguments is None else arguments
    return " ".join([f"python -m {module}", *(Path(w).name if w.startswith(("/", "~")) else w for w in words)])


def save(name: str, out: Path | None = None, **fields: Any) -> Path:
    """Write a result, with the command, the machine and the date. Returns its path.

    Args:
        name: of the measurement.
        out: a file, or a folder; None is the folder of results.
        fields: what was measured.
    """
    facts = machine.facts()
    path = out or RESULTS
    path = path if path.suffix == ".json" else path / f"{facts['date']}-{name.replace('_', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"name": name, "command": command(f"benchmarks.{name}"), "machine": facts, **fields}
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def source_folder(name: str) -> Path:
    """The folder of a built-in model, or the one that is named."""
    return builtin_folder(name) if name.startswith("builtin:") else Path(name)


def fingerprint(name: str) -> str:
    """Changes when a model is trained anew. The name is that of a built-in model, a folder or a GGUF file."""
    weights = Path(name) if Path(name).is_file() else source_folder(name) / "model.safetensors"
    return sha256([weights])[:16]
