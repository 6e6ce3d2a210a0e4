"""The results of a run as numbers. `recommend` puts them into words, `charts` draws them. Statistics come from `stats`.

The first setting of a run is the baseline. Ratios are over it, for the prompts and repeats that both answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from outrider.core.interpolate import interpolate
from outrider.core.intervals import Interval
from outrider.drafters.method import METHODS, model_method
from outrider.lab.bench import stats
from outrider.lab.bench.run import Limits, Run, Sample, Setting
from outrider.lab.bench.stats import AcceptanceStats

PHASES = ("target", "draft", "verify", "commit", "rest")


@dataclass(frozen=True)
class TextDifference:
    """Two answers to one prompt that differ. at: index of the first different token, or character if tokens are unknown.
    unit: token or character. before: the text before it. base, ours: what follows in each answer."""

    prompt: str
    repeat: int
    at: int
    unit: str
    before: str
    base: str
    ours: str


@dataclass(frozen=True)
class TextComparison:
    """Texts of a setting and of the baseline. promised: they must be equal. examples: some that are not."""

    compared: int
    differing: int
    promised: bool
    examples: list[TextDifference]


@dataclass(frozen=True)
class Floor:
    """Lower bounds in seconds per token, for the steps that were made. None: not measured.

    forwards: the forwards of the two models alone. memory: reading the target's weights once a step.
    """

    forwards: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class SettingResult:
    """All answers of one setting.

    ratio, prompts, texts: compared with the baseline; None or empty for the baseline itself. prompts: ratio by prompt.
    by_depth: see `acceptance_by_depth`. phases: seconds per token. draft_seconds: see `draft_token_seconds`.
    """

    setting: Setting
    answers: list[Sample]
    failed: list[Sample]
    rate: Interval | None
    ratio: Interval | None = None
    prompts: dict[str, float] = field(default_factory=dict)
    acceptance: AcceptanceStats | None = None
    by_depth: list[tuple[int, int]] = field(default_factory=list)
    texts: TextComparison | None = None
    phases: dict[str, float] = field(default_factory=dict)
    draft_seconds: float | None = None
    floor: Floor = Floor()

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def per_token(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phases.values())


def analyse(run: Run) -> list[SettingResult]:
    """One result for each setting, in the run's order."""
    base, results = stats.answered(run, run.settings[0].name), []
    # Requests that share a step also share its time.
    alone = len({s.turn for s in run.samples}) == len(run.samples)
    for i, setting in enumerate(run.settings):
        answers, draft_seconds = stats.answered(run, setting.name), draft_token_seconds(run, setting)
        promised = stats.identity_promised(run, setting.name)
        results.append(
            SettingResult(
                setting,
                answers,
                [s for s in run.samples if s.setting == setting.name and s.error is not None],
                stats.rate(answers),
                stats.ratio(answers, base) if i else None,
                ratio_by_prompt(answers, base) if i else {},
                stats.acceptance(answers),
                acceptance_by_depth(answers) if is_chain(setting) else [],
                compare_texts(answers, base, promised) if i else None,
                seconds_by_phase(answers),
                draft_seconds,
                floor(answers, run.limits, draft_seconds) if alone else Floor(),
            )
        )
    return results


@dataclass(frozen=True)
class CategoryResult:
    """A setting on one category of prompts. ratio: over the baseline, None for the baseline itself and without a common prompt.
    prompts: their number. ratios: one for each prompt."""

    category: str
    prompts: int
    setting: str
    answers: list[Sample]
    ratio: Interval | None
    ratios: list[float]

    @property
    def acceptance(self) -> AcceptanceStats | None:
        return stats.acceptance(self.answers)


def by_category(run: Run, results: Sequence[SettingResult]) -> list[CategoryResult]:
    """One for each category and setting, in the run's order. Empty where all prompts are of one category."""
    names = stats.categories(run)
    found = list[CategoryResult]()
    for name in names if len(names) > 1 else []:
        wanted = {p.id for p in run.prompts if p.category == name}
        base, *_ = answers = [[s for s in r.answers if s.prompt in wanted] for r in results]
        for r, ours in zip(results, answers, strict=True):
            ratio = stats.ratio(ours, base) if ours is not base else None
            ratios = [v for p, v in r.prompts.items() if p in wanted]
            found.append(CategoryResult(name, len(wanted), r.name, ours, ratio, ratios))
    return found


def is_chain(setting: Setting) -> bool:
    """True if draft tokens follow one another, so that the number of them is the depth."""
    config = setting.speculative_config or {}
    return config.get("tree_width") in (1, None) and not config.get("tree_nodes")


