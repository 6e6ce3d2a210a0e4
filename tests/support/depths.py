"""The best draft length by theory, which the explainer's page computes too."""

from __future__ import annotations

from collections.abc import Sequence


def best_depth(survival: Sequence[float], seconds: Sequence[float]) -> int:
    """The depth with the most tokens per second. 0 is plain decoding, and wins a tie.

    seconds[k]: time of a step with k levels.
    """
    rate, tokens, best = 1 / seconds[0], 1.0, 0
    for depth, (kept, time) in enumerate(zip(survival, seconds[1:], strict=False), 1):
        tokens += kept
        if tokens / time > rate:
            rate, best = tokens / time, depth
    return best
