"""Servers as subjects: right ones, broken ones, and those that are busy, wrong or say little."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from broken import ToyEngine

from outrider.certify.certificate import CertificatePart, Conclusion
from outrider.certify.contract import Contract
from outrider.certify.run import CertificateKind, TrialJournal, run_kinds
from outrider.certify.seeded import Seeded
from outrider.certify.statistical import Statistical
from outrider.certify.subjects import server
from outrider.certify.subjects.base import Job, Subject, Unsupported, Way, Writing
from outrider.certify.subjects.server import ServerSubject
from outrider.certify.two_sample import TwoSample
from outrider.params import SamplingParams

PROMPTS = ToyEngine().prompts()
Answer = Callable[[dict[str, Any]], httpx.Response | None]


class ToyServer:
    """OpenAI's API over a toy engine. speaks: how much it says. refuses: fields it does not take. first: may answer before it."""

    def __init__(
        self,
        engine: ToyEngine,
        *,
        ids: bool = True,
        logprobs: bool = True,
        refuses: tuple[str, ...] = (),
        first: Answer | None = None,
    ) -> None:
        self.engine, self.ids, self.logprobs, self.refuses, self.first = engine, ids, logprobs, refuses, first
        self.requests = list[dict[str, Any]]()
        self.grammar: str | None = None  # what follows a text that a grammar allows; None refuses grammars

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        if request.url.path != "/v1/completions":
            return httpx.Response(404, text="not here")
        body = json.loads(request.content)
        self.requests.append(body)
        if self.first is not None and (found := self.first(body)) is not None:
            return found
        if self.grammar is not None and "structured_outputs" in body:
            text = body["structured_outputs"]["choice"][0] + self.grammar
            return httpx.Response(200, json={"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]})
        wrong = [name for name in (*self.refuses, "structured_outputs") if name in body]
        if wrong:
            return httpx.Response(400, json={"error": {"message": f"{wrong[0]} is not supported"}})
        return httpx.Response(200, json=self.answer(body))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        known = {"temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "n", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs"}  # fmt: skip
        params = SamplingParams(**{k: v for k, v in body.items() if k in known and v is not None})
        bias = {int(t): b for t, b in body.get("logit_bias", {}).items()}
        job = Job(tuple(body["prompt"]), params.with_(logit_bias=bias or None))
        texts = self.engine.plain([job]) if body.get("off") else self.engine.write([job], Way("own"))
        choices = []
        for index, text in enumerate(texts):
            choice: dict[str, Any] = {"index": index, "text": text.text, "finish_reason": text.finish}
            if self.ids:
                choice["token_ids"] = text.tokens
            if text.logprobs is not None and self.logprobs:
                choice["logprobs"] = {"token_logprobs": [next(iter(x.values())) for x in text.logprobs]}
            if body.get("prompt_logprobs") and self.logprobs:
                choice["prompt_logprobs"] = self.read(body["prompt"], body["prompt_logprobs"])
            choices.append(choice)
        return {"choices": choices, "usage": {"completion_tokens": len(texts[0].tokens)}}

    def read(self, tokens: list[int], count: int) -> list[Any]:
        rows = self.engine.rows(
            Job(tuple(tokens[:2]), SamplingParams(max_tokens=1)), Writing(tokens=tokens[2:], prompt=tokens[:2])
        )
        out: list[Any] = [None, None]
        for row, token in zip(rows, tokens[2:], strict=True):
            kept = {*np.argsort(-row.probs)[:count].tolist(), token}
            out.append({str(t): {"logprob": float(np.log(row.probs[t]))} for t in kept})
        return out


def subject(toy: ToyServer, **options: Any) -> ServerSubject:
    options = {"off_body": {"off": True}, **options}
    return ServerSubject("http://toy:8000", PROMPTS, transport=httpx.MockTransport(toy), **options)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


def test_a_right_server_passes() -> None:
    toy = subject(ToyServer(ToyEngine()))
    assert toy.properties["token ids"] == "known"
    seeded = certified(Seeded(toy, length=12, rounds=1))
    assert seeded.conclusion is Conclusion.EXACT_TOKENS, seeded.sentence
    assert any("bad_words" in line for line in seeded.skipped)
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
    assert "needs at least 30" in short.sentence


def test_without_logprobs_rows_are_not_known() -> None:
    toy = subject(ToyServer(ToyEngine(), logprobs=False))
    job = Job(PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(Unsupported, match="--reference"):
        toy.rows(job, toy.write([job], toy.ways()[0])[0])


def test_a_refused_parameter_is_listed_and_is_no_error() -> None:
    toy = subject(ToyServer(ToyEngine(), refuses=("min_p", "logit_bias")))
    part = certified(Contract(toy, length=24))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
    assert any("min_p is not supported" in line for line in part.skipped)


@pytest.mark.parametrize("after", ["", " and more"])
def test_a_grammar_is_seen_to_hold(after: str) -> None:
    toy = ToyServer(ToyEngine())
    toy.grammar = after
    made = Contract(subject(toy), length=12)
    [check] = [c for c in made.checks() if c.name == "grammar"]
    assert bool(check.run()) is bool(after)


def test_a_server_without_a_switch_says_so() -> None:
    part = certified(Seeded(subject(ToyServer(ToyEngine()), off_body=None), length=16, rounds=1))
    assert part.conclusion is Conclusion.CANNOT_TELL
    assert any("--plain-url" in line for line in part.skipped)


def test_a_busy_server_is_asked_again() -> None:
    turns = iter(range(10**6))

    def busy(body: dict[str, Any]) -> httpx.Response | None:
        turn = next(turns)
        if turn % 3 == 0:
            return httpx.Response(429, headers={"retry-after": "1"}, text="slow down")
        return httpx.Response(503, text="loading") if turn % 3 == 1 else None

    part = certified(Seeded(subject(ToyServer(ToyEngine(), first=busy)), length=16, rounds=1), most=2)
    assert part.conclusion is Conclusion.EXACT_TOKENS


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda body: httpx.Response(200, text="<html>"), "not JSON"),
        (lambda body: httpx.Response(200, json=[1]), "not a JSON object"),
        (lambda body: httpx.Response(200, json={"choices": [3]}), "AttributeError"),
        (lambda body: httpx.Response(500, text="out of memory"), "out of memory"),
    ],
)
def test_a_server_that_is_wrong_is_reported(answer: Answer, why: str) -> None:
    with pytest.raises(ConnectionError, match=why):
        subject(ToyServer(ToyEngine(), first=answer))


