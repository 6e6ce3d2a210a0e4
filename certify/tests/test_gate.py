"""The gate before a roll-out: two servers that agree, part at a tie, draw, change a tool call, or fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider_certify import cli
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion
from outrider_certify.gate import GateServer, ToolCall, fields_that_differ, gate, read_traffic
from outrider_certify.page import render
from outrider_certify.subjects import transport
from outrider_certify.subjects.transport import ServerClient

ASKED = {"messages": [{"role": "user", "content": "pay four"}], "temperature": 0, "max_tokens": 16}
Write = Callable[[dict[str, Any]], dict[str, Any] | httpx.Response]


def said(
    text: str = "", calls: dict[str, Any] | None = None, scores: Sequence[tuple[str, float, float]] = ()
) -> dict[str, Any]:
    """An answer. scores: token, its log-probability, and that of the other word at its place."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls is not None:
        message["tool_calls"] = [{"function": {"name": "pay", "arguments": json.dumps(calls)}}]
    top = [
        {
            "token": t,
            "logprob": p,
            "top_logprobs": [{"token": t, "logprob": p}, {"token": {"a": "b", "b": "a"}.get(t, "?"), "logprob": q}],
        }
        for t, p, q in scores
    ]
    return {
        "choices": [{"message": message, "finish_reason": "stop", "logprobs": {"content": top}}],
        "usage": {"completion_tokens": 4},
    }


def server(write: Write) -> GateServer:
    def answer(request: httpx.Request) -> httpx.Response:
        found = write(json.loads(request.content))
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    return GateServer(
        ServerClient("http://toy:1", api_key=None, timeout=5, transport=httpx.MockTransport(answer)), "toy"
    )


def gated(before: Write, after: Write, *bodies: dict[str, Any]) -> Certificate:
    return gate(server(before), server(after), bodies or [ASKED])


def part(certificate: Certificate, kind: str) -> CertificatePart:
    found = certificate.part(kind)
    assert found
    return found


def test_equal_servers_pass() -> None:
    made = gated(lambda body: said("four"), lambda body: said("four"))
    assert made.conclusion is Conclusion.EXACT_TOKENS or made.conclusion is Conclusion.HOLDS
    assert made.conclusion.exit_code == 0
    latency = part(made, "latency")
    assert "tokens a second" in latency.sentence
    assert made.sentence.startswith("1 of 1 request")  # equality, although another part decides the verdict
    page = render(made)
    assert "measured, not judged" in page
    assert "0.0 s" not in page
    assert "budget" not in page


def test_an_argument_of_a_tool_call_that_changes_is_an_error_and_is_named() -> None:
    made = gated(lambda body: said(calls={"to": "x", "amount": 4}), lambda body: said(calls={"to": "x", "amount": "4"}))
    assert made.conclusion is Conclusion.DIFFERS
    found = part(made, "tool calls")
    assert found.findings[0].evidence == 'call 1, arguments.amount: 4 before, "4" after'
    equality = part(made, "equality")
    assert "curl -s http://toy:1/v1/chat/completions" in equality.findings[0].evidence


def test_an_error_is_reduced_to_the_shortest_request() -> None:
    long = {
        **ASKED,
        "top_p": 0.5,
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "say " * 8 + "no"}],
    }
    made = gated(
        lambda body: said("no"), lambda body: said("no" if "no" not in body["messages"][-1]["content"] else "yes"), long
    )
    equality = part(made, "equality")
    shown = [line for line in equality.findings[0].evidence.splitlines() if line.startswith("curl")]
    body = json.loads(shown[0].split(" -d ", 1)[1].strip("'"))
    assert body["messages"] == [{"role": "user", "content": "no"}]
    assert "top_p" not in body


@pytest.mark.parametrize(
    ("noise", "margin", "word", "kind"),
    [
        (0.02, 0.01, "b", "tie"),
        (0.02, 0.5, "b", "error"),
        (1.0, 0.5, "b", "error"),  # numbers so far apart are no rounding
        (0.02, 0.01, "z", "error"),  # the first server does not name that token
    ],
)
def test_two_scores_that_are_nearly_equal_are_a_tie(noise: float, margin: float, word: str, kind: str) -> None:
    made = gated(
        lambda body: said("x a", {"n": 1}, scores=[("x", -1.0, -3.0), ("a", -1.0, -1.0 - margin)]),
        lambda body: said(f"x {word}", {"n": 2}, scores=[("x", -1.0 - noise, -3.0), (word, -1.0, -1.0 - margin)]),
    )
    calls = part(made, "tool calls")
    assert calls.figures["different"] == (kind == "error")  # fields behind a tie are of another text
    equality = part(made, "equality")
    assert equality.figures[kind] == 1
    assert (made.conclusion is Conclusion.DIFFERS) is (kind == "error")


def test_without_log_probabilities_a_difference_is_an_error() -> None:
    made = gated(lambda body: said("a"), lambda body: said("b"))
    assert made.conclusion is Conclusion.DIFFERS


def _dice(words: str) -> Write:
    turns = iter(range(10**6))
    return lambda body: said(words[next(turns) % len(words)] * 9)