def draft_token_seconds(run: Run, setting: Setting) -> float | None:
    """Seconds for one draft token of a chain: 0 for a lookup, the measured time for the draft model. None: unknown."""
    configs = [s.speculative_config or {} for s in (setting, *run.settings)]
    methods = [[m] if isinstance(m := c.get("method", model_method()), str) else m for c in configs]
    if not is_chain(setting):
        return None
    if setting.speculative_config is None or all(m in METHODS and METHODS[m].cost == "lookup" for m in methods[0]):
        return 0.0
    # The first draft model of a run is the one that was measured.
    models = [c.get("model") for c, m in zip(configs, methods, strict=True) if c and m == [model_method()]]
    measured = len(models) > 1 and models[0] == models[1]
    return run.limits.draft_token if methods[0] == [model_method()] and measured else None


def ratio_by_prompt(ours: Iterable[Sample], base: Iterable[Sample]) -> dict[str, float]:
    """Ratio of tokens per second for each prompt, over the repeats of both. Each answer has its own clock."""
    mine, theirs = _rates(ours), _rates(base)
    return {p: mine[p] / theirs[p] for p in mine if p in theirs}


def _rates(samples: Iterable[Sample]) -> dict[str, float]:
    sums: dict[str, tuple[int, float]] = {}
    for s in samples:
        tokens, seconds = sums.get(s.prompt, (0, 0.0))
        sums[s.prompt] = tokens + s.output_tokens, seconds + s.seconds
    return {p: tokens / seconds for p, (tokens, seconds) in sums.items() if tokens and seconds > 0}


def acceptance_by_depth(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """For each depth of a chain, (verified, accepted) draft tokens. A token counts as verified if all before it were
    accepted."""
    steps = [(d, a) for s in samples for d, a in zip(s.drafted or [], s.accepted or [], strict=False)]
    deepest = max((d for d, _ in steps), default=0)
    verified = [sum(d >= j and a >= j - 1 for d, a in steps) for j in range(1, deepest + 1)]
    return [(n, sum(a >= j for _, a in steps)) for j, n in enumerate(verified, 1) if n]


def acceptance_rates(by_depth: Iterable[tuple[int, int]]) -> list[float]:
    """For each depth, the chance that a verified draft token is accepted."""
    return [min(accepted / verified, 1.0) for verified, accepted in by_depth]


def compare_texts(ours: Sequence[Sample], base: Sequence[Sample], promised: bool, most: int = 4) -> TextComparison:
    """most: number of examples."""
    different, compared = stats.differing(ours, base)
    mine, theirs = ({(s.prompt, s.repeat): s for s in samples} for samples in (ours, base))
    examples = [_difference(mine[key], theirs[key]) for key in different[:most]]
    return TextComparison(compared, len(different), promised, examples)


def _difference(mine: Sample, other: Sample) -> TextDifference:
    place = _first_difference(mine.text, other.text)
    at, unit = place, "character"
    if mine.token_ids and other.token_ids:
        at, unit = _first_difference(mine.token_ids, other.token_ids), "token"
    before = mine.text[max(place - 40, 0) : place]
    return TextDifference(mine.prompt, mine.repeat, at, unit, before, other.text[place:][:60], mine.text[place:][:60])


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def seconds_by_phase(samples: Iterable[Sample]) -> dict[str, float]:
    """Seconds per token in each of PHASES that took time. Empty if phases are unknown."""
    known = [s for s in samples if s.phases]
    tokens = sum(s.output_tokens for s in known)
    return {n: t for n in PHASES if (t := sum(s.phases.get(n, 0.0) for s in known) / tokens) > 0} if tokens else {}


def floor(samples: Iterable[Sample], limits: Limits, draft_seconds: float | None) -> Floor:
    """Lower bounds for the steps of these samples. An answer without steps made one for each token.

    draft_seconds: seconds for a draft token, None if unknown.
    """
    lengths, tokens = Counter[int](), 0
    for s in samples:
        tokens += s.output_tokens
        lengths.update(s.drafted if s.drafted else {0: s.output_tokens})
    steps = lengths.total()
    if not tokens or not steps:
        return Floor()
    memory = None
    if limits.weight_bytes and limits.read_bytes_per_second:
        memory = steps * limits.weight_bytes / limits.read_bytes_per_second / tokens
    target, drafted = _target_seconds(limits), any(d and n for d, n in lengths.items())
    if not target or (drafted and (len(target) == 1 or draft_seconds is None)):
        return Floor(None, memory)
    spent = sum(n * step_seconds(limits, d, draft_seconds or 0.0) for d, n in lengths.items())
    return Floor(spent / tokens, memory)


def step_seconds(limits: Limits, depth: int, draft_seconds: float) -> float:
    """The forwards of a step with a chain of this depth. draft_seconds: seconds for a draft token."""
    return interpolate(_target_seconds(limits), depth + 1) + depth * draft_seconds


def _target_seconds(limits: Limits) -> dict[int, float]:
    known = {int(n): t for n, t in limits.target.items() if n.isdecimal()}
    return known or ({1: limits.plain_step} if limits.plain_step else {})


def drift(run: Run) -> float | None:
    """Time per token in the second half of the run over that in the first, of repeated answers. None without repeats."""
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
