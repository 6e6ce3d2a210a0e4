"""The gate before a roll-out: a team's own prompts through two servers, and what differs.

A difference is a *tie* if the two best scores at the first differing token are no farther apart than the two servers are on the
tokens before it. It is *sampling* if the request draws tokens, or the first server does not repeat its own text. Every other
difference is an *error*. Of a request with n > 1, the first text is compared. The arguments of tool calls are compared field by
field. Latency stands beside it and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from outrider_certify import bounds
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion, Finding
from outrider_certify.lines import read_lines
from outrider_certify.subject import Unsupported
from outrider_certify.subjects.transport import ServerClient, curl
from outrider_certify.trials import counted
from outrider_certify.two_sample import pieces

EXAMPLE = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}'
SAMPLES = 5  # texts of each side, where a request draws tokens
_REDUCED, _QUESTIONS = 3, 30  # errors that are reduced, and questions for each
_SHOWN = 5
_LARGEST_NOISE = 0.5  # nats; more is no rounding
_WORSE = 0.01  # p-value below which a share of good answers is worse


def read_traffic(path: Path) -> list[dict[str, Any]]:
    """The bodies of the requests of a file: a JSON line each, OpenAI's or its batch format. Raises ValueError."""

    def parse(line: str) -> dict[str, Any]:
        parsed = json.loads(line)
        body = dict(parsed.get("body", parsed))
        if not ("messages" in body or "prompt" in body):
            raise ValueError("a request has messages or a prompt")
        return {k: v for k, v in body.items() if k not in ("model", "stream", "stream_options", "custom_id")}

    return read_lines(path, parse, EXAMPLE)


@dataclass(frozen=True)
class ToolCall:
    """name, and arguments as the server wrote them: a text that should be JSON."""

    name: str
    arguments: str

    @property
    def fields(self) -> dict[str, Any]:
        """The name and each argument by its path; the raw text where it is no JSON."""
        try:
            return {"name": self.name, **flat(json.loads(self.arguments or "{}"), "arguments")}
        except ValueError:
            return {"name": self.name, "arguments (no JSON)": self.arguments}


def flat(value: Any, path: str) -> dict[str, Any]:
    """Every value inside of a JSON value, by its path."""
    if isinstance(value, dict) and value:
        return {k: v for name, part in value.items() for k, v in flat(part, f"{path}.{name}").items()}
    if isinstance(value, list) and value:
        return {k: v for at, part in enumerate(value) for k, v in flat(part, f"{path}[{at}]").items()}
    return {path: value}


