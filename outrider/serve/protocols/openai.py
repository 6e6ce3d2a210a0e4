"""OpenAI's completions and chat completions, with vLLM's fields: choices, chunks, log-probabilities, usage, metrics."""

from __future__ import annotations

import asyncio
from collections import abc
from dataclasses import asdict
from time import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider._version import __version__
from outrider.core.detokenizer import Detokenizer, TokenBytes
from outrider.core.outputs import Delta
from outrider.drafters.method import NONE, PREDICTION
from outrider.engine.request import Sequence
from outrider.serve.answer import Answer, ChoiceReader, Ending, Event, Part, Writer
from outrider.serve.errors import Refused, dumps
from outrider.serve.pool import ModelPool
from outrider.serve.requests import ChatRequest, CommonRequest, CompletionRequest
from outrider.serve.service import Service

_LEAST = -9999.0  # JSON has no minus infinity


class TokenTeller:
    """Tells the tokens of one choice: their ids, pieces and log-probabilities, in the order in which they come.

    Args:
        sequence: the text.
        body: says what is shown.
        tokens: the model's.
        place: of the text in its answer.
    """

    def __init__(self, sequence: Sequence, body: CommonRequest, tokens: TokenBytes, place: int) -> None:
        self._sequence, self._body, self._tokens = sequence, body, tokens
        self._hides = body.skip_special_tokens is not False
        self._begins = not any(tokens.shows(t, self._hides) for t in sequence.prompt)  # no text before the next token
        self._count = len(sequence.request.continued)  # tokens whose log-probabilities were shown
        self.echo, self._sent = "", False  # the prompt as the answer shows it, and whether the client sent just that
        if body.echoes:
            prompt = body.prompts[place // (body.n or 1)]
            self._sent = isinstance(prompt, str)
            self.echo = prompt if self._sent else self._decoded(sequence.prompt)

    def _decoded(self, prompt: list[int]) -> str:
        reader = Detokenizer(self._tokens, (), skip_special_tokens=False)
        text = reader.push(*prompt)  # an unfinished character is finished by the text, if there is one
        return text + (reader.flush() if self._body.limit == 0 else "")

    def of(self, delta: Delta, text: str) -> dict[str, Any]:
        """What a delta says of its tokens. text: of the chunk."""
        body = self._body
        if not delta.token_ids and not body.return_pieces:
            return {}
        fields: dict[str, Any] = {"token_ids": delta.token_ids} if body.return_token_ids else {}
        if delta.logprobs:
            fields["logprobs"] = self.logprobs(delta.token_ids, delta.logprobs)
        if body.return_pieces and delta.text == text and delta.pieces:
            fields["pieces"] = delta.pieces
        return fields

    def prompt(self) -> dict[str, Any] | None:
        """The log-probabilities of an echoed prompt, its first token without one; None if they are not shown."""
        count = self._body.alternatives
        if not self._body.echoes or count is None:
            return None
        prompt = self._sequence.prompt
        places = self._tokens.places(self.echo, prompt, skip_special_tokens=self._sent)
        return self._lists(prompt, self.prompt_logprobs(count), places, self._tokens.begins(prompt, self._sent))

    def prompt_logprobs(self, count: int) -> list[dict[int, float] | None]:
        """The log-probabilities of the prompt with `count` alternatives each. None for all of them if it was not read to its
        end."""
        prompt, logprobs = self._sequence.prompt, self._sequence.prompt_logprobs
        if len(logprobs) != len(prompt):
            return [None] * len(prompt)
        return [None if x is None else {t: x[t], **_likeliest(x, count)} for t, x in zip(prompt, logprobs, strict=True)]

    def logprobs(self, tokens: abc.Sequence[int], logprobs: abc.Sequence[dict[int, float]]) -> dict[str, Any]:
        """The log-probabilities of the next tokens of the text. logprobs: of each token and its alternatives."""
        pairs, checker, at = list(zip(tokens, logprobs, strict=False)), self._sequence.checker, self._count
        self._count += len(pairs)
        if self._body.is_chat:
            end = checker.count - 1 if checker.silent else -1
            content = [self._token(t, x[t], x, n != end) for n, (t, x) in enumerate(pairs, at)]
            return {"content": content, "refusal": None}
        begins = self._tokens.begins(tokens, self._hides, self._begins)
        self._begins = begins[len(pairs)]
        places = [len(self.echo) + (checker.marks[n - 1] if n else 0) for n in range(at, self._count)]
        return self._lists(tokens, [x for _, x in pairs], places, begins)

    def _lists(
        self,
        tokens: abc.Sequence[int],
        logprobs: abc.Sequence[dict[int, float] | None],
        places: list[int],
        begins: abc.Sequence[bool],
    ) -> dict[str, Any]:
        """Log-probabilities as text completions have them. places: where each token begins in the text of the choice. begins:
        whether the text begins with it."""
        names, chosen, top = list[str](), list[float | None](), list[dict[str, float] | None]()
        for token, values, first in zip(tokens, logprobs, begins, strict=False):
            name, shown = self._tokens.label(token, first), dict[str, float]()
            for other, value in ({token: values[token]} | values if values else {}).items():
                label = name if other == token else self._tokens.label(other)
                shown[f"token_id:{other}" if label in shown else label] = max(value, _LEAST)
            names.append(name)
            chosen.append(shown.get(name))
            top.append(shown or None)
        return {"tokens": names, "token_logprobs": chosen, "top_logprobs": top, "text_offset": places}

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


class CompletionWriter(Writer):
    """Writes a completion or a chat completion, of several choices."""

    end = b"data: [DONE]\n\n"

    def __init__(self, answer: Answer, service: Service) -> None:
        super().__init__(answer)
        body = self._body = answer.body
        kind, name = ("chat.completion.chunk", "chatcmpl-") if body.is_chat else ("text_completion", "cmpl-")
        head = {"id": name + answer.name, "object": kind, "created": int(time()), "model": service.settings.model_name}
        self._head: dict[str, Any] = head
        self._head["system_fingerprint"] = f"outrider-{__version__}"
        options = body.stream_options
        self._counts = bool(options and options.continuous_usage_stats)
        self._uses = bool(body.stream and options and options.include_usage)
        if self._uses:
            self._head["usage"] = None  # in all chunks but the last
        self._tellers = [TokenTeller(s, body, service.tokens, place) for place, s in enumerate(answer.sequences)]
        self._fingerprints = service.fingerprints if body.return_fingerprint else None
        self._late = list[int]()  # choices whose first chunk has to wait for the log-probabilities of their prompts
        for choice in answer.choices if body.stream else ():
            if not choice.continues and body.echoes and body.alternatives is not None:
                self._late.append(choice.index)
            elif not choice.continues:  # else the text before it had the first chunk
                self.begin = [*self.begin, *map(self.encoded, self._opening(choice))]

    def encoded(self, event: Event) -> bytes:
        return b"data: " + dumps(event) + b"\n\n"

    def failed(self, refused: Refused) -> list[Event]:
        return [refused.body]

    async def part(self, choice: ChoiceReader, part: Part) -> list[Event]:
        chunks = list[Event]()
        if choice.index in self._late:
            self._late.remove(choice.index)
            chunks = await asyncio.to_thread(self._opening, choice)
        fields: dict[str, Any] = {} if part.delta is None else self._tellers[choice.index].of(part.delta, part.text)
        if part.ending is not None:
            chunk = self._chunk(choice, {}, **self._ending(choice, part.ending)) | {"guarantee": self.answer.guarantee}
        elif part.call is not None:
            chunk = self._chunk(choice, {"tool_calls": [{"index": part.number, **part.call.shape}]})
        else:
            chunk = self._chunk(choice, {"content": part.text}, **fields)
        if self._counts and not choice.ended:
            chunk["so_far"] = choice.so_far
        return [*chunks, chunk]

    def totals(self) -> list[Event]:
        return [self._totals([])] if self._uses else []

    async def whole(self) -> dict[str, Any]:
        await self.answer.end()
        choices = await asyncio.to_thread(lambda: list(map(self._choice, self.answer.choices)))  # logprobs take long
        shows_ids = self._body.is_chat and self._body.return_token_ids
        ids = {"prompt_token_ids": self.answer.sequences[0].prompt} if shows_ids else {}
        return {**self._totals(choices), "object": self._head["object"].removesuffix(".chunk"), **ids}

    def _opening(self, choice: ChoiceReader) -> list[Event]:
        """The first chunk, if the choice needs one: the role, the echo, the ids of the prompt."""
        ids = {"prompt_token_ids": choice.sequence.prompt} if self._body.return_token_ids else {}
        teller = self._tellers[choice.index]
        if self._body.is_chat:
            return [{**self._chunk(choice, {"role": "assistant", "content": ""}), **ids}]
        if not teller.echo and not ids:
            return []
        return [self._chunk(choice, {"content": teller.echo}, logprobs=teller.prompt(), **ids)]

    def _chunk(self, choice: ChoiceReader, delta: dict[str, Any], **more: Any) -> Event:
        """A chunk. delta: as a chat has it; a text completion has the content alone. more: fields of the choice."""
        content: dict[str, Any] = {"delta": delta} if self._body.is_chat else {"text": delta.get("content", "")}
        fields = {"index": choice.index, **content, "logprobs": None, "finish_reason": None, **more}
        return {**self._head, "choices": [fields]}

    def _choice(self, choice: ChoiceReader) -> dict[str, Any]:
        """A choice in one piece."""
        result, body, teller = choice.sequence, self._body, self._tellers[choice.index]
        text, calls = choice.whole()
        shown = teller.logprobs(result.written, result.logprobs) if result.params.logprobs is not None else None
        if not choice.continues:  # else the prompt was shown at the beginning of the text
            text = teller.echo + text
            before = teller.prompt()
            if before is not None and shown is not None:
                shown = {name: before[name] + shown[name] for name in shown}
        fields = {"index": choice.index, "logprobs": shown, **self._ending(choice, choice.ending(bool(calls)))}
        if body.is_chat:
            fields["message"] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            fields["message"] |= {"tool_calls": [call.shape for call in calls]} if calls else {}
        else:
            fields["text"] = text
        if body.prompt_alternatives is not None and result.params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                None if x is None else {str(t): max(v, _LEAST) for t, v in x.items()}
                for x in teller.prompt_logprobs(body.prompt_alternatives)
            ]
        if body.return_token_ids:
            fields |= {"token_ids": result.written} | ({} if body.is_chat else {"prompt_token_ids": result.prompt})
        return fields

    def _ending(self, choice: ChoiceReader, ending: Ending) -> dict[str, Any]:
        """Why a choice ended."""
        result, finish = choice.sequence, choice.sequence.finish
        fields: dict[str, Any] = {"finish_reason": ending.finish, "stop_reason": ending.reason, "seed": result.seed}
        if ending.note is not None:
            fields["note"] = ending.note
        if self._fingerprints is not None and finish is not None and finish.finish in ("stop", "length"):
            fingerprint = self._fingerprints.of(result.request, result.output, finish.finish)
            fields["fingerprint"] = fingerprint.model_dump(mode="json")
        return fields

    def _totals(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer with usage and metrics."""
        counts = {"usage": usage(self.answer), "metrics": metrics(self.answer)}
        return {**self._head, "choices": choices, "guarantee": self.answer.guarantee, **counts}


def usage(answer: Answer) -> dict[str, Any]:
    """The token counts of an answer. A prompt counts once for all of its texts.

    Draft tokens do not count, with one exception: as at OpenAI, the rejected tokens of the request's own prediction do.
    """
    sequences, firsts = answer.sequences, answer.sequences[:: answer.body.n or 1]
    predicted = [s for s in sequences if s.counts.method == PREDICTION]
    accepted = sum(sum(s.counts.accepted) for s in predicted)
    rejected = sum(sum(s.counts.drafted) for s in predicted) - accepted
    prompt, completion = sum(len(s.prompt) for s in firsts), sum(len(s.output) for s in sequences) + rejected
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.counts.cached for s in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def metrics(answer: Answer) -> dict[str, Any]:
    """The times of an answer, in milliseconds under vLLM's names and in seconds under ours, and vLLM's
    `speculative_decoding`. What vLLM counts for one text only is null for several."""
    sequences, alone, timing = answer.sequences, len(answer.sequences) == 1, _timing(answer.sequences[0])
    first = [s.clock.time_to_first_token for s in sequences if s.clock.time_to_first_token is not None]
    drafts = asdict(sequences[0].counts.speculative) if alone and sequences[0].counts.method != NONE else None
    if drafts is not None and not answer.body.detailed_metrics:
        del drafts["per_step_accepted"], drafts["per_step_drafted"]
    return {
        "time_to_first_token": min(first, default=None),
        "time_in_queue": min(s.clock.queued for s in sequences),
        "e2e_latency": max(s.clock.total for s in sequences),
        "preemptions": sum(s.counts.preemptions for s in sequences),
        **(timing if alone else dict.fromkeys(timing)),
        "speculative_decoding": drafts,
    }


def _timing(sequence: Sequence) -> dict[str, float | None]:
    """vLLM's times: the first token and tokens_per_second count from the moment the request left the queue."""
    clock, count = sequence.clock, len(sequence.written)
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


def _likeliest(logprobs: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(logprobs.items(), key=lambda item: -item[1])[:count])


def install(app: FastAPI, pool: ModelPool, documented: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. documented: what is answered."""

    @app.post("/v1/completions", responses=documented)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, given as texts or token ids."""
        service = await pool.lend(body.model, request, body.timeout)
        return await service.respond(body, request, CompletionWriter)

    @app.post("/v1/chat/completions", responses=documented)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer messages. Needs a model with a chat template."""
        service = await pool.lend(body.model, request, body.timeout)
        return await service.respond(body, request, CompletionWriter)
