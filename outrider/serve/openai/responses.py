"""The shapes that OpenAI's clients read: choices, chunks, log-probabilities, usage, metrics."""

from __future__ import annotations

from collections import abc
from dataclasses import asdict
from itertools import count
from typing import Any

from outrider.core.detokenizer import Detokenizer, TokenBytes
from outrider.core.outputs import Delta
from outrider.drafters.method import PREDICTION
from outrider.engine.fingerprint import Fingerprints
from outrider.engine.request import Sequence
from outrider.serve.openai.protocol import CommonRequest
from outrider.serve.openai.tools import ToolCall, ToolCallReader

_LEAST = -9999.0  # JSON has no minus infinity


class ChoiceWriter:
    """Writes one choice of an answer, whole or in chunks.

    is_open: it had its first chunk. A text that continues another had it there. so_far: the counts for `continuous_usage_stats`.
    """

    def __init__(
        self,
        body: CommonRequest,
        head: dict[str, Any],
        index: int,
        sequence: Sequence,
        tokens: TokenBytes,
        reader: ToolCallReader | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        """body: says what is shown. head: what each chunk begins with. tokens: the model's. reader: of tool calls, where
        tools were offered. fingerprints: what makes them, where they are shown."""
        self.sequence, self._body, self._head, self._index = sequence, body, head, index
        self._tokens, self._reader, self._fingerprints = tokens, reader, fingerprints
        self._hides, self._shows_tokens = body.skip_special_tokens is not False, body.shows_tokens
        self._begins = not any(tokens.shows(t, self._hides) for t in sequence.prompt)  # no text before the next token
        self._echo, self._sent = self._echoed(index)
        self.is_open = self._behind = bool(sequence.request.continued)
        self.so_far = {"tokens": len(sequence.request.continued), "drafted": 0, "accepted": 0}
        self._named = len(sequence.request.continued)  # tokens whose log-probabilities were shown

    def _echoed(self, index: int) -> tuple[str, bool]:
        """The prompt as the answer shows it, and whether that is what the client sent, character for character."""
        if not self._body.echoes:
            return "", False
        given = self._body.prompts[index // (self._body.n or 1)]
        if isinstance(given, str):
            return given, True
        prompt = Detokenizer(self._tokens, (), skip_special_tokens=False)
        text = prompt.push(*self.sequence.prompt)  # an unfinished character is finished by the text, if there is one
        return text + (prompt.flush() if self._body.limit == 0 else ""), False

    def open(self) -> dict[str, Any] | None:
        """The first chunk, if the choice needs one: the role, the echo, the ids of the prompt."""
        self.is_open = True
        ids = {"prompt_token_ids": self.sequence.prompt} if self._body.return_token_ids else {}
        if self._body.is_chat:
            return {**self._chunk({"role": "assistant", "content": ""}), **ids}
        if not self._echo and not ids:
            return None
        return self._chunk({"content": self._echo}, logprobs=self._prompt(), **ids)

    def count(self, delta: Delta) -> None:
        """Add a delta to `so_far`."""
        self.so_far["tokens"] += len(delta.token_ids)
        self.so_far["drafted"] += delta.drafted
        self.so_far["accepted"] += delta.accepted

    def read(self, text: str, delta: Delta | None, last: bool = False) -> list[dict[str, Any]]:
        """The chunks for more text: its content, then the tool calls that it completes. delta: what is known of its tokens."""
        reader = self._reader
        if self._behind:  # the text before is known since the sequence had its slot
            self._behind = False
            if reader is not None:
                reader.feed(self.sequence.cursor.continued_text)
        parts = reader.parts(text, last) if reader else [text] if text else []
        content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else ""
        tokens, more = self._shows_tokens and delta is not None and delta.token_ids, {}
        if delta is not None and (tokens or self._body.return_pieces):
            more = self._of_tokens(delta, content)
        if content or not parts:
            return [self._chunk({"content": content}, **more)] if content or tokens else []
        number = count(reader.called - sum(isinstance(part, ToolCall) for part in parts) if reader else 0)
        deltas = [
            {"content": p} if isinstance(p, str) else {"tool_calls": [{"index": next(number), **p.shape}]}
            for p in parts
        ]
        chunks = [self._chunk(delta) for delta in deltas]
        # The tokens come last: a client that has read them has the call, so the answer can go on from there.
        return [*chunks, self._chunk({"content": ""}, **more)] if tokens else chunks

    def close(self) -> list[dict[str, Any]]:
        """The chunks for what is still held back, then the last chunk."""
        held = self.read("", None, last=True)
        return [*held, self._chunk({}, **self._end(self._reader is not None and self._reader.called > 0))]

    def whole(self) -> dict[str, Any]:
        """The choice in one piece."""
        result, body = self.sequence, self._body
        text, calls = result.new_text, list[ToolCall]()
        if self._reader is not None:
            self._reader.feed(result.cursor.continued_text)
            text, calls = self._reader.feed(text, True)
        shown = self._logprobs(result.written, result.logprobs) if result.params.logprobs is not None else None
        if not self.is_open:  # else the prompt was shown at the beginning of the text
            text = self._echo + text
            before = self._prompt()
            if before is not None and shown is not None:
                shown = {name: before[name] + shown[name] for name in shown}
        choice: dict[str, Any] = {"index": self._index, "logprobs": shown, **self._end(bool(calls))}
        if body.is_chat:
            choice["message"] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            choice["message"] |= {"tool_calls": [call.shape for call in calls]} if calls else {}
        else:
            choice["text"] = text
        if body.prompt_alternatives is not None and result.params.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None if x is None else {str(t): max(v, _LEAST) for t, v in x.items()}
                for x in self._cut(body.prompt_alternatives)
            ]
        if body.return_token_ids:
            choice |= {"token_ids": result.written} | ({} if body.is_chat else {"prompt_token_ids": result.prompt})
        return choice

    def _chunk(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chunk. delta: as a chat has it; a text completion has the content alone. more: fields of the choice."""
        content: dict[str, Any] = {"delta": delta} if self._body.is_chat else {"text": delta.get("content", "")}
        choice = {"index": self._index, **content, "logprobs": None, "finish_reason": None, **more}
        return {**self._head, "choices": [choice]}

    def _of_tokens(self, delta: Delta, text: str) -> dict[str, Any]:
        """What a delta says of its tokens. text: of the chunk."""
        more: dict[str, Any] = {"token_ids": delta.token_ids} if self._body.return_token_ids else {}
        if delta.logprobs:
            more["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs)
        if self._body.return_pieces and delta.text == text and delta.pieces:
            more["pieces"] = delta.pieces
        return more

    def _end(self, called: bool) -> dict[str, Any]:
        """Why the choice ended. called: it has tool calls."""
        result, finish = self.sequence, self.sequence.finish
        assert finish is not None
        stopped = "tool_calls" if called else "stop"
        # OpenAI has no other name than `length` for a text that was cut off. stop_reason says by what.
        end: dict[str, Any] = {
            "finish_reason": stopped if finish.finish == "stop" else "length",
            "stop_reason": finish.reason,
            "seed": result.request.seed,
        }
        if (note := finish.note or result.counts.undrafted) is not None:
            end["note"] = note
        if self._fingerprints is not None and finish.finish in ("stop", "length"):
            made = self._fingerprints.of(result.request, result.output, finish.finish)
            end["fingerprint"] = made.model_dump(mode="json")
        return end

    def _prompt(self) -> dict[str, Any] | None:
        """The log-probabilities of an echoed prompt, its first token without one; None if they are not shown."""
        count = self._body.alternatives
        if not self._body.echoes or count is None:
            return None
        prompt = self.sequence.prompt
        places = self._tokens.places(self._echo, prompt, skip_special_tokens=self._sent)
        return self._lists(prompt, self._cut(count), places, self._tokens.begins(prompt, self._sent))

    def _cut(self, count: int) -> list[dict[int, float] | None]:
        """The log-probabilities of the prompt with `count` alternatives each. None for all of them if it was not read to its
        end."""
        prompt, known = self.sequence.prompt, self.sequence.prompt_logprobs
        if len(known) != len(prompt):
            return [None] * len(prompt)
        return [None if x is None else {t: x[t], **_likeliest(x, count)} for t, x in zip(prompt, known, strict=True)]

    def _logprobs(self, tokens: abc.Sequence[int], logprobs: abc.Sequence[dict[int, float]]) -> dict[str, Any]:
        """The log-probabilities of the next tokens of the text, as OpenAI shows them. logprobs: of each token and its
        alternatives."""
        known, checker, at = list(zip(tokens, logprobs, strict=False)), self.sequence.checker, self._named
        self._named += len(known)
        if self._body.is_chat:
            end = checker.count - 1 if checker.silent else -1
            content = [self._token(t, x[t], x, n != end) for n, (t, x) in enumerate(known, at)]
            return {"content": content, "refusal": None}
        begins = self._tokens.begins(tokens, self._hides, self._begins)
        self._begins = begins[len(known)]
        places = [len(self._echo) + (checker.marks[n - 1] if n else 0) for n in range(at, self._named)]
        return self._lists(tokens, [x for _, x in known], places, begins)

    def _lists(
        self,
        tokens: abc.Sequence[int],
        logprobs: abc.Sequence[dict[int, float] | None],
        places: list[int],
        begins: abc.Sequence[bool],
    ) -> dict[str, Any]:
        """Log-probabilities as text completions have them. places: where each token begins in the text of the choice. begins:
        whether the text begins with it."""
        names, own, top = list[str](), list[float | None](), list[dict[str, float] | None]()
        for token, known, first in zip(tokens, logprobs, begins, strict=False):
            name, found = self._tokens.label(token, first), dict[str, float]()
            for other, value in ({token: known[token]} | known if known else {}).items():
                called = name if other == token else self._tokens.label(other)
                found[f"token_id:{other}" if called in found else called] = max(value, _LEAST)
            names.append(name)
            own.append(found.get(name))
            top.append(found or None)
        return {"tokens": names, "token_logprobs": own, "top_logprobs": top, "text_offset": places}

    def _token(
        self, token: int, logprob: float, alternatives: dict[int, float] | None = None, shown: bool = True
    ) -> dict[str, Any]:
        """A token as chats show it. shown: False for one that ended the text and is no part of it."""
        shown = shown and self._tokens.shows(token, self._hides)
        out: dict[str, Any] = {
            "token": self._tokens.label(token, mark=""),
            "logprob": max(logprob, _LEAST),
            "bytes": list(self._tokens[token].data) if shown else [],
        }
        if alternatives is not None:
            best = _likeliest(alternatives, self._body.alternatives or 0)
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
    counts = asdict(result.counts.speculative)
    if not details:
        del counts["per_step_accepted"], counts["per_step_drafted"]
    return counts


def _likeliest(logprobs: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(logprobs.items(), key=lambda item: -item[1])[:count])
