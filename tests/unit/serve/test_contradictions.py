"""Parameters that forbid what others leave: the text ends, and the server does not fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import PAIR, Live, builtin, serving

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
DIGITS = {"structured_outputs": {"regex": "[0-9]{3}"}}
OBJECT = {"structured_outputs": {"regex": '\\{"a": [12]\\}'}}
# parameters -> why the text ends, and what a note names
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "min_tokens, choice": (CHOICE | {"min_tokens": 40}, "stop", ""),
    "min_tokens, regex": (DIGITS | {"min_tokens": 40}, "stop", ""),
    "min_tokens, JSON": (OBJECT | {"min_tokens": 40}, "stop", ""),
    "ignore_eos, choice": (CHOICE | {"ignore_eos": True}, "stop", ""),
    "both, JSON": (OBJECT | {"ignore_eos": True, "min_tokens": 40}, "stop", ""),
    "allowed_token_ids, choice": (CHOICE | {"allowed_token_ids": [5]}, "length", "allowed_token_ids"),
    "bad_words, choice": (
        {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["y", "ye", "yes"]},
        "length",
        "bad_words",
    ),
    "bias, choice": (CHOICE | {"logit_bias": {str(n): -100 for n in range(1000)}}, "stop", ""),
    "penalties, digits": (DIGITS | {"repetition_penalty": 1e6, "frequency_penalty": 2}, "stop", ""),
    "stop in a choice": (CHOICE | {"stop": ["e", "n"]}, "stop", ""),
    "only the end token, min_tokens": ({"allowed_token_ids": [0], "min_tokens": 9}, "length", "min_tokens"),
}


@pytest.fixture(scope="module", params=[None, PAIR], ids=["plain", "drafted"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(builtin(config=request.param)) as running:
        yield running


@pytest.mark.parametrize(("case", "temperature"), [(case, n % 2) for n, case in enumerate(CASES)])
def test_what_no_token_satisfies_ends_the_text(case: str, temperature: float, live: Live) -> None:
    given, finish, noted = CASES[case]
    ends = live.service.runtime.loaded.end_ids
    if given.get("allowed_token_ids") == [0]:
        given = given | {"allowed_token_ids": list(ends)}
    body = {"prompt": "x = ", "max_tokens": 60, "temperature": temperature, "seed": 1, **given}
    whole = httpx.post(live.url + "/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == finish
    assert noted in choice.get("note", "")
    assert bool(noted) == ("note" in choice)
    lines = httpx.post(live.url + "/v1/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [c for c in chunks if "error" in c] == []
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == finish
    if finish == "stop" and "stop" not in given:
        assert re.fullmatch('yes|no|[0-9]{3}|{"a": [12]}', choice["text"])
