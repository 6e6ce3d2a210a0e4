"""What a run says, as numbers for a page: worded in `verdict`, drawn in `pictures`. Statistics are those of `stats`.

The first setting of a run is the baseline: ratios are to it, over the prompts and repeats that both answered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from outrider.bench import stats
from outrider.bench.run import Limits, Run, Sample, Setting
from outrider.bench.stats import Acceptance, Interval

LOOKUPS = {"suffix", "ngram", "prediction", "token_recycling"}  # guess without a forward
PHASES = ("target", "draft", "verify", "commit", "rest")


@dataclass(frozen=True)
class Difference:
    """Two answers to one prompt that part ways. at: the first differing token, or character where tokens are unknown."""

    prompt: str
    repeat: int
    at: int
    unit: str
    before: str
    base: str
    ours: str


@dataclass(frozen=True)
class Texts:
    """Answers to the same prompt with the same repeat. promised: they must be the baseline's. examples: some that are not."""

    compared: int
    differing: int
    promised: bool
    examples: list[Difference]


@dataclass(frozen=True)
class Floor:
    """What the machine allows, in seconds per token, for the steps that were made. forwards: those of the two models
    alone. memory: reading the target's weights once a step. None: not measured."""

    forwards: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Figures:
    """All answers of one setting. ratio, prompts, texts: None or empty for the baseline. judged: see `judged`. guess: seconds
    of one, see `guess_seconds`."""

    setting: Setting
    answers: list[Sample]
    failed: list[Sample]
    rate: Interval | None
    ratio: Interval | None = None
    prompts: dict[str, float] = field(default_factory=dict)
    acceptance: Acceptance | None = None
    judged: list[tuple[int, int]] = field(default_factory=list)
    texts: Texts | None = None
    phases: dict[str, float] = field(default_factory=dict)
    guess: float | None = None
    floor: Floor = Floor()

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def per_token(self) -> float:
        """Seconds; of all phases together."""
        return sum(self.phases.values())


def figures(run: Run) -> list[Figures]:
    """One per setting, in the run's order."""
    base, found = stats.good(run, run.settings[0].name), []
    alone = len({s.turn for s in run.samples}) == len(run.samples)  # else steps are shared, and their times are too
    for i, setting in enumerate(run.settings):
        answers, guess = stats.good(run, setting.name), guess_seconds(run, setting)
        found.append(
            Figures(
                setting,
                answers,
                [s for s in run.samples if s.setting == setting.name and s.error is not None],
                stats.rate(answers) if timed(answers) else None,
                ratio(answers, base) if i else None,
                ratios(answers, base) if i else {},
                stats.acceptance(answers),
                judged(answers) if chain(setting) else [],
                texts(answers, base, stats.promised(run, setting.name)) if i else None,
                phases(answers),
                guess,
                floor(answers, run.limits, guess) if alone else Floor(),
            )
        )
    return found


def timed(samples: Iterable[Sample]) -> bool:
    """Whether a rate can be told: somebody wrote something, and it took time."""
    return any(s.output_tokens and s.seconds > 0 for s in samples)


def chain(setting: Setting) -> bool:
    """Whether guesses stand one after another, so that the number of guesses is the depth."""
    config = setting.speculative_config or {}
    return config.get("tree_width") in (1, None) and not config.get("tree_nodes")


def guess_seconds(run: Run, setting: Setting) -> float | None:
    """What one guess of a chain costs: nothing if it is looked up, a token of the draft model if that was measured. None:
    unknown."""
    configs = [s.speculative_config or {} for s in (setting, *run.settings)]
    methods = [[m] if isinstance(m := c.get("method", "draft_model"), str) else m for c in configs]
    if not chain(setting):
        return None
    if setting.speculative_config is None or set(methods[0]) <= LOOKUPS:
        return 0.0
    models = [c.get("model") for c, m in zip(configs, methods, strict=True) if c and m == ["draft_model"]]
    same = len(models) > 1 and models[0] == models[1]  # the first of a run is the one that was measured
    return run.limits.draft_token if methods[0] == ["draft_model"] and same else None


def ratio(ours: Sequence[Sample], base: Sequence[Sample]) -> Interval | None:
    """Times as many tokens per second; None where no prompt was answered by both."""
    found = stats.ratio(ours, base) if timed(ours) and timed(base) else None
    return found if found is not None and math.isfinite(found.value) and found.value > 0 else None


def ratios(ours: Iterable[Sample], base: Iterable[Sample]) -> dict[str, float]:
    """The same for each prompt alone, over the repeats of both. Answers that ran side by side are timed each by its own
    clock."""
    mine, theirs = _rates(ours), _rates(base)
    return {p: mine[p] / theirs[p] for p in mine if p in theirs}


