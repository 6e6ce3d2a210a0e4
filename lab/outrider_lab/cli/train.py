"""`outrider train`. Imports torch only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from outrider.cli.command import as_command
from outrider.cli.terminal import loading
from outrider.core.extras import needs
from outrider.serve.options import LoadOptions
from outrider_lab.train.settings import TRAINED, TrainingSettings


@as_command(
    "Build",
    "outrider train eagle3 -m ./my-model --minutes 60 -o ./my-head",
    "outrider train eagle3 -m ./my-model --prompts my-prompts.jsonl --prompts self --minutes 60 -o ./my-head",
    usual="-m -o --prompts --minutes --tokens --temperature --length --draft-vocab-size --seed --from",
)
def train(
    method: str,
    *,
    model: str,
    out: Path,
    minutes: float | None = None,
    tokens: int | None = None,
    asked: Annotated[dict[str, Any], TrainingSettings],
    load: LoadOptions,
) -> None:
    """Train a head: a small drafter that reads the hidden states of its model.

    The model writes answers, and the head learns to say them first. A run that was stopped goes on with the same command.

    Args:
        method: The kind of head: eagle3, medusa, dflash, dspark.
        out (FOLDER): The folder of the head. A run in it goes on.
        minutes: How long the run takes, with the writing of answers.
        tokens: Tokens to train on, in place of minutes. The same seed gives the same head.
    """
    if method not in TRAINED:
        raise ValueError(
            f"outrider trains heads of the kinds {', '.join(TRAINED)}, not {method!r}; write: outrider train {TRAINED[0]} "
            "-m MODEL -o HEAD"
        )
    with loading(model), needs("torch", "outrider train"):
        from outrider.engine.llm import LLM
        from outrider_lab.train.trainer import SLOTS, TrainingBudget
        from outrider_lab.train.trainer import train as run

        budget = TrainingBudget(minutes, tokens)
        settings = TrainingSettings(method=method, model=model, **asked)
        llm = LLM(model, max_num_seqs=SLOTS, **dict(load))
    run(settings, budget, out, llm, lambda line: print(line, flush=True))
    print(f"the head is in {out}")
