"""The zoo: engines with a planted fault each, and right ones. Is each fault named, and are the right ones left alone?

python certify/tests/zoo.py [--model toy|builtin:code] [--most TRIALS] [--runs N] [--only WORD]

Each engine has a whole certificate: all kinds that suit it, `--most` trials of each at most. A fault is named rightly if the
first cause of the certificate is its own. The exit code is 1 if a fault is not named, or a right engine raises an alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import process_time

import numpy as np
from broken import ToyEngine

from outrider_certify.certificate import Certificate, Conclusion
from outrider_certify.run import TestSettings, kinds_of
from outrider_certify.subject import Subject
from outrider_certify.trials import TrialJournal, run_kinds


@dataclass(frozen=True)
class Fault:
    """cause: words of the sentence that names it. rule: of the engine that has it. error: how wrong its drafter is."""

    cause: str
    rule: str = "match"
    error: float = 2.0


FAULTS = {
    # what tokens are drawn from
    "wrong q": Fault("likeliest draft token is taken", "rejection"),
    "raw q": Fault("judged by the raw q", "rejection"),
    "stale q": Fault("stale q", "rejection"),
    "draft temperature ignored": Fault("the draft ignores temperature", "rejection"),
    "no residual": Fault("no residual", "rejection"),
    "shared noise": Fault("shared noise", "rejection", 3.0),
    "bonus token from the draft": Fault("bonus token", "rejection"),
    "truncated q vocabulary": Fault("truncated q", "rejection"),
    "low q dropped": Fault("its own q is low", "rejection"),
    "everything accepted": Fault("without regard to the target", "rejection"),
    "first-failure block rule": Fault("come too rarely", "block"),
    "q of another row above two sequences": Fault("other texts in the batch", "rejection"),
    # which tokens are written
    "cache off by one": Fault("cache is off after a rejection"),
    "constant positions": Fault("wrong positions"),
    "penalties per step": Fault("penalties count otherwise"),
    "min_p dropped": Fault("min_p is not applied"),
    "top_k on the draft only": Fault("top_k is not applied"),
    "logit_bias dropped": Fault("logit_bias is not applied"),
    "bad words at the first token only": Fault("bad_words is applied otherwise"),
    "end token inside an accepted run": Fault("goes on past the end"),
    "stop string at the end of a step only": Fault("goes on past the end"),
    "greedy at any temperature": Fault("temperature is not applied"),
    # conditions
    "noise of another slot": Fault("other texts in the batch"),
    "stale logits after preemption": Fault("preempted sequence"),
    "prefix cache of another prompt": Fault("prefix cache"),
    "the second text of n reads another prompt": Fault("n > 1"),
    "rows shift by one with logprobs": Fault("log-probabilities are asked for"),
    "positions end at the window": Fault("long context"),
    "one ulp between row counts": Fault("how many rows"),
    # books
    "grammar mask of the parent node": Fault("the grammar is not applied"),
    "shared seeds": Fault("share their random numbers"),
    "seed ignored": Fault("the seed is ignored", "rejection"),
    "logprobs of the wrong row": Fault("log-probabilities are those of another row"),
    "usage past the end": Fault("tokens are counted that are not in the text"),
    "counters past the end": Fault("the acceptance counters do not agree"),
}


class Ties(ToyEngine):
    """A right engine whose scores are often equal."""

    def __init__(self, **given: object) -> None:
        super().__init__(**given)  # type: ignore[arg-type]
        self.table, self.wrong = np.round(self.table), np.round(self.wrong)


class SaysLittle(ToyEngine):
    """A right engine that tells neither its drafts nor its steps."""

    def draft_distributions(self, *_: object) -> None:  # type: ignore[override]
        return None

    def _text(self, *given):
        text = super()._text(*given)
        text.drafted, text.accepted = [], []
        return text


RIGHT: dict[str, Callable[[int], ToyEngine]] = {
    "match": lambda seed: ToyEngine(rule="match", seed=seed),
    "rejection": lambda seed: ToyEngine(rule="rejection", seed=seed),
    "block": lambda seed: ToyEngine(rule="block", seed=seed),
    "one draft token": lambda seed: ToyEngine(rule="rejection", gamma=1, seed=seed),
    "seven draft tokens": lambda seed: ToyEngine(rule="block", gamma=7, seed=seed),
    "a perfect drafter": lambda seed: ToyEngine(rule="rejection", error=0.0, seed=seed),
    "a hopeless drafter, 20 letters": lambda seed: ToyEngine(rule="rejection", error=6.0, vocab=20, seed=seed),
    "equal scores": lambda seed: Ties(rule="match", seed=seed),
    "equal scores, row counts round differently": lambda seed: Ties(rule="rejection", rounding=1e-6, seed=seed),
    "row counts round differently": lambda seed: ToyEngine(rule="match", rounding=1e-6, seed=seed),
    "says little": lambda seed: SaysLittle(rule="rejection", seed=seed),
}


def certificate(subject: Subject, most: int | None, seed: int = 0, budget: float = 600.0) -> Certificate:
    """A whole certificate. most: trials of each kind, at most. budget: seconds, which a number of trials leaves unused."""
    kinds = kinds_of(subject, (), TestSettings(seed=seed))
    parts = list(run_kinds(kinds, TrialJournal(None, {}), budget, most=most))
    return Certificate(subject=subject.name, parts=parts, complete=True)


def verdicts(
    make: Callable[[str, Fault], Subject], only: str, most: int | None, budget: float
) -> Iterator[tuple[str, Certificate, bool]]:
    """(fault, certificate, whether it is named rightly) of each faulty engine."""
    for name, fault in FAULTS.items():
        if only in name:
            made = certificate(make(name, fault), most, budget=budget)
            yield name, made, made.conclusion is Conclusion.DIFFERS and fault.cause in made.cause


def toy(name: str, fault: Fault) -> Subject:
    return ToyEngine(name, fault.rule, error=fault.error)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="toy")
    options.add_argument("--most", type=int, default=120)
    options.add_argument("--runs", type=int, default=20, help="of each right engine; 0 for none")
    options.add_argument("--first", type=int, default=0, help="number of the first run")
    options.add_argument("--budget", type=float, default=600.0, help="seconds of a certificate")
    options.add_argument("--only", default="", help="engines with this word in their names")
    options.add_argument("--faults", type=int, default=1, help="0 for the right engines alone")
    given = options.parse_args()
    make, right = toy, RIGHT
    if given.model != "toy":
        from zoo_model import engines

        make, right = engines(given.model)
    bad = tried = 0
    for name, made, named in verdicts(make, given.only, given.most, given.budget) if given.faults else ():
        bad, tried = bad + (not named), tried + 1
        tokens = sum(p.figures.get("tokens", 0) for p in made.parts)
        print(f"{'named' if named else 'NOT'}  {name}: {made.cause or made.sentence} ({tokens:,} tokens)", flush=True)
    print(f"faults named rightly: {tried - bad} of {tried}", flush=True)
    for name, engine in right.items():
        if given.only not in name or not given.runs:
            continue
        alarms, start = list[str](), process_time()
        for run in range(given.first, given.first + given.runs):
            made = certificate(engine(run), given.most, seed=run, budget=given.budget)
            alarms += [made.sentence] if made.conclusion is Conclusion.DIFFERS else []
        bad += bool(alarms)
        print(
            f"{len(alarms)} alarms in {given.runs} runs  {name} ({process_time() - start:.0f} s) {alarms[:1]}",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
