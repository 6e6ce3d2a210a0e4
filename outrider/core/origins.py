"""Where the tokens of a text came from, a letter each: traces, measurements and their pages write it so. Imports nothing."""

from __future__ import annotations

PLAIN, ACCEPTED, CORRECTED, BONUS = "p", "a", "c", "b"


def letters(drafted: int, accepted: int, refused: bool, written: int) -> str:
    """One per token that a step wrote: ACCEPTED (a guess), then CORRECTED (guesses were refused here), BONUS (all guesses on
    the way came true) or PLAIN (nothing was guessed), unless the text ended before.

    drafted, accepted: guesses. refused: the last accepted one had guesses behind it. written: tokens of the text.
    """
    own = PLAIN if not drafted else CORRECTED if refused else BONUS
    return (ACCEPTED * accepted + own)[:written]
