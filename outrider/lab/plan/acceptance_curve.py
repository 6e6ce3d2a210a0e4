"""How many draft tokens are accepted, measured: the curve over the draft length, and how answers differ from each other."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from operator import mul
from pathlib import Path
from typing import Any

from outrider.core.files import read_settings
from outrider.drafters.method import METHODS
from outrider.engine.trace import read
from outrider.lab.bench import stats
from outrider.lab.bench.run import Run

DEEPEST = 16  # draft tokens at most, where a single rate stands for a curve
_TRIES = 20  # attempts at a position that make its acceptance known
_WEIGHT = 8.0  # attempts that the common curve counts as, in the curve of one answer

_RATES = "spec_decode_per_position_acceptance_rates"

Steps = list[tuple[int, int]]  # draft tokens, accepted ones


@dataclass(frozen=True)
class AnswerAcceptance:
    """Acceptance by position in the drafts of one answer.

    chances[j]: a draft token at position j + 1 is accepted, given those before it. available[j]: a draft has such a token;
    a lookup does not always find one.
    """

    chances: tuple[float, ...]
    available: tuple[float, ...]

    @property
    def kept(self) -> list[float]:
        """kept[j - 1]: the first j draft tokens would be accepted if they exist."""
        return [*accumulate(self.chances, mul)]


@dataclass(frozen=True)
class AcceptanceCurve(AnswerAcceptance):
    """Acceptance by position in the drafts of all answers.

    answers: the same of single answers, which differ. source: where they come from, in words. model: they were measured with a
    drafter that is a model.
    """

    answers: tuple[AnswerAcceptance, ...] = field(default=(), repr=False)
    source: str = ""
    model: bool = False

    @property
    def depth(self) -> int:
        """The longest draft that the curve knows."""
        return len(self.chances)

    @property
    def survival(self) -> list[float]:
        """survival[j - 1]: the first j draft tokens exist and are accepted; as in `outrider.control.shapes`."""
        return [a * s for a, s in zip(self.available, self.kept, strict=True)]

    def cut(self, depth: int) -> AcceptanceCurve:
        """The curve of drafts of at most so many tokens."""
        answers = tuple(AnswerAcceptance(a.chances[:depth], a.available[:depth]) for a in self.answers)
        return AcceptanceCurve(self.chances[:depth], self.available[:depth], answers, self.source, self.model)


def constant(rate: float, depth: int = DEEPEST) -> AcceptanceCurve:
    """The same acceptance at every position. Raises ValueError for a rate outside 0..1."""
    if not 0 <= rate <= 1:
        raise ValueError(f"an acceptance rate is between 0 and 1, got {rate:g}")
    return AcceptanceCurve((rate,) * depth, (1.0,) * depth, source=f"one rate for every position, {rate:g}")


def find_curve(text: str, setting: str | None = None) -> AcceptanceCurve:
    """The curve of a number or of a file: `outrider bench --json`, `outrider tune --json`, a trace, or
    `vllm bench serve --save-result`.

    setting: the name of a setting in a report with several. Raises ValueError where nothing was drafted, FileNotFoundError.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = None
    if rate is not None:
        return constant(rate)
    path = Path(text)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {text}; --acceptance takes one, or a rate such as 0.7")
    if path.suffix == ".jsonl":
        trace = read(path)
        every = [[(step.depth, step.accepted) for step in text.steps] for text in trace.texts.values()]
        return _measured(every, trace.header.speculative_config, str(path))
    found = read_settings(path, "measure it: outrider bench --json report.json")
    if rates := found.get(_RATES):
        return _by_position(rates, str(path))
    if "method" in found:
        raise ValueError(
            f"{path} is a setting and holds no acceptance; measure it: "
            f"outrider bench --speculative-config {path} --json report.json (outrider tune has --json, too)"
        )
    return _of_run(Run.load(path), path, setting)


def _by_position(rates: abc.Sequence[float], source: str) -> AcceptanceCurve:
    """The curve of the shares of drafts that kept their first 1, 2, ... tokens."""
    survival = [min(max(float(rate), 0.0), 1.0) for rate in rates]
    chances = [s / before if before else 0.0 for before, s in zip([1.0, *survival], survival, strict=False)]
    return AcceptanceCurve(tuple(min(c, 1.0) for c in chances), (1.0,) * len(chances), source=f"{source}, by position")


def _of_run(run: Run, path: Path, wanted: str | None) -> AcceptanceCurve:
    every = {s.name: s.speculative_config or {} for s in run.settings}
    drafted = [name for name in every if stats.acceptance(stats.answered(run, name)) is not None]
    if wanted is not None and wanted not in drafted:
        raise ValueError(
            f"{path} has no drafts of a setting {wanted!r}; settings with drafts: {', '.join(drafted) or 'none'}"
        )
    if not drafted:
        raise ValueError(
            f"{path} holds no draft tokens; measure a setting that drafts: outrider bench --json report.json"
        )
    name = wanted or drafted[0]
    if wanted is None and len(drafted) > 1:
        raise ValueError(
            f"{path} has several settings that draft; name one: --setting {drafted[0]!r} (or {', '.join(drafted[1:])})"
        )
    answers = [stats.steps([s]) for s in stats.answered(run, name)]
    return _measured(answers, every[name], f"{path}, setting {name}")


def _measured(answers: list[Steps], config: abc.Mapping[str, Any], source: str) -> AcceptanceCurve:
    """The curve of some answers. A draft that ends early says nothing of the positions after it."""
    steps = [step for answer in answers for step in answer]
    counts = stats.by_depth(steps)
    known = next((j for j, (tried, _) in enumerate(counts) if tried < _TRIES), len(counts))
    if not known:
        raise ValueError(
            f"{source} has {len(steps)} steps with {counts[0][0] if counts else 0} draft tokens at the first position, too few "
            f"to know the acceptance; measure at least {_TRIES}"
        )
    common = [kept / tried for tried, kept in counts[:known]]
    method = config.get("method")
    names = [method] if isinstance(method, str) else list(method or ())
    lookup = bool(names) and all(name in METHODS and METHODS[name].cost == "lookup" for name in names)
    # A model always has a next token; a lookup often has none.
    available = _available(steps, [1.0] * known, 0.0) if lookup else [1.0] * known
    single = list[AnswerAcceptance]()
    for answer in answers:
        own = stats.by_depth(answer) + [(0, 0)] * known
        chances = tuple((kept + _WEIGHT * c) / (tried + _WEIGHT) for (tried, kept), c in zip(own, common, strict=False))
        some = _available(answer, available, _WEIGHT) if lookup else available
        single.append(AnswerAcceptance(chances, tuple(some)))
    assert all(map(isfinite, common))
    what = f"{source}: {len(steps)} steps of {len(answers)} answers"
    return AcceptanceCurve(tuple(common), tuple(available), tuple(single), what, bool(names) and not lookup)


def _available(steps: Steps, usual: abc.Sequence[float], weight: float) -> list[float]:
    """The share of steps with a draft token at each position. usual: the share that counts as `weight` steps."""
    return [
        (sum(drafted > j for drafted, _ in steps) + weight * share) / (len(steps) + weight)
        for j, share in enumerate(usual)
    ]
