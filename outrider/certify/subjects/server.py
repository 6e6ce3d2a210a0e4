"""A running server with OpenAI's API as a subject: one that can be told not to speculate, or a second one that does not.

The target's probabilities come from the server's own `prompt_logprobs`, or from a model here with the same weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

try:
    import httpx
except ImportError as missing:
    raise ValueError(
        f"{missing.name} is not installed, and certifying a server needs it: pip install 'outrider[certify]'"
    ) from None

from outrider.bench.remote import address
from outrider.certify.subjects.base import Job, Prompt, Row, Subject, Unsupported, Way, Writing
from outrider.core.types import Guarantee

LOAD = 4  # requests at a time, in the way "under load"
_KNOWN = 20  # likeliest tokens of each position that are asked for
_TRIES, _PAUSE = 4, 0.5  # for a server that is busy or breaks off; seconds, doubled each time
_LONGEST_PAUSE = 20.0
_LARGEST_NOISE = 0.5  # nats; more is no rounding, but another distribution
_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "seed",
    "n",
    "logprobs",
)
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "min_tokens": 0, "n": 1, "logprobs": None, "seed": None, "ignore_eos": False}  # fmt: skip


class _Refused(Unsupported):
    """HTTP 4xx: the server does not take the request."""


class ServerSubject(Subject):
    """url: the server that speculates. plain_url: one that does not. off_body: fields that turn speculation off at `url`.

    reference: a subject with the same weights, which gives the target's probabilities. body: fields of every request.
    Raises ConnectionError if no server answers, ValueError for a wrong address.
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[Prompt],
        *,
        plain_url: str | None = None,
        off_body: dict[str, Any] | None = None,
        reference: Subject | None = None,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

        def client(where: str) -> httpx.Client:
            return httpx.Client(
                base_url=address(where),
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=10),
                transport=transport,
            )

        self.url, self.reference = url, reference
        self.server = client(url)
        self.without = client(plain_url) if plain_url else self.server if off_body is not None else None
        self.off = {} if plain_url else off_body or {}
        self.model = model or self._first_model(self.server)
        self.plain_model = model or (self._first_model(self.without) if plain_url and self.without else self.model)
        self.name = f"the server at {address(url)}, {self.model}"
        self.properties = {
            "server": address(url),
            "model": self.model,
            "without speculation": plain_url or (json.dumps(off_body) if off_body is not None else "not known"),
        }
        self.versions = self._versions()
        self.weights = reference.weights if reference else {}
        self.partial_rows = reference is None
        self._noise: float | None = None
        self._prompts: list[Prompt] = [self._ids(p) for p in prompts]
        self._probe()

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def ways(self) -> Sequence[Way]:
        return [
            Way("one request at a time"),
            Way("under load", {"load": LOAD}),
            Way("again, under load", {"load": LOAD}),
        ]

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _first_model(self, client: httpx.Client) -> str:
        try:
            return str(client.get("/v1/models").json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"no server answers at {client.base_url} ({type(error).__name__}); start it first"
            ) from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConnectionError(
                f"{client.base_url} does not list its models; name one: --served-model NAME"
            ) from None

    def _versions(self) -> dict[str, str]:
        try:
            found = self.server.get("/version").json()
            return {"server": str(found.get("version", found))[:80]}
        except (httpx.HTTPError, ValueError, AttributeError):
            return {}

    def _post(self, client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. A server that is busy or breaks off is asked again. Raises _Refused, or ConnectionError at the end."""
        pause, why = _PAUSE, ""
        for attempt in range(_TRIES):
            try:
                answer = client.post(path, json=body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    try:
                        found = answer.json()
                    except ValueError:
                        raise ConnectionError("the server's answer is not JSON") from None
                    if isinstance(found, dict):
                        return found
                    raise ConnectionError("the server's answer is not a JSON object")
                why = f"HTTP {answer.status_code}: {' '.join(answer.text.split())[:200]}"
                if answer.status_code != 429 and answer.status_code < 500:
                    raise _Refused(f"the server refuses it ({why})")
                wanted = answer.headers.get("retry-after", "")
                pause = max(pause, float(wanted)) if wanted.replace(".", "", 1).isdigit() else pause
            if attempt < _TRIES - 1:
                time.sleep(min(pause, _LONGEST_PAUSE))
                pause *= 2
        raise ConnectionError(why)

    def _ids(self, prompt: Prompt) -> Prompt:
        """The prompt as token ids, if the server or the reference can tell them."""
        if not isinstance(prompt, str):
            return prompt
        try:
            body = {"model": self.model, "prompt": prompt, "content": prompt, "add_special": True}
            return tuple(int(t) for t in self._post(self.server, "/tokenize", body)["tokens"])
        except (Unsupported, ConnectionError, KeyError, TypeError, ValueError):
            return prompt

    def _body(self, job: Job) -> dict[str, Any]:
        p = job.params
        body: dict[str, Any] = {name: getattr(p, name) for name in _FIELDS}
        body = {k: v for k, v in body.items() if k not in _OFF or v != _OFF[k]}
        if p.temperature > 0:
            # Servers have defaults of their own; llama.cpp's for instance are top_k 40 and min_p 0.05.
            body = {
                "top_k": -1 if not self.llama else 0,
                "top_p": 1.0,
                **({"min_p": 0.0} if self.llama else {}),
                **body,
            }
        if self.llama:
            body["samplers"] = ["penalties", "top_k", "top_p", "min_p", "temperature"]
        if p.logit_bias:
            body["logit_bias"] = {str(t): b for t, b in p.logit_bias.items()}
        if p.stops:
            body["stop"] = list(p.stops)
        if p.stop_token_ids:
            body["stop_token_ids"] = list(p.stop_token_ids)
        if p.bad_words:
            raise Unsupported("bad words are given to a server as text, and here they are token ids")
        if p.logprobs is None and self._asks_logprobs:
            body["logprobs"] = 1
        body |= {"return_token_ids": True, "detailed_metrics": True} if self._extras else {}
        return {**body, "prompt": job.prompt if isinstance(job.prompt, str) else list(job.prompt)}

    llama = False  # llama.cpp: the likeliest tokens are filtered unless the body says otherwise
    _extras = True  # whether the server takes our additional fields
    _asks_logprobs = False  # whether token ids come with log-probabilities only

    def _probe(self) -> None:
        """Find out how this server tells token ids."""
        props = self.server.get("/props")
        self.llama = props.status_code == 200 and "default_generation_settings" in props.text
        from outrider.params import SamplingParams

        job = Job(self._prompts[0], SamplingParams(temperature=0, max_tokens=2))
        try:
            [text] = self._ask(self.server, self.model, job, {})
        except _Refused:
            self._extras = False
            [text] = self._ask(self.server, self.model, job, {})
        if not text.tokens and not text.error:
            self._asks_logprobs = True
            try:
                [text] = self._ask(self.server, self.model, job, {})
            except _Refused:
                self._asks_logprobs = False
        self.properties["token ids"] = "known" if text.tokens else "not known: texts are compared"
        if text.error:
            raise ConnectionError(f"{self.url} does not write a text: {text.error}")

    def _ask(self, client: httpx.Client, model: str, job: Job, more: dict[str, Any]) -> list[Writing]:
        body = {**self._body(job), "model": model, **more}
        try:
            answer = self._post(client, "/v1/completions", body)
            if answer.get("guarantee") == Guarantee.EXACT_TOKENS.value and client is self.server:
                self.promise = Guarantee.EXACT_TOKENS
            texts = [_writing(choice, job) for choice in answer["choices"]]
            if len(texts) == 1:
                texts[0].usage = (answer.get("usage") or {}).get("completion_tokens")
                steps = ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_drafted")
                if steps is not None:
                    texts[0].drafted = list(steps)
                    texts[0].accepted = list(answer["metrics"]["speculative_decoding"]["per_step_accepted"])
            return texts
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError) as error:
            return [Writing(error=f"{type(error).__name__}: {error}") for _ in range(job.params.n)]

    def write(self, jobs: Sequence[Job], way: Way) -> list[Writing]:
        load = way.options.get("load", 1)
        if load == 1 or len(jobs) == 1:
            return [text for job in jobs for text in self._ask(self.server, self.model, job, {})]
        with ThreadPoolExecutor(load) as pool:
            found = list(pool.map(lambda job: self._ask(self.server, self.model, job, {}), jobs))
        return [text for texts in found for text in texts]

    def plain(self, jobs: Sequence[Job]) -> list[Writing]:
        if self.without is None:
            raise Unsupported(
                "name a server without speculation (--plain-url), or fields that turn it off (--off-body)"
            )
        client, model = self.without, self.plain_model
        return [text for job in jobs for text in self._ask(client, model, job, self.off)]

    def constrained(self, job: Job, choices: Sequence[str]) -> Writing:
        if self.llama:
            more: dict[str, Any] = {"grammar": "root ::= " + " | ".join(json.dumps(c) for c in choices)}
        else:
            more = {"structured_outputs": {"choice": list(choices)}}
        [text] = self._ask(self.server, self.model, job, more)
        return text

    # -- the target's numbers -----------------------------------------------------------------------------------------------

    def rows(self, job: Job, writing: Writing) -> list[Row]:
        if not writing.tokens:
            raise Unsupported("the server gives no token ids, so its tokens have no known probabilities")
        prompt = writing.prompt or ([] if isinstance(job.prompt, str) else list(job.prompt))
        if not prompt:
            raise Unsupported("the token ids of the prompt are not known")
        if self.reference is not None:
            return self.reference.rows(replace(job, prompt=tuple(prompt)), replace(writing, prompt=prompt))
        if job.params.temperature != 1 or (job.params.top_k, job.params.top_p, job.params.min_p) not in (
            (0, 1.0, 0.0),
        ):
            raise Unsupported("prompt_logprobs are those of temperature 1 without filters; name a --reference model")
        return self._prompt_rows(prompt, writing.tokens)

    def _prompt_rows(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Row]:
        body = {
            "model": self.plain_model,
            "prompt": [*prompt, *tokens],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": _KNOWN,
            **self.off,
        }
        answer = self._post(self.without or self.server, "/v1/completions", body)
        found = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        if not isinstance(found, list) or len(found) < len(prompt) + len(tokens):
            raise Unsupported("the server gives no prompt_logprobs; name a model with its weights: --reference MODEL")
        return [_row(entry) for entry in found[len(prompt) : len(prompt) + len(tokens)]]

    def draft_rows(self, job: Job, writing: Writing) -> list[Row] | None:
        return None if self.reference is None else self.reference.draft_rows(job, writing)

    def noise(self) -> float | None:
        """The largest difference of a log-probability of plain decoding, written one by one and read at once.

        None if it is larger than rounding can be.
        """
        if self._noise is None and self.without is not None:
            from outrider.params import SamplingParams

            gaps = list[float]()
            for prompt in self._prompts[:3]:
                job = Job(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1))
                try:
                    for text in self.plain([job]):
                        read = self.rows(job.with_(temperature=1.0), text)
                        for row, token, known in zip(read, text.tokens, text.logprobs or [], strict=False):
                            p = _mass(row, token)
                            if p and token in known:
                                gaps.append(abs(math.log(p) - known[token]))
                except (Unsupported, ConnectionError):
                    return None
            self._noise = max(gaps) if gaps and max(gaps) <= _LARGEST_NOISE else None
        return self._noise

    def margin(self, job: Job, writing: Writing, at: int, other: int | None) -> float | None:
        if other is None or not writing.tokens:
            return None
        try:
            row = self.rows(job.with_(temperature=1.0), replace(writing, tokens=writing.tokens[: at + 1]))[at]
        except (Unsupported, ConnectionError):
            return None
        p, q = _mass(row, writing.tokens[at]), _mass(row, other)
        return abs(math.log(p) - math.log(q)) if p and q else None

    def show(self, tokens: Sequence[int]) -> str:
        return self.reference.show(tokens) if self.reference else super().show(tokens)

    def close(self) -> None:
        self.server.close()
        if self.without is not None:
            self.without.close()


def _mass(row: Row, token: int) -> float | None:
    """The probability of a token; None if it is not among the known ones."""
    if row.ids is None:
        return float(row.probs[token])
    found = np.flatnonzero(row.ids == token)
    return float(row.probs[found[0]]) if len(found) else None


def _row(entry: Any) -> Row:
    """The likeliest tokens of a position, of vLLM's or our own `prompt_logprobs`. The text's own token does not count.

    Which tokens are known must not depend on the text, so a token beyond the likeliest is left out.
    """
    pairs = [(int(t), float(v["logprob"] if isinstance(v, dict) else v)) for t, v in (entry or {}).items()]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    best = pairs[:_KNOWN]
    return Row(np.exp([v for _, v in best]), np.array([t for t, _ in best]))


def _writing(choice: dict[str, Any], job: Job) -> Writing:
    """A choice of /v1/completions. Token ids: vLLM's and ours are in `token_ids`, llama.cpp's with the log-probabilities."""
    found = choice.get("logprobs") or {}
    content = found.get("content") or []
    tokens = [int(t) for t in choice.get("token_ids") or [c["id"] for c in content if "id" in c]]
    values = found.get("token_logprobs") or [c.get("logprob") for c in content]
    logprobs = None
    if tokens and len(values) >= len(tokens) and all(v is not None for v in values):
        logprobs = [{t: float(v)} for t, v in zip(tokens, values, strict=False)]
    prompt = choice.get("prompt_token_ids") or ([] if isinstance(job.prompt, str) else list(job.prompt))
    return Writing(
        tokens=tokens,
        text=str(choice.get("text") or ""),
        prompt=[int(t) for t in prompt],
        finish=choice.get("finish_reason"),
        stop=choice.get("stop_reason"),
        logprobs=logprobs,
    )
