"""Request bodies: what is checked before they are read, and their fields. Names and meanings are OpenAI's, else vLLM's, and
a few of our own.

Reading and validation are single calls that stop every thread, so they cannot move to a worker. Their time grows with the number
of values, and that number is bounded before they start.

An unknown field is ignored, as other servers do. A field that looks like a misspelling of a known one is refused.
A number may also come as a string that holds a JSON number, "0.7", and a whole number as 8.0: clients in some languages send
that, and vLLM takes it.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import fields
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from outrider.core.docstrings import arguments
from outrider.core.params import RANGES, BadParameter, SamplingParams
from outrider.models.chat_template import text_of
from outrider.serve.tools import OPENAI, ToolForm, ToolOffer, offered, with_tools

# Validation stops at the first wrong item. An error for each of a million items would take minutes.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_SIMPLE = {int, float, bool, type(None)}
MAX_UNKNOWN = 100  # keys that no field has
MAX_CHOICES = 16  # prompts times n
MAX_DEPTH = 16  # draft tokens that a request may ask for
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # characters, also of a bad word
MAX_LOGPROBS = 20  # of one token
MAX_ENTRIES = 1024  # of logit_bias, and of each list of tokens
# The text of a prompt is one value, and each id of a token is one. A list, an object and a name cost more.
MAX_VALUES, MAX_PARTS = 250_000, 40_000

_HIGH, _LOW = rb"\\u[dD][89abAB]..", rb"\\u[dD][c-fC-F].."
_HALF = re.compile(_HIGH + rb"(?!" + _LOW + rb")|(?<!" + _HIGH + rb")" + _LOW)  # of a surrogate pair

# Numbers that Python reads and JSON has not, or that no float holds. Each begins where its digits begin, so the search is linear.
_ENDLESS = re.compile(rb"NaN|Infinity|(?<![\d.])\d+(?:\.\d+)?[eE]\+?\d{3,}|(?<!\d)\d{309,}\.")
_STRING = re.compile(rb'"[^"]*"')
# Without one of these, once its digits are zeros, a body has no such number. That takes a hundredth of the time.
_ZEROS, _SUSPECTS = (
    bytes.maketrans(b"123456789E", b"000000000e"),
    (b"NaN", b"Infinity", b"0e000", b"0e+000", b"0" * 309),
)
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,39})(\.\d{1,40})?([eE][+-]?\d{1,3})?")  # of JSON, and not a long one


def check_body(body: bytes) -> None:
    """Raise ValueError for JSON with more than MAX_VALUES values, or with more than MAX_PARTS lists, objects and names.

    Also for half of a surrogate pair, for a number that is not finite, and for another encoding than UTF-8. Parses nothing."""
    if b"\0" in body:  # Python also reads UTF-16 and UTF-32, and halves of pairs in them
        raise ValueError("the body is not UTF-8, so it is not JSON")
    for pair in (b"\\\\", b'\\"') if b"\\" in body else ():  # what is left of quotes then begins or ends a string
        body = body.replace(pair, b"  ")
    if b"\\u" in body and _HALF.search(body):
        raise ValueError("the request has half of a surrogate pair, which is not a character")
    zeros = body.translate(_ZEROS)
    if any(suspect in zeros for suspect in _SUSPECTS):
        for number in _ENDLESS.findall(_STRING.sub(b"", body)):
            if not isfinite(float(number)):
                raise ValueError(f"the request has the number {number[:20].decode()}, and a number in JSON is finite")
    if body.count(b",") <= MAX_VALUES and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return
    codes = np.frombuffer(body, np.uint8)
    outside = np.cumsum(codes == ord('"'), dtype=np.uint8) % 2 == 0
    counts = np.bincount(codes[outside], minlength=256)
    if counts[ord(",")] > MAX_VALUES:
        raise ValueError(f"the body has more than {MAX_VALUES} values; send fewer, or text in place of token ids")
    if sum(counts[code] for code in b"[{:") > MAX_PARTS:
        raise ValueError(f"the body has more than {MAX_PARTS} lists, objects and names; send fewer")


def few(given: Any) -> Any:
    """A field before its validation. Raises ValueError for an object of very many entries."""
    if isinstance(given, dict) and len(given) > 8192:
        raise ValueError(f"{len(given)} entries are too many")
    return given


class JsonObject(BaseModel):
    """A body, or an object in one. Its values have their types already. Its characters were checked, see `check_body`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    missing: ClassVar[dict[str, str]] = {}  # fields that are refused, and what is said of each

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, why in cls.missing.items():
            if data.get(name) not in (None, False, "", []):
                raise BadParameter(f"{name}: {why}", name)
        kinds = {name: {field.annotation, *get_args(field.annotation)} for name, field in cls.model_fields.items()}
        return {name: _number(value, kinds.get(name, set())) for name, value in data.items()}


