"""What a training run is asked for. Imports nothing large: the command line is made from it."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from outrider.serve.options import Options, setting

TRAINED = ("eagle3", "medusa", "dflash", "dspark")
"""The kinds of heads that are trained."""


class TrainingSettings(Options):
    """What a run was asked for. A run that goes on must be asked for the same.

    method: one of `TRAINED`. model: as `load` takes it. temperatures: of the answers.
    """

    method: str
    model: str
    prompts: list[str] = setting(
        ["self"],
        "Training",
        "A file of prompts, as for outrider bench, or self: the model invents them. May be repeated; they take turns.",
        metavar="FILE|self",
    )
    temperatures: list[float] = setting(
        [0.8, 0.0], "Training", "Of the answers. May be repeated; they take turns.", "--temperature"
    )
    length: int = setting(384, "Training", "Tokens of a prompt and its answer, at most.", ge=32)
    draft_vocab_size: int = setting(
        8192, "Training", "Tokens that the head can propose, the most frequent ones; 0 for all.", ge=0
    )
    intermediate_size: int = setting(
        0,
        "Training",
        "Neurons of a new EAGLE head, at most: those of the model's last layer that do most; 0 for all.",
        ge=0,
    )
    batch_tokens: int = setting(2048, "Training", "Tokens of a training step.", ge=32)
    texts: str | None = setting(
        None,
        "Training",
        "A trace with tokens of this model, as outrider serve --trace FILE --trace-detail tokens writes it. Its texts train the "
        "head as they are, in place of prompts.",
        metavar="TRACE",
    )
    keep_features: bool = setting(
        False,
        "Training",
        "Keep what the model says of each text on disk until the run ends. It is kept while the model writes the text, so "
        "training does not run the model. For each token four to six times the hidden size in bytes.",
    )
    seed: int = setting(0, "Training", "Of the answers, and of the head's beginning.")
    start: str | None = setting(
        None, "Training", "A head to begin with, in place of a new one.", "--from", metavar="FOLDER"
    )

    @model_validator(mode="after")
    def _neurons_of_a_new_head(self) -> Self:
        if self.intermediate_size and (self.method != "eagle3" or self.start is not None):
            raise ValueError(
                f"--intermediate-size {self.intermediate_size} is for a new eagle3 head, and this run trains "
                f"{self.method if self.start is None else self.start}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.texts is not None and self.prompts != ["self"]:
            raise ValueError(f"--texts {self.texts} trains as it is, so no prompts are answered; leave out --prompts")
        return self
