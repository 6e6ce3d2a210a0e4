"""What the package knows of a drafting method, and the table of them, which `outrider.drafters.registry` fills.

The registry is imported with the package `outrider.drafters`, so the table is never empty.

This module imports no torch: the command line lists the methods before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
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


METHODS: dict[str, DraftMethod] = {}
"""The built-in methods by name, in the order in which they are listed."""


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
    entry = FileEntry(name, name, PLUGINS) if ".py:" in name else None
    return None if name in METHODS else entry or plugins().get(name)


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