def test_a_server_that_breaks_later_is_cannot_tell() -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)

    def slow(body: dict[str, Any]) -> httpx.Response:
        raise httpx.ReadTimeout("no answer")

    toy.first = slow
    part = certified(Seeded(made, length=16, rounds=1), most=2)
    assert part.conclusion is Conclusion.CANNOT_TELL
    assert "ReadTimeout" in part.sentence
    part = certified(Statistical(made, length=16), most=2)
    assert part.conclusion is Conclusion.CANNOT_TELL


def test_no_server() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ConnectionError, match="no server answers"):
        ServerSubject("http://toy:8000", PROMPTS, transport=httpx.MockTransport(refuse))


def test_a_plain_server_that_contradicts_its_own_numbers_gives_no_ties() -> None:
    engine, plain = ToyServer(ToyEngine()), ToyServer(ToyEngine("cache off by one", rule="match"))

    def both(request: httpx.Request) -> httpx.Response:
        return plain(request) if request.url.host == "plain" else engine(request)

    toy = ServerSubject("http://toy:1", PROMPTS, plain_url="http://plain:2", transport=httpx.MockTransport(both))
    assert isinstance(toy, Subject)
    assert certified(Seeded(toy, length=16, rounds=1), most=2).conclusion is Conclusion.DIFFERS
    assert plain.requests
