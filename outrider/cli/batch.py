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
    from outrider.serve.batch import BatchLine, Journal

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
    with loading(model), needs("serve", "outrider batch"):
        from outrider.serve.batch import Journal, scan
    options = BatchOptions(model=model, speculative_config=config, **given)
    if not input_file.is_file():
        raise FileNotFoundError(f"there is no file {input_file}; give a file of requests, one JSON object a line")
    if out.absolute() == input_file.absolute() or (out.exists() and out.samefile(input_file)):
        raise ValueError(f"-o {out} is the file of requests itself; name another file for the answers")
    lines = scan(input_file)
    if not lines:
        raise ValueError(f"{input_file} has no lines; an example of one is in docs/guides/batch.md")
    journal = Journal(out, options.of_texts)
    tokens, started = 0, perf_counter()
    try:
        left = [line for line in lines if line.code is None and line.key not in journal]
        if len(journal):
            print(f"{len(journal)} lines were answered before, {len(left)} are left", file=sys.stderr)
        if ray is None:
            answers = _here(input_file, left, options)
        else:
            answers = _there(input_file, left, options, ray, replicas or 2, cpus or 1)
        for key, row in _shown(answers, len(left)) if left else ():
            journal.add(key, row)
            tokens += _tokens(row)
        failed = _failed(lines, journal)
        journal.finish(lines)
    except KeyboardInterrupt:
        print(f"{len(journal)} answers are kept in {journal.path}; the same command continues", file=sys.stderr)
        raise
    finally:
        journal.close()
    for problem in failed[:_SHOWN]:
        warn(f"error: {problem}", RED)
    if len(failed) > _SHOWN:
        warn(f"and {len(failed) - _SHOWN} more errors, in {out}", RED)
    what = _counted(len(lines) - len(failed), "answer") + (f" and {_counted(len(failed), 'error')}" if failed else "")
    seconds = perf_counter() - started
    said = f"{what} in {out}: {tokens} tokens in {seconds:.0f} s, {tokens / seconds:.1f} tokens/s"
    print(said, file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


Answers = Iterator[tuple[str, dict[str, Any]]]


def _shown(answers: Answers, total: int) -> Answers:
    """The answers, and a bar on a terminal that says how far they are. total: how many there will be."""
    from rich.console import Console
    from rich.progress import track

    bar = Console(stderr=True)
    return iter(track(answers, "answering", total, console=bar, transient=True, disable=plain(sys.stderr)))


def _here(path: Path, lines: list[BatchLine], options: BatchOptions) -> Answers:
    from outrider.serve.batch import BatchAnswerer, read

    with loading(options.model):
        answerer = BatchAnswerer(options)
    with answerer:
        for request, row in answerer.answers(read(path, lines)):
            yield request.key, row


def _there(
    path: Path, lines: list[BatchLine], options: BatchOptions, address: str, replicas: int, cpus: int
) -> Answers:
    from outrider.serve.batch import read

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


def _tokens(row: dict[str, Any]) -> int:
    body = (row["response"] or {}).get("body") or {}
    return (body.get("usage") or {}).get("completion_tokens", 0)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
