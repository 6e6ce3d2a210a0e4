"""The scheduler's decisions as pure functions of counts."""

from __future__ import annotations

import math

HEADROOM = 32  # tokens that a seated sequence must be able to grow by


def share(limit: float) -> float:
    """How many of the queue's places one owner may take: the rest is for others."""
    return limit if limit == math.inf else limit - limit // 4


def may_seat(running: int, held: int, tokens: int, kv_limit: float) -> bool:
    """Whether a sequence of so many tokens gets a slot that is free. Alone it always does.

    held: tokens of the sequences that run. kv_limit: tokens that all of them may hold.
    """
    return not running or held + tokens + HEADROOM * (running + 1) <= kv_limit


def must_preempt(running: int, held: int, kv_limit: float) -> bool:
    """Whether the youngest sequence gives way, because the next step may not fit. One sequence alone never does."""
    return running > 1 and held + HEADROOM * running > kv_limit


def prefill_tokens(running: int, chunk: int, alone: int) -> int:
    """Prompt tokens of the next prefill at most. alone: for a sequence that keeps no other waiting."""
    return chunk if running > 1 else alone