class StreamOptions(JsonObject):
    """include_usage: one more event, with the usage; other protocols always have it. continuous_usage_stats: `so_far` in every
    event, with counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(JsonObject):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(JsonObject):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _schema_beside_the_type(cls, data: Any) -> Any:
        """As llama.cpp and others have it: {"type": "json_object", "schema": {...}}."""
        if isinstance(data, dict) and data.get("schema") is not None and data.get("json_schema") is None:
            return {"type": "json_schema", "json_schema": {"schema": data["schema"]}}
        return data


class StructuredOutputs(JsonObject):
    """vLLM's `structured_outputs`: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid")  # nothing that bounds a text is left out
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None


class Prediction(JsonObject):
    """A text that most of the answer is expected to repeat."""

    type: Literal["content"]
    content: str | Objects


# What other servers call it. Without it a text would have any form.
_FORMS = {"guided_json": "json", "json_schema": "json", "guided_choice": "choice"}
_FORMS |= dict.fromkeys(("guided_regex", "regex", "guided_grammar", "grammar", "ebnf"), "regex")


# What the answers of the other protocols have no place for
UNSEEN = dict.fromkeys(
    ("return_fingerprint", "return_token_ids", "return_pieces"),
    "the answers of this endpoint do not show it; ask at /v1/chat/completions",
)


def sampling_fields() -> Any:
    """A body with the numbers and switches of `SamplingParams`: types and meanings as they are declared there.

    The ranges are in the schema only: `SamplingParams` refuses what is outside, in better words than pydantic's. How long a text
    is and what is reported of its tokens differs between the endpoints, so each says that itself.
    """
    kinds, texts = get_type_hints(SamplingParams), arguments(SamplingParams)
    members = dict[str, Any]()
    for name, kind in kinds.items():
        if name not in ("max_tokens", "logprobs", "prompt_logprobs") and {*(get_args(kind) or [kind])} <= _SIMPLE:
            ends = zip(("minimum", "maximum"), RANGES.get(name, ())[:2], strict=False)
            limits: Any = {word: end for word, end in ends if end is not None}
            members[name] = kind | None, Field(None, description=texts[name].text, json_schema_extra=limits)
    return create_model("SamplingFields", __base__=JsonObject, **members)


