"""Servers that refuse, fail, die, hang, limit their rate, lie, or say less than was asked."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from broken import ToyEngine
from toy_server import PROMPTS, Answer, ToyServer, certified, subject

from outrider_certify.certificate import Conclusion
from outrider_certify.contract import Contract
from outrider_certify.run import certify
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.subjects.server import ServerSubject
from outrider_certify.trials import TrialJournal, run_kinds
from outrider_certify.two_sample import TwoSample

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.mark.parametrize("ends", [False, True])
def test_a_parameter_that_ends_the_engine_is_a_finding(ends: bool) -> None:
    """vLLM on a CPU ends at top_k under speculation."""
    toy = ToyServer(ToyEngine())
    made = subject(toy)

    def breaks(body: dict[str, Any]) -> httpx.Response | None:
        if body.get("top_k") == 1 and not body.get("off"):
            toy.ended = ends
            return httpx.Response(500, text="RuntimeError in apply_top_k_only")
        return None

    toy.first = breaks
    journal = TrialJournal(None, {})
    [part] = run_kinds([Contract(made, length=12)], journal, 1e9, ready=lambda: made.server.gone)
    assert part.conclusion is Conclusion.DIFFERS
    assert part.findings[0].title == "the engine fails under speculation"
    assert "top_k" in part.findings[0].cause
    assert "apply_top_k_only" in part.findings[0].evidence
    done = len(journal.of("contract"))
    if not ends:
        assert part.figures["checks"] > 10
        return
    assert done == 1
    assert any("ended" in line for line in part.skipped)
    toy.ended = False  # started again: the same command goes on behind the trial that ended it
    assert made.ready() == ""
    [part] = run_kinds([Contract(made, length=12)], journal, 1e9, ready=made.ready)
    assert part.figures["checks"] > 10
    assert part.conclusion is Conclusion.DIFFERS


def test_an_engine_that_fails_on_texts_is_a_finding_of_every_kind() -> None:
    def breaks(body: dict[str, Any]) -> httpx.Response | None:
        if body.get("frequency_penalty") and not body.get("off"):
            return httpx.Response(500, text="penalties")
        return httpx.Response(500, text="hot") if body["temperature"] > 0 and not body.get("off") else None

    toy = ToyServer(ToyEngine())
    made = subject(toy)
    toy.first = breaks
    part = certified(Seeded(made, length=12, rounds=1))
    assert part.conclusion is Conclusion.DIFFERS
    assert "frequency_penalty" in part.findings[0].cause
    for kind in (Statistical(made, length=12), TwoSample(made, length=12)):
        part = certified(kind, most=2)
        assert part.findings[0].title == "the engine fails under speculation", part.sentence


def test_a_parameter_that_speculation_alone_refuses_is_a_finding() -> None:
    toy = ToyServer(ToyEngine(), refuses=("min_p", "logit_bias"))
    toy.refuses_speculating = True
    made = subject(toy)
    part = certified(Contract(made, length=24))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
    assert part.findings[0].title == "speculation refuses what plain decoding takes"
    assert not part.findings[0].error
    assert "min_p" in part.findings[0].where
    assert "logit_bias" in part.findings[0].where
    seeded = certified(Seeded(made, length=12, rounds=1))
    assert seeded.findings[0].where == "near ties, logit_bias, together"


def test_what_plain_decoding_does_not_do_either_is_no_error_of_speculation() -> None:
    toy = ToyServer(ToyEngine())
    toy.completion = lambda body: ToyServer.completion(toy, {k: v for k, v in body.items() if k != "stop_token_ids"})  # type: ignore[method-assign]
    part = certified(Contract(subject(toy), length=12))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
    assert any("without speculation it has no effect either" in line for line in part.skipped)


def test_a_refused_parameter_is_listed_and_is_no_error() -> None:
    toy = subject(ToyServer(ToyEngine(), refuses=("min_p", "logit_bias")))
    part = certified(Contract(toy, length=24))
    assert part.conclusion is Conclusion.HOLDS, part.sentence
    assert any("min_p is not supported" in line for line in part.skipped)


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


def test_a_server_that_hangs_under_speculation_is_a_finding() -> None:
    def hangs(body: dict[str, Any]) -> httpx.Response | None:
        if body.get("frequency_penalty") and not body.get("off"):
            raise httpx.ReadTimeout("no answer")
        return None

    toy = ToyServer(ToyEngine())
    made = subject(toy)
    toy.first = hangs
    certificate = certify(made, 1e-9, ["contract"])
    assert certificate.part("contract")
    part = certified(Contract(made, length=12))
    assert part.conclusion is Conclusion.DIFFERS
    assert part.findings[0].title == "the engine fails under speculation"
    assert "it hangs: no answer within" in part.findings[0].evidence
    assert "frequency_penalty" in part.findings[0].cause


def test_a_server_that_dies_with_and_without_speculation_is_no_fault_of_speculation() -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)
    toy.first = lambda body: httpx.Response(500, text="disk full")
    for kind in (Contract(made, length=12), Statistical(made, length=12), Seeded(made, length=12, rounds=1)):
        part = certified(kind, most=2)
        assert part.conclusion is not Conclusion.DIFFERS, part.sentence
        assert "disk full" in " ".join([part.sentence, *part.skipped])


def test_a_server_that_limits_its_rate_for_ever_cannot_be_told_and_says_why() -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)
    toy.first = lambda body: httpx.Response(429, text="slow down")
    certificate = certify(made, 1e-9, ["seeded"])
    assert certificate.conclusion is Conclusion.CANNOT_TELL
    told = certificate.part("server")
    assert told
    assert "limits the rate" in told.findings[0].title
    assert not told.findings[0].error


def test_a_server_that_lies_about_token_ids_is_found() -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)
    assert Contract(made, length=12).checks()["token ids"][1]() == []
    decode = made.decode
    made.decode = lambda tokens: decode([(t + 1) % 8 for t in tokens])  # type: ignore[method-assign]
    made.encode = lambda text, *, prompt: [0]  # type: ignore[method-assign]
    part = certified(Contract(made, length=12))
    assert "token ids fails" in [f.title for f in part.findings]


@pytest.mark.parametrize(("kept", "what"), [(1, "1 log-probabilities at token 0"), (3, "")])
def test_fewer_log_probabilities_than_were_asked_for_are_found(kept: int, what: str) -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)

    def few(body: dict[str, Any]) -> httpx.Response | None:
        answer = toy.answer(body)
        for choice in answer["choices"]:
            if choice.get("logprobs"):
                tops = [{str(i): -1.0 for i in range(kept)} for _ in choice["logprobs"]["token_logprobs"]]
                choice["logprobs"]["top_logprobs"] = tops
        return httpx.Response(200, json=answer) if not (body.get("stream") or body.get("off")) else None

    toy.first = few
    part = certified(Contract(made, length=12))
    titles = [f.title for f in part.findings]
    assert ("number of logprobs fails" in titles) is bool(what)
    assert what in "".join(f.evidence for f in part.findings)


def test_log_probabilities_of_some_tokens_only_are_found() -> None:
    toy = ToyServer(ToyEngine())
    made = subject(toy)

    def half(body: dict[str, Any]) -> httpx.Response | None:
        answer = toy.answer(body)
        for choice in answer["choices"]:
            if choice.get("logprobs"):
                choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:5]
        return httpx.Response(200, json=answer) if body.get("logprobs") is not None and not body.get("stream") else None

    toy.first = half
    part = certified(Contract(made, length=12))
    assert "5 log-probabilities for 12 tokens" in "".join(f.evidence for f in part.findings)
