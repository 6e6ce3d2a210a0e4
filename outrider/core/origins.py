"""Where each token of a text came from, as one letter. Traces, measurements and reports use these letters. Imports nothing."""

from __future__ import annotations

PLAIN, ACCEPTED, CORRECTED, BONUS = "p", "a", "c", "b"


def letters(drafted: int, accepted: int, refused: bool, written: int) -> str:
    """One letter for each token that a step wrote.

    ACCEPTED stands for a draft token. The target's own token follows, unless the text ended before it. It is CORRECTED if draft
    tokens were rejected here, BONUS if all on the path were accepted, and PLAIN if nothing was drafted.

    Args:
        drafted: Number of draft tokens.
        accepted: Number of accepted draft tokens.
        refused: Whether the last accepted node had children.
        written: Tokens of the text.
    """
    last = PLAIN if not drafted else CORRECTED if refused else BONUS
    return (ACCEPTED * accepted + last)[:written]
