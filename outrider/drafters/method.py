"""The drafting methods: one row for each.

To add a method, write its drafter in one file, with a function `from_setup` that makes it, and add one row to `METHODS`. The
configuration, the help texts and `auto` read the rows. A package can offer a method by an entry point (`find`).

This module does not import numpy: the command line lists the methods before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.models.base import LanguageModel

PLUGINS = "outrider.drafters"
"""The entry point group in which other packages name their methods."""

NONE, AUTO, PREDICTION = "none", "auto", "prediction"
"""The methods that stand for no drafter, for all that help, and for the text that a request expects."""

LOWER_PRECISION = {
    "float32": ("int8", "int4"),
    "bfloat16": ("int8", "int4"),
    "float16": ("int8", "int4"),
    "int8": ("int4",),
    "gguf": ("int4",),  # files of 8 bits gain; those of 4 do not
}
"""Weights of a model -> the weights of a copy that is cheaper to read, and so can draft for it."""

Cost = Literal["lookup", "model", "self"]
"""What one level of a draft costs. lookup: no forward pass. model: a forward pass of other weights, a draft model or a
quantized copy. self: a forward pass through some of the target's own layers."""


@dataclass(frozen=True)
class DraftMethod:
    """A drafting method: all that the other modules know about it."""

    name: str  # the value of `method` in a configuration
    help: str  # one line for the list of methods
    # makes the drafter from a `DrafterSetup`. Raises ValueError if the method cannot draft for the target
    make: Callable[[Any], Drafter]
    cost: Cost | None = None  # what one level of a draft costs; None derives it from the drafter (`level_cost`)
    default_depth: int = 5  # draft tokens in a row where the user gives no number
    # keys of `SpeculativeConfig` that only this method reads. A new method can read `options` and needs no key
    keys: tuple[str, ...] = ()
    needs_model: bool = False  # the key `model` must name its draft model
    # kinds of trained heads that it reads, by their names in `heads.files`. Then `model` is the folder of one
    heads: tuple[str, ...] = ()
    per_request: bool = False  # a request to a server can choose it, whatever the server's own method is
    auto: Callable[[Any], bool] | None = None  # whether the method "auto" uses it for a setup; None if never
    # what must be there besides the model, in a few words; a draft model or a head need not be named
    requires: str = ""

    @property
    def needs(self) -> str:
        """What must be there besides the model, in a few words; `nothing`, or how to give it."""
        model = "-d FOLDER, a trained head" if self.heads else "-d MODEL"
        return self.requires or (model if self.needs_model else "nothing")


def made_by(module: str, function: str = "from_setup") -> Callable[[Any], Drafter]:
    """The maker in a drafter's own file. The file is imported when a drafter is made.

    Args:
        module: Below `outrider.drafters`.
        function: Its function (setup) -> Drafter. It raises ValueError for a target that the method cannot draft for.
    """

    def make(setup: Any) -> Drafter:
        return getattr(import_module(f"outrider.drafters.{module}"), function)(setup)

    return make


class FileEntry(EntryPoint):
    """A drafter of a Python file. Its name is FILE.py:NAME."""

    def load(self) -> Any:
        file, _, name = self.value.rpartition(":")
        return getattr(_module(Path(file).expanduser().resolve()), name)


@cache
def _module(file: Path) -> ModuleType:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offered(name: str) -> EntryPoint | None:
    """What makes the drafters of a method that is not built in: an entry point of a package, or a name in a Python file."""
    if name in METHODS:
        return None
    return FileEntry(name, name, PLUGINS) if ".py:" in name else plugins().get(name)


def canonical(name: str) -> str:
    """A method's name as the table has it: a hyphen may stand for an underscore, and eagle3 is vLLM's name of eagle."""
    if name in METHODS or offered(name) is not None:
        return name
    name = name.replace("-", "_")
    return {"eagle3": "eagle"}.get(name, name)


