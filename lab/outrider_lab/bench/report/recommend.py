"""What to do with the settings of a run, in plain words: keep, drop or change them, and why."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.core.intervals import Interval
from outrider_lab.bench import stats
from outrider_lab.bench.report.analysis import SettingResult, analyse, by_category
from outrider_lab.bench.report.format import count, factor, interval, percent
from outrider_lab.bench.run import Run

# A smaller difference is not worth a setting.
WORTH = 0.03
KEEP, DROP, CHANGE, OPEN, BROKEN = "keep", "drop", "change", "open", "broken"
LABELS = {
    KEEP: "Keep it",
    DROP: "Drop it",
    CHANGE: "Change this",
    OPEN: "Not decided",
    BROKEN: "Something is wrong",
}


@dataclass(frozen=True)
class Recommendation:
    """What to do with a setting, and why."""

    kind: str  # KEEP, DROP, CHANGE, OPEN (the numbers do not decide) or BROKEN (texts differ that must be equal)
    headline: str  # one sentence
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)  # what to change
    setting: str | None = None  # the setting it is about
    config: str | None = None  # the value for `--speculative-config`, if the setting is to be kept

    @property
    def label(self) -> str:
        return LABELS[self.kind]


def recommend(run: Run, results: list[SettingResult] | None = None) -> Recommendation:
    """Compares all settings of a run with the first. Raises ValueError for a run without an answer."""
    results = analyse(run) if results is None else results
    base, others = results[0], results[1:]
    if not any(r.answers for r in results):
        raise ValueError(no_answers(run))
    notes = _notes(run, results)
    compared = [r for r in others if r.ratio is not None]
    if not others:
        why = f"There is nothing to compare: only {base.name} was measured."
        return Recommendation(OPEN, why, notes, ["Measure plain decoding and at least one other setting."])
    if not compared:
        silent = base if not base.answers else others[0]
        return Recommendation(OPEN, f"{silent.name} gave no answer that can be compared with another.", notes)
    broken = [r for r in compared if r.texts and r.texts.promised and r.texts.differing]
    best = max([r for r in compared if r not in broken] or compared, key=_speedup)
    assert best.ratio is not None
    kind, headline = assess(best.name, best.ratio, base.name, run.concurrency)
    reasons = [
        *_texts(run, best, base),
        *_acceptance(best),
        *_outside_steps(best),
        *_other_settings(best, compared),
    ]
    advice = [*_categories(run, best), *_drafting(best)]
    if kind in (DROP, OPEN) and advice:
        kind = CHANGE
    if broken:
        reasons.insert(0, headline)
        different = sum(r.texts.differing for r in broken if r.texts)
        names = " and ".join(r.name for r in broken)
        headline = (
            f"Do not trust {names}: {count(different, 'text')} must be equal to the text of {base.name}, but differ."
        )
        advice.insert(
            0,
            "Without the native kernels, rounding can decide a near-tie of two tokens. With them it is a fault: report it with "
            "the file of this run.",
        )
        kind = BROKEN
    config = best.setting.speculative_config if kind == KEEP else None
    return Recommendation(kind, headline, reasons + notes, advice, best.name, json.dumps(config) if config else None)


def assess(name: str, ratio: Interval, base: str, concurrency: int = 1) -> tuple[str, str]:
    """The kind and the sentence for one setting, from its ratio to the baseline.

    Args:
        concurrency: Prompts that were sent together.
    """
    fast = f"{name} is {factor(ratio.value)} times as fast as {base} ({interval(ratio)})"
    if ratio.low > 1 - WORTH and ratio.high < 1 + WORTH:
        return DROP, f"{fast}. This difference is not worth a setting."
    if ratio.low > 1:
        return KEEP, f"{fast}."
    if ratio.high < 1:
        return DROP, f"{name} is slower: {factor(ratio.value)} times the speed of {base} ({interval(ratio)})."
    if not math.isfinite(ratio.high):
        return OPEN, f"{fast}, and prompts differ. Measure more prompts."
    width = math.log(ratio.high / ratio.low) / 2 if ratio.low > 0 else math.inf
    needed = ratio.groups * (width / math.log(1 + WORTH)) ** 2
    advice = "The gain differs too much from prompt to prompt for one number. Look at the prompts in the report."
    if needed <= 20 * ratio.groups:
        advice = f"About {math.ceil(needed / 10) * 10} of them would show a difference of {percent(WORTH)}."
    compared = f"{ratio.groups} groups of up to {concurrency} prompts" if concurrency > 1 else f"{ratio.groups} prompts"
    return OPEN, f"{fast}. This can be chance, with {compared}. {advice}"


def no_answers(run: Run) -> str:
    """Why there is nothing to report, and what to do."""
    if not run.samples:
        return "the run holds no answers: it ended before the first. Measure again: outrider bench --json RUN.json"
    why, times = Counter(s.error for s in run.samples).most_common(1)[0]
    return f"all {len(run.samples)} requests of the run failed, {times} of them with: {why}. Correct that and measure again"


def _speedup(result: SettingResult) -> float:
    return result.ratio.value if result.ratio else 0.0


def _other_settings(best: SettingResult, compared: list[SettingResult]) -> list[str]:
    """The speed of the other settings, and if the best is significantly faster than each."""
    said = []
    for other in sorted((r for r in compared if r is not best), key=_speedup, reverse=True):
        ahead = stats.ratio(best.answers, other.answers)
        if ahead is None or other.ratio is None:
            continue
        place = f"slower than {best.name}" if ahead.low > 1 else f"not clearly slower than {best.name}"
        said.append(f"{other.name}: {factor(other.ratio.value)} times as fast ({interval(other.ratio)}), {place}.")
    return said


def _texts(run: Run, best: SettingResult, base: SettingResult) -> list[str]:
    texts, greedy, guarantee = best.texts, run.sampling.get("temperature") == 0, best.setting.guarantee
    if texts is None or not texts.compared:
        return ["No texts could be compared."]
    if not texts.differing:
        answers = count(texts.compared, "answer")
        return [f"Identical texts: all {answers} of {best.name} are equal to those of {base.name}."]
    ids = ", ".join(dict.fromkeys(d.prompt for d in texts.examples[:3])) + ", ..." * (texts.differing > 3)
    said = (
        f"{texts.differing} of {count(texts.compared, 'text')} of {best.name} differ from those of {base.name} ({ids})"
    )
    if texts.promised:
        return [f"{said}, although the guarantee is exact-tokens."]
    if guarantee == "exact-distribution" and not greedy:
        return [f"{said}. This is correct: the distribution is the same, the random draws are others."]
    if guarantee == "exact-distribution":
        return [f"{said}. Greedy texts can differ only where rounding decides a near-tie. Look at the places."]
    return [f"{said}. There is no guarantee: look at the places, and judge the quality as well as the speed."]


def _acceptance(best: SettingResult) -> list[str]:
    acceptance = best.acceptance
    if acceptance is None or acceptance.rate is None:
        return []
    rate = percent(acceptance.rate)
    return [f"A step of {best.name} commits {acceptance.length:.2f} tokens. {rate} of its draft tokens are accepted."]


def _categories(run: Run, best: SettingResult) -> list[str]:
    results = {name: next(r for r in some if r.name == best.name) for name, (_, some) in by_category(run).items()}
    each = {name: r.ratio for name, r in results.items() if r.ratio is not None}
    slower = [f"{n} ({factor(r.value)})" for n, r in each.items() if r.high < 1]
    faster = [f"{n} ({factor(r.value)})" for n, r in each.items() if r.low > 1]
    if not slower or not faster:
        return []
    return [f"It is faster for {', '.join(faster)} and slower for {', '.join(slower)}. Decode the latter plainly."]


def _drafting(best: SettingResult) -> list[str]:
    share = best.phases.get("draft", 0.0) / (best.per_token or 1.0)
    advice = "Use a smaller draft model, or fewer draft tokens"
    return [f"Drafting takes {percent(share)} of the time. {advice}."] if share > 0.35 else []


def _outside_steps(best: SettingResult) -> list[str]:
    share = best.phases.get("rest", 0.0) / (best.per_token or 1.0)
    what = "prefill, tokenizer, waiting. Speculation cannot help there"
    return [f"{percent(share)} of the time is outside of steps: {what}."] if share > 0.25 else []


def _notes(run: Run, results: list[SettingResult]) -> list[str]:
    """What limits the value of the measurement."""
    said = []
    wanted = len(run.prompts) * len(run.settings) * run.repeats
    if not run.complete:
        said.append(
            f"The measurement was interrupted: {len(run.samples)} of {wanted} answers are here. Run the same command with "
            "--resume to continue."
        )
    for r in results:
        if r.failed:
            why = Counter(s.error for s in r.failed).most_common(1)[0][0]
            total = len(r.failed) + len(r.answers)
            said.append(f"{len(r.failed)} of {total} requests of {r.name} failed and do not count. Most often: {why}")
    lengths = [sum(s.output_tokens for s in r.answers) / len(r.answers) for r in results if r.answers]
    if lengths and any(abs(a - b) > 0.1 * max(a, b) for a, b in pairwise(lengths)):
        said.append(
            "The answers of the settings differ in length by more than a tenth. That alone changes tokens per second."
        )
    return said
