"""Servers as subjects: right ones, broken ones, and those that are busy, wrong or say little."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from broken import ToyEngine
from toy_server import PROMPTS, ToyServer, certified, subject

from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.contract import Contract
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.subject import SamplingParams, Subject, TextRequest, Unsupported
from outrider_certify.subjects.server import ServerSubject
from outrider_certify.two_sample import TwoSample

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_right_server_passes() -> None:
    toy = subject(ToyServer(ToyEngine()))
    assert toy.properties["token ids"] == "known"
    seeded = certified(Seeded(toy, length=12, rounds=1))
    assert seeded.conclusion is Conclusion.EXACT_TOKENS, seeded.sentence
    assert not seeded.skipped
    assert "as a stream" in seeded.tested["ways to speculate"]
    statistical = certified(Statistical(toy, length=32, deviation=0.35), most=4)
    assert statistical.conclusion is Conclusion.SAME_DISTRIBUTION, statistical.sentence
    contract = certified(Contract(toy, length=24))
    assert contract.conclusion is Conclusion.HOLDS, contract.sentence


@pytest.mark.parametrize(("fault", "cause"), [("greedy at any temperature", "likeliest"), ("everything accepted", "")])
def test_a_wrong_distribution_is_found_by_prompt_logprobs(fault: str, cause: str) -> None:
    part = certified(Statistical(subject(ToyServer(ToyEngine(fault, error=2.5))), length=32), most=40)
    assert part.conclusion is Conclusion.DIFFERS, part.sentence
    assert cause in part.findings[0].cause


def test_random_tokens_are_named() -> None:
    engine = ToyEngine(vocab=26)
    rng = np.random.default_rng(0)
    engine._judge = lambda drafted, *rest: (0, int(rng.integers(26)))  # type: ignore[method-assign]
    part = certified(Statistical(subject(ToyServer(engine)), length=24), most=10)
    assert part.conclusion is Conclusion.DIFFERS
    assert "random" in part.findings[0].cause


def test_a_reference_gives_the_probabilities() -> None:
    """With them the drafter is known too, and so is the mistake."""
    toy = subject(ToyServer(ToyEngine("no residual", error=2.0), logprobs=False), reference=ToyEngine(error=2.0))
    part = certified(Statistical(toy, length=32), most=30)
    assert part.conclusion is Conclusion.DIFFERS
    assert "no residual" in part.findings[0].cause


def test_wrong_tokens_of_a_server_are_found() -> None:
    part = certified(Seeded(subject(ToyServer(ToyEngine("cache off by one"))), length=16, rounds=1))
    assert part.conclusion is Conclusion.DIFFERS
    assert "errors" in part.figures


def test_without_token_ids_texts_are_compared() -> None:
    right, wrong = (subject(ToyServer(ToyEngine(f), ids=False, logprobs=False)) for f in ("", "cache off by one"))
    assert "texts are compared" in right.properties["token ids"]
    assert certified(Seeded(right, length=16, rounds=1)).conclusion is Conclusion.EXACT_TOKENS
    found = certified(Seeded(wrong, length=16, rounds=1))
    assert found.conclusion is Conclusion.DIFFERS
    assert "not known, because the noise" in found.sentence


def test_without_probabilities_two_samples_are_compared() -> None:
    def part(fault: str) -> CertificatePart:
        return certified(TwoSample(subject(ToyServer(ToyEngine(fault), logprobs=False)), length=16), most=8)

    assert part("").conclusion is Conclusion.CANNOT_TELL
    assert "no difference was seen" in part("").sentence
    assert part("greedy at any temperature").conclusion is Conclusion.DIFFERS
    short = certified(TwoSample(subject(ToyServer(ToyEngine(), logprobs=False)), length=16), most=2)
    assert "needs at least 15" in short.sentence


def test_without_logprobs_rows_are_not_known() -> None:
    toy = subject(ToyServer(ToyEngine(), logprobs=False))
    request = TextRequest(PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(Unsupported, match="--reference"):
        toy.distributions(request, toy.generate([request], toy.variants()[0])[0])


def test_bad_words_that_the_server_reads_otherwise_are_not_tested() -> None:
    toy = ToyServer(ToyEngine())
    toy.reads_otherwise = 1
    part = certified(Seeded(subject(toy), length=12, rounds=1))
    assert any("reads '" in line and "as other tokens" in line for line in part.skipped)


def test_bad_words_of_a_server_are_seen_to_hold() -> None:
    toy = ToyServer(ToyEngine())
    contract = Contract(subject(toy), length=12)
    _, check = contract.checks()["bad_words"]
    assert check() == []
    assert any("bad_words" in body for body in toy.requests)

    def lost(body: dict[str, Any]) -> httpx.Response:
        return ToyServer.completion(toy, {k: v for k, v in body.items() if k != "bad_words" or body.get("off")})

    toy.completion = lost  # type: ignore[method-assign]
    assert "is in the text" in check()[0]


CHAT = [" ".join(map(str, prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("fault", ["", "cache off by one"])
def test_the_chat_endpoint(fault: str) -> None:
    toy = ToyServer(ToyEngine(fault))
    chat = ServerSubject(
        "http://toy:8000", CHAT, transport=httpx.MockTransport(toy), off_body={"off": True}, endpoint="chat"
    )
    part = certified(Seeded(chat, length=16, rounds=1))
    assert part.conclusion is (Conclusion.DIFFERS if fault else Conclusion.EXACT_TOKENS), part.sentence
    assert all("messages" in body for body in toy.requests if "prompt_logprobs" not in body)
    if not fault:
        statistical = certified(Statistical(chat, length=32, deviation=0.35), most=4)
        assert statistical.conclusion is Conclusion.SAME_DISTRIBUTION, statistical.sentence
        contract = certified(Contract(chat, length=16))
        assert contract.conclusion is Conclusion.HOLDS, contract.sentence
        assert "stream" in contract.tested["checks"]


def test_a_server_with_the_chat_endpoint_only_says_so() -> None:
    def chat_only(request: httpx.Request) -> httpx.Response:
        return (
            httpx.Response(404, text="") if request.url.path == "/v1/completions" else ToyServer(ToyEngine())(request)
        )

    with pytest.raises(ConnectionError, match="--endpoint chat"):
        ServerSubject("http://toy:8000", PROMPTS, transport=httpx.MockTransport(chat_only))


def _one_token_lost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"choices": [{**e["choices"][0], "token_ids": e["choices"][0].get("token_ids", [])[:1]}]} for e in events]


def _text_lost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"choices": [{**e["choices"][0], "text": e["choices"][0].get("text", "")[:-1]}]} for e in events]


@pytest.mark.parametrize(
    ("spoil", "what"), [(_one_token_lost, "tokens of the stream"), (_text_lost, "text of the stream")]
)
def test_a_stream_that_loses_something_is_found(spoil: Any, what: str) -> None:
    toy = ToyServer(ToyEngine())
    toy.spoil = spoil
    made = subject(toy)
    part = certified(Contract(made, length=12))
    assert part.conclusion is Conclusion.DIFFERS
    assert [f.title for f in part.findings] == ["stream fails"]
    assert what in part.findings[0].evidence
    assert certified(Seeded(made, length=12, rounds=1)).conclusion is Conclusion.DIFFERS


def test_a_stream_without_its_end_and_one_with_an_error_break() -> None:
    for last in (["data: "], ['data: {"error": {"message": "the engine died"}}']):
        toy = ToyServer(ToyEngine())
        toy.last = last
        part = certified(Contract(subject(toy), length=12))
        assert part.findings[0].title == "the engine fails under speculation"
        assert "stream" in part.findings[0].cause


def test_a_server_without_streams_is_listed() -> None:
    toy = ToyServer(ToyEngine())
    toy.streams = False
    part = certified(Contract(subject(toy), length=12))
    assert part.conclusion is Conclusion.HOLDS
    assert not part.findings
    assert any("no streams" in line for line in part.skipped)


@pytest.mark.parametrize("after", ["", "er"])
def test_a_grammar_by_response_format(after: str) -> None:
    toy = ToyServer(ToyEngine())

    def schema(body: dict[str, Any]) -> httpx.Response | None:
        if "response_format" not in body:
            return None
        text = json.dumps(body["response_format"]["json_schema"]["schema"]["enum"][0] + after)
        return httpx.Response(200, json={"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]})

    toy.first = schema
    _, check = Contract(subject(toy), length=12).checks()["grammar"]
    assert bool(check()) is bool(after)


@pytest.mark.parametrize("after", ["", " and more"])
def test_a_grammar_is_seen_to_hold(after: str) -> None:
    toy = ToyServer(ToyEngine())
    toy.grammar = after
    made = Contract(subject(toy), length=12)
    _, check = made.checks()["grammar"]
    assert bool(check()) is bool(after)


def test_a_plain_server_that_contradicts_its_own_numbers_gives_no_ties() -> None:
    engine, plain = ToyServer(ToyEngine()), ToyServer(ToyEngine("cache off by one", rule="match"))

    def both(request: httpx.Request) -> httpx.Response:
        return plain(request) if request.url.host == "plain" else engine(request)

    toy = ServerSubject("http://toy:1", PROMPTS, plain_url="http://plain:2", transport=httpx.MockTransport(both))
    assert isinstance(toy, Subject)
    assert certified(Seeded(toy, length=16, rounds=1), most=2).conclusion is Conclusion.DIFFERS
    assert plain.requests


def test_a_stream_that_leaves_out_log_probabilities_is_found_and_its_text_is_compared() -> None:
    """llama.cpp tells token ids with log-probabilities, and streams none for accepted draft tokens."""
    toy = ToyServer(ToyEngine())

    def llama(request: httpx.Request) -> httpx.Response:
        found = toy(request)
        body = json.loads(request.content) if request.content else {}
        if "completions" not in request.url.path or body.get("stream"):
            return httpx.Response(
                found.status_code, headers=found.headers, content=found.content.replace(b'"token_ids"', b'"unknown"')
            )
        answer = found.json()
        for choice in answer["choices"]:
            ids = choice.pop("token_ids", [])
            choice["logprobs"] = (
                {"content": [{"id": t, "logprob": -1.0} for t in ids]} if body.get("logprobs") else None
            )
        return httpx.Response(200, json=answer)

    made = ServerSubject(
        "http://toy:1", PROMPTS, off_body={"off": True}, transport=httpx.MockTransport(llama), reference=ToyEngine()
    )
    assert certified(Seeded(made, length=12, rounds=1), most=3).conclusion is Conclusion.EXACT_TOKENS
    part = certified(Contract(made, length=12))
    assert "leaves out" in next(f for f in part.findings if f.title == "stream fails").evidence


def test_numbers_of_a_reference_that_plain_decoding_contradicts_tell_no_margin() -> None:
    reference = ToyEngine()
    toy = subject(ToyServer(ToyEngine()), reference=reference)
    request = TextRequest(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4))
    [text] = toy.plain([request])
    foreign = next(t for t in range(20) if t not in text.tokens)
    assert toy.margin(request, text, 2, foreign) is not None
    reference.distributions = lambda request, text: ToyEngine.distributions(
        reference, request.with_(logit_bias={foreign: 60.0}), text
    )
    assert toy.margin(request, text, 2, foreign) is None


def test_a_difference_is_reduced_to_a_line_that_repeats_it() -> None:
    part = certified(Seeded(subject(ToyServer(ToyEngine("cache off by one"))), length=16, rounds=1))
    assert "the shortest that still differs" in part.findings[0].evidence
    assert "curl -s http://toy:8000/v1/completions" in part.findings[0].evidence
