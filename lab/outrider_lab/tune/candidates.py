"""What `outrider tune` tries of each method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import AUTO, LOWER_PRECISION, METHODS, NONE, PREDICTION, method_of, model_method

Configs = Mapping[str, dict[str, Any]]  # by name


@dataclass(frozen=True)
class TuneInputs:
    """What `outrider tune` was given. It decides which methods can be tried."""

    weights: str  # precision of the target's weights
    draft: str | None = None  # name of a draft model
    layers: str | None = None  # file of `outrider layers`
    predictions: bool = False  # whether a prompt brings a prediction
    mtp: bool = False  # whether the target's checkpoint holds an MTP layer


class Tried(NamedTuple):
    """What is tried of a method. One that is not in `TRIED` is tried as it is."""

    depth: int = 8  # the most draft tokens in a row
    configs: Callable[[TuneInputs], Configs] | None = None
    hint: str = ""  # what is needed to try it


def _nothing(inputs: TuneInputs) -> Configs:
    return {}


def _head(name: str, what: str, depth: int = 8) -> Tried:
    """what: it has in its folder."""
    return Tried(depth, lambda i: _with_model(name, i), f"name the folder of {what}, --draft-model FOLDER")


def _with_model(method: str, inputs: TuneInputs) -> Configs:
    """The candidate of a method that needs a model, if the model that was given is one of its own."""
    fits = inputs.draft is not None and model_method(inputs.draft) == method
    return {method: {"method": method, "model": inputs.draft}} if fits else {}


def _copies(inputs: TuneInputs) -> Configs:
    lower = LOWER_PRECISION.get(inputs.weights, ())
    return {f"quantized_self-{name}": {"method": "quantized_self", "quantization": name} for name in lower}


TRIED = {
    NONE: Tried(configs=_nothing, hint="the others are compared with it"),
    AUTO: Tried(configs=_nothing, hint="it is made of the others"),
    "draft_model": Tried(configs=lambda i: _with_model("draft_model", i)),
    "eagle": _head("eagle", "a head", 7),
    "peagle": _head("peagle", "a P-EAGLE head", 7),
    "mtp": Tried(4, lambda i: {"mtp": {"method": "mtp"}} if i.mtp else {}, "the model's files hold no MTP layer"),
    "medusa": _head("medusa", "Medusa heads", 4),
    "dflash": _head("dflash", "a block drafter"),
    "dspark": _head("dspark", "a block drafter"),
    # a level costs about half a forward pass of the target
    "quantized_self": Tried(4, _copies, "no weights are cheaper to read than the model's own"),
    "layer_skip": Tried(
        configs=lambda i: {"layer_skip": {"method": "layer_skip", "layers": i.layers}} if i.layers else {},
        hint="name the layers, --layers FILE",
    ),
    PREDICTION: Tried(
        16, lambda i: {PREDICTION: {"method": PREDICTION}} if i.predictions else {}, "no prompt has a prediction"
    ),
    "suffix": Tried(16),
    "ngram": Tried(16),
}


def deepest(drafters: Iterable[str]) -> int:
    """The most draft tokens in a row that are tried of some drafters."""
    return max((TRIED.get(name, Tried()).depth for name in drafters if method_of(name)), default=8)


def candidates(inputs: TuneInputs, wanted: list[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """Names and configurations to try. Raises ValueError for a method that is unknown, or that lacks an input.

    wanted: methods that the user named, None for all.
    """
    out = list[tuple[str, dict[str, Any]]]()
    for name in wanted or METHODS:
        if wanted:
            SpeculativeConfig.of({"method": name, **({"model": inputs.draft} if inputs.draft else {})})
        tried = TRIED.get(name, Tried())
        some = {name: {"method": name}} if tried.configs is None else tried.configs(inputs)
        if wanted and not some:
            raise ValueError(f"--method {name} is nothing to tune here: {tried.hint}")
        out += some.items()
    return out
