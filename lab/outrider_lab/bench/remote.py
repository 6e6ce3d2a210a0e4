"""Backend of running servers with OpenAI's API: two servers, or one server with speculation on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from outrider.core.extras import needs
from outrider_lab.bench.events import StreamError, address, error_message, error_text, events
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.run import Arrivals, Sample, Setting

with needs("lab", "a measurement of servers"):
    import httpx

# Fields of a request without draft tokens. outrider's servers understand them.
OFF = {"disable_spec_decode": True}
# Seconds to connect.
_CONNECT = 10.0
# Additional fields of the body and of stream_options. Some servers reject them.
_BODY_EXTRA = {"detailed_metrics": True}
_STREAM_EXTRA = {"continuous_usage_stats": True}


class RequestFailed(Exception):
    """A request got no valid answer. The message says why."""


class Remote:
    """Running servers."""

    def __init__(
        self,
        settings: Sequence[Setting],
        model: str | None,
        sampling: dict[str, Any],
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        off: dict[str, Any] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Find the server and the model of each setting.

        Args:
            settings: Each with its `base_url`. The fields of `speculative_config` are added to each request.
            model: The name on the servers. None takes the first model of each.
            timeout: Seconds for an answer.
            off: Fields of requests without speculation, those whose `speculative_config` is None.

        Raises ValueError for a wrong address, and ConnectionError if a server does not answer.
        """
        self.sampling, self.timeout, self.off = sampling, timeout, OFF if off is None else off
        self.clients: dict[str, httpx.Client] = {}
        self.models: dict[str, str] = {}
        # Warnings for the user, in order, each once.
        self.notes: dict[str, None] = {}
        # Servers that reject the additional fields.
        self._no_extras: set[str] = set()
        for setting in settings:
            url = setting.base_url or ""
            if url not in self.clients:
                base = address(url)
                self.clients[url] = httpx.Client(
                    base_url=base,
                    headers={"authorization": f"Bearer {api_key}"} if api_key else {},
                    timeout=httpx.Timeout(timeout, connect=_CONNECT),
                    transport=transport,
                    trust_env=urlsplit(base).hostname not in ("localhost", "127.0.0.1", "::1"),
                )
                self.models[url] = model or _first_model(self.clients[url], url)

    def warm(self, setting: Setting, prompts: Sequence[Prompt]) -> None:
        """Also finds out if the server accepts the additional fields, and if `off` works."""
        url = setting.base_url or ""
        [first, *_] = self.answer(setting, prompts, 0, 0)
        if first.error and "HTTP 4" in first.error and url not in self._no_extras:
            self._no_extras.add(url)
            [second, *_] = self.answer(setting, prompts, 0, 0)
            if second.error:
                self._no_extras.discard(url)  # the error has another cause
            first = second
        if setting.speculative_config is None and sum(first.drafted or ()):
            self.notes[
                f"{url} still drafts tokens with {json.dumps(self.off)}, so {setting.name} is not plain decoding and the "
                "ratios are not the gain of speculation; compare two servers, or give --off-body"
            ] = None

    def reset(self) -> None:
        """Does nothing: a server cannot be made to forget."""

    def answer(self, setting: Setting, prompts: Sequence[Prompt], repeat: int, turn: int) -> list[Sample]:
        if len(prompts) == 1:
            return [self._one(setting, prompts[0], repeat, turn)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._one(setting, prompt, repeat, turn), prompts))

    def _one(self, setting: Setting, prompt: Prompt, repeat: int, turn: int) -> Sample:
        url = setting.base_url or ""
        about = {"prompt": prompt.id, "setting": setting.name, "repeat": repeat, "turn": turn}
        path, body = self._request(setting, prompt, repeat)
        start = perf_counter()
        try:
            with self.clients[url].stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise RequestFailed(f"HTTP {response.status_code}: {_message(response)}")
                parts = events(_timed(response.iter_bytes(), start + self.timeout))
                return Sample(**about, seed=body["seed"], **self._read(parts, setting, start))
        except httpx.ReadTimeout:
            failed = f"no data for {self.timeout:g} s; --timeout allows more"
        except httpx.ConnectError as error:
            failed = f"no connection to {url} ({error})"
        except httpx.HTTPError as error:
            failed = f"the connection broke ({type(error).__name__}: {error})"
        except (RequestFailed, StreamError) as error:
            failed = str(error)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            failed = f"the server's answer is not valid ({type(error).__name__}: {error})"
        return Sample(**about, seed=body["seed"], seconds=perf_counter() - start, error=failed)

    def _request(self, setting: Setting, prompt: Prompt, repeat: int) -> tuple[str, dict[str, Any]]:
        url = setting.base_url or ""
        options: dict[str, Any] = {"include_usage": True}
        body = {**self.sampling, "seed": self.sampling["seed"] + repeat, "model": self.models[url], "stream": True}
        if url not in self._no_extras:
            body |= _BODY_EXTRA
            options |= _STREAM_EXTRA
        body["stream_options"] = options
        if prompt.max_tokens is not None:
            body["max_tokens"] = prompt.max_tokens
        if prompt.prediction is not None:
            body["prediction"] = {"type": "content", "content": prompt.prediction}
        body |= self.off if setting.speculative_config is None else setting.speculative_config
        if isinstance(prompt.content, str):
            return "/v1/completions", {**body, "prompt": prompt.content}
        return "/v1/chat/completions", {**body, "messages": prompt.content}

    def _read(self, events: Iterator[dict[str, Any]], setting: Setting, start: float) -> dict[str, Any]:
        """Fields of a sample, from a stream."""
        received, usage, came, fields = 0, None, Arrivals(), dict[str, Any]()
        written, finish = "", None
        for event in events:
            now = perf_counter() - start
            if event.get("error"):
                raise RequestFailed(f"the server stopped: {_line(error_text(event['error']))}")
            usage = event.get("usage") or usage
            so_far = (event.get("so_far") or {}).get("tokens") or (event.get("usage") or {}).get("completion_tokens")
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
                finish = choice.get("finish_reason") or finish
                if not text:
                    continue
                tokens = max(int(so_far) - received, 1) if so_far else 1
                received, written = received + tokens, written + text
                came.add(now, tokens)
            setting.guarantee = event.get("guarantee") or setting.guarantee
            steps = (event.get("metrics") or {}).get("speculative_decoding") or {}
            if steps.get("per_step_drafted") is not None:
                fields |= {"drafted": list(steps["per_step_drafted"]), "accepted": list(steps["per_step_accepted"])}
        if finish is None:
            raise RequestFailed("the stream ended before the answer did" if written else "the stream had no text")
        if usage:
            lost = (usage.get("completion_tokens_details") or {}).get("rejected_prediction_tokens") or 0
            fields |= {"prompt_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"] - lost}
        else:
            fields["output_tokens"] = received
            self.notes[
                f"{setting.base_url} does not report the number of tokens. Each event counts as one token, so tokens/s are too "
                "low if it sends several at once"
            ] = None
        seconds = {} if written else {"seconds": perf_counter() - start}
        return {**vars(came), **seconds, **fields, "text": written, "finish_reason": finish}


def _first_model(client: httpx.Client, url: str) -> str:
    """The first model in a server's list. Raises ConnectionError without one."""
    try:
        response = client.get("/v1/models", timeout=_CONNECT)
    except httpx.HTTPError as error:
        raise ConnectionError(
            f"no server answers at {url} ({error}); start one, for example: outrider serve builtin:code"
        ) from None
    if response.status_code == 401:
        raise ConnectionError(f"{url} needs a key: set OUTRIDER_API_KEY in the environment")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConnectionError(f"{url} does not list its models ({_message(response)}); name one: -m NAME") from None


def _timed(parts: Iterator[bytes], deadline: float) -> Iterator[bytes]:
    """The parts of a response. Raises RequestFailed after the deadline, a `perf_counter` time."""
    for part in parts:
        if perf_counter() > deadline:
            raise RequestFailed("the answer took longer than --timeout allows")
        yield part


def _message(response: httpx.Response) -> str:
    """The error message of a response, in one line."""
    body = response.read()
    return _line(error_message(body) or body.decode(errors="replace")) or response.reason_phrase


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
