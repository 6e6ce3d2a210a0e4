"""A running server with OpenAI's API as a subject: one that can be told not to speculate, or a second one that does not.

The target's probabilities come from the server's own `prompt_logprobs`, or from a model here with the same weights.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider_certify.subject import (
    GeneratedText,
    Prompt,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
)
from outrider_certify.subjects import llama
from outrider_certify.subjects.engines import UNKNOWN, recognised
from outrider_certify.subjects.transport import BrokenServer, RefusedRequest, ServerClient, curl

if TYPE_CHECKING:
    import httpx

LOAD = 4  # requests at a time, in the variant "under load"
_KNOWN = 20  # likeliest tokens of each position that are asked for
_LARGEST_NOISE = 0.5  # nats; more is no rounding, but another distribution
# Sent where they are not off, and temperature and max_tokens always.
_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "min_tokens", "ignore_eos", "seed", "n", "logprobs")  # fmt: skip
# What an answer of another form than expected raises.
_WRONG_ANSWER = (ConnectionError, Unsupported, LookupError, TypeError, ValueError, AttributeError)
ENDPOINTS = ("completions", "chat")
_DRAFTED = re.compile(r"^\S*(?:spec_decode_num_draft_tokens|drafted)_total(?:\{.*\})? ([\d.e+]+)$", re.MULTILINE)


class ServerSubject(Subject):
    """A server, and its plain decoding: at a second server, or by fields of the request."""

    long_context = 512

    def __init__(
        self,
        url: str,
        prompts: Sequence[Prompt],
        *,
        plain_url: str | None = None,
        off_body: dict[str, Any] | None = None,
        on_body: dict[str, Any] | None = None,
        reference: Subject | None = None,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        endpoint: str = "completions",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Find out what a server tells.

        Without `plain_url`, `off_body` and `on_body`, an engine with a field of its own (`engines`) is asked by it, if no draft
        token is seen then.

        Args:
            url: The server that speculates.
            plain_url: A server that does not.
            off_body: Fields that turn speculation off at `url`.
            on_body: Fields that turn it on.
            reference: A subject with the same weights, which gives the target's probabilities.
            endpoint: Of ENDPOINTS; "chat" sends a prompt as the message of a user.

        Raises ConnectionError if no server answers, ValueError for a wrong address.
        """
        super().__init__()
        if endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint is one of {', '.join(ENDPOINTS)}, got {endpoint!r}")

        def client(where: str) -> ServerClient:
            return ServerClient(where, api_key=api_key, timeout=timeout, transport=transport)

        self.reference, self.chat = reference, endpoint == "chat"
        self.server = client(url)
        switched = off_body is not None or on_body is not None
        self.without = client(plain_url) if plain_url else self.server if switched else None
        self.off, self.on = {} if plain_url else off_body or {}, on_body or {}
        self.model = model or self.server.first_model()
        self.plain_model = model or (self.without.first_model() if plain_url and self.without else self.model)
        self.name = f"the server at {self.server.url}, {self.model}" + (", chat" if self.chat else "")
        self.properties = {
            "server": self.server.url,
            "endpoint": f"/v1/{'chat/' * self.chat}completions",
            "model": self.model,
            "without speculation": plain_url or (json.dumps(off_body or {}) if switched else "not known"),
        }
        self.weights = reference.weights if reference else {}
        self.partial_distributions = reference is None
        self._noise: float | None = None
        self._told = 0
        self._messages: dict[str, list[int]] = {}
        self._prompts = list(prompts)
        if not self.chat:
            with contextlib.suppress(Unsupported):  # then the prompts stay texts
                self._prompts = [tuple(self.encode(p, prompt=True)) if isinstance(p, str) else p for p in prompts]
        self._probe()

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def variants(self) -> Sequence[SpeculationVariant]:
        return [
            SpeculationVariant("one request at a time"),
            SpeculationVariant("under load", {"load": LOAD}),
            SpeculationVariant("again, under load", {"load": LOAD}),
            SpeculationVariant("as a stream", {"stream": True}),
        ]

    def reproduce(self, request: TextRequest, variant: SpeculationVariant) -> str:
        load = variant.options.get("load", 1)
        more = {**self.on, **({"stream": True} if variant.options.get("stream") else {})}
        sides = [(self.server, self.model, more), (self.without or self.server, self.plain_model, self.off)]
        lines = [
            curl(client.url + self.properties["endpoint"], {**self._body(request), "model": model, **fields})
            for client, model, fields in sides
        ]
        return "\n    ".join(lines) + (f"\n    ({load} requests at a time)" if load > 1 else "")

    def ready(self) -> str:
        return self.server.ready() or (self.without.ready() if self.without else "")

    # -- requests ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        body = {"model": self.model, "prompt": text, "content": text}
        body |= {"add_special": prompt, "add_special_tokens": prompt}
        try:
            return [int(t) for t in self.server.post("/tokenize", body)["tokens"]]
        except _WRONG_ANSWER as error:
            raise Unsupported(f"the server does not tell the token ids of a text ({error}); give token ids") from None

    def decode(self, tokens: Sequence[int]) -> str:
        try:
            told = self.server.post("/detokenize", {"model": self.model, "tokens": list(tokens)})
            return str(told["content" if self.llama else "prompt"])
        except _WRONG_ANSWER as error:
            raise Unsupported(f"the server does not tell the text of token ids ({error})") from None

    def troubles(self) -> dict[str, int]:
        return dict(
            self.server.troubles + (self.without.troubles if self.without not in (None, self.server) else Counter())
        )

    def _body(self, request: TextRequest) -> dict[str, Any]:
        p, off = request.params, SamplingParams()
        body: dict[str, Any] = {"temperature": p.temperature, "max_tokens": p.max_tokens}
        if p.temperature > 0:
            # Servers have defaults of their own; llama.cpp's for instance are top_k 40 and min_p 0.05.
            body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.llama else {"top_k": -1, "top_p": 1.0}
        body |= {name: getattr(p, name) for name in _FIELDS if getattr(p, name) != getattr(off, name)}
        if self.llama:
            body["samplers"] = list(llama.SAMPLERS)
            if "repetition_penalty" in body:
                body["repeat_penalty"] = body.pop("repetition_penalty")
        if p.logit_bias:
            body["logit_bias"] = {str(t): b for t, b in p.logit_bias.items()}
        if p.stop:
            body["stop"] = list(p.stop)
        if p.stop_token_ids:
            body["stop_token_ids"] = list(p.stop_token_ids)
        if p.bad_words:
            body["bad_words"] = [self._word(word) for word in p.bad_words]
        if p.logprobs is None and self._asks_logprobs:
            body["logprobs"] = 1
        body |= {"return_token_ids": True, "detailed_metrics": True} if self._extras else {}
        if not self.chat:
            return {**body, "prompt": list(request.prompt_ids) or request.prompt}
        if not isinstance(request.prompt, str):
            raise Unsupported("the chat endpoint takes texts, and this prompt is token ids")
        if "logprobs" in body:
            body |= {"top_logprobs": body["logprobs"], "logprobs": True}
        return {**body, "messages": [{"role": "user", "content": request.prompt}]}

    def _word(self, word: Sequence[int] | str) -> str:
        """A bad word as a text. Raises Unsupported if the server would read the text as other tokens."""
        if isinstance(word, str):
            return word
        if self.llama:
            raise Unsupported("llama.cpp has no bad_words; its logit_bias is tested")
        try:
            text = self.decode(word)
            again = self.encode(text, prompt=False)
        except Unsupported as why:
            raise Unsupported(f"bad words are given as text: {why}") from None
        if again != list(word):
            raise Unsupported(f"bad words are given as text, and the server reads {text!r} as other tokens")
        return text

    llama = False  # llama.cpp: the likeliest tokens are filtered unless the body says otherwise
    _extras = True  # whether the server takes our additional fields
    _asks_logprobs = False  # whether token ids come with log-probabilities only

    def _probe(self) -> None:
        """Find out how this server tells token ids."""
        props, about = self._told_at("/props"), self._told_at("/version")
        self.llama = "default_generation_settings" in props
        self.ways = recognised(self._told_at)
        if self.ways is not UNKNOWN:
            self.properties["engine"] = self.ways.name
        if self.llama:
            self.versions["server"] = f"llama.cpp {props.get('build_info', '')}".strip()
        elif about:
            self.versions["server"] = str(about.get("version", about))[:80]
        before = self._drafted()
        request = TextRequest(self._prompts[0], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        try:
            [text] = self._ask(self.server, self.model, request, self.on)
        except RefusedRequest as why:
            if self.properties["endpoint"].endswith("/v1/completions") and "HTTP 404" in str(why):
                raise ConnectionError(f"{why}; if it has the chat endpoint only: --endpoint chat") from None
            self._extras = False
            [text] = self._ask(self.server, self.model, request, self.on)
        if not text.tokens and not text.error:
            self._asks_logprobs = True
            try:
                [text] = self._ask(self.server, self.model, request, self.on)
            except RefusedRequest:
                self._asks_logprobs = False
        self.properties["token ids"] = "known" if text.tokens else "not known: texts are compared"
        if text.error:
            raise ConnectionError(f"{self.server.url} does not write a text: {text.error}")
        count = sum(text.drafted) or self._drafted() - before
        self.properties["speculation"] = (
            f"seen: {count:g} draft tokens in the first texts" if count else "not seen: it reports no draft tokens"
        )
        if self.without is None and self.ways.off:
            self._turn_off(request, self.ways.off)

    def _turn_off(self, request: TextRequest, off: dict[str, Any]) -> None:
        """Use a field that this engine has, if it does what it should."""
        before = self._drafted()
        try:
            [text] = self._ask(self.server, self.model, request, off)
        except RefusedRequest:
            return
        if not text.error and not sum(text.drafted) and self._drafted() == before:
            self.without, self.off = self.server, off
            self.properties["without speculation"] = json.dumps(off)

    def _told_at(self, path: str) -> dict[str, Any]:
        """What the server says of itself; empty if it says nothing."""
        answer = self.server.get(path)
        try:
            told = answer.json() if answer is not None and answer.status_code == 200 else {}
        except ValueError:
            told = {}
        return told if isinstance(told, dict) else {}

    def _drafted(self) -> float:
        """Draft tokens so far, as /metrics counts them, or llama.cpp in its answers; 0 if neither does."""
        answer = self.server.get("/metrics")
        counted = sum(float(n) for n in _DRAFTED.findall(answer.text)) if answer is not None else 0.0
        return counted or float(self._told)

    def _ask(self, client: ServerClient, model: str, request: TextRequest, more: dict[str, Any]) -> list[GeneratedText]:
        body = {**self._body(request), "model": model, **more}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        try:
            answer = client.post(self.properties["endpoint"], body)
            if answer.get("guarantee") == "exact-tokens" and client is self.server:
                self.exact_tokens = True
            texts = [_generated(c, request, answer.get("prompt_token_ids")) for c in answer["choices"]]
            usage = (answer.get("usage") or {}).get("completion_tokens")
            if self._asks_logprobs and usage != sum(len(text.tokens) for text in texts):
                for text in texts:  # a stream of llama.cpp leaves out accepted draft tokens
                    text.tokens, text.logprobs = [], None
            if len(texts) == 1:
                texts[0].usage = usage
                steps = (answer.get("metrics") or {}).get("speculative_decoding") or {}
                texts[0].drafted = list(steps.get("per_step_drafted") or ())
                texts[0].accepted = list(steps.get("per_step_accepted") or ())
            for text in texts:
                text.prompt = text.prompt or self._chat_ids(request.prompt)
            if client is self.server:
                self._told += (answer.get("timings") or {}).get("draft_n", 0)
            return texts
        except (ConnectionError, KeyError, TypeError, ValueError, AttributeError) as error:
            broke = isinstance(error, BrokenServer)
            why = str(error) if broke else f"{type(error).__name__}: {error}"
            return [GeneratedText(error=why, broke=broke) for _ in range(request.params.n)]

    def _chat_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt that is a message, as far as llama.cpp tells them; other servers do in their answers."""
        if not (self.llama and self.chat and isinstance(prompt, str)):
            return []
        if prompt not in self._messages:
            self._messages[prompt] = []
            with contextlib.suppress(*_WRONG_ANSWER):
                self._messages[prompt] = llama.chat_prompt(self.server, prompt)
        return self._messages[prompt]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        load = variant.options.get("load", 1)
        more = {**self.on, **({"stream": True} if variant.options.get("stream") else {})}
        if load == 1 or len(requests) == 1:
            return [text for request in requests for text in self._ask(self.server, self.model, request, more)]
        with ThreadPoolExecutor(load) as pool:
            answers = pool.map(lambda request: self._ask(self.server, self.model, request, more), requests)
            return [text for texts in answers for text in texts]

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        if self.without is None:
            hint = f" ({self.ways.name}: {self.ways.without})" if self.ways is not UNKNOWN else ""
            raise Unsupported(
                "it has no field that is known to turn speculation off: start a second server of the same model without "
                f"speculation and add --plain-url http://..., or name the fields with --off-body{hint}"
            )
        client, model = self.without, self.plain_model
        return [text for request in requests for text in self._ask(client, model, request, self.off)]

    def constrained(self, request: TextRequest, choices: Sequence[str]) -> GeneratedText:
        if self.llama:
            more: dict[str, Any] = {"grammar": "root ::= " + " | ".join(json.dumps(c) for c in choices)}
        else:
            more = {"structured_outputs": {"choice": list(choices)}}
        try:
            [text] = self._ask(self.server, self.model, request, more)
        except RefusedRequest:
            schema = {"name": "choice", "schema": {"type": "string", "enum": list(choices)}, "strict": True}
            more = {"response_format": {"type": "json_schema", "json_schema": schema}}
            [text] = self._ask(self.server, self.model, request, more)
            with contextlib.suppress(ValueError, TypeError):
                text.text = str(json.loads(text.text))
        return text

    # -- the target's numbers -----------------------------------------------------------------------------------------------

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        if not text.tokens:
            raise Unsupported("the server gives no token ids, so its tokens have no known probabilities")
        prompt = text.prompt or list(request.prompt_ids)
        if not prompt:
            raise Unsupported("the token ids of the prompt are not known")
        if self.reference is not None:
            return self.reference.distributions(replace(request, prompt=tuple(prompt)), replace(text, prompt=prompt))
        p = request.params
        if (p.temperature, p.top_k, p.top_p, p.min_p) != (1, 0, 1, 0):
            raise Unsupported("prompt_logprobs are those of temperature 1 without filters; name a --reference model")
        return self._prompt_distributions(prompt, text.tokens)

    def _prompt_distributions(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[TokenDistribution]:
        body = {
            "model": self.plain_model,
            "prompt": [*prompt, *tokens],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": _KNOWN,
            **self.off,
        }
        answer = (self.without or self.server).post("/v1/completions", body)
        entries = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) < len(prompt) + len(tokens):
            raise Unsupported("the server gives no prompt_logprobs; name a model with its weights: --reference MODEL")
        return [_distribution(entry) for entry in entries[len(prompt) : len(prompt) + len(tokens)]]

    def draft_distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution] | None:
        return None if self.reference is None else self.reference.draft_distributions(request, text)

    def noise(self) -> float | None:
        """The largest difference of a log-probability of plain decoding, written one by one and read at once.

        None if it is larger than rounding can be.
        """
        if self._noise is None and self.llama and self.without is not None:
            prompts = [self._chat_ids(p) if isinstance(p, str) else p for p in self._prompts[:3]]
            with contextlib.suppress(*_WRONG_ANSWER):
                self._noise = llama.noise(self.without, [p for p in prompts if p])
        if self._noise is None and self.without is not None:
            gaps = list[float]()
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
            requests = [TextRequest(prompt, params) for prompt in self._prompts[:3]]
            try:
                for request, text in zip(requests, self.plain(requests), strict=True):
                    read = self.distributions(request.with_(temperature=1.0), text)
                    for distribution, token, logprobs in zip(read, text.tokens, text.logprobs or [], strict=False):
                        if (p := distribution.prob(token)) and token in logprobs:
                            gaps.append(abs(math.log(p) - logprobs[token]))
            except (Unsupported, ConnectionError):
                return None
            self._noise = max(gaps) if gaps and max(gaps) <= _LARGEST_NOISE else None
        return self._noise

    def margin(self, request: TextRequest, text: GeneratedText, at: int, other: int | None) -> float | None:
        if other is None or not text.tokens:
            return None
        prompt = text.prompt or list(request.prompt_ids)
        if self.llama and self.without is not None and prompt:
            with contextlib.suppress(*_WRONG_ANSWER):
                before, body = [*prompt, *text.tokens[:at]], self._body(request)
                return llama.margin(self.without, before, body, text.tokens[at], other)
        try:
            read = replace(text, tokens=text.tokens[: at + 1])
            distribution = self.distributions(request.with_(temperature=1.0), read)[at]
        except (Unsupported, ConnectionError):
            return None
        p, q, most = distribution.prob(text.tokens[at]), distribution.prob(other), float(distribution.probs.max())
        if p and request.params.temperature == 0 and math.log(most) - math.log(p) > 2 * (self.noise() or 0.0):
            return None  # plain decoding itself did not take the likeliest of these numbers: they are not its own
        return abs(math.log(p) - math.log(q)) if p and q else None

    def show(self, tokens: Sequence[int]) -> str:
        return self.reference.show(tokens) if self.reference else super().show(tokens)


def _distribution(entry: Any) -> TokenDistribution:
    """The likeliest tokens of a position, of vLLM's or our own `prompt_logprobs`. The text's own token does not count.

    Which tokens are known must not depend on the text, so a token beyond the likeliest is left out.
    """
    pairs = [(int(t), float(v["logprob"] if isinstance(v, dict) else v)) for t, v in (entry or {}).items()]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    best = pairs[:_KNOWN]
    return TokenDistribution(np.exp([v for _, v in best]), np.array([t for t, _ in best]))


def _generated(choice: dict[str, Any], request: TextRequest, prompt: Sequence[int] | None) -> GeneratedText:
    """A choice of an answer. Token ids: vLLM's and ours are in `token_ids`, llama.cpp's with the log-probabilities."""
    logs = choice.get("logprobs") or {}
    content = logs.get("content") or []
    tokens = [int(t) for t in choice.get("token_ids") or [c["id"] for c in content if "id" in c]]
    values = logs.get("token_logprobs") or [c.get("logprob") for c in content]
    logprobs = None
    if tokens and values and all(v is not None for v in values):
        logprobs = [{t: float(v)} for t, v in zip(tokens, values, strict=False)]
    tops = logs.get("top_logprobs") or [c["top_logprobs"] for c in content if "top_logprobs" in c]
    return GeneratedText(
        tokens=tokens,
        text=str(choice.get("text") or (choice.get("message") or {}).get("content") or ""),
        prompt=[int(t) for t in choice.get("prompt_token_ids") or prompt or request.prompt_ids],
        finish=choice.get("finish_reason"),
        logprobs=logprobs,
        alternatives=[len(top or ()) for top in tops],
    )
