"""The order in which a measurement asks, and what becomes of one that is interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.bench.prompts import Ask
from outrider.bench.run import Run, Sample, Setting


@dataclass(frozen=True)
class Turn:
    """One measurement: a setting is asked for these prompts, all at once. number: its place in the plan."""

    number: int
    repeat: int
    group: int
    setting: int


class Side(Protocol):
    """Whoever is measured: models of this process, or servers."""

    def warm(self, setting: Setting, asks: Sequence[Ask]) -> None:
        """Answer once, unmeasured. Raises where nothing can be had from this setting."""
        ...

    def forget(self) -> None:
        """A repeat begins: its own answers of the last one must not be found again."""
        ...

    def answer(self, setting: Setting, asks: Sequence[Ask], repeat: int, turn: int) -> list[Sample]:
        """The answers to these prompts, asked at once, in their order. What fails becomes the sample's error."""
        ...


def groups(asks: Sequence[Ask], concurrency: int) -> list[Sequence[Ask]]:
    """Prompts that are asked together."""
    return [asks[i : i + concurrency] for i in range(0, len(asks), concurrency)]


def plan(groups: int, settings: int, repeats: int) -> list[Turn]:
    """Every group with every setting in every repeat. The settings take turns, and from group to group and repeat to repeat
    the other way round (A B, B A): what drifts in a line falls on all alike, and none is always the first to read a prompt."""
    turns = list[Turn]()
    for repeat in range(repeats):
        for group in range(groups):
            order = range(settings) if (group + repeat) % 2 == 0 else reversed(range(settings))
            turns += [Turn(len(turns) + i, repeat, group, setting) for i, setting in enumerate(order)]
    return turns


def measure(run: Run, side: Side, asks: Sequence[Ask]) -> Iterator[list[Sample]]:
    """Measure what is missing in `run`, and put it there turn by turn; yields the samples of each. Turns with a failed answer
    are missing in a run that is gone on with. Whoever stops reading, or ctrl-C, leaves a run of whole turns."""
    failed = {s.turn for s in run.samples if s.error is not None}
    run.samples = [s for s in run.samples if s.turn not in failed]
    done, together = {s.turn for s in run.samples}, groups(asks, run.concurrency)
    turns = plan(len(together), len(run.settings), run.repeats)
    missing = [turn for turn in turns if turn.number not in done]
    if missing:
        for setting in run.settings:
            side.warm(setting, together[0])
    repeat = None
    for turn in missing:
        if turn.repeat != repeat:
            side.forget()
            repeat = turn.repeat
        samples = side.answer(run.settings[turn.setting], together[turn.group], turn.repeat, turn.number)
        run.samples += samples
        yield samples
    run.complete = True


def resumable(old: Run, new: Run) -> None:
    """Raise ValueError unless `new` asks for the very measurement that `old` is part of."""
    told = {"format": "format", "model": "model", "machine": "machine and versions", "settings": "settings"}
    told |= {"prompts": "prompts", "sampling": "sampling", "repeats": "--repeats", "concurrency": "--concurrency"}
    ours, theirs = old.model_dump(), new.model_dump()
    for setting in (*ours["settings"], *theirs["settings"]):
        del setting["guarantee"]  # learned while measuring
    for name, what in told.items():
        if ours[name] != theirs[name]:
            was, now = _first_difference(ours[name], theirs[name])
            raise ValueError(
                f"the file holds another measurement ({what}: {was} there, {now} now); give the options of then, "
                f"{old.command}, or another file"
            )


def _first_difference(a: object, b: object) -> tuple[object, object]:
    """The first parts in which two values differ, as short as they can be shown."""
    if isinstance(a, dict) and isinstance(b, dict):
        key = next((k for k in (*a, *b) if a.get(k) != b.get(k)), None)
        x, y = _first_difference(a.get(key), b.get(key))
        return f"{key}={x}", f"{key}={y}"
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return len(a), len(b)
        return next(_first_difference(x, y) for x, y in zip(a, b, strict=True) if x != y)
    return (f"{str(x)[:60]}…" if len(str(x)) > 60 else x for x in (a, b))  # type: ignore[return-value]
