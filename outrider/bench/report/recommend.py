"""What to do about it, in plain words: keep it, drop it, change this, and why."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.bench import stats
from outrider.bench.report.analysis import Figures, drift, figures, ratio, step_seconds, survival
from outrider.bench.run import Run
from outrider.bench.stats import Interval

WORTH = 0.03  # a difference smaller than this is not worth a setting
KEEP, DROP, CHANGE, OPEN, BROKEN = "keep", "drop", "change", "open", "broken"
LABELS = {
    KEEP: "Keep it",
    DROP: "Drop it",
    CHANGE: "Change this",
    OPEN: "This does not tell",
    BROKEN: "Something is wrong",
}


@dataclass(frozen=True)
class Verdict:
    """kind: KEEP, DROP, CHANGE, OPEN (the numbers do not tell) or BROKEN (a promise was). headline: one sentence. reasons:
    why. advice: what to change. setting: the one it is about. config: what to hand to `--speculative-config`, if kept."""

    kind: str
    headline: str
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    setting: str | None = None
    config: str | None = None

    @property
    def label(self) -> str:
        return LABELS[self.kind]


def verdict(run: Run, found: list[Figures] | None = None) -> Verdict:
    """Of all settings of a run against its first. Raises ValueError for a run that holds no answer."""
    found = figures(run) if found is None else found
    base, others = found[0], found[1:]
    if not any(f.answers for f in found):
        raise ValueError(nothing(run))
    notes = _caveats(run, found)
    compared = [f for f in others if f.ratio is not None]
    if not others:
        why = f"Only {base.name} was measured, so there is nothing to compare it with."
        return Verdict(OPEN, why, notes, ["Measure plain decoding and at least one setting beside it."])
    if not compared:
        silent = base if not base.answers else others[0]
        return Verdict(OPEN, f"{silent.name} gave no answer that could be compared with another.", notes)
    broken = [f for f in compared if f.texts and f.texts.promised and f.texts.differing]
    best = max([f for f in compared if f not in broken] or compared, key=_order)
    kind, headline = _judge(best, base)
    reasons = [
        *_texts(run, best, base),
        *_acceptance(best),
        *_hopeless(run, best),
        *_rest(best),
        *_beside(best, compared),
    ]
    levers = [*_categories(run, best, base), *_length(run, best), *_drafting(best)]
    if kind in (DROP, OPEN) and levers:
        kind = CHANGE
    advice = [*levers, *_expected(run, best)]
    if broken:
        reasons.insert(0, headline)
        parted = sum(f.texts.differing for f in broken if f.texts)
        names = " and ".join(f.name for f in broken)
        headline = (
            f"Do not trust {names}: {count(parted, 'text')} should have been as written by {base.name}, but differ."
        )
        advice.insert(0, "This is a fault, in outrider or in the model. Please report it with this run's file.")
        kind = BROKEN
    config = best.setting.speculative_config if kind == KEEP else None
    return Verdict(kind, headline, reasons + notes, advice, best.name, json.dumps(config) if config else None)


def nothing(run: Run) -> str:
    """Why there is nothing to report, and what to do."""
    if not run.samples:
        return "the run holds no answers: it ended before the first; measure again with: outrider bench --json RUN.json"
    why, times = Counter(s.error for s in run.samples).most_common(1)[0]
    return (
        f"all {len(run.samples)} requests of the run failed, {times} of them with: {why}; mend that and measure again"
    )


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", "\N{NO-BREAK SPACE}%")


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def between(found: Interval) -> str:
    if not math.isfinite(found.high):
        return "one prompt is too few for an interval"
    return f"95\N{NO-BREAK SPACE}% interval {times(found.low)} to {times(found.high)}"


def _order(f: Figures) -> float:
    return f.ratio.value if f.ratio else 0.0


def _judge(best: Figures, base: Figures) -> tuple[str, str]:
    """The kind and the headline of the best setting."""
    found = best.ratio
    assert found is not None
    fast = f"{best.name} is {times(found.value)} times as fast as {base.name} ({between(found)})"
    if found.low > 1 - WORTH and found.high < 1 + WORTH:
        return DROP, f"{fast}: a difference that is not worth a setting."
    if found.low > 1:
        return KEEP, f"{fast}."
    if found.high < 1:
        return DROP, f"{best.name} is slower: {times(found.value)} times the speed of {base.name} ({between(found)})."
    if not math.isfinite(found.high):
        return OPEN, f"{fast}, and prompts differ. Measure more of them."
    width = math.log(found.high / found.low) / 2 if found.low > 0 else math.inf
    more = found.groups * (width / math.log(1 + WORTH)) ** 2
    advice = "the gain differs too much from prompt to prompt for one number: look at the prompts below"
    if more <= 20 * found.groups:
        advice = f"about {math.ceil(more / 10) * 10} prompts like these would tell a difference of {percent(WORTH)}"
    return OPEN, f"{fast}, which may be chance. {found.groups} prompts were compared; {advice}."


def _beside(best: Figures, compared: list[Figures]) -> list[str]:
    """How the other settings did, and whether the best is surely the best of them."""
    said = []
    for other in sorted((f for f in compared if f is not best), key=_order, reverse=True):
        ahead = ratio(best.answers, other.answers)
        if ahead is None or other.ratio is None:
            continue
        sure = f"surely behind {best.name}" if ahead.low > 1 else f"not told apart from {best.name}"
        said.append(f"{other.name}: {times(other.ratio.value)} times as fast ({between(other.ratio)}), {sure}.")
    return said


def _texts(run: Run, best: Figures, base: Figures) -> list[str]:
    texts, greedy, promise = best.texts, run.sampling.get("temperature") == 0, best.setting.guarantee
    if texts is None or not texts.compared:
        return ["No texts could be compared."]
    if not texts.differing:
        return [f"Identical texts: all {count(texts.compared, 'answer')} of {best.name} are as written by {base.name}."]
    said = f"{texts.differing} of {count(texts.compared, 'text')} of {best.name} are not as written by {base.name}"
    if texts.promised:
        return [f"{said}, although exact-tokens was promised."]
    if promise == "approximate":
        return [f"{said}: this setting is approximate. Judge the quality beside the speed."]
    if promise == "exact-distribution" and not greedy:
        return [f"{said}, as they may: the same law, other draws from it."]
    if promise == "exact-distribution":
        return [f"{said}. Greedy texts of one law differ only where rounding decides between equals: look at where."]
    return [f"{said}. Nothing was promised; look at where, and judge the quality beside the speed."]


def _acceptance(best: Figures) -> list[str]:
    found = best.acceptance
    if found is None or found.rate is None:
        return []
    rate = percent(found.rate)
    return [f"A step of {best.name} commits {found.length:.2f} tokens; {rate} of its guesses are accepted."]


def _categories(run: Run, best: Figures, base: Figures) -> list[str]:
    names, each = stats.categories(run), {}
    for name in names if len(names) > 1 else []:
        wanted = {p.id for p in run.prompts if p.category == name}
        sides = ([s for s in side.answers if s.prompt in wanted] for side in (best, base))
        if (one := ratio(*sides)) is not None:
            each[name] = one
    slower = [f"{n} ({times(r.value)})" for n, r in each.items() if r.high < 1]
    faster = [f"{n} ({times(r.value)})" for n, r in each.items() if r.low > 1]
    if not slower or not faster:
        return []
    return [f"It pays for {', '.join(faster)} and costs for {', '.join(slower)}: decode the latter plainly."]


def _length(run: Run, best: Figures) -> list[str]:
    """Another length of the chain, if the measured acceptance and the measured forwards promise 5 % more by it."""
    rates, now, wanted = _by_length(run, best)
    tried = [d for s in best.answers for d in s.drafted or []]
    chosen = tried.count(now) < len(tried) / 2  # by a controller, which sees more than we do
    if not wanted or chosen or rates[wanted] < rates[now] * 1.05:
        return []
    expected = f"{times(rates[wanted] / rates[0])} times plain in place of {times(rates[now] / rates[0])}"
    return [
        f"Set num_speculative_tokens to {wanted} in place of {now}: later guesses are kept too seldom for what they cost "
        f"(expected of the forwards alone: {expected})."
    ]


def _hopeless(run: Run, best: Figures) -> list[str]:
    _, now, wanted = _by_length(run, best)
    return (
        ["At this acceptance and the cost of these forwards, guessing pays at no length."] if now and not wanted else []
    )


def _by_length(run: Run, best: Figures) -> tuple[list[float], int, int]:
    """Expected tokens per second of the forwards alone with 0, 1, 2... guesses, the number tried, and the best one. Noughts
    where too little is known."""
    alive = survival(best.judged)
    if not alive or len(run.limits.target) < 2 or best.judged[0][0] < 100 or best.guess is None:
        return [], 0, 0
    rates = [(1 + sum(alive[:k])) / step_seconds(run.limits, k, best.guess) for k in range(len(alive) + 1)]
    return rates, len(alive), max(range(len(rates)), key=rates.__getitem__)


def _drafting(best: Figures) -> list[str]:
    share = best.phases.get("draft", 0.0) / (best.per_token or 1.0)
    advice = "use a smaller drafter, or fewer guesses"
    return [f"{percent(share)} of the time goes into drafting: {advice}."] if share > 0.35 else []


def _rest(best: Figures) -> list[str]:
    share = best.phases.get("rest", 0.0) / (best.per_token or 1.0)
    what = "(reading prompts, the tokenizer, waiting), where speculation cannot help"
    return [f"{percent(share)} of the time is in no step {what}."] if share > 0.25 else []


def _expected(run: Run, best: Figures) -> list[str]:
    expected = run.predicted.get(best.name)
    if not expected or best.rate is None or 0.8 < best.rate.value / expected < 1.25:
        return []
    return [
        f"The cost model expected {expected:.1f} tokens per second and {best.rate.value:.1f} were measured: calibrate again on "
        "an idle machine before you trust its choices."
    ]


def _caveats(run: Run, found: list[Figures]) -> list[str]:
    said = []
    wanted = len(run.prompts) * len(run.settings) * run.repeats
    if not run.complete:
        said.append(
            f"The measurement was interrupted: {len(run.samples)} of {wanted} answers are here. Its command goes on with them "
            "when --resume is added."
        )
    for f in found:
        if f.failed:
            why = Counter(s.error for s in f.failed).most_common(1)[0][0]
            total = len(f.failed) + len(f.answers)
            said.append(f"{len(f.failed)} of {total} requests of {f.name} failed and count nowhere; most often: {why}")
    moved = drift(run)
    if moved is not None and not 0.9 < moved < 1.1:
        word = "slower" if moved > 1 else "faster"
        said.append(
            f"The machine became {word} while it was measured ({times(moved)} times as long per token in the second half). "
            "Settings took turns, so ratios hold; tokens per second are of a machine that was busy part of the time."
        )
    lengths = [sum(s.output_tokens for s in f.answers) / len(f.answers) for f in found if f.answers]
    if lengths and any(abs(a - b) > 0.1 * max(a, b) for a, b in pairwise(lengths)):
        said.append(
            "Answers of the settings differ in length by more than a tenth, which alone changes tokens per second."
        )
    return said