def find(name: str) -> DraftMethod:
    """The method of that name, built in or offered. Raises KeyError if there is none.

    What is offered is a `DraftMethod`, or a function `(setup, **options) -> Drafter`. One that cannot be imported is
    reported when the drafter is made.
    """
    entry = offered(name)
    if entry is None:
        return METHODS[name]
    try:
        loaded: Any = entry.load()
    except Exception:
        loaded = None  # it raises again when the drafter is made
    if isinstance(loaded, DraftMethod):
        return replace(loaded, name=name)
    return DraftMethod(name, f"from {entry.value}", partial(_checked, entry))


def plugins() -> dict[str, EntryPoint]:
    """The methods that installed packages offer: name -> entry point."""
    return {entry.name: entry for entry in entry_points(group=PLUGINS) if entry.name not in METHODS}


def owner(key: str) -> DraftMethod | None:
    """The built-in method that alone reads this key of the configuration."""
    return next((method for method in METHODS.values() if key in method.keys), None)


def model_method(model: Any = None) -> str:
    """The method of a configuration with the key `model` alone: that of a trained head's folder, else of a draft model."""
    if isinstance(model, (str, Path)) and (Path(model).expanduser() / "config.json").is_file():
        from outrider.drafters.heads.files import head_kind

        kind = head_kind(model)
        for name, method in METHODS.items():
            if kind in method.heads:
                return name
    return next(name for name, method in METHODS.items() if method.needs_model and not method.heads)


def _checked(entry: EntryPoint, setup: Any) -> Drafter:
    """Make a drafter that is offered. Raises ValueError if that fails or gives no drafter."""
    from outrider.drafters.base import Drafter

    try:
        make = entry.load()
        first = next(iter(signature(make).parameters.values()), None)
        needs_setup = first is not None and first.default is first.empty and first.kind is not first.VAR_KEYWORD
        drafter = make(*[setup][:needs_setup], **setup.config.options)
    except Exception as error:
        raise ValueError(
            f"the drafter {entry.name!r} ({entry.value}) cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"the drafter {entry.name!r} ({entry.value}) returned a {type(drafter).__name__}, which is not a drafter. Derive it "
            "from outrider.drafters.BaseDrafter and write `propose`"
        )
    return drafter


def method_of(drafter: str) -> DraftMethod | None:
    """The method of a drafter that `make_drafters` named; None for a drafter of the caller."""
    return find(drafter) if drafter in METHODS or offered(drafter) else None


def lookup_names(drafters: Iterable[str]) -> list[str]:
    """The drafters that propose at next to no cost."""
    return [name for name in drafters if (method := method_of(name)) is not None and method.cost == "lookup"]


def level_cost(name: str, drafter: Drafter, target: LanguageModel) -> float:
    """Cost of one draft level, in forward passes of the target, from the number of weights: until it is measured."""
    method, model = method_of(name), drafter.resources().model
    if method is not None and (method.cost == "lookup" or (method.cost is None and model is None)):
        return 0.0
    if method is not None and method.cost == "self":
        return model.num_layers / target.num_layers
    draft, whole = getattr(model, "weight_bytes", 0), target.weight_bytes
    return draft / whole if draft and whole else 0.25


# -- what the rows ask ----------------------------------------------------------------------------------------------------


def _none(setup: Any) -> Drafter:
    raise ValueError(f"{setup.config.method!r} is no drafter")


def _brings_draft(setup: Any) -> bool:
    if setup.config.model is not None:
        return model_method(setup.config.model) == "draft_model"
    return setup.target.name == "builtin:code"


def brings(method: str, setup: Any) -> bool:
    """Whether there is a head of this method for the target."""
    from outrider.drafters.heads.files import head_of

    head = head_of(setup.config.model, setup.target.name)
    return head is not None and model_method(head) == method


def _has_lower_precision(setup: Any) -> bool:
    from outrider.kernels import cpu as native

    lower = LOWER_PRECISION.get(setup.target.weights, ())
    return setup.config.copy_weights in lower and setup.target.model.device == "cpu" and native.available()


