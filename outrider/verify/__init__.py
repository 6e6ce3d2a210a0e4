"""Which guesses stand, and what comes after them. Pure: the same arguments give the same verdict. Imports L0 and L1.

A verifier reads a draft, asks the target for its law at the nodes it visits, reads its noise, and returns a `Verdict`.
There is no generator, model or cache here, and nothing about a device. Three rules:

| name      | decides by                               | promise            | drafts                                |
|-----------|------------------------------------------|--------------------|---------------------------------------|
| match     | the target's own sample; is it a child?  | exact tokens       | any tree, however it was made         |
| rejection | min(1, p/q), guess by guess from the top | exact distribution | any tree, with its laws q where drawn |
| block     | the same ratio, jointly over the chain   | exact distribution | chains, with their law q where drawn  |
| traversal | the same ratio, jointly, leaves first    | exact distribution | any tree, with its laws q where drawn |

How siblings were made (`Siblings`) is part of the draft, and the ratio rules judge by it: chosen, drawn with or without
replacement, or all but the last chosen. The shape of a tree may follow what was drawn so far; what was drawn stays.

Each exists twice: the definition, one sequence in a screen of Python (`reference_*`), and the batched form. The first
is proved exact by enumeration (`tests/exact/test_verify_exact.py`), the second equals it decision for decision given the same
noise (`tests/exact/test_verify_twins.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.types import Draft, Guarantee, Verdict
from outrider.verify.batched import FixedDistribution, TargetDistribution, block, match, rejection, traversal
from outrider.verify.reference import (
    Choices,
    reference_block,
    reference_match,
    reference_rejection,
    reference_traversal,
)

__all__ = [
    "ALIASES",
    "VERIFIERS",
    "Choices",
    "FixedDistribution",
    "TargetDistribution",
    "Verifier",
    "block",
    "match",
    "reference_block",
    "reference_match",
    "reference_rejection",
    "reference_traversal",
    "rejection",
    "traversal",
    "verifier",
]


@dataclass(frozen=True)
class Verifier:
    """A rule and what must be known to use it. Call it like its function."""

    name: str
    function: Callable[[TargetDistribution, Draft, Noise, Tensor], Verdict]
    guarantee: Guarantee
    draft_stream: Stream  # the noise a sampling drafter draws from: TOKEN couples it with the target
    needs_probs: bool  # must a drafter that draws return the law it drew from?
    trees: bool  # may a node have two children?
    help: str

    def __call__(self, target: TargetDistribution, draft: Draft, noise: Noise, position: Tensor) -> Verdict:
        return self.function(target, draft, noise, position)


VERIFIERS: dict[str, Verifier] = {
    v.name: v
    for v in (
        Verifier(
            "match",
            match,
            Guarantee.EXACT_TOKENS,
            Stream.TOKEN,
            needs_probs=False,
            trees=True,
            help="keep guesses that equal the target's own sample: the tokens of plain decoding, whatever the drafter",
        ),
        Verifier(
            "rejection",
            rejection,
            Guarantee.EXACT_DISTRIBUTION,
            Stream.DRAFT,
            needs_probs=True,
            trees=True,
            help="keep a guess with probability min(1, p/q): the law of plain decoding, other tokens",
        ),
        Verifier(
            "block",
            block,
            Guarantee.EXACT_DISTRIBUTION,
            Stream.DRAFT,
            needs_probs=True,
            trees=False,
            help="judge the whole chain at once: the law of plain decoding, at least as many guesses kept as rejection",
        ),
        Verifier(
            "traversal",
            traversal,
            Guarantee.EXACT_DISTRIBUTION,
            Stream.DRAFT,
            needs_probs=True,
            trees=True,
            help="judge a tree from its leaves up: the law of plain decoding, and on a chain the same as block",
        ),
    )
}

ALIASES = {"standard": "rejection"}  # vLLM's rejection_sample_method; its "block" is ours


def verifier(name: str) -> Verifier:
    """The verifier of that name, or of vLLM's name for it. Raises ValueError, naming the nearest one."""
    found = VERIFIERS.get(ALIASES.get(name, name))
    if found is None:
        close = difflib.get_close_matches(name.lower(), [*VERIFIERS, *ALIASES], n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        known = "\n".join(f"  {v.name}: {v.help}" for v in VERIFIERS.values())
        raise ValueError(f"there is no verifier {name!r}{hint} There are:\n{known}")
    return found
