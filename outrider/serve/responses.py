"""From what the engine tells to what OpenAI's clients read: choices, chunks, log-probabilities, usage, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from outrider._version import __version__
from outrider.core.types import Guarantee
from outrider.engine import Result, Update
from outrider.serve.tools import Call, Reader

_LEAST = -9999.0  # JSON has no minus infinity


class Writer:
    """The shapes of one answer. chat: chat completion or text completion."""

    def __init__(
        self,
        name: str,
        created: int,
        model: str,
        chat: bool,
        guarantee: Guarantee,
        decode: Any,
        top: int,
        reader: Callable[[], Reader] | None = None,
    ) -> None:
        """decode: token ids -> text, for log-probabilities. top: alternatives to show of each token. reader: makes a reader
        of calls, where tools were offered."""
        self._top, self.reader = top, reader
        self.chat, self.guarantee, self._decode = chat, guarantee, decode
        self._head = {"id": name, "object": "", "created": created, "model": model}
        self._head["system_fingerprint"] = f"outrider-{__version__}"

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def whole(self, results: Sequence[Result], texts: Sequence[str], detailed: bool, prompts: int) -> dict[str, Any]:
        """The answer in one piece. texts: what to show, one a result. prompts: how many there were."""
        choices = []
        for index, (result, text) in enumerate(zip(results, texts, strict=True)):
            choice: dict[str, Any] = {
                "index": index,
                "logprobs": self._logprobs(result.output.logprobs, result.output.token_ids),
            }
            content, calls = self.reader().feed(text, True) if self.reader else (text, [])
            if self.chat:
                message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
                choice["message"] = {**message, "tool_calls": [c.shape for c in calls]} if calls else message
            else:
                choice["text"] = text
            choice |= self._end(result, bool(calls))
            if result.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [_told(x) for x in result.prompt_logprobs]
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "guarantee": self.guarantee.value}
        return {**body, "usage": usage(results, prompts), "metrics": metrics(results, detailed)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, index: int, text: str, update: Update | None, offset: int = 0) -> dict[str, Any]:
        """A chunk of text, with what the update says of its tokens."""
        logprobs = self._logprobs(update.logprobs, update.token_ids, offset) if update and update.logprobs else None
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk([{"index": index, **content, "logprobs": logprobs, "finish_reason": None}])

    def call(self, index: int, number: int, call: Call) -> dict[str, Any]:
        """A chunk that carries a choice's call of a tool, whole. number: of the call in its choice, from 0."""
        delta = {"tool_calls": [{"index": number, **call.shape}]}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def closing(self, index: int, result: Result, called: bool = False) -> dict[str, Any]:
        """The last chunk of a choice. called: were tools called in it?"""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        chunk = self._chunk([{"index": index, **content, "logprobs": None, **self._end(result, called)}])
        return {**chunk, "guarantee": self.guarantee.value}

    def totals(self, results: Sequence[Result], detailed: bool, prompts: int) -> dict[str, Any]:
        """The chunk after all choices that carries usage and metrics."""
        told = {"guarantee": self.guarantee.value, "metrics": metrics(results, detailed)}
        return {**self._chunk([]), "usage": usage(results, prompts), **told}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _end(self, result: Result, called: bool) -> dict[str, Any]:
        out = result.output
        finish = "tool_calls" if called and out.finish_reason == "stop" else out.finish_reason
        end = {"finish_reason": finish, "stop_reason": out.stop_reason, "seed": out.seed}
        return end if result.undrafted is None else {**end, "note": result.undrafted}

    def _logprobs(self, logprobs: Sequence[dict[int, float]] | None, tokens: Sequence[int], offset: int = 0) -> Any:
        if logprobs is None:
            return None
        if self.chat:
            return {"content": [self._token(t, x[t], x) for t, x in zip(tokens, logprobs, strict=False)]}
        texts, offsets = [self._decode([t]) for t in tokens], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [{self._decode([t]): max(v, _LEAST) for t, v in x.items()} for x in logprobs]
        own = [max(x[t], _LEAST) for t, x in zip(tokens, logprobs, strict=False)]
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def _token(self, token: int, logprob: float, alternatives: dict[int, float] | None = None) -> dict[str, Any]:
        text = self._decode([token])
        out: dict[str, Any] = {
            "token": text,
            "logprob": max(logprob, _LEAST),
            "bytes": list(text.encode("utf-8", "replace")),
        }
        if alternatives is not None:
            best = sorted(alternatives.items(), key=lambda item: -item[1])[: self._top]
            out["top_logprobs"] = [self._token(t, v) for t, v in best]
        return out


def usage(results: Sequence[Result], prompts: int) -> dict[str, Any]:
    """Each prompt counts once, however many texts continue it. Guesses are no tokens of the completion, unless they come
    from the request's own prediction: OpenAI counts the rejected ones, too."""
    each = max(1, len(results) // max(prompts, 1))
    firsts = results[::each]
    asked, written = sum(r.prompt_tokens for r in firsts), sum(len(r.output.token_ids) for r in results)
    kept = sum(r.prediction[0] for r in results if r.prediction)
    lost = sum(r.prediction[1] for r in results if r.prediction)
    return {
        "prompt_tokens": asked,
        "completion_tokens": written + lost,
        "total_tokens": asked + written + lost,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": lost,
        },
    }


def metrics(results: Sequence[Result], detailed: bool) -> dict[str, Any]:
    """Times in seconds, and vLLM's `speculative_decoding`: null without guesses, and for several texts."""
    first = [r.first for r in results if r.first is not None]
    speculative = None
    if len(results) == 1 and results[0].speculative is not None:
        speculative = asdict(results[0].speculative)
        if not detailed:
            del speculative["per_step_accepted"], speculative["per_step_drafted"]
    return {
        "time_to_first_token": min(first, default=None),
        "time_in_queue": min(r.queued for r in results),
        "e2e_latency": max(r.total for r in results),
        "preemptions": sum(r.preemptions for r in results),
        "speculative_decoding": speculative,
    }


def _told(logprobs: dict[int, float] | None) -> dict[str, float] | None:
    return None if logprobs is None else {str(t): max(v, _LEAST) for t, v in logprobs.items()}
