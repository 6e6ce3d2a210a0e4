"""The order of the measurements, and how an interrupted one continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.run import Run, Sample, Setting


@dataclass(frozen=True)
class Turn:
    """One measurement: one setting answers a group of prompts at the same time."""

    number: int  # its index in the plan
    repeat: int
    group: int
    setting: int


class Backend(Protocol):
    """What answers the prompts: models in this process, or servers."""

    def warm(self, setting: Setting, prompts: Sequence[Prompt]) -> None:
        """Answer once without measuring. Raises if this setting gives no answer."""
        ...

    def reset(self) -> None:
        """A repeat begins: forget the answers of the last one, so that they cannot be found again."""
        ...

    def answer(self, setting: Setting, prompts: Sequence[Prompt], repeat: int, turn: int) -> list[Sample]:
        """Answers to these prompts, sent at the same time, in their order. A failure becomes the sample's error."""
        ...


def groups(prompts: Sequence[Prompt], concurrency: int) -> list[Sequence[Prompt]]:
    """Prompts that are sent together."""
    return [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]


def plan(groups: int, settings: int, repeats: int) -> list[Turn]:
    """Every group with every setting in every repeat.

    The settings alternate, and their order is reversed from group to group and from repeat to repeat (A B, B A). A linear
    drift of the machine then affects all settings alike, and no setting is always the first to read a prompt.
    """
    turns = list[Turn]()
    for repeat in range(repeats):
        for group in range(groups):
            order = range(settings) if (group + repeat) % 2 == 0 else reversed(range(settings))
            turns += [Turn(len(turns) + i, repeat, group, setting) for i, setting in enumerate(order)]
    return turns


def measure(run: Run, backend: Backend, prompts: Sequence[Prompt]) -> Iterator[list[Sample]]:
    """Measure the turns that `run` does not have, and add them to it. Yields the samples of each turn.

    A resumed run repeats the turns that have a failed answer. An interrupt leaves a run of whole turns.
    """
    run.forget_failed()
    done, together = {s.turn for s in run.samples}, groups(prompts, run.concurrency)
    turns = plan(len(together), len(run.settings), run.repeats)
    missing = [turn for turn in turns if turn.number not in done]
    if missing:
        for setting in run.settings:
            backend.warm(setting, together[0])
    repeat = None
    for turn in missing:
        if turn.repeat != repeat:
            backend.reset()
            repeat = turn.repeat
        samples = backend.answer(run.settings[turn.setting], together[turn.group], turn.repeat, turn.number)
        run.samples.extend(samples)
        yield samples
    run.complete = True


def check_resumable(old: Run, new: Run) -> None:
    """Raise ValueError unless `old` is an interrupted part of the measurement `new`."""
    fields = {"format": "format", "model": "model", "machine": "machine and versions", "settings": "settings"}
    fields |= {"prompts": "prompts", "sampling": "sampling", "repeats": "--repeats", "concurrency": "--concurrency"}
    ours, theirs = old.model_dump(), new.model_dump()
    for setting in (*ours["settings"], *theirs["settings"]):
        del setting["guarantee"]  # found out while measuring
    for name, what in fields.items():
        if ours[name] != theirs[name]:
            raise ValueError(
                f"the file holds another measurement (different {what}). Use its options, {old.command}, or another file"
            )
