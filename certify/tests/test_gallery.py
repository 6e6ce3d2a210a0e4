"""The gallery: broken engines, each a real incident, found by the certificate that is meant for it, with the cause by name."""

from __future__ import annotations

import pytest
from broken import ToyEngine
from zoo import RIGHT

from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.conditions import NEIGHBOURS, not_asked
from outrider_certify.contract import Contract
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds

MOST = 60  # trials of the statistical kind: 14,000 tokens


def certified(kind: CertificateKind, most: int | None = MOST) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


# -- statistical --

DISTRIBUTION = {
    "wrong q": "likeliest draft token is taken",
    "raw q": "judged by the raw q",
    "stale q": "stale q",
    "draft temperature ignored": "the draft ignores temperature",
    "no residual": "no residual",
    "top_k on the draft only": "top_k is not applied",
    "min_p dropped": "min_p is not applied",
    "truncated q vocabulary": "truncated q",
    "low q dropped": "its own q is low",
    "penalties per step": "penalties count the tokens of a step",
    "greedy at any temperature": "as if temperature were 0",
    "everything accepted": "without regard to the target",
    "cache off by one": "another context",
    "constant positions": "another context",
    "bonus token from the draft": "bonus token",
    "q of another row above two sequences": "other texts in the batch",
}


# Strata for faults that few texts show. The others have all of them.
STRATA = {
    "draft temperature ignored": ("temperature 1", "temperature 0.7"),
    "top_k on the draft only": ("temperature 1", "top_k"),
    "min_p dropped": ("temperature 1", "min_p"),
    "penalties per step": ("temperature 1", "penalties"),
    "q of another row above two sequences": ("temperature 1", NEIGHBOURS),
}


@pytest.mark.parametrize("fault", list(DISTRIBUTION))
def test_a_wrong_distribution_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in STRATA:
        whole = Statistical.strata
        monkeypatch.setattr(Statistical, "strata", lambda self: {name: whole(self)[name] for name in STRATA[fault]})
    part = certified(Statistical(ToyEngine(fault, error=2.0), length=40))
    assert part.conclusion is Conclusion.DIFFERS, part.sentence
    assert DISTRIBUTION[fault] in part.findings[0].cause, part.findings[0]


@pytest.mark.long
def test_noise_that_is_shared_with_a_better_drafter_is_found() -> None:
    """It takes 20,880 tokens."""
    part = certified(Statistical(ToyEngine("shared noise", error=2.0), length=40), 4 * MOST)
    assert part.conclusion is Conclusion.DIFFERS, part.sentence
    assert "shared noise" in part.findings[0].cause


def test_a_block_rule_that_stops_too_early_is_found() -> None:
    part = certified(Statistical(ToyEngine("first-failure block rule", "block"), length=40))
    assert part.conclusion is Conclusion.DIFFERS
    assert "come too rarely" in part.findings[0].cause


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_right_engine_has_the_same_distribution(rule: str) -> None:
    part = certified(Statistical(ToyEngine(rule=rule), length=40, deviation=0.25), most=5)
    assert part.conclusion is Conclusion.SAME_DISTRIBUTION, part.sentence
    assert part.figures["tv_bound"] < 0.25


# -- seeded --

TOKENS = {
    "cache off by one": "cache is off after a rejection",
    "constant positions": "wrong positions",
    "penalties per step": "penalties count otherwise",
    "min_p dropped": "min_p is not applied",
    "top_k on the draft only": "top_k is not applied",
    "logit_bias dropped": "logit_bias is not applied",
    "bad words at the first token only": "bad_words is applied otherwise",
    "end token inside an accepted run": "goes on past the end",
    "stop string at the end of a step only": "goes on past the end",
    "greedy at any temperature": "temperature is not applied",
    "noise of another slot": "other texts in the batch",
    "stale logits after preemption": "preempted sequence",
    "the second text of n reads another prompt": "n > 1",
    "rows shift by one with logprobs": "log-probabilities are asked for",
    "positions end at the window": "long context",
    "one ulp between row counts": "how many rows",
    "prefix cache of another prompt": "prefix cache",
    "shared seeds": "share their random numbers",
}


@pytest.mark.parametrize("fault", list(TOKENS))
def test_wrong_tokens_are_found(fault: str) -> None:
    part = certified(Seeded(ToyEngine(fault, "match", prompts=2, seed=1), length=24, rounds=1), most=None)
    assert part.conclusion is Conclusion.DIFFERS, part.sentence
    assert TOKENS[fault] in part.findings[0].cause, part.findings[0]


@pytest.mark.parametrize(
    ("fault", "seed"), [("bad words at the first token only", 2), ("one ulp between row counts", 3)]
)
def test_a_parameter_that_some_texts_obey_is_not_called_ignored(fault: str, seed: int) -> None:
    """With a perfect drafter, the wrong texts are those of plain decoding without the parameter."""
    part = certified(Seeded(ToyEngine(fault, "match", error=0.0, seed=seed, prompts=2), length=24, rounds=1), most=None)
    assert TOKENS[fault] in part.findings[0].cause, part.findings[0]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_right_engine_has_exact_tokens(rule: str) -> None:
    part = certified(Seeded(ToyEngine(rule=rule, prompts=3), length=24, rounds=1), most=None)
    assert part.conclusion is Conclusion.EXACT_TOKENS, part.sentence
    assert not part.findings


def test_a_right_engine_is_asked_new_prompts_until_a_rare_change_is_excluded() -> None:
    engine = ToyEngine(rule="rejection", prompts=2)
    part = certified(Seeded(engine, length=8, rate=0.02), most=None)
    assert part.conclusion is Conclusion.EXACT_TOKENS
    assert bounds.smallest_rate(part.figures["texts"]) <= 0.02
    assert {
        not_asked(not_asked(prompt, 1), 1) for prompt in engine.prompts()
    } <= engine.seen  # again, in the second round


# -- contract --

BOOKS = {
    "grammar mask of the parent node": "grammar",
    "shared seeds": "n",
    "seed ignored": "seed",
    "logprobs of the wrong row": "logprobs",
    "usage past the end": "usage",
    "counters past the end": "acceptance counters",
    "min_p dropped": "min_p",
    "top_k on the draft only": "top_k",
    "logit_bias dropped": "logit_bias",
    "bad words at the first token only": "bad_words",
    "end token inside an accepted run": "end token",
    "stop string at the end of a step only": "stop",
}


@pytest.mark.parametrize("fault", list(BOOKS))
def test_a_broken_contract_is_found(fault: str) -> None:
    part = certified(Contract(ToyEngine(fault, "match")))
    assert part.conclusion is Conclusion.DIFFERS
    assert f"{BOOKS[fault]} fails" in [f.title for f in part.findings]
    assert all(f.evidence for f in part.findings)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_right_engine_keeps_the_contract(rule: str) -> None:
    part = certified(Contract(ToyEngine(rule=rule)))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
    assert part.skipped == ["number of logprobs: it does not tell how many log-probabilities come with a token"]


def test_a_right_engine_with_equal_scores_keeps_the_contract() -> None:
    """Which of two equally likely tokens is drawn is free, also where only the likeliest may be drawn."""
    part = certified(Contract(RIGHT["equal scores"](0)))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
