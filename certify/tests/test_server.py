"""Servers as subjects: right ones, broken ones, and those that are busy, wrong or say little."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from broken import LETTERS, ToyEngine

from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.contract import Contract
from outrider_certify.run import certify
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.subject import (
    GeneratedText,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    Unsupported,
)
from outrider_certify.subjects import engines, transport
from outrider_certify.subjects.server import ServerSubject
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds
from outrider_certify.two_sample import TwoSample

PROMPTS = ToyEngine().prompts()
Answer = Callable[[dict[str, Any]], httpx.Response | None]


def ids(text: str) -> list[int]:
    """The tokens of a text of letters, or of numbers."""
    return [LETTERS.index(c) for c in text] if text.isalpha() else [int(t) for t in text.split()]


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
        self.owner, self.switch = "", "off"
        self.ended, self.streams, self.refuses_speculating, self.reads_otherwise = False, True, False, 0
        self.spoil: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda events: events
        self.last = ["data: [DONE]", ""]
        self.grammar: str | None = None  # what follows a text that a grammar allows; None refuses grammars

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy", "owned_by": self.owner}]})
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(LETTERS[t] for t in body["tokens"])})
        if request.url.path == "/tokenize" and "add_special_tokens" in body:
            return httpx.Response(200, json={"tokens": [t + self.reads_otherwise for t in ids(body["prompt"])]})
        if request.url.path not in ("/v1/completions", "/v1/chat/completions"):
            return httpx.Response(404, text="not here")
        if self.ended:
            raise httpx.ConnectError("refused")
        self.requests.append(body)
        if request.url.path.startswith("/v1/chat"):
            return self.chat(body)
        return self.completion(body)

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        """The prompt is the token ids that the message names."""
        body["prompt"] = [int(t) for t in body["messages"][0]["content"].split()]
        body["logprobs"] = body.pop("top_logprobs", None)
        found = self.completion({**body, "stream": False})
        if found.status_code != 200:
            return found
        answer = found.json()
        for choice in answer["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            values = (choice.pop("logprobs", None) or {}).get("token_logprobs", [])
            choice["logprobs"] = {"content": [{"logprob": v} for v in values]}
        answer["prompt_token_ids"] = body["prompt"]
        return self.streamed(answer) if body.get("stream") else httpx.Response(200, json=answer)

    def streamed(self, answer: dict[str, Any]) -> httpx.Response:
        """Two tokens an event. The text comes with the first."""
        events = list[dict[str, Any]]()
        for choice in answer["choices"]:
            tokens, text = (
                choice.get("token_ids", []),
                choice.get("text") or choice.get("message", {}).get("content", ""),
            )
            for at in range(0, max(len(tokens), 1), 2):
                piece = {"index": choice["index"], "token_ids": tokens[at : at + 2], "finish_reason": None}
                shown = text if at == 0 else ""
                events.append(
                    {"choices": [piece | ({"delta": {"content": shown}} if "message" in choice else {"text": shown})]}
                )
            events.append(
                {"choices": [{"index": choice["index"], "text": "", "finish_reason": choice["finish_reason"]}]}
            )
        events = self.spoil(events)
        lines = [f"data: {json.dumps(e)}" for e in [*events, {"choices": [], "usage": answer["usage"]}]]
        content = "\n\n".join([": a comment", *lines, *self.last])
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)

    def completion(self, body: dict[str, Any]) -> httpx.Response:
        if self.first is not None and (found := self.first(body)) is not None:
            return found
        if self.grammar is not None and "structured_outputs" in body:
            text = body["structured_outputs"]["choice"][0] + self.grammar
            return httpx.Response(200, json={"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]})
        wrong = [name for name in (*self.refuses, "structured_outputs", "response_format") if name in body]
        if wrong and not (self.refuses_speculating and body.get("off")):
            return httpx.Response(400, json={"error": {"message": f"{wrong[0]} is not supported"}})
        answer = self.answer(body)
        if body.get("stream") and self.streams:
            return self.streamed(answer)
        return httpx.Response(200, json=answer)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        known = {"temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "n", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs"}  # fmt: skip
        params = SamplingParams(**{k: v for k, v in body.items() if k in known and v is not None})
        bias = {int(t): b for t, b in body.get("logit_bias", {}).items()}
        request = TextRequest(tuple(body["prompt"]), replace(params, logit_bias=bias or None))
        if body.get("bad_words"):
            words = [ids(word) for word in body["bad_words"]]
            request = request.with_(bad_words=words)
        texts = (
            self.engine.plain([request])
            if body.get(self.switch)
            else self.engine.generate([request], SpeculationVariant("own"))
        )
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
        drafted = sum(sum(t.drafted) for t in texts)
        usage = {"completion_tokens": len(texts[0].tokens)}
        return {"choices": choices, "usage": usage, "timings": {"draft_n": drafted}}

    def read(self, tokens: list[int], count: int) -> list[Any]:
        rows = self.engine.distributions(
            TextRequest(tuple(tokens[:2]), SamplingParams(max_tokens=1)),
            GeneratedText(tokens=tokens[2:], prompt=tokens[:2]),
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
    monkeypatch.setattr(transport.time, "sleep", lambda seconds: None)


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


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
    assert "needs at least 30" in short.sentence


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


@pytest.mark.parametrize("after", ["", " and more"])
def test_a_grammar_is_seen_to_hold(after: str) -> None:
    toy = ToyServer(ToyEngine())
    toy.grammar = after
    made = Contract(subject(toy), length=12)
    _, check = made.checks()["grammar"]
    assert bool(check()) is bool(after)


def test_a_server_without_a_switch_says_so_and_is_not_asked_for_ever() -> None:
    toy = subject(ToyServer(ToyEngine(), logprobs=False), off_body=None)
    assert certified(TwoSample(toy, length=16)).conclusion is Conclusion.CANNOT_TELL
    part = certified(Seeded(toy, length=16))
    assert part.conclusion is Conclusion.CANNOT_TELL
    assert any("add --plain-url" in line for line in part.skipped)


@pytest.mark.parametrize(("switch", "found"), [("disable_spec_decode", True), ("other", False)])
def test_an_engine_is_told_by_its_own_field_not_to_speculate_if_that_works(switch: str, *, found: bool) -> None:
    server = ToyServer(ToyEngine())
    server.owner, server.switch = "outrider", switch
    toy = subject(server, off_body=None)
    assert toy.properties["without speculation"] == ('{"disable_spec_decode": true}' if found else "not known")
    part = certified(Seeded(toy, length=16, rounds=1))
    assert part.conclusion is (Conclusion.EXACT_TOKENS if found else Conclusion.CANNOT_TELL)


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


# -- servers that die, hang, limit their rate, lie, or say less than was asked --


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


def test_a_difference_is_reduced_to_a_line_that_repeats_it() -> None:
    part = certified(Seeded(subject(ToyServer(ToyEngine("cache off by one"))), length=16, rounds=1))
    assert "the shortest that still differs" in part.findings[0].evidence
    assert "curl -s http://toy:8000/v1/completions" in part.findings[0].evidence


@pytest.mark.parametrize(
    ("owner", "name"),
    [("vllm", "vLLM"), ("sglang", "SGLang"), ("tensorrt_llm", "TensorRT-LLM"), ("organization_owner", "LM Studio")],
)
def test_an_engine_is_recognised_and_its_way_to_plain_decoding_is_told(owner: str, name: str) -> None:
    server = ToyServer(ToyEngine())
    server.owner = owner
    made = subject(server, off_body=None)
    assert made.properties["engine"] == name
    with pytest.raises(Unsupported, match=f"{name}: "):
        made.plain([TextRequest(PROMPTS[0], SamplingParams())])


def test_ollama_and_llama_cpp_are_recognised_by_their_own_routes() -> None:
    said = {"/api/version": {"version": "0.12"}, "/api/tags": {"models": []}}
    assert engines.recognised(lambda path: said.get(path, {})) is engines.OLLAMA
    assert (
        engines.recognised(lambda path: {"default_generation_settings": {}} if path == "/props" else {})
        is engines.LLAMA
    )
    assert engines.recognised(lambda path: {}) is engines.UNKNOWN


def test_fields_that_turn_speculation_on_are_sent_on_that_side_only() -> None:
    server = ToyServer(ToyEngine())
    made = subject(server, off_body=None, on_body={"draft_model": "small"})
    server.requests.clear()
    request = TextRequest(PROMPTS[0], SamplingParams(max_tokens=2))
    made.generate([request], made.variants()[0])
    made.plain([request])
    assert ["draft_model" in body for body in server.requests] == [True, False]
