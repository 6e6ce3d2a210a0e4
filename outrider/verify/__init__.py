"""Verifiers: which draft tokens are accepted, and which token comes after them.

A verifier is a pure function: the same arguments give the same verdict. It reads a draft, asks the target for its
distribution at the nodes it visits, reads its noise, and returns a `Verdict`. It has no generator, model or cache.

| name      | decides by                                | guarantee          | drafts                          |
|-----------|-------------------------------------------|--------------------|---------------------------------|
| match     | the target's own sample: is it a child?   | exact tokens       | any tree                        |
| rejection | min(1, p/q), node by node from the root   | exact distribution | any tree, with q where drawn    |
| block     | the same ratio, jointly over the chain    | exact distribution | chains, with q where drawn      |
| traversal | the same ratio, jointly, leaves first     | exact distribution | any tree, with q where drawn    |

`Draft.siblings` says how the children of a node were made: chosen, drawn with or without replacement, or all but the
last chosen. The ratio verifiers use it. The shape of a tree may depend on the tokens drawn so far, but a drawn token
must stay in the tree.

Each verifier exists twice. The reference (`reference_*`) handles one sequence in a few lines of Python; enumeration
proves that it is exact (`tests/exact/test_verify_exact.py`). The batched form makes the same decisions from the same
noise (`tests/exact/test_verify_twins.py`). To add a verifier, write both and add a `Verifier` to `VERIFIERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.core.noise import Noise, Stream
from outrider.core.types import Array, Draft, Guarantee, Siblings, Verdict
from outrider.verify.batched import FixedDistribution, TargetDistribution, block, match, rejection, traversal
from outrider.verify.reference import (
    Choices,
    Outcome,
    Probs,
    reference_block,
    reference_match,
    reference_rejection,
    reference_traversal,
)

__all__ = [
    "VERIFIERS",
    "Choices",
    "FixedDistribution",
    "Reference",
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
]


class Reference(Protocol):
    """The definition of a verifier on one sequence; see `outrider.verify.reference`."""

    def __call__(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        target: Callable[[int], Probs],
        drafter: Callable[[int], Probs],
        choose: Choices,
        siblings: Siblings = Siblings.IID,
    ) -> Outcome: ...


@dataclass(frozen=True)
class Verifier:
    """A verifier and its properties. Call it like its function."""

    name: str  # in `speculative_config` and in traces
    # the batched form, (target, draft, noise, position) -> Verdict
    function: Callable[[TargetDistribution, Draft, Noise, Any], Verdict]
    reference: Reference  # the definition on one sequence. A replay runs it again to explain each decision
    guarantee: Guarantee  # what its output has in common with plain decoding
    draft_stream: Stream  # noise that a sampling drafter draws from. TOKEN is the target's own noise
    needs_probs: bool  # a drafter that draws must return the distribution it drew from
    trees: bool  # a node may have two children
    # what a node's coin is compared with, in words. None means no coins, but the target's own sample
    explains_by: str | None
    help: str  # one line for command-line help

    def __call__(
        self, target: TargetDistribution, draft: Draft, noise: Noise, position: Array | Sequence[int]
    ) -> Verdict:
        return self.function(target, draft, noise, position)


VERIFIERS: dict[str, Verifier] = {
    v.name: v
    for v in (
        Verifier(
            name="match",
            function=match,
            reference=reference_match,
            guarantee=Guarantee.EXACT_TOKENS,
            draft_stream=Stream.TOKEN,
            needs_probs=False,
            trees=True,
            explains_by=None,
            help="accept draft tokens that equal the target's own sample: the tokens of plain decoding",
        ),
        Verifier(
            name="rejection",
            function=rejection,
            reference=reference_rejection,
            guarantee=Guarantee.EXACT_DISTRIBUTION,
            draft_stream=Stream.DRAFT,
            needs_probs=True,
            trees=True,
            explains_by="p/q",
            help="accept a draft token with probability min(1, p/q): the distribution of plain decoding, other tokens",
        ),
        Verifier(
            name="block",
            function=block,
            reference=reference_block,
            guarantee=Guarantee.EXACT_DISTRIBUTION,
            draft_stream=Stream.DRAFT,
            needs_probs=True,
            trees=False,
            explains_by="the probability of its chain",
            help="judge a chain as a whole: the distribution of plain decoding, accepts at least as much as rejection",
        ),
        Verifier(
            name="traversal",
            function=traversal,
            reference=reference_traversal,
            guarantee=Guarantee.EXACT_DISTRIBUTION,
            draft_stream=Stream.DRAFT,
            needs_probs=True,
            trees=True,
            explains_by="the probability of its path",
            help="judge a tree from its leaves up: the distribution of plain decoding; on a chain it equals block",
        ),
    )
}
