"""The shapes that OpenAI's clients read: choices, chunks, log-probabilities, usage, metrics."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import time
from typing import Any

from outrider._version import __version__
from outrider.core.outputs import Delta
from outrider.core.types import Guarantee
from outrider.drafters.method import PREDICTION
from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Sequence
from outrider.serve.openai.tools import ToolCall, ToolCallReader

_LEAST = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class Shown:
    """What an answer shows besides its text. logprobs, prompt_logprobs: how many alternatives, None for no
    log-probabilities. echo: the prompt before the text. token_ids: of prompt and output.
    details: counts of each step. pieces: which parts of a streamed text were draft tokens."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    details: bool = False
    pieces: bool = False

    @property
    def of_prompt(self) -> int | None:
        """How many alternatives the engine must report for each prompt token."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(asked, default=None)


@dataclass
class ResponseWriter:
    """Writes one response, whole or in chunks.

    chat: a chat completion, else a text completion. decode: token ids -> text. prompts: token ids [choice]. n: choices of each
    prompt. reader: makes a reader of tool calls, where tools were offered. fingerprints: what makes them, where they are shown.
    """

    id: str
    model: str
    chat: bool
    guarantee: Guarantee
    decode: Callable[[abc.Sequence[int]], str]
    shown: Shown
    prompts: abc.Sequence[list[int]]
    n: int = 1
    reader: Callable[[], ToolCallReader] | None = None
    fingerprints: Fingerprints | None = None
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.echoes = [self.decode(prompt) if self.shown.echo else "" for prompt in self.prompts]
        self._head = {"id": self.id, "object": "", "created": self.created, "model": self.model}
        self._head["system_fingerprint"] = f"outrider-{__version__}"

    @property
    def shows_tokens(self) -> bool:
        """A token is shown even if it adds no text."""
        return self.shown.token_ids or self.shown.logprobs is not None

    @property
    def opens_late(self) -> bool:
        """The first chunk of a choice has to wait for the log-probabilities of its prompt."""
        return self.shown.echo and self.shown.logprobs is not None

    def whole(self, results: abc.Sequence[Sequence]) -> dict[str, Any]:
        """The response in one piece."""
        choices = []
        for index, (result, echo) in enumerate(zip(results, self.echoes, strict=True)):
            if result.request.continued:
                echo = ""  # it was shown at the beginning of the text
            known, tokens = result.prompt_logprobs, result.written
            offset = len(echo) + sum(len(self.decode([t])) for t in result.request.continued)
            logprobs = result.logprobs if result.params.logprobs is not None else None
            before = None if result.request.continued else self._prompt(index, known)
            shown = self._logprobs(tokens, logprobs, offset)
            if before is not None and shown is not None:
                shown = {name: before[name] + shown[name] for name in shown}
            choice: dict[str, Any] = {"index": index, "logprobs": shown}
            text, calls = result.new_text, list[ToolCall]()
            if self.reader is not None:
                reader = self.reader()
                reader.feed(result.cursor.continued_text)
                content, calls = reader.feed(text, True)
            else:
                content = echo + text
            if self.chat:
                message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
                choice["message"] = {**message, "tool_calls": [c.shape for c in calls]} if calls else message
            else:
                choice["text"] = content
            choice |= self._end(result, bool(calls))
            if self.shown.prompt_logprobs is not None and result.params.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [
                    None if x is None else {str(t): max(v, _LEAST) for t, v in x.items()}
                    for x in self._cut(index, known, self.shown.prompt_logprobs)
                ]
            if self.shown.token_ids:
                choice["token_ids"] = tokens
                if not self.chat:
                    choice["prompt_token_ids"] = self.prompts[index]
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "guarantee": self.guarantee.value}
        if self.chat and self.shown.token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return {**body, **self._counts(results)}

    def opening(self, index: int, known: abc.Sequence[dict[int, float] | None] = ()) -> dict[str, Any] | None:
        """The first chunk of a choice, if it needs one: the role, the echo, the ids of the prompt. known: the
        log-probabilities of the prompt, if the choice `opens_late`."""
        ids = {"prompt_token_ids": self.prompts[index]} if self.shown.token_ids else {}
        choice = {"index": index, "logprobs": None, "finish_reason": None}
        if self.chat:
            return {**self._chunk([{**choice, "delta": {"role": "assistant", "content": ""}}]), **ids}
        if not self.echoes[index] and not ids:
            return None
        return self._chunk([{**choice, "text": self.echoes[index], "logprobs": self._prompt(index, known), **ids}])

    def piece(self, index: int, text: str, delta: Delta | None, offset: int = 0) -> dict[str, Any]:
        """A chunk of text, with what the delta says of its tokens."""
        tokens = delta.token_ids if delta else []
        logprobs = self._logprobs(tokens, delta.logprobs, offset) if delta and delta.logprobs else None
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        more: dict[str, Any] = {"token_ids": tokens} if self.shown.token_ids else {}
        if self.shown.pieces and delta and delta.text == text and delta.pieces:
            more["pieces"] = delta.pieces
        return self._chunk([{"index": index, **content, "logprobs": logprobs, "finish_reason": None, **more}])

    def call(self, index: int, number: int, call: ToolCall) -> dict[str, Any]:
        """A chunk with one whole tool call. number: of the call in its choice, from 0."""
        delta = {"tool_calls": [{"index": number, **call.shape}]}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def closing(self, index: int, result: Sequence, called: bool = False) -> dict[str, Any]:
        """The last chunk of a choice. called: the choice has tool calls."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        chunk = self._chunk([{"index": index, **content, "logprobs": None, **self._end(result, called)}])
        return {**chunk, "guarantee": self.guarantee.value}

    def totals(self, results: abc.Sequence[Sequence]) -> dict[str, Any]:
        """The chunk after all choices that carries usage and metrics."""
        return {**self._chunk([]), "guarantee": self.guarantee.value, **self._counts(results)}

    def _counts(self, results: abc.Sequence[Sequence]) -> dict[str, Any]:
        return {"usage": usage(results, self.n), "metrics": metrics(results, self.shown.details)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _end(self, result: Sequence, called: bool) -> dict[str, Any]:
        assert result.finish is not None
        finish = "tool_calls" if called and result.finish.finish == "stop" else result.finish.finish
        end: dict[str, Any] = {
            "finish_reason": finish,
            "stop_reason": result.finish.reason,
            "seed": result.request.seed,
        }
        if result.counts.undrafted is not None:
            end["note"] = result.counts.undrafted
        if self.fingerprints is not None and result.finish.finish in ("stop", "length"):
            made = self.fingerprints.of(result.request, result.output, result.finish.finish)
            end["fingerprint"] = made.model_dump(mode="json")
        return end

    def _prompt(self, index: int, known: abc.Sequence[dict[int, float] | None]) -> dict[str, Any] | None:
        """The log-probabilities of an echoed prompt, its first token without one; None if they are not shown."""
        count = self.shown.logprobs
        if not self.shown.echo or count is None:
            return None
        return self._logprobs(self.prompts[index], self._cut(index, known, count))

    def _cut(
        self, index: int, known: abc.Sequence[dict[int, float] | None], count: int
    ) -> list[dict[int, float] | None]:
        """The log-probabilities of a prompt with `count` alternatives each. None for all of them if the prompt was
        not read to its end."""
        prompt = self.prompts[index]
        if len(known) != len(prompt):
            return [None] * len(prompt)
        return [None if x is None else {t: x[t], **_likeliest(x, count)} for t, x in zip(prompt, known, strict=True)]

    def _logprobs(
        self, tokens: abc.Sequence[int], logprobs: abc.Sequence[dict[int, float] | None] | None, offset: int = 0
    ) -> dict[str, Any] | None:
        """Log-probabilities as OpenAI shows them. logprobs: of each token and its alternatives, None where there is
        none. offset: where the text of the tokens begins in the text of the choice."""
        if logprobs is None:
            return None
        pairs = list(zip(tokens, logprobs, strict=False))
        if self.chat:
            return {"content": [self._token(t, x[t], x) for t, x in pairs if x is not None]}
        texts, offsets = [self.decode([t]) for t, _ in pairs], list[int]()
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [None if x is None else self._by_text(x) for _, x in pairs]
        own = [None if x is None else max(x[t], _LEAST) for t, x in pairs]
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def _by_text(self, logprobs: dict[int, float]) -> dict[str, float]:
        """Alternatives by their text; of two tokens with one text, as parts of characters may have, the likelier."""
        found = dict[str, float]()
        for token, value in logprobs.items():
            text = self.decode([token])
            found[text] = max(value, found.get(text, _LEAST))
        return found

    def _token(self, token: int, logprob: float, alternatives: dict[int, float] | None = None) -> dict[str, Any]:
        text = self.decode([token])
        out: dict[str, Any] = {
            "token": text,
            "logprob": max(logprob, _LEAST),
            "bytes": list(text.encode("utf-8", "replace")),
        }
        if alternatives is not None:
            best = _likeliest(alternatives, self.shown.logprobs or 0)
            out["top_logprobs"] = [self._token(t, v) for t, v in best.items()]
        return out


def usage(results: abc.Sequence[Sequence], n: int) -> dict[str, Any]:
    """OpenAI's token counts. A prompt counts once for its `n` texts.

    Draft tokens do not count, with one exception: as at OpenAI, the rejected tokens of the request's own prediction do.
    """
    firsts = results[::n]
    asked, written = sum(len(r.prompt) for r in firsts), sum(len(r.output) for r in results)
    predicted = [r for r in results if r.counts.method == PREDICTION]
    accepted = sum(sum(r.counts.accepted) for r in predicted)
    rejected = sum(sum(r.counts.drafted) for r in predicted) - accepted
    return {
        "prompt_tokens": asked,
        "completion_tokens": written + rejected,
        "total_tokens": asked + written + rejected,
        "prompt_tokens_details": {"cached_tokens": sum(r.counts.cached for r in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def metrics(results: abc.Sequence[Sequence], details: bool) -> dict[str, Any]:
    """The times of an answer, in milliseconds under vLLM's names and in seconds under ours, and vLLM's
    `speculative_decoding`. What vLLM counts for one text only is null for several."""
    first = [r.clock.time_to_first_token for r in results if r.clock.time_to_first_token is not None]
    return {
        "time_to_first_token": min(first, default=None),
        "time_in_queue": min(r.clock.queued for r in results),
        "e2e_latency": max(r.clock.total for r in results),
        "preemptions": sum(r.counts.preemptions for r in results),
        **(_timing(results[0]) if len(results) == 1 else dict.fromkeys(_TIMING)),
        "speculative_decoding": _speculative(results[0], details) if len(results) == 1 else None,
    }


_TIMING = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def _timing(result: Sequence) -> dict[str, float | None]:
    """vLLM's times: the first token and tokens_per_second count from the moment the request left the queue."""
    clock, count = result.clock, len(result.written)
    queue, end = 1000 * clock.queued, 1000 * clock.total
    first = None if clock.time_to_first_token is None else 1000 * clock.time_to_first_token
    decode = None if first is None else end - first
    return {
        "time_to_first_token_ms": None if first is None else first - queue,
        "generation_time_ms": decode,
        "queue_time_ms": queue,
        "mean_itl_ms": decode / (count - 1) if decode is not None and count > 1 else None,
        "tokens_per_second": 1000 * count / (end - queue) if count and end > queue else None,
    }


def _speculative(result: Sequence, details: bool) -> dict[str, Any] | None:
    if result.counts.method == "none":
        return None
    counts = asdict(result.counts.speculative())
    if not details:
        del counts["per_step_accepted"], counts["per_step_drafted"]
    return counts


def _likeliest(logprobs: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(logprobs.items(), key=lambda item: -item[1])[:count])