class CommonRequest(sampling_fields()):
    """The fields of text completions and chat completions."""

    missing: ClassVar[dict[str, str]] = {
        "use_beam_search": "this server has no beam search; leave it out, or send temperature=0 for greedy decoding",
        **{old: f'send structured_outputs: {{"{new}": ...}} in its place' for old, new in _FORMS.items()},
        "functions": "send tools in its place",
        "function_call": "send tool_choice in its place",
        "audio": "this server writes text only; leave it out",
        "web_search_options": "this server searches nothing; leave it out, or offer a search as one of your tools",
        "chat_template": "a request cannot bring a template; start the server with --chat-template FILE",
    }

    is_chat: ClassVar[bool] = False  # the prompt is messages
    tells_thoughts: ClassVar[bool] = False  # its answer has thoughts apart from the text
    renamed: ClassVar[dict[str, str]] = {}  # what the protocol that became this body calls a field, by our name
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(few)] = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    max_total_tokens: int | None = Field(
        None, ge=1, description="of prompt and text: the text ends there, also if max_tokens allows more"
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    disable_spec_decode: bool | None = Field(None, description="true: no draft tokens")
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="draft tokens per step, in place of the planner's choice"
    )
    method: str | None = Field(
        None, description="the drafting method: none, ngram, suffix, prediction, or the server's own"
    )
    timeout: float | None = Field(None, gt=0, description="seconds; then the text ends where it is")
    detailed_metrics: bool | None = Field(None, description="also the counts of each step")
    return_token_ids: bool | None = Field(None, description="the token ids of prompt and output, too")
    return_pieces: bool | None = Field(
        None,
        description="in a stream also the pieces of each event: [text, whether it is a draft token that was accepted]",
    )
    return_fingerprint: bool | None = Field(
        None, description="what each text depends on, for outrider replay --fingerprint on any machine"
    )
    continued_tokens: Ids | Annotated[list[Ids], Field(fail_fast=True)] | None = Field(
        None,
        description="an answer that was cut off goes on: the token ids of each choice so far; with the seed and the other "
        "fields of the first request the text is the same",
    )
    best_of: int | None = Field(None, ge=1, description="only the value of n is accepted")
    use_beam_search: bool | None = Field(None, description="only false is accepted")

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if value not in (None, n):
            raise ValueError(
                f"this server does not choose among outputs, and n is {n}; send best_of={n} or leave it out"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {*cls.model_fields, *cls.missing, *HARMLESS}
        unknown = [key for key in data if key not in known]
        if len(unknown) > MAX_UNKNOWN:
            raise ValueError(
                f"the request has {len(unknown)} fields that do not exist; {MAX_UNKNOWN} are ignored, no more"
            )
        names = [name for name in cls.model_fields if len(name) > 4]
        longest = 2 * max(map(len, names))
        for key in unknown:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.85) if len(key) < longest else []
            if close:
                raise BadParameter(f"there is no field {key!r}; did you mean {close[0]!r}?", key)
        return data

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that all requests have, as they were given: another protocol's request becomes one of ours with them."""
        return self.model_dump(include=set(CommonRequest.model_fields), exclude_none=True, by_alias=True)

    @property
    def depth(self) -> int | None:
        """Draft tokens per step; None leaves it to the server."""
        return 0 if self.disable_spec_decode else self.num_speculative_tokens

    @property
    def offer(self) -> ToolOffer | None:
        """The tools on offer; None without any. Raises ValueError for tools that are not valid."""
        return None

    @property
    def called(self) -> dict[str, str]:
        """What the client calls a field, by our name of it."""
        return {"continued": "continued_tokens"}

    @property
    def limit(self) -> int | None:
        """Tokens of a text, at most; 0 reads the prompt only, None is as many as fit."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """How many alternatives the answer shows for each token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    @property
    def prompts(self) -> list[Any]:
        """Each a text or token ids. A chat has messages in their place."""
        return []

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt."""
        return False

    def params(self) -> SamplingParams:
        """The sampling parameters. Raises ValueError for invalid values, and for more than a limit of the server."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        echoed = self.alternatives if self.echoes else None
        for count, limit, what, name in (
            ((self.n or 1) * max(len(self.prompts), 1), MAX_CHOICES, "texts of one request", "n"),
            (self.depth or 0, MAX_DEPTH, "draft tokens a step", "num_speculative_tokens"),
            (len(stops), MAX_STOPS, "stop strings", "stop"),
            (max(map(len, stops), default=0), MAX_STOP_LENGTH, "characters in a stop string", "stop"),
            (self.alternatives or 0, MAX_LOGPROBS, "logprobs of one token", "logprobs"),
            (self.prompt_alternatives or 0, MAX_LOGPROBS, "prompt_logprobs of one token", "prompt_logprobs"),
            *(
                (len(getattr(self, name) or ()), MAX_ENTRIES, f"entries in {name}", name)
                for name in ("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids")
            ),
            (max(map(len, self.bad_words or ()), default=0), MAX_STOP_LENGTH, "characters in a bad word", "bad_words"),
        ):
            if count > limit:
                raise BadParameter(f"{str(count)[:20]} {what} are too many; this server takes {limit}", name)
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            if not re.fullmatch("[0-9]{1,19}", token) or not -100 <= value <= 100:
                got = f"{token[:20]!r}: {value:g}"
                raise BadParameter(f"logit_bias maps token ids to numbers in [-100, 100], got {got}", "logit_bias")
            bias[int(token)] = value
        values = {f.name: getattr(self, f.name, None) for f in fields(SamplingParams)} | {
            "max_tokens": None,
            "logit_bias": bias or None,
            "stop": stops or None,
            "logprobs": self.alternatives,
            "prompt_logprobs": max((x for x in (self.prompt_alternatives, echoed) if x is not None), default=None),
            "prediction": self.prediction and text_of(self.prediction.content, "prediction.content"),
        }
        return SamplingParams(max_tokens=self.limit or None, **{k: v for k, v in values.items() if v is not None})


