"""Sampling parameters to try, chosen after a look at a text, so that each of them must change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_certify.subject import GeneratedText, SamplingParams

Effect = Callable[[GeneratedText, GeneratedText], str]


def _no_effect(before: GeneratedText, after: GeneratedText) -> str:
    return ""


@dataclass(frozen=True)
class ParameterChange:
    """A parameter with a value for one text."""

    params: dict[str, Any]  # the changes
    effect: Effect = _no_effect  # (text without it, text with it) -> what is wrong, "" if the parameter had its effect


def _repeats_less(before: GeneratedText, after: GeneratedText) -> str:
    if before.tokens == after.tokens and len(set(before.tokens)) < 0.8 * len(before.tokens):
        return "the text repeats tokens as before"
    return ""


# They do nothing to a greedy text.
FILTERS = {name: ParameterChange({name: value}) for name, value in (("top_k", 2), ("top_p", 0.5), ("min_p", 0.5))}
PENALTIES = {
    name: ParameterChange({name: value}, _repeats_less)
    for name, value in (("repetition_penalty", 1.8), ("presence_penalty", 2.0), ("frequency_penalty", 2.0))
}
# The parameters of `chosen`, for a text that is long enough.
CHOSEN = ("logit_bias", "bad_words", "stop_token_ids", "min_tokens", "stop")


def chosen(text: GeneratedText) -> dict[str, ParameterChange]:
    """Parameters whose value depends on the text that is written without them."""
    changes = dict[str, ParameterChange]()
    if len(text.tokens) >= 6:
        common = Counter(text.tokens).most_common(1)[0][0]
        late = text.tokens[2 * len(text.tokens) // 3]
        bad = [[text.tokens[3]], text.tokens[4:6]]
        bias = {"logit_bias": {common: -100.0}}
        changes = {
            "logit_bias": ParameterChange(bias, _without([[common]], "logit_bias of -100")),
            "bad_words": ParameterChange({"bad_words": bad}, _without(bad, "bad_words")),
            "stop_token_ids": ParameterChange({"stop_token_ids": [late]}, _ends_at_token(late)),
            "min_tokens": ParameterChange({"stop_token_ids": [common], "min_tokens": 5}, _at_least(5)),
        }
    middle = len(text.text) // 2
    stop = text.text[middle : middle + 3]
    if len(text.text) >= 9 and stop.strip():
        changes["stop"] = ParameterChange({"stop": [stop]}, _cut_at(stop))
    return changes


def together(chosen_changes: dict[str, ParameterChange]) -> dict[str, Any]:
    """All parameters that can be combined, at once."""
    names = ("frequency_penalty", "presence_penalty", "bad_words")
    combined = {**PENALTIES, **chosen_changes}
    params = {k: v for name in names if name in combined for k, v in combined[name].params.items()}
    return params | {"top_k": 6, "top_p": 0.9, "min_p": 0.02}


def turned_off(params: SamplingParams) -> dict[str, dict[str, Any]]:
    """For each parameter that is set: the change that turns it off. Temperature is off in greedy decoding."""
    off = SamplingParams(temperature=0)
    names = (*FILTERS, *PENALTIES, *CHOSEN, "allowed_token_ids", "temperature")
    return {name: {name: getattr(off, name)} for name in names if getattr(params, name) != getattr(off, name)}


def _without(words: list[list[int]], what: str) -> Effect:
    def effect(before: GeneratedText, after: GeneratedText) -> str:
        for word in words:
            for at in range(len(after.tokens) - len(word) + 1):
                if after.tokens[at : at + len(word)] == word:
                    return f"{word} is in the text at token {at} in spite of {what}"
        return ""

    return effect


def _ends_at_token(token: int) -> Effect:
    def effect(before: GeneratedText, after: GeneratedText) -> str:
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
    def effect(before: GeneratedText, after: GeneratedText) -> str:
        if len(after.tokens) < count:
            return f"the text has {len(after.tokens)} tokens, and min_tokens was {count}"
        return ""

    return effect


def _cut_at(stop: str) -> Effect:
    def effect(before: GeneratedText, after: GeneratedText) -> str:
        if stop in after.text:
            return f"the stop string {stop!r} is in the text"
        wanted = before.text[: before.text.index(stop)]
        if after.text != wanted:
            return f"the text does not end before the stop string {stop!r}: {len(after.text)} characters, not {len(wanted)}"
        return "" if after.finish == "stop" else f"it ended at a stop string, and its finish reason is {after.finish!r}"

    return effect