def _rates(samples: Iterable[Sample]) -> dict[str, float]:
    sums: dict[str, tuple[int, float]] = {}
    for s in samples:
        tokens, seconds = sums.get(s.prompt, (0, 0.0))
        sums[s.prompt] = tokens + s.output_tokens, seconds + s.seconds
    return {p: tokens / seconds for p, (tokens, seconds) in sums.items() if tokens and seconds > 0}


def judged(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """Of a chain, per depth: guesses that were judged (all before them were kept), and those kept."""
    steps = [(d, a) for s in samples for d, a in zip(s.drafted or [], s.accepted or [], strict=False)]
    deepest = max((d for d, _ in steps), default=0)
    tried = [sum(d >= j and a >= j - 1 for d, a in steps) for j in range(1, deepest + 1)]
    return [(n, sum(a >= j for _, a in steps)) for j, n in enumerate(tried, 1) if n]


def survival(judged: Iterable[tuple[int, int]]) -> list[float]:
    """The chance that the first j guesses are all kept, whatever lengths were tried (Kaplan and Meier)."""
    found, alive = list[float](), 1.0
    for tried, kept in judged:
        alive *= min(kept / tried, 1.0)
        found.append(alive)
    return found


def texts(ours: Sequence[Sample], base: Sequence[Sample], promised: bool, most: int = 4) -> Texts:
    parted, compared = stats.differing(ours, base)
    mine, theirs = ({(s.prompt, s.repeat): s for s in side} for side in (ours, base))
    return Texts(compared, len(parted), promised, [_difference(mine[key], theirs[key]) for key in parted[:most]])


def _difference(mine: Sample, other: Sample) -> Difference:
    place = _parting(mine.text, other.text)
    at, unit = place, "character"
    if mine.token_ids and other.token_ids:
        at, unit = _parting(mine.token_ids, other.token_ids), "token"
    before = mine.text[max(place - 40, 0) : place]
    return Difference(mine.prompt, mine.repeat, at, unit, before, other.text[place:][:60], mine.text[place:][:60])


def _parting(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def phases(samples: Iterable[Sample]) -> dict[str, float]:
    """Seconds per token in each of PHASES that took any; empty where nobody measured them."""
    known = [s for s in samples if s.phases]
    tokens = sum(s.output_tokens for s in known)
    return {n: t for n in PHASES if (t := sum(s.phases.get(n, 0.0) for s in known) / tokens) > 0} if tokens else {}


def floor(samples: Iterable[Sample], limits: Limits, guess: float | None) -> Floor:
    """Of the steps these samples made. An answer without steps made one per token. guess: seconds of one, None: unknown."""
    guesses, tokens = Counter[int](), 0
    for s in samples:
        tokens += s.output_tokens
        guesses.update(s.drafted if s.drafted else {0: s.output_tokens})
    steps = guesses.total()
    if not tokens or not steps:
        return Floor()
    memory = None
    if limits.weight_bytes and limits.read_bytes_per_second:
        memory = steps * limits.weight_bytes / limits.read_bytes_per_second / tokens
    target, guessed = _target(limits), any(d and n for d, n in guesses.items())
    if not target or (guessed and (len(target) == 1 or guess is None)):
        return Floor(None, memory)
    spent = sum(n * step_seconds(limits, d, guess or 0.0) for d, n in guesses.items())
    return Floor(spent / tokens, memory)


def step_seconds(limits: Limits, depth: int, guess: float) -> float:
    """The forwards of a step with a chain of so many guesses: straight lines between what was measured, level beyond. guess:
    seconds of one."""
    points = sorted(_target(limits).items())
    nodes = depth + 1
    below = max((p for p in points if p[0] <= nodes), default=points[0])
    above = min((p for p in points if p[0] >= nodes), default=points[-1])
    share = (nodes - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    return below[1] + share * (above[1] - below[1]) + depth * guess


def _target(limits: Limits) -> dict[int, float]:
    known = {int(n): t for n, t in limits.target.items() if n.isdecimal()}
    return known or ({1: limits.plain_step} if limits.plain_step else {})


def drift(run: Run) -> float | None:
    """How many times as long the same answers took in the second half of the run; None where nothing was repeated."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for s in run.samples:
        if s.error is None and s.output_tokens and s.seconds > 0:
            groups.setdefault((s.prompt, s.setting), []).append((s.turn, s.seconds / s.output_tokens))
    middle = max((s.turn for s in run.samples), default=0) / 2
    halves: tuple[list[float], list[float]] = ([], [])
    for group in groups.values():
        usual = mean(t for _, t in group)
        for turn, t in group if len(group) > 1 else []:
            halves[turn > middle].append(t / usual)
    return mean(halves[1]) / mean(halves[0]) if all(halves) else None
