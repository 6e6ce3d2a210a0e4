"""`outrider batch`: a file of requests to a file of answers. Imports nothing large until the command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from outrider.cli.command import as_command
from outrider.cli.options import CODE, SpeculationOptions
from outrider.cli.terminal import RED, loading, plain, warn
from outrider.core.extras import install, needs
from outrider.serve.options import BatchOptions

if TYPE_CHECKING:
    from outrider.serve.batch.lines import BatchLine, Journal

_SHOWN = 5  # problems that are named on the terminal; the output has all


@as_command(
    "Use",
    "outrider batch requests.jsonl -o answers.jsonl",
    "outrider batch requests.jsonl -o answers.jsonl -m ./my-model --served-model-name gpt-4o-mini --max-num-seqs 16",
    "outrider batch requests.jsonl -o answers.jsonl -m ./my-model --ray auto --replicas 8 --cpus 4",
    usual="-o -m -d -k --method --served-model-name --quantization --max-num-seqs --ray --replicas",
)
def batch(
    input_file: Path,
    *,
    out: Path,
    model: str = CODE,
    speculation: SpeculationOptions,
    given: Annotated[dict[str, Any], BatchOptions],
    ray: str | None = None,
    replicas: Annotated[int | None, Field(ge=1)] = None,
    cpus: Annotated[int | None, Field(ge=1)] = None,
) -> None:
    """Answer a file of requests: OpenAI's batch format in and out, with the engine's slots full.

    Answers are kept in OUT.partial as they come. If the command is interrupted or killed, the same command continues: no
    answer is lost or written twice. OUT is written at the end. Exit code 1: some answers are errors; the output says why.

    Args:
        input_file (INPUT): Requests in the format of OpenAI's Batch API, one JSON object a line.
        out (FILE): The file of answers, in the order of the requests.
        ray (ADDRESS): Answer on a Ray cluster: its address, auto, or local for a new one here.
        replicas: Actors on the cluster, at most; 2 without it.
        cpus: CPUs of each actor; 1 without it.
    """
    config = speculation.config(model)
    if ray is None and (replicas or cpus):
        raise ValueError("--replicas and --cpus are those of a cluster; add --ray ADDRESS, or leave them out")
    with loading(model):
        with needs("serve", "outrider batch"):
            import outrider.serve.batch.answer  # noqa: F401
        from outrider.serve.batch.lines import Journal, scan
    options = BatchOptions(model=model, speculative_config=config, **given)
    if not input_file.is_file():
        raise FileNotFoundError(f"there is no file {input_file}; give a file of requests, one JSON object a line")
    if out.absolute() == input_file.absolute() or (out.exists() and out.samefile(input_file)):
        raise ValueError(f"-o {out} is the file of requests itself; name another file for the answers")
    lines = scan(input_file)
    if not lines:
        raise ValueError(f"{input_file} has no lines; an example of one is in docs/guides/batch.md")
    journal = Journal(out, options.of_texts)
    try:
        left = [line for line in lines if line.code is None and line.key not in journal]
        shown = BatchProgress(len(left), len(journal))
        if ray is None:
            answers = _here(input_file, left, options, shown)
        else:
            answers = _there(input_file, left, options, ray, replicas or 2, cpus or 1)
        for key, row in answers if left else ():
            journal.add(key, row)
            shown.add(row)
        failed = _failed(lines, journal)
        journal.finish(lines)
    except KeyboardInterrupt:
        print(f"{len(journal)} answers are kept in {journal.path}; the same command continues", file=sys.stderr)
        raise
    finally:
        journal.close()
    shown.end(out, len(lines), failed)
    raise typer.Exit(1 if failed else 0)


def _here(
    path: Path, lines: list[BatchLine], options: BatchOptions, shown: BatchProgress
) -> Iterator[tuple[str, dict[str, Any]]]:
    from outrider.serve.batch.answer import BatchAnswerer
    from outrider.serve.batch.lines import read

    with loading(options.model):
        answerer = BatchAnswerer(options)
    shown.begin()
    with answerer:
        for request, row in answerer.answers(read(path, lines)):
            yield request.key, row


def _there(
    path: Path, lines: list[BatchLine], options: BatchOptions, address: str, replicas: int, cpus: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    from outrider.serve.batch.lines import read

    entry = next(iter(entry_points(group="outrider.batch", name="ray")), None)
    if entry is None:
        raise ValueError(f"--ray needs outrider-ray, which is not installed: {install('ray')}")
    yield from entry.load()(read(path, lines), options, address, replicas, cpus)


def _failed(lines: list[BatchLine], journal: Journal) -> list[str]:
    """A sentence for each line whose answer is an error."""
    texts = list[str]()
    for line in lines:
        row = line.row if line.code is not None else journal.row(line.key)
        if row["error"] is not None:
            texts.append(row["error"]["message"])
        elif row["response"]["status_code"] != 200:
            texts.append(f"line {line.number} ({line.custom_id}): {row['response']['body']['error']['message']}")
    return texts


class BatchProgress:
    """A line on standard error that says how far the batch is: redrawn on a terminal, else a new one every 10 seconds."""

    def __init__(self, total: int, had: int) -> None:
        """total: lines that need an answer now. had: those that were answered before."""
        self.total, self.done, self.tokens = total, 0, 0
        self.started = self.last = perf_counter()
        self._bare = plain(sys.stderr)
        if had:
            print(f"{had} lines were answered before, {total} are left", file=sys.stderr)

    def begin(self) -> None:
        """Count the time from now on: the model is loaded."""
        self.started = self.last = perf_counter()

    def add(self, row: dict[str, Any]) -> None:
        """Count an answer."""
        body = (row["response"] or {}).get("body") or {}
        self.done += 1
        self.tokens += (body.get("usage") or {}).get("completion_tokens", 0)
        now = perf_counter()
        if now - self.last > (10 if self._bare else 0.2):
            self.last = now
            print(self.line(now - self.started), end="\n" if self._bare else "\x1b[K\r", file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """How far it is after so many seconds of work."""
        left = (self.total - self.done) * seconds / max(self.done, 1)
        speed = self.tokens / seconds if seconds else 0.0
        return f"{self.done} of {self.total} lines, {speed:.0f} tokens/s, {_duration(left)} left"

    def end(self, out: Path, lines: int, failed: list[str]) -> None:
        """Say what was done, and which lines failed. lines: of the output."""
        seconds = perf_counter() - self.started
        for problem in failed[:_SHOWN]:
            warn(f"error: {problem}", RED)
        if len(failed) > _SHOWN:
            warn(f"and {len(failed) - _SHOWN} more errors, in {out}", RED)
        speed = f", {self.tokens / seconds:.1f} tokens/s" if self.tokens else ""
        what = _counted(lines - len(failed), "answer") + (f" and {_counted(len(failed), 'error')}" if failed else "")
        print(f"{what} in {out}: {self.tokens} tokens in {_duration(seconds)}{speed}", file=sys.stderr)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
