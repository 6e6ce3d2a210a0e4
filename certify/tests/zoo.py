"""The zoo: engines with a planted fault each, and right ones. Is each fault named, and are the right ones left alone?

python certify/tests/zoo.py [--model toy|builtin:code] [--runs N] [--only WORD] [--journal FILE]

Each engine has a certificate with a budget of ten minutes, which ends as soon as it can tell. A fault is named rightly if the
first cause of the certificate is its own. The exit code is 1 if a fault is not named, or a right engine raises an alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
from broken import ToyEngine

from outrider_certify.certificate import Certificate, Conclusion
from outrider_certify.run import TestSettings, kinds_of
from outrider_certify.subject import Subject
from outrider_certify.trials import Record, TrialJournal, run_kinds


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

    def draft_distributions(self, request, text) -> None:
        return None

    def _text(self, request, index, options):
        text = super()._text(request, index, options)
        text.drafted, text.accepted = [], []
        return text


RIGHT: dict[str, Callable[[int], Subject]] = {
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


def toys() -> tuple[Callable[[str, Fault], Subject], dict[str, Callable[[int], Subject]]]:
    """What makes a faulty engine, and right engines by name."""
    return lambda name, fault: ToyEngine(name, fault.rule, error=fault.error), RIGHT


def tried(subject: Subject, fault: Fault | None, settings: TestSettings, budget: float) -> Record:
    """What a certificate says. A fault is named by the first cause, so the parts after it are not made.

    budget: seconds of processor time, which other programs of the machine do not spend.
    """
    made = Certificate(subject=subject.name)
    for part in run_kinds(kinds_of(subject, (), settings), TrialJournal(None, {}), budget, clock=process_time):
        made.parts.append(part)
        if fault and part.causes:
            break
    differs = made.conclusion is Conclusion.DIFFERS
    return {
        "right": differs and fault.cause in made.cause if fault else not differs,
        "said": made.cause or made.sentence,
        "tokens": sum(p.figures.get("tokens", 0) for p in made.parts),
        "spent": sum(p.seconds for p in made.parts),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="toy")
    options.add_argument("--runs", type=int, default=20, help="of each right engine; 0 for none")
    options.add_argument("--budget", type=float, default=600.0, help="seconds of processor time of a certificate")
    options.add_argument("--deviation", type=float, default=0.1, help="the total variation that is to be excluded")
    options.add_argument("--max-tokens", type=int, default=24, help="tokens of a text")
    options.add_argument("--only", default="", help="engines with this in `fault: NAME` or `right: NAME`")
    options.add_argument(
        "--journal", type=Path, help="a file that keeps what is done, so that the same command goes on"
    )
    given = options.parse_args()
    if given.model == "toy":
        make, right = toys()
    else:
        from zoo_model import engines

        make, right = engines(given.model)
    identity = {name: getattr(given, name) for name in ("model", "budget", "deviation", "max_tokens")}
    journal = TrialJournal(given.journal, identity)
    todo: list[tuple[str, Fault | None, int, Callable[[], Subject]]] = [
        (name, fault, 0, partial(make, name, fault)) for name, fault in FAULTS.items()
    ]
    todo += [(name, None, run, partial(engine, run)) for run in range(given.runs) for name, engine in right.items()]
    count = Counter[tuple[bool, bool]]()
    for name, fault, run, engine in todo:
        kind = "fault" if fault else "right"
        if given.only not in f"{kind}: {name}":
            continue
        record = journal.records.get((kind, f"{name}, {run}"))
        if record is None:
            settings = TestSettings(seed=run, max_tokens=given.max_tokens, deviation=given.deviation)
            made = tried(engine(), fault, settings, given.budget)
            record = journal.add(kind, f"{name}, {run}", made, made["spent"])
        count[bool(fault), record["right"]] += 1
        verdict = ("named" if record["right"] else "NOT NAMED") if fault else "quiet" if record["right"] else "ALARM"
        print(
            f"{verdict}  {record['key']}: {record['said']} ({record['tokens']:,} tokens, {record['spent']:.0f} s)",
            flush=True,
        )
    print(f"faults named rightly: {count[True, True]} of {count[True, True] + count[True, False]}")
    print(f"alarms on right engines: {count[False, False]} in {count[False, True] + count[False, False]} runs")
    return int(count[True, False] + count[False, False] > 0)


if __name__ == "__main__":
    sys.exit(main())