# Fields that clients send and that change no answer here: they are of the bill, of a cache, of a store or of what this server
# does not have. They are not misspellings. The last line has fields of another route.
HARMLESS = {
    "metadata", "store", "service_tier", "verbosity", "safety_identifier", "prompt_cache_key", "length_penalty",
    "prompt_cache_retention", "max_tool_calls", "context_management", "cache_control", "inference_geo", "speed",
    "diagnostics", "user_profile_id", "stop_token", "client_metadata", "chat_template_kwargs", "reasoning_effort",
    "max_tokens", "max_completion_tokens", "prompt", "messages", "logprobs", "top_logprobs", "suffix",
}  # fmt: skip


class CompletionRequest(CommonRequest):
    """POST /v1/completions"""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    max_tokens: int | None = Field(16, ge=0, description="0 reads the prompt only, with echo or prompt_logprobs")
    suffix: str | None = Field(
        None, description="the text after a gap; the model writes what stands between prompt and it"
    )

    @field_validator("max_tokens")
    @classmethod
    def _something_to_do(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo") and info.data.get("prompt_logprobs") is None:
            raise ValueError(
                "Input should be greater than or equal to 1; 0 reads the prompt only: add echo or prompt_logprobs"
            )
        if value == 0 and info.data.get("min_tokens"):
            raise ValueError(f"min_tokens={info.data['min_tokens']} is more than max_tokens=0; raise max_tokens")
        return value

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> list[Any]:
        prompt = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions"""

    is_chat: ClassVar[bool] = True
    tool_form: ClassVar[ToolForm] = OPENAI
    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer has one call at most")
    modalities: list[Literal["text"]] | None = Field(None, description="of the answer: text")
    reasoning_effort: str | None = Field(
        None, description="for templates that take it; none keeps a model from thinking"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(None, description="whether the prompt ends with the mark of an answer")
    continue_final_message: bool | None = Field(None, description="the answer goes on from the last message's text")

    @model_validator(mode="before")
    @classmethod
    def _usual_tools(cls, data: Any) -> Any:
        return with_tools(data) if isinstance(data, dict) else data

    @field_validator("continue_final_message")
    @classmethod
    def _beside_the_mark(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("an answer that goes on has no mark of its own; leave out add_generation_prompt")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("without logprobs none are shown; send logprobs: true, too")
        return value

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def offer(self) -> ToolOffer | None:
        return offered(self.tools, self.tool_choice, self.parallel_tool_calls is not False, self.tool_form)

    @property
    def called(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().called | {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs"}


class TokenizeRequest(JsonObject):
    """POST /tokenize: a prompt, or messages with what `/v1/chat/completions` takes for its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="with the tokens that prompts begin with; a template writes them, so messages have none more"
    )
    return_token_strs: bool | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def chat(self) -> ChatRequest | None:
        """The chat whose prompt is asked for; None for a prompt. Raises ValueError unless it is one of them."""
        if (self.prompt is None) == (self.messages is None):
            raise BadParameter("give a prompt or messages, one of them", "prompt")
        names = set(type(self).model_fields) - {"model", "prompt", "add_special_tokens", "return_token_strs"}
        values = self.model_dump(include=names, exclude_none=True)
        if self.prompt is None:
            return ChatRequest.model_validate(values)
        for name in values:
            raise BadParameter(f"{name} is for messages, and a prompt is encoded as it is; leave it out", name)
        return None


class DetokenizeRequest(JsonObject):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def _number(value: Any, kinds: set[Any]) -> Any:
    """The number that a field of these types takes for a value; the value itself if there is none."""
    if isinstance(value, str) and str not in kinds and {int, float} & kinds and _NUMBER.fullmatch(value):
        value = json.loads(value)
    return int(value) if isinstance(value, float) and int in kinds and value.is_integer() else value
