"""Sampling parameters to try, chosen after a look at a text, so that each of them must change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_certify.subjects.base import Writing

Effect = Callable[[Writing, Writing], str]


@dataclass(frozen=True)
class Knob:
    """A parameter with a value for one text.

    params: the changes. effect: (text without it, text with it) -> what is wrong, "" if the parameter had its effect.
    """

    name: str
    params: dict[str, Any]
    effect: Effect | None = None


NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "bad_words": (),
    "allowed_token_ids": None,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def filters() -> list[Knob]:
    """Parameters that shorten the list of candidates. They do nothing to a greedy text."""
    return [Knob("top_k", {"top_k": 2}), Knob("top_p", {"top_p": 0.5}), Knob("min_p", {"min_p": 0.5})]


def penalties() -> list[Knob]:
    return [
        Knob("repetition_penalty", {"repetition_penalty": 1.8}, _repeats_less),
        Knob("presence_penalty", {"presence_penalty": 2.0}, _repeats_less),
        Knob("frequency_penalty", {"frequency_penalty": 2.0}, _repeats_less),
    ]


def chosen(text: Writing) -> list[Knob]:
    """Parameters whose value depends on the text that is written without them."""
    knobs = list[Knob]()
    if len(text.tokens) >= 6:
        common = [t for t, _ in Counter(text.tokens).most_common(2)]
        late = text.tokens[2 * len(text.tokens) // 3]
        bad = [[text.tokens[3]], text.tokens[4:6]]
        knobs += [
            Knob("logit_bias", {"logit_bias": {common[0]: -100.0}}, _without_token(common[0], "logit_bias of -100")),
            Knob("bad_words", {"bad_words": bad}, _without_run(bad)),
            Knob("stop_token_ids", {"stop_token_ids": [late]}, _ends_at_token(late)),
            Knob("min_tokens", {"stop_token_ids": [common[0]], "min_tokens": 5}, _at_least(5)),
        ]
    if len(text.text) >= 9:
        middle = len(text.text) // 2
        stop = text.text[middle : middle + 3]
        if stop.strip():
            knobs.append(Knob("stop", {"stop": [stop]}, _cut_at(stop)))
    return knobs


def together(knobs: list[Knob]) -> Knob:
    """All that can be combined, at once."""
    names = ("top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "bad_words")
    params: dict[str, Any] = {}
    for knob in knobs:
        if knob.name in names:
            params |= knob.params
    return Knob("together", params | {"top_k": 6, "top_p": 0.9, "min_p": 0.02})


def _repeats_less(before: Writing, after: Writing) -> str:
    if before.tokens == after.tokens and len(set(before.tokens)) < 0.8 * len(before.tokens):
        return "the text repeats tokens as before"
    return ""


def _without_token(token: int, what: str) -> Effect:
    return lambda before, after: f"token {token} is in the text in spite of {what}" if token in after.tokens else ""


def _without_run(words: list[list[int]]) -> Effect:
    def effect(before: Writing, after: Writing) -> str:
        for word in words:
            for at in range(len(after.tokens) - len(word) + 1):
                if after.tokens[at : at + len(word)] == word:
                    return f"the bad word {word} is in the text at token {at}"
        return ""

    return effect


def _ends_at_token(token: int) -> Effect:
    def effect(before: Writing, after: Writing) -> str:
        if token in after.tokens[:-1]:
            return f"the text goes on past the stop token {token}"
        wanted = before.tokens.index(token)
        inside = after.tokens[:wanted] == before.tokens[:wanted] and len(after.tokens) in (wanted, wanted + 1)
        if not inside:
            return (
                f"the text does not end at the stop token {token}: it has {len(after.tokens)} tokens, not {wanted + 1}"
            )
        return "" if after.finish == "stop" else f"it ended at a stop token, and its finish reason is {after.finish!r}"

    return effect


def _at_least(count: int) -> Effect:
    def effect(before: Writing, after: Writing) -> str:
        if len(after.tokens) < count:
            return f"the text has {len(after.tokens)} tokens, and min_tokens was {count}"
        return ""

    return effect


def _cut_at(stop: str) -> Effect:
    def effect(before: Writing, after: Writing) -> str:
        if stop in after.text:
            return f"the stop string {stop!r} is in the text"
        wanted = before.text[: before.text.index(stop)]
        if after.text != wanted:
            return f"the text does not end before the stop string {stop!r}: {len(after.text)} characters, not {len(wanted)}"
        return "" if after.finish == "stop" else f"it ended at a stop string, and its finish reason is {after.finish!r}"

    return effect
