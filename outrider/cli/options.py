"""The options that commands share. Imports nothing large."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

import typer
from pydantic import AfterValidator, create_model, model_validator

from outrider.cli.terminal import readable
from outrider.core.docstrings import arguments
from outrider.core.params import RANGES, SamplingParams
from outrider.core.suggest import did_you_mean
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import AUTO, METHODS, canonical, owner
from outrider.serve.options import Options, setting

if TYPE_CHECKING:
    from outrider.engine.trace import Recorder

CODE, CODE_DRAFT = "builtin:code", "builtin:code-draft"
NO_MODEL = f"name a model: a folder, a GGUF file, a hub name or a built-in model, such as {CODE}"


# -- single options -------------------------------------------------------------------------------------------------------


def canonical_names(given: Any) -> Any:
    """The names of methods as the table has them; None stays."""
    return canonical(given) if isinstance(given, str) else given and [*map(canonical, given)]


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take the options of a TOML file as defaults of the command. Its keys are the names of the options."""
    if file is not None:
        with readable(False):
            context.default_map = _options_of(file, context.command.params)
    return file


def _options_of(file: Path, parameters: list[Any]) -> dict[str, Any]:
    """What a file says, by the names of parameters. Values are words of the command line, so the same limits hold for them.

    Raises ValueError for what no option is.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--config {file} is not TOML ({error}); a line of it: port = 8000") from None
    options = {one.name: one for one in parameters if one.param_type_name == "argument"}
    for one in parameters:
        options |= {
            name[2:].replace("-", "_"): one for name in one.opts if name.startswith("--") and name[2:] not in options
        }
    del options["config"]
    out = dict[str, Any]()
    for key, value in table.items():
        if (one := options.get(key.replace("-", "_"))) is None:
            raise ValueError(f"--config {file}: there is no option {key!r}{did_you_mean(key, options)}")
        words = [_word(file, key, v, one) for v in (value if isinstance(value, list) else [value])]
        if len(words) != 1 and not (one.multiple if one.param_type_name == "option" else one.nargs == -1):
            raise ValueError(f"--config {file}: {key} takes one value, got {len(words)}")
        out[one.name] = words if isinstance(value, list) or one.nargs == -1 or one.multiple else words[0]
    return out


def _word(file: Path, key: str, value: Any, one: Any) -> str:
    """A value of a file as the command line has it."""
    if isinstance(value, dict) and key.replace("-", "_") != "speculative_config":
        raise ValueError(f"--config {file}: only speculative_config may be a table, and {key} is one")
    if isinstance(value, bool) != bool(getattr(one, "is_flag", False)):
        words = "true and false are for options without a value, and only they"
        raise ValueError(f"--config {file}: {key} = {json.dumps(value)}: {words}")
    return value if isinstance(value, str) else json.dumps(value, default=str)


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of options; the command line goes before it.",
        rich_help_panel="Server",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
    ),
]


# -- groups ---------------------------------------------------------------------------------------------------------------


class SampledOptions(Options):
    """Options of `SamplingParams`. Raises ValueError for a value out of range."""

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        values = {name: getattr(self, name, None) for name in RANGES}
        SamplingParams(**{name: value for name, value in values.items() if value is not None})
        return self


def sampling(panel: str, **defaults: Any) -> Any:
    """A group of options of `SamplingParams`. defaults: by name, in the order of the help page."""
    kinds, said = get_type_hints(SamplingParams) | {"stop": list[str] | None}, arguments(SamplingParams)
    members: Any = {n: (kinds[n], setting(default, panel, said[n].text)) for n, default in defaults.items()}
    return create_model("OptionGroup", __base__=SampledOptions, **members)


def _configured(name: str) -> Any:
    """An option of `SpeculativeConfig`, with its default and its words."""
    said = arguments(SpeculativeConfig)[name].text
    return setting(SpeculativeConfig.model_fields[name].default, "Speculation", said)


_SHAPE = ("num_speculative_tokens", "tree_width", "tree_nodes", "verifier")
"""Options that say how large a draft is and how it is checked."""


class SpeculationOptions(Options):
    """How to speculate: single options, or one JSON object in their place."""

    method: Annotated[str | None, AfterValidator(canonical_names)] = setting(
        None, "Speculation", "How to draft: `outrider methods`, or your own FILE.py:NAME. Default: auto."
    )
    draft_model: str | None = setting(
        None, "Speculation", "A small model, or the folder of a trained head, that drafts."
    )
    num_speculative_tokens: int | None = _configured("num_speculative_tokens")
    tree_width: int | None = _configured("tree_width")
    tree_nodes: int | None = _configured("tree_nodes")
    verifier: str = _configured("verifier")
    corpus: list[str] | None = setting(
        None, "Speculation", "A file or folder of texts for suffix. May be repeated.", metavar="PATH"
    )
    speculative_config: str | None = setting(
        None, "Speculation", "All of this as JSON or a file, in place of these options.", metavar="JSON|FILE"
    )

    def config(self, model: str) -> dict[str, Any]:
        """The speculative_config for a model; `auto` without a method and a draft model. Raises ValueError for options that
        exclude another."""
        chosen = self.model_dump(include={"method", "draft_model", *_SHAPE}, exclude_defaults=True)
        corpus = {"corpus": self.corpus} if self.corpus else {}
        if self.speculative_config is not None:
            for name in chosen:
                raise ValueError(f"--speculative-config replaces --{name.replace('_', '-')}; give one or the other")
            return {**parse_speculative_config(self.speculative_config), **corpus}
        method, draft = self.method, self.draft_model
        if method is None and draft is None:
            # a key of the configuration that alone names its method
            named = owner(next((key for key in ("prediction", "corpus") if getattr(self, key, None)), ""))
            # another verifier has drafts of fixed length, for which one drafter is better than the choice of all
            usual = None if self.verifier != "match" and own_draft(model) else AUTO
            method = named.name if named else usual
        entry = METHODS.get(method or "")
        needs_model = method is None or (entry is not None and entry.needs_model)
        if draft is not None and not needs_model and method != AUTO:
            raise ValueError(f"--method {method} uses no draft model; leave out --draft-model {draft} or --method")
        if needs_model and not (entry and entry.heads):
            draft = draft or own_draft(model)
        shape = {name: value for name, value in chosen.items() if name in _SHAPE}
        return {k: v for k, v in {"method": method, **shape, "model": draft, **corpus}.items() if v is not None}


class ServedSpeculationOptions(SpeculationOptions):
    """How to speculate for each model of a server."""

    speculative_config: list[str] | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None,
        "Speculation",
        "All of this as JSON or a file, in place of these options. Of one of several models: NAME=JSON|FILE.",
        metavar="JSON|FILE",
    )

    def configs(self, models: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The speculative_config of each model, by the name that clients use. models: what to load, by that name.

        Raises ValueError for options that exclude another, and for a name that no model has.
        """
        named, everyone = dict[str, str](), list[str]()
        for text in self.speculative_config or ():
            name, equal, rest = text.partition("=")
            if name in models:
                named[name] = rest
            elif equal and not text.lstrip().startswith("{") and not Path(text).is_file():
                raise ValueError(
                    f"--speculative-config {name}=...: no model has this name; they are {', '.join(models)}"
                )
            else:
                everyone.append(text)
        if len(everyone) > 1:
            raise ValueError(
                "--speculative-config is given twice; for one of several models write NAME=JSON or NAME=FILE"
            )
        if len(models) > 1 and self.draft_model is not None:
            name = next(iter(models))
            raise ValueError(
                f"--draft-model {self.draft_model} drafts for one model, and there are {len(models)}; name the model: "
                f"--speculative-config '{name}={json.dumps({'model': self.draft_model})}'"
            )
        shared = self.model_dump(exclude={"speculative_config"}) | {"speculative_config": next(iter(everyone), None)}
        chosen: dict[str, dict[str, Any]] = {
            name: {"speculative_config": named[name]} if name in named else shared for name in models
        }
        return {name: SpeculationOptions(**chosen[name]).config(model) for name, model in models.items()}


