"""`outrider train`. Imports torch only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Debug, LoadOptions, Model, option
from outrider.cli.terminal import loading, readable

METHODS = ("eagle3", "medusa", "dflash", "dspark")


def train(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"The kind of head: {', '.join(METHODS)}.")],
    model: Model,
    out: Annotated[
        Path, option("Output", "The folder of the head. A run in it goes on.", "--out", "-o", metavar="FOLDER")
    ],
    prompts: Annotated[
        list[str] | None,
        option(
            "Training",
            "A file of prompts, as for outrider bench, or self: the model invents them. May be repeated; they take turns.",
            metavar="FILE|self",
        ),
    ] = None,
    minutes: Annotated[float | None, option("Training", "How long the run takes, with the writing of answers.")] = None,
    tokens: Annotated[
        int | None, option("Training", "Tokens to train on, in place of minutes. The same seed gives the same head.")
    ] = None,
    temperature: Annotated[
        list[float] | None, option("Training", "Of the answers. May be repeated; they take turns. [default: 0.8, 0]")
    ] = None,
    length: Annotated[int, option("Training", "Tokens of a prompt and its answer, at most.", min=32)] = 384,
    draft_vocab_size: Annotated[
        int, option("Training", "Tokens that the head can propose, the most frequent ones; 0 for all.", min=0)
    ] = 8192,
    batch_tokens: Annotated[int, option("Training", "Tokens of a training step.", min=32)] = 2048,
    seed: Annotated[int, option("Training", "Of the answers, and of the head's beginning.")] = 0,
    start: Annotated[
        Path | None,
        option("Training", "A head to begin with, in place of a new one.", "--from", metavar="FOLDER"),
    ] = None,
    *,
    load: LoadOptions,
    debug: Debug = False,
) -> None:
    """Train a head: a small drafter that reads the hidden states of its model.

    The model writes answers, and the head learns to say them first. A run that was stopped goes on with the same command.
    """
    with readable(debug):
        if method not in METHODS:
            raise ValueError(
                f"outrider trains heads of the kinds {', '.join(METHODS)}, not {method!r}; write: outrider train {METHODS[0]}"
            )
        with loading(model):
            from outrider.engine.llm import LLM
            from outrider.train.trainer import SLOTS, TrainingBudget, TrainingSettings
            from outrider.train.trainer import train as run

            budget = TrainingBudget(minutes, tokens)
            settings = TrainingSettings(
                method,
                model,
                tuple(prompts or ["self"]),
                tuple(temperature or [0.8, 0.0]),
                length,
                draft_vocab_size,
                batch_tokens,
                seed,
                None if start is None else str(start),
            )
            llm = LLM(model, max_num_seqs=SLOTS, **dict(load))
        run(settings, budget, out, llm, lambda line: print(line, flush=True))
        print(f"the head is in {out}")
