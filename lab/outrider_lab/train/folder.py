"""The folder of a training run: the head for its users, and what the run needs to go on, in `training/`.

config.json, model.safetensors: the head as it was last measured. MODEL_CARD.md: what it is, for people.
training/: settings.json (what the run was asked for), answers.jsonl, checkpoint.pt, run.json (the curve, for programs).
training/features/: what the target says of the texts, while a run keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from outrider.core.files import write_whole, written_whole
from outrider.kernels.machine import machine
from outrider_lab.train.answers import AnswerFile
from outrider_lab.train.settings import TrainingSettings
from outrider_lab.train.survival import Survival


@dataclass
class Progress:
    """How far a run is."""

    seconds: float = 0.0  # of training and its measurements, without writing answers
    writing_seconds: float = 0.0
    tokens: int = 0  # read in training, without filling
    step: int = 0
    epoch: int = 0  # the next one, as batch
    batch: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)  # one entry for each measurement

    def next_epoch(self) -> None:
        """Every batch of this epoch was read."""
        self.epoch, self.batch = self.epoch + 1, 0

    def step_begins(self, tokens: int) -> None:
        """A step reads so many tokens."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens

    def step_ends(self, seconds: float) -> None:
        """It took so many seconds, with what was done since the last one."""
        self.batch, self.seconds = self.batch + 1, self.seconds + seconds


class RunFolder:
    """The files of a run. Each is replaced whole."""

    def __init__(self, path: Path, settings: TrainingSettings) -> None:
        """Raises FileExistsError for a folder of something else, ValueError for a run with other settings."""
        self.path, self._state = path, path / "training"
        self.settings = settings
        self._file = self._state / "settings.json"
        if self._file.exists():
            self._compare(json.loads(self._file.read_text()))
        elif path.exists() and any(entry != self._state for entry in path.iterdir()):
            raise FileExistsError(
                f"{path} is not empty and is no training run; give a new folder, or that of a run to go on with"
            )
        self.answers = AnswerFile(self._state / "answers.jsonl")
        self.features = self._state / "features"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training in this folder meanwhile. Raises ValueError if another process does."""
        try:
            with FileLock(self._state / ".lock").acquire(timeout=0):
                write_whole(self._file, json.dumps(self.settings.model_dump(), indent=1) + "\n")
                yield
        except Timeout:
            raise ValueError(
                f"another process trains in {self.path} now; wait for it, or give another folder: -o {self.path}-2"
            ) from None

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, on the CPU, or None."""
        file = self._state / "checkpoint.pt"
        return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None

    def save(self, state: dict[str, Any]) -> None:
        with written_whole(self._state / "checkpoint.pt") as partial:
            torch.save(state, partial)

    @property
    def writing_seconds(self) -> float:
        """Seconds that the answers took so far."""
        file = self._state / "writing_seconds"
        return float(file.read_text()) if file.exists() else 0.0

    @writing_seconds.setter
    def writing_seconds(self, seconds: float) -> None:
        write_whole(self._state / "writing_seconds", f"{seconds:.1f}\n")

    def write_card(self, progress: Progress, model: str, parameters: int) -> None:
        """run.json and MODEL_CARD.md."""
        count = len(self.answers.answers)
        run = {
            "settings": self.settings.model_dump(),
            "answers": {"texts": count, "tokens": self.answers.tokens, "seconds": round(self.writing_seconds)},
            "training": {"tokens": progress.tokens, "steps": progress.step, "seconds": round(progress.seconds)},
            "parameters_trained": parameters,
            "machine": machine(),
            "curve": progress.curve,
        }
        write_whole(self._state / "run.json", json.dumps(run, indent=1) + "\n")
        write_whole(self.path / "MODEL_CARD.md", self._card(progress, model, parameters))

    def _card(self, progress: Progress, model: str, parameters: int) -> str:
        s = self.settings
        depth = len(progress.curve[-1]["held_out"][0]["S"])
        lines = [
            f"# A head for {model}",
            "",
            f"A head of the kind {s.method} with {parameters:,} trained parameters, for speculative decoding. Made by "
            "`outrider train`.",
            "",
            f"* Text: {self.answers.tokens:,} tokens in {len(self.answers.answers):,} answers that {model} wrote, "
            + (
                f"as the trace {Path(s.texts).name} has them."
                if s.texts is not None
                else f"at temperatures {', '.join(f'{t:g}' for t in s.temperatures)}. Prompts: "
                f"{', '.join(Path(p).name for p in s.prompts)}."
            ),
            f"* Training: {progress.tokens:,} tokens in {progress.step:,} steps, {progress.seconds / 60:.0f} minutes; writing "
            f"the answers took {self.writing_seconds / 60:.0f} minutes. Seed {s.seed}.",
            f"* Machine: {machine()['cpu']}, {machine()['cores']} cores.",
            "",
            "S_j is the share of places in held-out answers where the first j drafted tokens are the target's own.",
            "",
            f"| tokens | text | {' | '.join(f'S_{k + 1}' for k in range(depth))} | tokens a step |",
            "|---" * (depth + 3) + "|",
        ]
        for point in progress.curve:
            groups = point["held_out"] if point is progress.curve[-1] else point["held_out"][:1]
            for group in groups:
                shares = " | ".join(f"{x:.3f}" for x in group["S"])
                lines.append(f"| {point['tokens']:,} | {group['group']} | {shares} | {group['accepted_length']:.2f} |")
        return "\n".join(lines) + "\n"

    def _compare(self, stored: dict[str, Any]) -> None:
        """Raise ValueError for other settings than those of what is kept. A start with wrong prompts keeps nothing."""
        files = (self._state / name for name in ("answers.jsonl", "checkpoint.pt"))
        if not any(file.exists() and file.stat().st_size for file in files):
            return
        for name, value in self.settings.model_dump().items():
            if stored.get(name, value) != value:
                raise ValueError(
                    f"{self.path} holds a run with {name}={stored.get(name)!r}, and this one has {value!r}; give the same to go "
                    "on with it, or another folder with -o"
                )


def point(progress: Progress, loss: float, measured: list[Survival]) -> dict[str, Any]:
    """An entry of the curve."""
    groups = [
        {
            "group": s.group,
            "S": [round(x, 4) for x in s.shares],
            "accepted_length": round(s.accepted_length, 3),
            "places": s.places,
        }
        for s in measured
    ]
    so_far = {"tokens": progress.tokens, "seconds": round(progress.seconds), "loss": round(loss, 4)}
    return {**so_far, "held_out": groups}


def verdict(curve: list[dict[str, Any]], now: Survival) -> str:
    """Whether more training will help: whether the first tokens got better in the last third of the run, by more than chance."""
    told = f"the first drafted token is right at {now.shares[0]:.3f} of the places in held-out answers"
    earlier = [p for p in curve if 0 < p["tokens"] <= curve[-1]["tokens"] * 2 / 3]
    if now.error > 0.02 or not earlier:
        return f"{told}, measured at {now.places:,} places: too few to say whether it still rises"
    rise = now.shares[0] - earlier[-1]["held_out"][0]["S"][0]
    if rise > now.error:
        again = "more training will help. Give the same command a larger budget"
        return f"{told}, {rise:.3f} more than after two thirds of the run: {again}"
    return f"{told}, {rise:+.3f} since two thirds of the run: more of the same will not help; other prompts may"
