"""What the target says of each text, read once and kept on disk in 8 bits, so that later passes do not run the target."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.core.files import write_whole
from outrider.train.answers import TrainingText
from outrider.train.batches import batch_of
from outrider.train.teacher import Taught, Teacher

BLOCK = 32  # neighbours that share a scale, as in GGUF's Q8_0: a few numbers of a state are far larger than the others


class KeptTeacher:
    """A teacher for the texts of a run, in files of a folder: an int8 for each number of `Taught`, a float16 for each block.

    A text always reads what was kept, never what was computed, so a run has the same bits stopped or not. A text counts as kept
    when its numbers are written, so a kill leaves none half written. Other texts than those of the files begin the files again.
    """

    def __init__(self, teacher: Teacher, texts: Sequence[TrainingText], folder: Path) -> None:
        self._teacher, self._width = teacher, teacher.hidden * (1 + len(teacher.taps))
        self._block = math.gcd(BLOCK, teacher.hidden)
        lengths = [len(text.tokens) for text in texts]
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        total, known, these = int(self._ends[-1]), folder / "lengths.json", json.dumps(lengths)
        mode = "r+" if known.exists() and known.read_text() == these else "w+"
        known.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = np.memmap(folder / "numbers", np.int8, mode, shape=(total, self._width))
        self._scales = np.memmap(folder / "scales", np.float16, mode, shape=(total, self._width // self._block))
        self._whole = np.memmap(folder / "whole", np.bool_, mode, shape=(len(texts),))
        write_whole(known, these)

    def read(self, numbers: Sequence[int], texts: Sequence[TrainingText]) -> Taught:
        """What `Teacher.read` says of the texts with these numbers, to 8 bits; zeros after the end of a text."""
        missing = [at for at, number in enumerate(numbers) if not self._whole[number]]
        if missing:
            taught = self._teacher.read(batch_of([texts[at] for at in missing]).tokens)
            for at, found in zip(missing, torch.cat(taught, -1).cpu(), strict=True):
                self._keep(numbers[at], found[: len(texts[at].tokens)])
        every = torch.zeros(len(texts), max(len(text.tokens) for text in texts), self._width)
        for row, number in zip(every, numbers, strict=True):
            kept = self._kept(number)
            row[: len(kept)] = kept
        every = every.to(self._teacher.device)
        return Taught(every[..., : -self._teacher.hidden], every[..., -self._teacher.hidden :])

    def _keep(self, number: int, found: Tensor) -> None:
        blocks = found.view(len(found), -1, self._block)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(1e-7, 65504).half()
        rows = slice(self._starts[number], self._ends[number])
        self._numbers[rows] = (
            (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8).view(len(found), -1).numpy()
        )
        self._scales[rows] = scales[..., 0].numpy()
        self._whole[number] = True

    def _kept(self, number: int) -> Tensor:
        rows = slice(self._starts[number], self._ends[number])
        numbers, scales = torch.from_numpy(self._numbers[rows].copy()), torch.from_numpy(self._scales[rows].copy())
        return (numbers.view(len(numbers), -1, self._block) * scales.float()[..., None]).view(len(numbers), -1)
