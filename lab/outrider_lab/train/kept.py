"""What the target says of each text, computed once and kept on disk in 8 bits: while the target writes the text, or when the text
is read first. So training does not run the target again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from outrider.core.jsonl import JsonLines
from outrider.core.types import Array, Commit
from outrider.drafters.base import DraftContext, NoDraft, TargetPass
from outrider.models.base import FINAL_NORM
from outrider_lab.train.answers import TrainingText
from outrider_lab.train.batches import batch_of
from outrider_lab.train.teacher import Taught, Teacher

BLOCK = 32  # neighbours that share a scale, as in GGUF's Q8_0: a few numbers of a state are far larger than the others


class EightBits(NamedTuple):
    """States in 8 bits. numbers: int8 [n, width]. scales: float16 [n, block]."""

    numbers: Array
    scales: Array


def eight_bits(states: Array, block: int) -> EightBits:
    """states: float32 [n, width]."""
    blocks = states.reshape(len(states), -1, block)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).clip(1e-7, 65504).astype(np.float16)
    numbers = np.rint(blocks / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    return EightBits(numbers.reshape(len(states), -1), scales[..., 0])


class KeptFeatures:
    """The tapped states and the last one of each text, by its number, in files that grow.

    The last token of a text has none: no draft follows it. A text counts as kept when its line in the index is written, so a kill
    leaves none half written.
    """

    def __init__(self, folder: Path, hidden: int, taps: Sequence[int]) -> None:
        """hidden: width of a state. taps: of the head that learns the texts."""
        self.taps, self.block, self._folder = (*taps, FINAL_NORM), math.gcd(BLOCK, hidden), folder
        self._width = hidden * len(self.taps)
        folder.mkdir(parents=True, exist_ok=True)
        self._index, self._rows, self._total = JsonLines(folder / "index.jsonl"), dict[int, range](), 0
        for line in self._index.whole():
            number, self._total, count = line.value
            self._rows[number] = range(self._total - count, self._total)
        self._files = [(folder / name).open("a+b") for name in ("numbers", "scales")]
        self._sizes = self._width, 2 * self._width // self.block
        for file, size in zip(self._files, self._sizes, strict=True):
            file.truncate(self._total * size)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def add(self, number: int, states: EightBits) -> None:
        for file, part in zip(self._files, states, strict=True):
            file.write(part.tobytes())
            file.flush()
        count = len(states.numbers)
        self._rows[number] = range(self._total, self._total + count)
        self._total += count
        self._index.add(json.dumps([number, self._total, count]).encode())

    def read(self, number: int) -> Array:
        """float32 [n, width]."""
        rows, parts = self._rows[number], list[bytes]()
        for file, size in zip(self._files, self._sizes, strict=True):
            file.seek(rows.start * size)
            parts.append(file.read(len(rows) * size))
        numbers = np.frombuffer(parts[0], np.int8).reshape(len(rows), -1, self.block)
        scales = np.frombuffer(parts[1], np.float16).reshape(len(rows), -1, 1)
        return (numbers * scales.astype(np.float32)).reshape(len(rows), -1)

    def remove(self) -> None:
        for file in (self._index, *self._files):
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class KeptTeacher:
    """A teacher that computes each text once. A text always reads what was kept, never what was computed, so a run has the same
    bits stopped or not."""

    def __init__(self, teacher: Teacher, features: KeptFeatures) -> None:
        self._teacher, self.features = teacher, features

    def read(self, texts: Sequence[TrainingText]) -> Taught:
        """What `Teacher.read` says of the texts, to 8 bits; zeros at the last token of a text, and after it."""
        missing = [text for text in texts if text.number not in self.features]
        if missing:
            taught = self._teacher.read(batch_of(missing).tokens)
            for text, states in zip(missing, torch.cat(taught, -1).cpu().numpy(), strict=True):
                self.features.add(text.number, eight_bits(states[: len(text.tokens) - 1], self.features.block))
        rows = [self.features.read(text.number) for text in texts]
        every = torch.zeros(len(texts), max(len(text.tokens) for text in texts), rows[0].shape[1])
        for row, states in zip(every, rows, strict=True):
            row[: len(states)] = torch.from_numpy(states)
        every = every.to(self._teacher.device)
        return Taught(every[..., : -self._teacher.hidden], every[..., -self._teacher.hidden :])


class FeatureRecorder(NoDraft):
    """A drafter that proposes nothing. It keeps what the target says while it writes, so that no text is read again.

    It must be asked in each step (`Fixed(1)`): only steps that may draft hand their features over.
    """

    def __init__(self, features: KeptFeatures) -> None:
        self.taps, self._features = features.taps, features
        self._running = dict[int, tuple[list[int], list[EightBits]]]()  # by slot: its tokens, and what was said of them
        self._ended = dict[tuple[int, ...], list[EightBits]]()

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        self._running.setdefault(slot, ([], []))[1].append(eight_bits(features, self._features.block))

    def update(self, context: DraftContext, commits: Sequence[Commit], target: TargetPass) -> None:
        said = [c.features for c in commits if c.features is not None]  # a long prompt's first step has none
        states = eight_bits(np.concatenate(said), self._features.block) if said else None
        at = 0
        for slot, tokens, commit in zip(context.slots, context.tokens, commits, strict=True):
            blocks = self._running.get(slot, ([], []))[1]
            if states and commit.features is not None:
                end = at + len(commit.features)
                blocks.append(EightBits(states.numbers[at:end], states.scales[at:end]))
                at = end
            self._running[slot] = tokens, blocks

    def release(self, slot: int) -> None:
        if slot in self._running:
            tokens, blocks = self._running.pop(slot)
            self._ended[tuple(tokens)] = blocks

    def keep(self, texts: Mapping[int, Sequence[int]], length: int) -> None:
        """Keep texts that have just ended, by number, up to so many tokens; forget all others that have."""
        for number, tokens in texts.items():
            parts = zip(*self._ended[tuple(tokens)], strict=True)
            self._features.add(number, EightBits(*(np.concatenate(part)[: length - 1] for part in parts)))
        self._ended.clear()
