"""The options that commands share, and the way a command takes a group of them. Imports nothing large.

A group is a dataclass. Each field is one option: its annotation is typer's, with type, heading and help text. `grouped` lets a
command take a group as one argument, and typer sees the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.drafters.registry import AUTO, METHODS, owner

if TYPE_CHECKING:
    from outrider.params import SamplingParams
    from outrider.trace import Recorder

CODE, CODE_DRAFT = "builtin:code", "builtin:code-draft"
WIDE = "builtin:code-160M"
CHAT = "builtin:smollm2-135m"
"""The built-in model at the cost of 160 million weights. builtin:code itself is too small for a speedup."""


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """A typer option under a heading of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see each field of a command's option groups as a parameter of its own.

    The order of the parameters, and of the fields in a group, is the order in the help page. Raises ValueError if two
    groups have a field of the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = list[Parameter](), dict[str, Any]()
    for name, parameter in signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        groups[name] = group = hints[name]
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])
            )

    @wraps(command)
    def run(**given: Any) -> Any:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        return command(**given, **made)

    run.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


# -- single options -------------------------------------------------------------------------------------------------------

_MODEL = "A folder, a GGUF file, a hub name or a built-in model."
Model = Annotated[str, option("Model", _MODEL, "--model", "-m")]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
ModelInstead = Annotated[str | None, option("Model", "The same as the argument MODEL.", "--model", "-m")]
Dtype = Annotated[str, option("Model", "auto (as in the checkpoint), float32, bfloat16 or float16.")]
Device = Annotated[str, option("Model", "auto, cpu or cuda.")]
Quantization = Annotated[str | None, option("Model", "int8 or int4 weights, on the CPU.")]
KvCacheDtype = Annotated[
    str, option("Model", "Keys and values: auto (float32 on the CPU), bfloat16, or int8 with 28 % of the memory.")
]
DraftModel = Annotated[
    str | None,
    option(
        "Speculation",
        "A small model, or the folder of a trained head, that drafts.",
        "--draft-model",
        "-d",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    option(
        "Speculation",
        "Draft tokens in a row, at most; without it, as many as help.",
        "--num-speculative-tokens",
        "-k",
    ),
]
ApiKey = Annotated[
    str | None, option("Server", "The key of the server; better set by the variable.", envvar="OUTRIDER_API_KEY")
]
Debug = Annotated[bool, option("Output", "Show the traceback of an error.", "--debug")]


# -- groups ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionOptions:
    """How the weights of a model are kept. The names are those of `load`."""

    dtype: Dtype = "auto"
    quantization: Quantization = None


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. The names are those of `load` and `LLM`."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"


@dataclass(frozen=True)
class ModelOptions:
    """A model and how it is loaded. The names are those of `LLM`."""

    model: Model = CODE
    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: Annotated[int | None, option("Model", "Tokens of prompt and output together, at most.")] = None


_SHAPE = ("num_speculative_tokens", "tree_width", "tree_nodes", "verifier")


@dataclass(frozen=True)
class SpeculationOptions:
    """How to speculate: single options, or one JSON object in their place."""

    method: Annotated[
        str | None, option("Speculation", "How to draft; `outrider methods` lists the ways. Default: auto.")
    ] = None
    draft_model: DraftModel = None
    num_speculative_tokens: NumSpeculativeTokens = None
    tree_width: Annotated[
        int, option("Speculation", "Children of a node in the draft tree, at most; 1 is a chain.")
    ] = 1
    tree_nodes: Annotated[int | None, option("Speculation", "Draft tokens in a step, at most.")] = None
    corpus: Annotated[
        list[str] | None,
        option("Speculation", "A file or folder of texts for suffix. May be repeated.", metavar="PATH"),
    ] = None
    verifier: Annotated[
        str,
        option(
            "Speculation",
            "match: the same tokens as plain decoding. rejection, block, traversal: the same distribution of texts.",
        ),
    ] = "match"
    speculative_config: Annotated[
        str | None,
        option("Speculation", "All of this as JSON or a file, in place of these options.", metavar="JSON|FILE"),
    ] = None

    def config(self, model: str) -> dict[str, Any]:
        """The speculative_config for a model; `auto` without a method and a draft model. Raises ValueError for options that
        exclude another."""
        method = self.method
        if method is None and self.draft_model is None and self.speculative_config is None:
            own = owner(self._key())
            # another verifier has drafts of fixed length, for which one drafter is better than the choice of all
            usual = None if self.verifier != "match" and own_draft(model) else AUTO
            method = own.name if own else usual
        config = self._config(model, method)
        return {**config, "corpus": self.corpus} if self.corpus else config

    def _key(self) -> str:
        """The key of the configuration that alone names its method."""
        return "corpus" if self.corpus else ""

    def _config(self, model: str, method: str | None) -> dict[str, Any]:
        draft = self.draft_model
        if self.speculative_config is not None:
            for name in self._given("method", "draft_model", *_SHAPE):
                given = f"--{name.replace('_', '-')}"
                raise ValueError(f"--speculative-config replaces {given}; give one or the other")
            return parse_speculative_config(self.speculative_config)
        needs_model = method is None or (method in METHODS and METHODS[method].needs_model)
        if draft is not None and not needs_model and method != AUTO:
            raise ValueError(f"--method {method} uses no draft model; leave out --draft-model {draft} or --method")
        if needs_model and not (method in METHODS and METHODS[method].heads):
            draft = draft or own_draft(model)
        config: dict[str, Any] = {} if method is None else {"method": method}
        config |= self._given(*_SHAPE)
        return config if draft is None else {**config, "model": draft}

    def _given(self, *names: str) -> dict[str, Any]:
        """Those of these options that the user gave."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != getattr(SpeculationOptions, name)}


@dataclass(frozen=True)
class PromptSpeculationOptions(SpeculationOptions):
    """How to speculate on one prompt, whose answer may be known in part."""

    prediction: Annotated[
        Path | None, option("Speculation", "A text file that the answer will mostly repeat, for prediction.")
    ] = None

    def predicted_text(self) -> str | None:
        """The text of --prediction. Raises ValueError if the file is not text."""
        if self.prediction is None:
            return None
        try:
            return self.prediction.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"--prediction {self.prediction} is not UTF-8 text; name the text that the answer will repeat"
            ) from None

    def _key(self) -> str:
        return "prediction" if self.prediction else super()._key()


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when a text ends. The names are those of `SamplingParams`."""

    temperature: Annotated[float, option("Sampling", "0 is greedy.", "--temperature", "-t")] = 0.0
    top_p: Annotated[float, option("Sampling", "1 is off.")] = 1.0
    top_k: Annotated[int, option("Sampling", "0 is off.")] = 0
    min_p: Annotated[float, option("Sampling", "0 is off.")] = 0.0
    repetition_penalty: Annotated[float, option("Sampling", "1 is off.")] = 1.0
    max_tokens: Annotated[int, option("Sampling", "Tokens to generate, at most.", "--max-tokens", "-n")] = 128
    stop: Annotated[list[str] | None, option("Sampling", "A text to stop at. May be repeated.", metavar="<str>")] = None
    ignore_eos: Annotated[bool, option("Sampling", "Continue after the end token.", "--ignore-eos")] = False
    seed: Annotated[int | None, option("Sampling", "Without it, a seed is drawn and shown.")] = None

    def params(self, seed: int, prediction: str | None = None) -> SamplingParams:
        """The same as `SamplingParams`. seed: used if the user gave none."""
        from outrider.params import SamplingParams

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= {"stop": self.stop or (), "seed": seed if self.seed is None else self.seed}
        return SamplingParams(**given, prediction=prediction)


@dataclass(frozen=True)
class TraceOptions:
    """Whether to write a trace, and how much it holds."""

    trace: Annotated[
        Path | None, option("Output", "Write every step to this file, for outrider replay.", metavar="FILE")
    ] = None
    trace_detail: Annotated[
        str | None,
        option(
            "Output",
            "counts: numbers only; usual for serve. tokens: also the token ids of prompts, drafts and texts, so the file "
            "reveals them; usual for generate. probs: also the probabilities of the likeliest tokens.",
            "--trace-detail",
            metavar="counts|tokens|probs",
        ),
    ] = None

    def recorder(self, usual: str) -> Recorder | None:
        """The recorder, or None without --trace. usual: the detail if the user gave none. Raises ValueError for a detail
        without a file."""
        if self.trace is None:
            if self.trace_detail is not None:
                detail = self.trace_detail
                raise ValueError(f"--trace-detail {detail} needs a file: --trace run.jsonl --trace-detail {detail}")
            return None
        from outrider.trace import Recorder

        return Recorder(self.trace, self.trace_detail or usual)


# -- what options mean ----------------------------------------------------------------------------------------------------


def one_model(argument: str | None, named: str | None) -> str:
    """The model of a command that takes it as its argument or as --model. Raises ValueError for none, and for two."""
    model = argument or named
    if model is None:
        raise ValueError(f"name a model: a folder, a GGUF file, a hub name or a built-in model, such as {CODE}")
    if argument and named:
        raise ValueError(f"two models, {argument} and --model {named}; give one of them")
    return model


def own_draft(model: str) -> str | None:
    """The draft model that a built-in model brings; None for all other models."""
    return CODE_DRAFT if model.startswith(CODE) and model != CODE_DRAFT else None


def parse_speculative_config(given: str) -> dict[str, Any]:
    """Read a speculative_config from JSON or from a file that holds it. Raises ValueError if it is neither."""
    example = 'an example: \'{"method": "suffix"}\', or a file with it, as outrider tune writes'
    path = Path(given)
    is_file = not given.lstrip().startswith(("{", "[")) and path.is_file()
    try:
        config = json.loads(path.read_text(encoding="utf-8") if is_file else given)
    except ValueError as error:
        where, other = (f" in {given}", "") if is_file else ("", " and names no file")
        raise ValueError(f"--speculative-config{where} is not JSON ({error}){other}; {example}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config must be a JSON object, got {given}; {example}")
    return config