@dataclass
class Answer:
    """What a server answered."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None
    seconds: float = 0.0
    tokens: int = 0
    # of each token: its text, its log-probability, those of the likeliest
    scores: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    error: str = ""  # why there is no answer

    @property
    def content(self) -> tuple[Any, ...]:
        return self.text, [call.fields for call in self.calls], self.finish


class GateServer:
    """One of the two servers."""

    def __init__(self, client: ServerClient, model: str | None) -> None:
        self.client, self.model = client, model or client.first_model()

    def ask(self, body: dict[str, Any], **more: Any) -> Answer:
        start = perf_counter()
        try:
            answer = _answer(self.client.post(path_of(body), {**body, "model": self.model, **more}))
        except (Unsupported, ConnectionError) as error:
            answer = Answer(error=str(error))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            answer = Answer(error=f"the answer has another form than expected ({type(error).__name__}: {error})")
        answer.seconds = perf_counter() - start
        return answer

    def curl(self, body: dict[str, Any]) -> str:
        return curl(self.client.url + path_of(body), {**body, "model": self.model})


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _answer(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [
        ToolCall(str(c["function"]["name"]), str(c["function"].get("arguments") or ""))
        for c in message.get("tool_calls") or []
    ]
    logs, scores = choice.get("logprobs") or {}, list[tuple[str, float, dict[str, float]]]()
    for c in logs.get("content") or []:
        scores.append((c["token"], c["logprob"], {t["token"]: t["logprob"] for t in c.get("top_logprobs") or []}))
    tops = logs.get("top_logprobs") or [{}] * len(logs.get("tokens") or [])
    for token, value, top in zip(logs.get("tokens") or [], logs.get("token_logprobs") or [], tops, strict=False):
        scores.append((token, value or 0.0, top or {}))
    tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
    return Answer(str(message.get("content") or ""), calls, choice.get("finish_reason"), tokens=tokens, scores=scores)


@dataclass
class GateLine:
    """One request through both servers."""

    body: dict[str, Any]
    before: list[Answer]
    after: list[Answer]
    kind: str = "same"  # same, tie, sampling, error or failed
    why: str = ""
    fields: list[str] = field(default_factory=list)  # of tool calls that differ
    shown: list[str] = field(default_factory=list)


class Gate:
    """The comparison. confidence: of the test of requests that draw tokens."""

    def __init__(self, before: GateServer, after: GateServer, *, confidence: float = 0.99) -> None:
        self.before, self.after, self.confidence = before, after, confidence
        self._reduced = 0

    def line(self, body: dict[str, Any], turn: int = 0) -> GateLine:
        """Ask both. Who is asked first changes from line to line, so that neither has the warmer caches."""
        drawn = body.get("temperature") != 0 and body.get("seed") is None
        sides: list[tuple[GateServer, list[Answer]]] = [(self.before, []), (self.after, [])]
        for _ in range(SAMPLES if drawn else 1):
            for server, answers in sides if turn % 2 == 0 else sides[::-1]:
                answers.append(server.ask(body))
        line = GateLine(body, sides[0][1], sides[1][1])
        self._classify(line, drawn=drawn)
        if line.kind == "error" and self._reduced < _REDUCED:
            self._reduced += 1
            body = self.reduced(body)
        if line.kind in ("error", "tie"):
            line.shown = [self.before.curl(body), self.after.curl(body)]
        return line

    def _classify(self, line: GateLine, *, drawn: bool) -> None:
        one, other = line.before[0], line.after[0]
        broke = next((a.error for a in line.after if a.error), "")
        if any(a.error for a in line.before):
            line.kind, line.why = "failed", next(a.error for a in line.before if a.error)
        elif broke:
            line.kind, line.why = "error", f"it fails where the first server answers: {broke}"
        elif drawn:
            line.kind = "same" if one.content == other.content else "sampling"
        elif one.content != other.content:
            line.fields = fields_that_differ(one.calls, other.calls)
            line.kind, line.why = self._why(line.body, one, other)

    def _why(self, body: dict[str, Any], one: Answer, other: Answer) -> tuple[str, str]:
        """The kind of a difference where the same text is expected, and the reason."""
        again = self.before.ask(body)
        if not again.error and again.content != one.content:
            return "sampling", "the first server does not repeat its own text"
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if "messages" in body else {"logprobs": 5}
        a, b = self.before.ask(body, **more).scores, self.after.ask(body, **more).scores
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), None)
        if at is None or b[at][0] not in a[at][2]:
            return "error", "no log-probabilities show that it is a tie"
        noise = max((abs(x[1] - y[1]) for x, y in zip(a[:at], b[:at], strict=True)), default=0.0)
        margin = abs(a[at][1] - a[at][2][b[at][0]])
        said = f"token {at}: margin {margin:.3g}, the servers' numbers differ by {noise:.2g} before it"
        return ("tie" if margin <= 2 * noise <= 2 * _LARGEST_NOISE else "error"), said

    def reduced(self, body: dict[str, Any]) -> dict[str, Any]:
        """The smallest request that still shows a difference of the two servers."""
        left = _QUESTIONS
        while left > 0:
            for smaller in smaller_bodies(body):
                left -= 1
                one, other = self.before.ask(smaller), self.after.ask(smaller)
                if not one.error and (other.error or one.content != other.content):
                    body = smaller
                    break
                if left <= 0:
                    return body
            else:
                return body
        return body

    # -- the page ---------------------------------------------------------------------------------------------------------

    def parts(self, lines: Sequence[GateLine]) -> list[CertificatePart]:
        return [self._equality(lines), _tool_calls(lines), _quality(lines), _latency(lines)]

    def _equality(self, lines: Sequence[GateLine]) -> CertificatePart:
        kinds = {
            kind: [line for line in lines if line.kind == kind]
            for kind in ("same", "tie", "sampling", "error", "failed")
        }
        count = {kind: len(some) for kind, some in kinds.items()}
        part = CertificatePart(
            kind="equality",
            conclusion=Conclusion.EXACT_TOKENS,
            sentence=f"{count['same']} of {counted(len(lines), 'request')} have the same answer from both servers, "
            f"{count['tie']} part at a tie, {count['sampling']} are drawn anew.",
            tested={name: str(n) for name, n in count.items()},
            figures=dict(count),
        )
        pairs = [
            (i, _pieces(a), _pieces(b))
            for i, line in enumerate(lines)
            if len(line.before) > 1 and line.kind in ("same", "sampling")
            for a, b in zip(line.before, line.after, strict=True)
        ]
        if pairs:
            groups, first, second = zip(*pairs, strict=True)
            distance, p = bounds.two_sample_p_value(first, second, groups=groups)
            part.figures |= {"mmd": distance, "p_value": p}
            part.power = f"{len(pairs)} pairs of drawn answers show no difference to a kernel test (p = {p:.2g})."
            if p < 1 - self.confidence:
                part.conclusion, part.power = Conclusion.DIFFERS, ""
                part.findings.append(
                    Finding(title="drawn answers come from two distributions", evidence=f"p = {p:.2g}")
                )
        for kind, error in (("error", True), ("tie", False)):
            for line in kinds[kind][:_SHOWN]:
                part.findings.append(_finding(line, error=error))
        if count["error"]:
            part.conclusion = Conclusion.DIFFERS
            part.sentence = (
                f"Differs: {count['error']} of {counted(len(lines), 'request')} have another answer. {part.sentence}"
            )
        if count["failed"]:
            part.skipped = [
                f"{count['failed']} requests that the first server does not answer: {kinds['failed'][0].why}"
            ]
        if count["failed"] == len(lines):
            part.conclusion, part.sentence = Conclusion.CANNOT_TELL, f"Cannot tell: {part.skipped[0]}."
        return part


def smaller_bodies(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Requests that are smaller than another one, the smallest first."""
    for name in [k for k in body if k not in ("messages", "prompt", "max_tokens", "temperature")]:
        yield {k: v for k, v in body.items() if k != name}
    if len(messages := body.get("messages") or []) > 1:
        yield {**body, "messages": messages[-1:]}
        yield {**body, "messages": messages[1:]}
    limit = body.get("max_tokens") or 64
    if limit > 1:
        yield {**body, "max_tokens": limit // 2}
    if messages and isinstance(said := messages[-1].get("content"), str) and len(said) > 1:
        yield {**body, "messages": [*messages[:-1], {**messages[-1], "content": said[-(len(said) // 2) :]}]}
    if isinstance(said := body.get("prompt"), str | list) and len(said) > 1:
        yield {**body, "prompt": said[-(len(said) // 2) :]}


def fields_that_differ(before: Sequence[ToolCall], after: Sequence[ToolCall]) -> list[str]:
    """A line for each field of each tool call that is another one."""
    lines = list[str]()
    for at in range(max(len(before), len(after))):
        one = before[at].fields if at < len(before) else {}
        other = after[at].fields if at < len(after) else {}
        for name in dict.fromkeys((*one, *other)):
            a, b = (json.dumps(x[name]) if name in x else "missing" for x in (one, other))
            if a != b:
                lines.append(f"call {at + 1}, {name}: {a} before, {b} after")
    return lines


def _finding(line: GateLine, *, error: bool) -> Finding:
    one, other = line.before[0], next((a for a in line.after if a.error), line.after[0])
    at = next((i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), 0)
    evidence = [line.why, *line.fields[:8]]
    if one.text != other.text and not other.error:
        evidence += [
            f"before ... {one.text[max(at - 30, 0) : at + 60]!r}",
            f"after  ... {other.text[max(at - 30, 0) : at + 60]!r}",
        ]
    prompt = line.body.get("prompt") or line.body["messages"][-1].get("content")
    return Finding(
        title="another answer" if error else "a tie",
        where=str(prompt)[:120],
        evidence="\n".join([*evidence, *line.shown]),
        error=error,
    )


def _pieces(answer: Answer) -> list[object]:
    return pieces((), answer.text + "".join(f"{c.name}{c.arguments}" for c in answer.calls))


def _tool_calls(lines: Sequence[GateLine]) -> CertificatePart:
    some = [line for line in lines if any(a.calls for a in (*line.before, *line.after))]
    different = [line for line in some if line.fields and line.kind == "error"]
    part = CertificatePart(
        kind="tool calls",
        conclusion=Conclusion.DIFFERS if different else Conclusion.HOLDS if some else Conclusion.NOT_TESTED,
        sentence=f"{len(different)} of {counted(len(some), 'request')} with tool calls have other fields."
        if some
        else "No answer has a tool call.",
        figures={"checks": len(some), "different": len(different)},
    )
    if different:
        evidence = "\n".join(f for line in different[:_SHOWN] for f in line.fields[:4])
        part.findings = [Finding(title="arguments of tool calls differ", evidence=evidence)]
    return part


_GOOD: dict[str, tuple[Callable[[dict[str, Any]], bool], Callable[[Answer], bool]]] = {
    "ends by itself": (lambda body: True, lambda a: a.finish in ("stop", "tool_calls")),
    "is JSON, where the request asks for it": (lambda body: "response_format" in body, lambda a: _is_json(a.text)),
    "calls a tool with arguments that are JSON, where tools are given": (
        lambda body: bool(body.get("tools")) and body.get("tool_choice") != "none",
        lambda a: bool(a.calls) and all(_is_json(c.arguments or "{}") for c in a.calls),
    ),
}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _quality(lines: Sequence[GateLine]) -> CertificatePart:
    """Shares of answers that are well formed, and whether a share is worse after."""
    part = CertificatePart(kind="quality", conclusion=Conclusion.HOLDS, sentence="")
    said = list[str]()
    for name, (asked, good) in _GOOD.items():
        both = [
            (good(a), good(b)) for line in lines if asked(line.body) for a, b in zip(line.before, line.after, strict=True)
            if not (a.error or b.error)
        ]  # fmt: skip
        if not both:
            continue
        lost, won = sum(a and not b for a, b in both), sum(b and not a for a, b in both)
        p = bounds.sign_p_value(lost, won)
        share = [f"{100 * sum(side) / len(both):.0f} %" for side in zip(*both, strict=True)]
        said.append(f"{share[0]} before and {share[1]} after: {name}")
        part.figures[name] = {"answers": len(both), "lost": lost, "won": won, "p_value": p}
        if p < _WORSE and lost > won:
            part.conclusion = Conclusion.DIFFERS
            part.findings.append(
                Finding(title=f"fewer answers: {name}", evidence=f"{lost} lost, {won} won, p = {p:.2g}")
            )
    part.sentence = f"Answers, {'; '.join(said)}." if said else "No answer could be judged."
    part.conclusion = part.conclusion if said else Conclusion.NOT_TESTED
    return part


def _latency(lines: Sequence[GateLine]) -> CertificatePart:
    good = [line for line in lines if not any(a.error for a in (*line.before, *line.after))]
    part = CertificatePart(kind="latency", conclusion=Conclusion.NOT_TESTED, sentence="No answer was timed.")
    if not good:
        return part
    sides = {"before": [a for line in good for a in line.before], "after": [a for line in good for a in line.after]}
    middle = {name: median(a.seconds for a in side) for name, side in sides.items()}
    late = {name: sorted(a.seconds for a in side)[int(0.95 * (len(side) - 1))] for name, side in sides.items()}
    rate = {name: sum(a.tokens for a in side) / max(sum(a.seconds for a in side), 1e-9) for name, side in sides.items()}
    part.sentence = (
        f"An answer takes {middle['before']:.2f} s before and {middle['after']:.2f} s after (median); 95 % take less than "
        f"{late['before']:.2f} s and {late['after']:.2f} s; {rate['before']:.1f} and {rate['after']:.1f} tokens a second."
    )
    part.figures = {"median": middle, "late": late, "tokens_per_second": rate}
    return part


def gate(
    before: GateServer,
    after: GateServer,
    traffic: Sequence[dict[str, Any]],
    *,
    confidence: float = 0.99,
    progress: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """All requests through both servers, as a certificate with the parts equality, tool calls, quality and latency."""
    from outrider_certify.run import described

    comparison, lines = Gate(before, after, confidence=confidence), list[GateLine]()
    for turn, body in enumerate(traffic):
        lines.append(comparison.line(body, turn))
        progress(f"request {turn + 1} of {len(traffic)}: {lines[-1].kind}")
    certificate = described(f"{before.client.url} and then {after.client.url}")
    certificate.properties = {
        "before": f"{before.client.url}, {before.model}",
        "after": f"{after.client.url}, {after.model}",
        "requests": str(len(traffic)),
    }
    certificate.parts, certificate.complete = comparison.parts(lines), True
    certificate.confidence = confidence
    return certificate
