"""Settings measured at running servers that speak OpenAI's protocol: two servers, or one that is told not to guess."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

try:
    import httpx
except ImportError as missing:
    raise ValueError(
        f"{missing.name} is missing, with which servers are asked; pip install 'outrider[bench]'"
    ) from None

from outrider.bench.prompts import Ask
from outrider.bench.run import Sample, Setting

OFF = {"disable_spec_decode": True}  # what a request says that wants no guesses; outrider's servers obey it
_PATIENCE = 10.0  # seconds for a connection
_WISHES = (
    {"detailed_metrics": True},
    {"continuous_usage_stats": True},
)  # in the body, in stream_options: not all servers obey
_LONGEST = 1 << 24  # bytes of an event
_STEPS = 100_000  # more of them than this in an answer are nonsense


class Failed(Exception):
    """Why an answer is none."""


class Remote:
    """Servers. settings: each with its `base_url`; what their `speculative_config` holds is sent with the request, None is
    the wish for no guesses: `off`. model: None asks each server for its first. timeout: seconds for an answer."""

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
        """Raises ValueError for an address that is none, ConnectionError where no server answers."""
        self.sampling, self.timeout, self.off = sampling, timeout, OFF if off is None else off
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.clients: dict[str, httpx.Client] = {}
        self.models: dict[str, str] = {}
        self.notes: dict[str, None] = {}  # what a reader of the figures should know; each once
        self._plain_protocol: set[str] = set()  # servers that refuse our wishes
        for setting in settings:
            url = setting.base_url or ""
            if url not in self.clients:
                self.clients[url] = httpx.Client(
                    base_url=address(url),
                    headers=headers,
                    timeout=httpx.Timeout(timeout, connect=_PATIENCE),
                    transport=transport,
                    trust_env=urlsplit(address(url)).hostname not in ("localhost", "127.0.0.1", "::1"),
                )
                self.models[url] = model or self._first_model(url)

    def warm(self, setting: Setting, asks: Sequence[Ask]) -> None:
        """Also finds out whether the server takes our wishes, what it promises, and whether it obeys `off`."""
        url = setting.base_url or ""
        [first, *_] = self.answer(setting, asks, 0, 0)
        if first.error and "HTTP 4" in first.error and url not in self._plain_protocol:
            self._plain_protocol.add(url)
            [second, *_] = self.answer(setting, asks, 0, 0)
            if second.error:
                self._plain_protocol.discard(url)  # it was something else
            first = second
        if setting.speculative_config is None and sum(first.drafted or ()):
            self.notes[
                f"{url} guesses on when it is told not to ({json.dumps(self.off)}): {setting.name} is not plain decoding, and "
                "what is measured against it is not the gain of speculation; compare two servers, or give --off-body"
            ] = None

    def forget(self) -> None:
        """A server cannot be told to."""

    def answer(self, setting: Setting, asks: Sequence[Ask], repeat: int, turn: int) -> list[Sample]:
        if len(asks) == 1:
            return [self._one(setting, asks[0], repeat, turn)]
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(lambda ask: self._one(setting, ask, repeat, turn), asks))

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def _one(self, setting: Setting, ask: Ask, repeat: int, turn: int) -> Sample:
        url = setting.base_url or ""
        sample = Sample(
            prompt=ask.id,
            setting=setting.name,
            repeat=repeat,
            turn=turn,
            seconds=0,
            seed=self.sampling["seed"] + repeat,
        )
        path, body = self._request(setting, ask, repeat)
        start = perf_counter()
        try:
            with self.clients[url].stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise Failed(f"HTTP {response.status_code}: {_message(response)}")
                self._read(_events(response, start + self.timeout), sample, setting, start)
        except httpx.ReadTimeout:
            sample.error = f"nothing came for {self.timeout:g} s; --timeout allows more"
        except httpx.ConnectError as error:
            sample.error = f"no connection to {url} ({error})"
        except httpx.HTTPError as error:
            sample.error = f"the connection broke ({type(error).__name__}: {error})"
        except Failed as error:
            sample.error = str(error)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            sample.error = f"the server answers nonsense ({type(error).__name__}: {error})"
        if sample.error:
            sample.seconds = perf_counter() - start
        return sample

    def _request(self, setting: Setting, ask: Ask, repeat: int) -> tuple[str, dict[str, Any]]:
        url = setting.base_url or ""
        options: dict[str, Any] = {"include_usage": True}
        body = {**self.sampling, "seed": self.sampling["seed"] + repeat, "model": self.models[url], "stream": True}
        if url not in self._plain_protocol:
            body |= _WISHES[0]
            options |= _WISHES[1]
        body["stream_options"] = options
        if ask.max_tokens is not None:
            body["max_tokens"] = ask.max_tokens
        if ask.prediction is not None:
            body["prediction"] = {"type": "content", "content": ask.prediction}
        body |= self.off if setting.speculative_config is None else setting.speculative_config
        if isinstance(ask.prompt, str):
            return "/v1/completions", {**body, "prompt": ask.prompt}
        return "/v1/chat/completions", {**body, "messages": ask.prompt}

    def _read(self, events: Iterator[dict[str, Any]], sample: Sample, setting: Setting, start: float) -> None:
        """Fill the sample from a stream."""
        told, counted, usage = 0, 0, None
        for event in events:
            now = perf_counter() - start
            if event.get("error"):
                raise Failed(f"the server broke off: {_short(event['error'])}")
            usage = event.get("usage") or usage
            so_far = (event.get("so_far") or {}).get("tokens") or (event.get("usage") or {}).get("completion_tokens")
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
                sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
                if not text:
                    continue
                came = max(int(so_far) - told, 1) if so_far else 1
                told, counted = told + came, counted + 1
                if sample.ttft is None:
                    sample.ttft = now
                else:
                    sample.gaps.append((now - sample.seconds, came))
                sample.text, sample.seconds = sample.text + text, now
            setting.guarantee = event.get("guarantee") or setting.guarantee
            self._steps((event.get("metrics") or {}).get("speculative_decoding"), sample)
        if sample.finish_reason is None:
            raise Failed("the stream ended in the middle" if sample.text else "the stream held no text")
        if not sample.text:
            sample.seconds = perf_counter() - start
        if usage:
            lost = (usage.get("completion_tokens_details") or {}).get("rejected_prediction_tokens") or 0
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"] - lost
        else:
            sample.output_tokens = told
            self.notes[
                f"{setting.base_url} does not tell how many tokens it wrote: every event counts as one, and where it sends "
                "several at once, tokens/s are too low"
            ] = None

    def _steps(self, told: dict[str, Any] | None, sample: Sample) -> None:
        """Guesses of each step, from vLLM's `metrics.speculative_decoding`. Without the details the order of the steps is
        lost, and without the histogram by length a draft counts as long as it may be."""
        if not told:
            return
        if told.get("per_step_drafted") is not None:
            sample.drafted, sample.accepted = list(told["per_step_drafted"]), list(told["per_step_accepted"])
            return
        by_length = told.get("acceptance_histogram_by_draft_length")
        if not by_length and told.get("acceptance_histogram"):
            by_length = {told.get("num_spec_tokens") or 0: told["acceptance_histogram"]}
        pairs = [
            (int(length), accepted, int(count))
            for length, counts in (by_length or {}).items()
            for accepted, count in enumerate(counts)
        ]
        if not 0 < sum(count for *_, count in pairs) < _STEPS:
            return
        sample.drafted = [length for length, _, count in pairs for _ in range(count)]
        sample.accepted = [accepted for _, accepted, count in pairs for _ in range(count)]

    def _first_model(self, url: str) -> str:
        """The first model that a server names."""
        try:
            response = self.clients[url].get("/v1/models", timeout=_PATIENCE)
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"no server answers at {url} ({error}); start one, for example: outrider serve builtin:code"
            ) from None
        if response.status_code == 401:
            raise ConnectionError(f"{url} wants a key: OUTRIDER_API_KEY=... in the environment")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConnectionError(
                f"{url} does not name its models ({_message(response)}); say which: -m NAME"
            ) from None


def address(url: str) -> str:
    """A server's address without /v1. Raises ValueError for one that is none, and for one that holds a password."""
    parts = urlsplit(url if "//" in url else "http://" + url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address of a server; an example: http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError(
            "the address holds a name or password, which would be written into files; use OUTRIDER_API_KEY"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _events(response: httpx.Response, deadline: float) -> Iterator[dict[str, Any]]:
    """The events of a stream, to its end. Raises Failed for what is none, and past the deadline."""
    for line in _lines(response, deadline):
        if not line.startswith("data:"):
            if line and line[0] in "{<":
                raise Failed(f"this is no stream of events: {line[:100]}")
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise Failed(f"an event is not JSON: {data[:100]}") from None
        if not isinstance(event, dict):
            raise Failed(f"an event is no object: {data[:100]}")
        yield event


def _lines(response: httpx.Response, deadline: float) -> Iterator[str]:
    """The lines of a stream, as they come."""
    rest = b""
    for part in response.iter_bytes():
        if perf_counter() > deadline:
            raise Failed("the answer took longer than --timeout allows")
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST:
            raise Failed(f"this is no stream of events: {rest[:100].decode(errors='replace')}")
        yield from (line.rstrip(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _message(response: httpx.Response) -> str:
    """What an answer says is wrong, in a line."""
    text = response.read().decode(errors="replace")
    try:
        return _short(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200] or response.reason_phrase


def _short(error: Any) -> str:
    return " ".join(str(error["message"] if isinstance(error, dict) and "message" in error else error).split())[:200]