def _head(
    name: str, text: str, file: str = "", maker: str = "from_setup", heads: tuple[str, ...] = (), **more: Any
) -> DraftMethod:
    """The row of a method with a trained head. heads: kinds that it reads, if not its name alone."""
    return DraftMethod(
        name,
        text,
        made_by(f"heads.{file or name}", maker),
        cost="model",
        needs_model=True,
        heads=heads or (name,),
        auto=partial(brings, name),
        **more,
    )


METHODS = {
    row.name: row
    for row in (
        DraftMethod(NONE, "plain decoding, without draft tokens", _none),
        DraftMethod(
            AUTO, "the methods that fit this model, chosen at each step; start with this one", _none, default_depth=16
        ),
        DraftMethod(
            "draft_model",
            "a smaller model of the same family; helps any text if it is ten times smaller and often right",
            made_by("model.cross_tokenizer"),
            cost="model",
            needs_model=True,
            keys=("draft_vocab", "draft_vocab_corpus"),
            auto=_brings_draft,
        ),
        _head(
            "eagle",
            "a trained EAGLE-3 or EAGLE-1 head, which reads the model's own layers; helps any text at a few percent of a step",
            heads=("eagle3", "eagle1"),
        ),
        _head(
            "peagle",
            "a trained P-EAGLE head, which drafts all tokens of a step in one forward pass",
            file="eagle",
            maker="parallel_from_setup",
        ),
        DraftMethod(
            "mtp",
            "the MTP layer of the model's own files (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5); nothing else is needed",
            made_by("heads.mtp"),
            cost="model",
            auto=lambda setup: setup.config.model is None and setup.target.has_mtp,
            requires="an MTP layer in the model's files",
        ),
        _head(
            "medusa",
            "trained Medusa heads: each predicts one later token from the model's last state; cheap, and right less often",
        ),
        _head(
            "dflash",
            "a trained DFlash or DFlash2 drafter, which drafts a block of tokens in one forward pass",
            file="block",
            heads=("dflash", "dflash2"),
            default_depth=7,
        ),
        _head(
            "dspark",
            "a trained DSpark drafter: a block in one pass, then each token corrected by the one before it",
            file="block",
            default_depth=7,
        ),
        DraftMethod(
            "quantized_self",
            "an int8 or int4 copy of the model itself; helps without a second model where memory bandwidth is the limit",
            made_by("model.self_speculation", "quantized_from_setup"),
            cost="model",
            auto=_has_lower_precision,
            requires="a CPU, and weights of more than 4 bits",
        ),
        DraftMethod(
            "layer_skip",
            "some of the model's own layers; helps where a search finds layers that the model can skip (outrider layers)",
            made_by("model.self_speculation", "layer_skip_from_setup"),
            cost="self",
            keys=("layers",),
            requires='"layers", as outrider layers finds them',
        ),
        DraftMethod(
            PREDICTION,
            "a text that you expect the answer to repeat; helps edits of a file",
            made_by("lookup.prediction"),
            cost="lookup",
            default_depth=16,
            keys=("prediction",),
            per_request=True,
            auto=lambda setup: True,
            requires="--prediction FILE, or one in each request",
        ),
        DraftMethod(
            "suffix",
            "text seen before: in this text, in other answers or in a corpus; helps edits, agents and structured output",
            made_by("lookup.suffix"),
            cost="lookup",
            default_depth=16,
            keys=("corpus", "corpus_tokens", "suffix_shared_tokens", "suffix_decoding_min_token_prob"),
            per_request=True,
            auto=lambda setup: True,
        ),
        DraftMethod(
            "ngram",
            "prompt lookup; helps where the answer quotes its prompt",
            made_by("lookup.ngram"),
            cost="lookup",
            default_depth=10,
            keys=("prompt_lookup_min", "prompt_lookup_max"),
            per_request=True,
        ),
        DraftMethod(
            "token_recycling",
            "likely successors of each token so far; helps any text a little, without a second model",
            made_by("lookup.token_recycling"),
            cost="lookup",
        ),
    )
}
"""The built-in methods by name, in the order in which they are listed."""