class PromptSpeculationOptions(SpeculationOptions):
    """How to speculate on one prompt, whose answer may be known in part."""

    prediction: Path | None = setting(
        None, "Speculation", "A text file that the answer will mostly repeat, for prediction."
    )

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


_USUAL: Any = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 128}
_USUAL |= {"stop": None, "ignore_eos": False, "seed": None}


class SamplingOptions(sampling("Sampling", **_USUAL)):
    """How tokens are chosen and when a text ends."""

    def params(self, seed: int, prediction: str | None = None) -> SamplingParams:
        """The same as `SamplingParams`. seed: used if the user gave none."""
        values = {**dict(self), "stop": self.stop or (), "seed": seed if self.seed is None else self.seed}
        return SamplingParams(**values, prediction=prediction)


class TraceOptions(Options):
    """Whether to write a trace, and how much it holds."""

    trace: Path | None = setting(None, "Output", "Write every step to this file, for outrider replay.", metavar="FILE")
    trace_detail: str | None = setting(
        None,
        "Output",
        "counts: numbers only; usual for serve. tokens: also the token ids of prompts, drafts and texts, so the file "
        "reveals them; usual for generate. probs: also the probabilities of the likeliest tokens.",
        metavar="counts|tokens|probs",
    )

    def recorder(self, usual: str) -> Recorder | None:
        """The recorder, or None without --trace. usual: the detail if the user gave none. Raises ValueError for a detail
        without a file."""
        if self.trace is None:
            if self.trace_detail is not None:
                detail = self.trace_detail
                raise ValueError(f"--trace-detail {detail} needs a file: --trace run.jsonl --trace-detail {detail}")
            return None
        from outrider.engine.trace import Recorder

        return Recorder(self.trace, self.trace_detail or usual)


# -- what options mean ----------------------------------------------------------------------------------------------------


def own_draft(model: str) -> str | None:
    """The draft model that a built-in model brings; None for all other models."""
    return CODE_DRAFT if model == CODE else None


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