@pytest.mark.parametrize(("after", "differs"), [("abcd", False), ("wxyz", True)])
def test_requests_that_draw_are_compared_as_samples(after: str, *, differs: bool) -> None:
    drawn = [{"prompt": f"roll {i}", "temperature": None if i % 2 else 1.0} for i in range(6)]
    made = gated(_dice("abcd"), _dice(after), *drawn)
    equality = part(made, "equality")
    assert equality.figures["error"] == 0
    assert (equality.conclusion is Conclusion.DIFFERS) is differs, equality.figures


def test_a_server_that_does_not_repeat_itself_draws() -> None:
    made = gated(_dice("abc"), _dice("xyz"))
    equality = part(made, "equality")
    assert equality.figures["sampling"] == 1


def test_a_first_server_that_fails_when_it_is_asked_again_does_not_draw() -> None:
    turns = iter(range(10**6))
    made = gated(lambda body: httpx.Response(400) if next(turns) else said("a"), lambda body: said("b"))
    assert made.conclusion is Conclusion.DIFFERS


def test_a_server_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.time, "sleep", lambda s: None)
    made = gated(lambda body: said("a"), lambda body: httpx.Response(500, text="out of memory"))
    assert made.conclusion is Conclusion.DIFFERS
    both = gated(lambda body: httpx.Response(500), lambda body: httpx.Response(500))
    assert both.conclusion is Conclusion.CANNOT_TELL
    odd = gated(lambda body: said("a"), lambda body: {"choices": []})
    equality = part(odd, "equality")
    assert "another form" in equality.findings[0].evidence


def test_fewer_well_formed_answers_are_worse() -> None:
    bodies = [
        {**ASKED, "messages": [{"role": "user", "content": str(i)}], "response_format": {"type": "json_object"}}
        for i in range(12)
    ]
    made = gated(lambda body: said('{"a": 1}'), lambda body: said('{"a": '), *bodies)
    found = part(made, "quality")
    assert found.conclusion is Conclusion.DIFFERS
    assert "JSON" in found.findings[0].title


def test_an_answer_without_a_call_has_no_good_arguments() -> None:
    asked = {**ASKED, "tools": [{"type": "function", "function": {"name": "pay"}}]}
    found = part(gated(lambda body: said("four"), lambda body: said(calls={"amount": 4}), asked), "quality")
    assert [counts["won"] for name, counts in found.figures.items() if "calls a tool" in name] == [1]


def test_more_well_formed_answers_are_not_worse_and_errors_are_no_answers() -> None:
    bodies = [{**ASKED, "seed": i, "response_format": {"type": "json_object"}} for i in range(12)]
    for before, after in (
        (lambda body: said('{"a": '), lambda body: said('{"a": 1}')),
        (lambda body: said('{"a": 1}'), lambda body: httpx.Response(400)),
    ):
        found = part(gated(before, after, *bodies), "quality")
        assert found.conclusion is not Conclusion.DIFFERS


def test_the_servers_take_turns_at_being_asked_first() -> None:
    asked = list[str]()
    gated(
        lambda body: asked.append("before") or said("a"),
        lambda body: asked.append("after") or said("a"),
        *[{**ASKED, "seed": i} for i in range(4)],
    )
    assert asked == ["before", "after", "after", "before"] * 2


def test_a_reduction_asks_few_questions_and_keeps_no_request_that_fails() -> None:
    asked = list[dict[str, Any]]()

    def before(body: dict[str, Any]) -> Any:
        asked.append(body)
        return httpx.Response(400) if len(body["messages"][-1]["content"]) < 100 else said("a")

    long = {**ASKED, "messages": [{"role": "user", "content": "word " * 200}], **{f"x{n}": n for n in range(40)}}
    equality = part(gated(before, lambda body: said("b"), long), "equality")
    assert len(asked) <= 1 + 2 + 30
    shown = [line for line in equality.findings[0].evidence.splitlines() if line.startswith("curl")]
    assert len(json.loads(shown[0].split(" -d ", 1)[1].strip("'"))["messages"][-1]["content"]) >= 100


def test_fields_are_compared_by_their_path() -> None:
    one = [ToolCall("pay", '{"who": [{"id": 1}, {"id": 2}]}')]
    assert fields_that_differ(one, [ToolCall("pay", '{"who": [{"id": 1}, {"id": 3}]}')]) == [
        "call 1, arguments.who[1].id: 2 before, 3 after"
    ]
    assert fields_that_differ(one, [ToolCall("pay", '{ "who": [{"id": 1}, {"id": 2}] }')]) == []
    assert "no JSON" in fields_that_differ(one, [ToolCall("pay", '{"who": [')])[-1]
    assert len(fields_that_differ(one, [])) == 3


def test_traffic_is_read_as_bodies_or_in_batch_format(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text(
        json.dumps({"custom_id": "1", "body": {**ASKED, "model": "m", "stream": True}}) + "\n" + json.dumps(ASKED)
    )
    assert read_traffic(file) == [ASKED, ASKED]
    file.write_text('{"text": "x"}')
    with pytest.raises(ValueError, match="messages or a prompt; a correct line is"):
        read_traffic(file)


def test_the_gate_needs_both_servers_and_requests() -> None:
    with pytest.raises(ValueError, match="--before URL --after URL --traffic"):
        cli.run(cli.CertifyOptions(before="http://127.0.0.1:1"))
