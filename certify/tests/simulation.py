"""What a certificate promises, counted over many runs of engines whose distribution is known.

python certify/tests/simulation.py [--right N] [--off N] [--journal FILE]

Right engines may raise as many alarms as the confidence allows. An engine that is off by 10 % more than the smallest deviation
that a certificate states must be found in 95 % of its runs, and one that is off by 10 % less in fewer. The exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from unittest.mock import patch

import numpy as np
from broken import ToyEngine
from scipy import stats

from outrider_certify import bounds
from outrider_certify.audit import Audit
from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.statistical import SQUARE, Statistical
from outrider_certify.subject import GeneratedText, SpeculationVariant, Subject, TextRequest, TokenDistribution
from outrider_certify.trials import TrialJournal, run_kinds

CELLS = SQUARE**2
TRIALS = 32  # of a run that is to find a deviation
ALPHA = 0.01


def shifted(deviation: float) -> np.ndarray:
    """Cells of which half are too large and half too small, with this total variation to equal ones."""
    return (1 + 2 * deviation * np.where(np.arange(CELLS) % 2, 1, -1)) / CELLS


class PairsTilted(Subject):
    """Sixteen tokens, all equally likely. The second of each pair depends on the first: no single token shows it."""

    exact_numbers = True

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def prompts(self) -> list[tuple[int, ...]]:
        return [(i,) for i in range(6)]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        return [self._text(r, i) for r in requests for i in range(r.params.n)]

    def _text(self, request: TextRequest, index: int) -> GeneratedText:
        rng, tokens = np.random.default_rng([request.params.seed or 0, index]), list[int]()
        cells = shifted(self.deviation).reshape(SQUARE, SQUARE)
        for _ in range(request.params.max_tokens // 2):
            a = int(rng.integers(16))
            part = np.roll(cells[0], a // 4)
            b = int(rng.choice(4, p=part / part.sum()))
            tokens += [a, 4 * b + int(rng.integers(4))]
        return GeneratedText(tokens, prompt=list(request.prompt_ids), finish="length")

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        return [TokenDistribution(np.full(16, 1 / 16)) for _ in text.tokens]


def judged(kind: Statistical, trials: int) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=trials)
    return part


def right(run: int) -> CertificatePart:
    """Two looks at a right engine with few tokens, where false alarms are likeliest."""
    engine = ToyEngine(rule=("rejection", "block", "match")[run % 3], seed=run)
    return judged(Statistical(engine, length=6, seed=run), 16)


def _no_bet(audit: Audit, context: object, token: int) -> bool:
    return audit.add(np.zeros_like(audit.logs), np.zeros_like(audit.placed), 1)


def off_by(deviation: float, run: int) -> CertificatePart:
    """Without bets, which take five sixths of the time. None can win where all tokens are equally likely."""
    with patch.object(Audit, "see", _no_bet):
        return judged(Statistical(PairsTilted(deviation), seed=run), TRIALS)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--right", type=int, default=1000, help="runs of right engines")
    options.add_argument("--off", type=int, default=200, help="runs of engines that are off, of each size")
    options.add_argument(
        "--journal", type=Path, help="a file that keeps what is done, so that the same command goes on"
    )
    given = options.parse_args()
    journal, stated = TrialJournal(given.journal, {}), off_by(0.0, 0).figures["smallest_deviation"]
    print(f"a certificate of {TRIALS} trials states that it finds a deviation of {stated:.4f}", flush=True)
    runs = {
        "right": (given.right, right),
        "0.9 of the stated deviation": (given.off, lambda run: off_by(0.9 * stated, run)),
        "1.1 of the stated deviation": (given.off, lambda run: off_by(1.1 * stated, run)),
    }
    alarms = dict.fromkeys(runs, 0)
    for name, (count, make) in runs.items():
        for run in range(count):
            start, record = process_time(), journal.records.get((name, str(run)))
            if record is None:
                alarm = make(run).conclusion is Conclusion.DIFFERS
                record = journal.add(name, str(run), {"alarm": alarm}, process_time() - start)
            alarms[name] += record["alarm"]
        low, high = bounds.share_interval(alarms[name], count)
        print(f"{name}: {alarms[name]} alarms in {count} runs (95 % interval {low:.3f} to {high:.3f})", flush=True)
    allowed = stats.binom.ppf(0.999, given.right, ALPHA)
    less, more = (alarms[name] / max(given.off, 1) for name in list(runs)[1:])
    return int(alarms["right"] > allowed or not less < bounds.POWER <= more)


if __name__ == "__main__":
    sys.exit(main())
