"""A running server with OpenAI's API as a subject: one that can be told not to speculate, or a second one that does not.

The target's probabilities come from the server's own `prompt_logprobs`, or from a model here with the same weights.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee
from outrider_certify.subjects import llama
from outrider_certify.subjects.base import Job, Prompt, Row, Subject, Unsupported, Way, Writing
from outrider_certify.subjects.transport import BrokenServer, RefusedRequest, ServerClient

if TYPE_CHECKING:
    import httpx

LOAD = 4  # requests at a time, in the way "under load"
_KNOWN = 20  # likeliest tokens of each position that are asked for
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


ENDPOINTS = ("completions", "chat")
_DRAFTED = re.compile(r"^\S*(?:spec_decode_num_draft_tokens|drafted)_total(?:\{.*\})? ([\d.e+]+)$", re.MULTILINE)


class ServerSubject(Subject):
    """url: the server that speculates. plain_url: one that does not. off_body: fields that turn speculation off at `url`.

    reference: a subject with the same weights, which gives the target's probabilities. endpoint: of ENDPOINTS; "chat" sends a
    prompt as the message of a user. Raises ConnectionError if no server answers, ValueError for a wrong address.
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
        endpoint: str = "completions",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__()
        if endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint is one of {', '.join(ENDPOINTS)}, got {endpoint!r}")

        def client(where: str) -> ServerClient:
            return ServerClient(where, api_key=api_key, timeout=timeout, transport=transport)

        self.reference, self.chat = reference, endpoint == "chat"
        self.server = client(url)
        self.without = client(plain_url) if plain_url else self.server if off_body is not None else None
        self.off = {} if plain_url else off_body or {}
        self.model = model or self.server.first_model()
        self.plain_model = model or (self.without.first_model() if plain_url and self.without else self.model)
        self.name = f"the server at {self.server.url}, {self.model}" + (", chat" if self.chat else "")
        self.properties = {
            "server": self.server.url,
            "endpoint": f"/v1/{'chat/' * self.chat}completions",
            "model": self.model,
            "without speculation": plain_url or (json.dumps(off_body) if off_body is not None else "not known"),
        }
        self.versions = self._versions()
        self.weights = reference.weights if reference else {}
        self.partial_rows = reference is None
        self._noise: float | None = None
        self._told = 0
        self._messages: dict[str, list[int]] = {}
        self._prompts: list[Prompt] = [p if self.chat else self._ids(p) for p in prompts]
        self._probe()

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def ways(self) -> Sequence[Way]:
        return [
            Way("one request at a time"),
            Way("under load", {"load": LOAD}),
            Way("again, under load", {"load": LOAD}),
            Way("as a stream", {"stream": True}),
        ]

    def ready(self) -> str:
        return self.server.ready() or (self.without.ready() if self.without else "")

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _versions(self) -> dict[str, str]:
        answer = self.server.get("/version")
        try:
            found = answer.json() if answer is not None and answer.status_code == 200 else {}
            return {"server": str(found.get("version", found))[:80]} if found else {}
        except (ValueError, AttributeError):
            return {}

    def _ids(self, prompt: Prompt) -> Prompt:
        """The prompt as token ids, if the server or the reference can tell them."""
        if not isinstance(prompt, str):
            return prompt
        try:
            body = {"model": self.model, "prompt": prompt, "content": prompt, "add_special": True}
            return tuple(int(t) for t in self.server.post("/tokenize", body)["tokens"])
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
            body["samplers"] = list(llama.SAMPLERS)
            if "repetition_penalty" in body:
                body["repeat_penalty"] = body.pop("repetition_penalty")
        if p.logit_bias:
            body["logit_bias"] = {str(t): b for t, b in p.logit_bias.items()}
        if p.stops:
            body["stop"] = list(p.stops)
        if p.stop_token_ids:
            body["stop_token_ids"] = list(p.stop_token_ids)
        if p.bad_words:
            body["bad_words"] = [self._word(word) for word in p.bad_words]
        if p.logprobs is None and self._asks_logprobs:
            body["logprobs"] = 1
        body |= {"return_token_ids": True, "detailed_metrics": True} if self._extras else {}
        if not self.chat:
            return {**body, "prompt": job.prompt if isinstance(job.prompt, str) else list(job.prompt)}
        if not isinstance(job.prompt, str):
            raise Unsupported("the chat endpoint takes texts, and this prompt is token ids")
        if "logprobs" in body:
            body |= {"top_logprobs": body["logprobs"], "logprobs": True}
        return {**body, "messages": [{"role": "user", "content": job.prompt}]}

    def _word(self, word: Sequence[int] | str) -> str:
        """A bad word as a text. Raises Unsupported if the server would read the text as other tokens."""
        if isinstance(word, str):
            return word
        if self.llama:
            raise Unsupported("llama.cpp has no bad_words; its logit_bias is tested")
        try:
            text = str(self.server.post("/detokenize", {"model": self.model, "tokens": list(word)})["prompt"])
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            again = [int(t) for t in self.server.post("/tokenize", body)["tokens"]]
        except (ConnectionError, KeyError, TypeError, ValueError) as error:
            raise Unsupported(
                f"bad words are given as text, and the server does not tell a token's text ({error})"
            ) from None
        if again != list(word):
            raise Unsupported(f"bad words are given as text, and the server reads {text!r} as other tokens")
        return text

    llama = False  # llama.cpp: the likeliest tokens are filtered unless the body says otherwise
    _extras = True  # whether the server takes our additional fields
    _asks_logprobs = False  # whether token ids come with log-probabilities only

    def _probe(self) -> None:
        """Find out how this server tells token ids."""
        props = self.server.get("/props")
        self.llama = props is not None and props.status_code == 200 and "default_generation_settings" in props.text
        if props is not None and self.llama:
            self.versions["server"] = f"llama.cpp {props.json().get('build_info', '')}".strip()
        before = self._drafted()
        job = Job(self._prompts[0], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        try:
            [text] = self._ask(self.server, self.model, job, {})
        except RefusedRequest as why:
            if self.properties["endpoint"].endswith("/v1/completions") and "HTTP 404" in str(why):
                raise ConnectionError(f"{why}; if it has the chat endpoint only: --endpoint chat") from None
            self._extras = False
            [text] = self._ask(self.server, self.model, job, {})
        if not text.tokens and not text.error:
            self._asks_logprobs = True
            try:
                [text] = self._ask(self.server, self.model, job, {})
            except RefusedRequest:
                self._asks_logprobs = False
        self.properties["token ids"] = "known" if text.tokens else "not known: texts are compared"
        if text.error:
            raise ConnectionError(f"{self.server.url} does not write a text: {text.error}")
        count = sum(text.drafted) or self._drafted() - before
        self.properties["speculation"] = (
            f"seen: {count:g} draft tokens in the first texts" if count else "not seen: it reports no draft tokens"
        )

    def _drafted(self) -> float:
        """Draft tokens so far, as /metrics counts them, or llama.cpp in its answers; 0 if neither does."""
        answer = self.server.get("/metrics")
        counted = sum(float(n) for n in _DRAFTED.findall(answer.text)) if answer is not None else 0.0
        return counted or float(self._told)

    def _ask(self, client: ServerClient, model: str, job: Job, more: dict[str, Any]) -> list[Writing]:
        body = {**self._body(job), "model": model, **more}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        try:
            answer = client.post(self.properties["endpoint"], body)
            if answer.get("guarantee") == Guarantee.EXACT_TOKENS.value and client is self.server:
                self.promise = Guarantee.EXACT_TOKENS
            texts = [_writing(c, job, answer.get("prompt_token_ids")) for c in answer["choices"]]
            if len(texts) == 1:
                texts[0].usage = (answer.get("usage") or {}).get("completion_tokens")
                _count(texts[0], answer)
                if self._asks_logprobs and texts[0].usage != len(texts[0].tokens):
                    self._read_again(texts[0])
            for text in texts:
                text.prompt = text.prompt or self._chat_ids(job.prompt)
            if client is self.server:
                self._told += (answer.get("timings") or {}).get("draft_n", 0)
            return texts
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError) as error:
            broke = isinstance(error, BrokenServer)
            why = str(error) if broke else f"{type(error).__name__}: {error}"
            return [Writing(error=why, broke=broke) for _ in range(job.params.n)]

    def _read_again(self, text: Writing) -> None:
        """The tokens of a stream of llama.cpp, which leaves out accepted draft tokens: those of its text, if it has as many."""
        text.tokens, text.logprobs = [], None
        if self.llama:
            with contextlib.suppress(ConnectionError, Unsupported, LookupError, TypeError, ValueError):
                found = llama.encoded(self.server, text.text)
                text.tokens = found if len(found) == text.usage else []

    def _chat_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt that is a message, as far as llama.cpp tells them; other servers do in their answers."""
        if not (self.llama and self.chat and isinstance(prompt, str)):
            return []
        if prompt not in self._messages:
            self._messages[prompt] = []
            with contextlib.suppress(ConnectionError, Unsupported, LookupError, TypeError, ValueError):
                self._messages[prompt] = llama.chat_prompt(self.server, prompt)
        return self._messages[prompt]

    def write(self, jobs: Sequence[Job], way: Way) -> list[Writing]:
        load = way.options.get("load", 1)
        more = {"stream": True} if way.options.get("stream") else {}
        if load == 1 or len(jobs) == 1:
            return [text for job in jobs for text in self._ask(self.server, self.model, job, more)]
        with ThreadPoolExecutor(load) as pool:
            found = list(pool.map(lambda job: self._ask(self.server, self.model, job, more), jobs))
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
        try:
            [text] = self._ask(self.server, self.model, job, more)
        except RefusedRequest:
            schema = {"name": "choice", "schema": {"type": "string", "enum": list(choices)}, "strict": True}
            more = {"response_format": {"type": "json_schema", "json_schema": schema}}
            [text] = self._ask(self.server, self.model, job, more)
            with contextlib.suppress(ValueError, TypeError):
                text.text = str(json.loads(text.text))
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
        answer = (self.without or self.server).post("/v1/completions", body)
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
        if self._noise is None and self.llama and self.without is not None:
            known = [p for p in (self._chat_ids(p) if isinstance(p, str) else p for p in self._prompts[:3]) if p]
            with contextlib.suppress(Unsupported, ConnectionError, LookupError, TypeError, ValueError):
                self._noise = llama.noise(self.without, known)
        if self._noise is None and self.without is not None:
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
        prompt = writing.prompt or ([] if isinstance(job.prompt, str) else list(job.prompt))
        if self.llama and self.without is not None and prompt:
            with contextlib.suppress(Unsupported, ConnectionError, LookupError, TypeError, ValueError):
                before, body = [*prompt, *writing.tokens[:at]], self._body(job)
                return llama.margin(self.without, before, body, writing.tokens[at], other)
        try:
            row = self.rows(job.with_(temperature=1.0), replace(writing, tokens=writing.tokens[: at + 1]))[at]
        except (Unsupported, ConnectionError):
            return None
        p, q = _mass(row, writing.tokens[at]), _mass(row, other)
        noise = self.noise() or 0.0
        if p and job.params.temperature == 0 and math.log(float(row.probs.max())) - math.log(p) > 2 * noise:
            return None  # plain decoding itself did not take the likeliest of these numbers: they are not its own
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


def _count(text: Writing, answer: dict[str, Any]) -> None:
    """What an answer says of the draft tokens of each step."""
    steps = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    if steps.get("per_step_drafted") is not None:
        text.drafted, text.accepted = list(steps["per_step_drafted"]), list(steps["per_step_accepted"])


def _writing(choice: dict[str, Any], job: Job, prompt: Sequence[int] | None) -> Writing:
    """A choice of an answer. Token ids: vLLM's and ours are in `token_ids`, llama.cpp's with the log-probabilities."""
    found = choice.get("logprobs") or {}
    content = found.get("content") or []
    tokens = [int(t) for t in choice.get("token_ids") or [c["id"] for c in content if "id" in c]]
    values = found.get("token_logprobs") or [c.get("logprob") for c in content]
    logprobs = None
    if tokens and len(values) >= len(tokens) and all(v is not None for v in values):
        logprobs = [{t: float(v)} for t, v in zip(tokens, values, strict=False)]
    known = choice.get("prompt_token_ids") or prompt or (() if isinstance(job.prompt, str) else job.prompt)
    return Writing(
        tokens=tokens,
        text=str(choice.get("text") or (choice.get("message") or {}).get("content") or ""),
        prompt=[int(t) for t in known],
        finish=choice.get("finish_reason"),
        stop=choice.get("stop_reason"),
        logprobs=logprobs,
    )
