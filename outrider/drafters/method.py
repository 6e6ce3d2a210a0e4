"""What the package knows of a drafting method: the form of a row of `outrider.drafters.registry`.

This module imports no torch: the command line lists the methods before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.drafters.config import SpeculativeConfig
    from outrider.models.load import Loaded

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
class DrafterSetup:
    """What a drafter is made for.

    rows: sequences in a batch, at most. max_length: tokens of a sequence, at most. device: "cpu", "cuda" or "auto".
    """

    config: SpeculativeConfig
    target: Loaded
    rows: int
    max_length: int
    device: str


@dataclass(frozen=True)
class TuneInputs:
    """What `outrider tune` was given. It decides which methods can be tried.

    weights: precision of the target's weights. draft: name of a draft model. layers: file of `outrider layers`.
    predictions: whether a prompt brings a prediction. mtp: whether the target's checkpoint holds an MTP layer.
    """

    weights: str
    draft: str | None = None
    layers: str | None = None
    predictions: bool = False
    mtp: bool = False


@dataclass(frozen=True)
class EngineExport:
    """How another engine runs a method.

    flags: its settings for a configuration: keys of vLLM's `--speculative-config`, keys of TensorRT-LLM's
    `speculative_config`, or command line flags. notes: what that engine does differently, and the effect.
    """

    flags: Callable[[SpeculativeConfig], Mapping[str, Any]]
    notes: Callable[[SpeculativeConfig], Sequence[str]] = lambda config: ()


@dataclass(frozen=True)
class DraftMethod:
    """A drafting method: all that the other modules know about it.

    make: makes the drafter. Raises ValueError if the method cannot draft for the target.
    cost: what one level of a draft costs; None derives it from the drafter (`level_cost`).
    default_depth: draft tokens in a row where the user gives no number. tune_depth: the most that `outrider tune` tries.
    chains: the name of its chains among the shipped ones, if that does not depend on what a level costs.
    keys: the keys of `SpeculativeConfig` that only this method reads. A new method can read `options` and needs no key.
    needs_model: the key `model` must name its draft model. heads: the kinds of trained heads that it reads, as
    `outrider.drafters.heads.files` names them; then `model` names the folder of one.
    per_request: a request to a server can choose it, whatever the server's own method is.
    auto: whether the method "auto" uses it for this target; None if never.
    candidates: the configurations that `outrider tune` tries, by name. tune_hint: what it needs to try one.
    requires: what must be there besides the model, in a few words; a draft model or a head need not be named.
    exports: for a method of another package, how engines run it, by the names of `outrider.integrations.engines.ENGINES`.
    """

    name: str
    help: str
    make: Callable[[DrafterSetup], Drafter]
    cost: Cost | None = None
    default_depth: int = 5
    tune_depth: int = 8
    chains: Literal["head", "self", ""] = ""
    keys: tuple[str, ...] = ()
    needs_model: bool = False
    heads: tuple[str, ...] = ()
    per_request: bool = False
    auto: Callable[[DrafterSetup], bool] | None = None
    candidates: Callable[[TuneInputs], Mapping[str, dict[str, Any]]] | None = None
    tune_hint: str = ""
    requires: str = ""
    exports: Mapping[str, EngineExport] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What must be there besides the model, in a few words; `nothing`, or how to give it."""
        model = "-d FOLDER, a trained head" if self.heads else "-d MODEL"
        return self.requires or (model if self.needs_model else "nothing")

    def tune_candidates(self, inputs: TuneInputs) -> Mapping[str, dict[str, Any]]:
        """The configurations to try, by name."""
        return {self.name: {"method": self.name}} if self.candidates is None else self.candidates(inputs)


def made_by(module: str, function: str = "from_setup") -> Callable[[DrafterSetup], Drafter]:
    """The maker in a drafter's own file. The file is imported when a drafter is made.

    module: below `outrider.drafters`. function: its function (setup) -> Drafter, which raises ValueError for a target that the
    method cannot draft for.
    """

    def make(setup: DrafterSetup) -> Drafter:
        return getattr(import_module(f"outrider.drafters.{module}"), function)(setup)

    return make
