"""The conditions that break engines: what a request needs beside its parameters, before a mistake shows."""

from __future__ import annotations

from outrider_certify.subject import Prompt

MATES = (0, 3)  # companions in the batch, in turns
AGAIN, LOGPROBS, SEVERAL = "the same prompt again", "logprobs", "n"
NEW = "a new prompt"
LONG, NEIGHBOURS, PREEMPTION, NEAR_TIES = "long context", "neighbours in the batch", "preemption", "near ties"
CONDITIONS = {
    LOGPROBS: "texts change when log-probabilities are asked for",
    SEVERAL: "only the texts of a request with n > 1 differ: they share what each of them must have alone",
    LONG: "only texts with a long context differ: positions, a window or the cache end too early",
    NEIGHBOURS: "texts depend on the other texts in the batch",
    PREEMPTION: "texts differ where more sequences wait than there are slots: what a preempted sequence finds again is stale",
    NEAR_TIES: "numbers depend on how many rows are computed at once: texts part where two scores are nearly equal",
    AGAIN: "only the second text of a prompt differs: the prefix cache gives back something else than was computed",
}
"""The conditions that break engines, each a set of trials of its own -> the mistake, if texts differ under it alone."""
CHANGED_PROMPTS = (NEW, AGAIN, LONG)  # where a prompt is not that of the other trials


def not_asked(prompt: Prompt, number: int) -> Prompt:
    """A prompt that no other trial asks, with the same end."""
    if isinstance(prompt, str):
        return f"({number}) {prompt}"
    base, digits = max(len(prompt), 2), list[int]()
    while number or not digits:
        number, digit = divmod(number, base)
        digits.append(prompt[digit % len(prompt)])
    return (prompt[-1], *digits, *prompt)


def longer(prompt: Prompt, tokens: int) -> Prompt:
    """A prompt again and again, until it has so many tokens; a text has about four characters in a token."""
    if isinstance(prompt, str):
        return "\n".join([prompt] * max(4 * tokens // max(len(prompt), 1), 2))
    return (prompt * (tokens // max(len(prompt), 1) + 1))[:tokens]
