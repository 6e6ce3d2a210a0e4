"""Old names of the public Python API. They work for one release and warn. Imports nothing of the package.

`MODULES` lists modules that moved. `NAMES` lists names that changed, by the module in which they are now. To end the support,
delete this file and the lines that import it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "outrider.custom_generate": "outrider.integrations.transformers",
    "outrider.drafters.corpus": "outrider.drafters.lookup.corpus",
    "outrider.drafters.documents": "outrider.drafters.lookup.documents",
    "outrider.drafters.make": "outrider.drafters.registry",
    "outrider.drafters.ngram": "outrider.drafters.lookup.ngram",
    "outrider.drafters.prediction": "outrider.drafters.lookup.prediction",
    "outrider.drafters.recycling": "outrider.drafters.lookup.token_recycling",
    "outrider.drafters.skip": "outrider.drafters.model.self_speculation",
    "outrider.drafters.suffix": "outrider.drafters.lookup.suffix",
    "outrider.drafters.translated": "outrider.drafters.model.cross_tokenizer",
    "outrider.drafters.vocabulary": "outrider.drafters.model.vocabulary",
    "outrider.grammar": "outrider.core.grammar",
    "outrider.measure": "outrider.bench",
    "outrider.measure.prompts": "outrider.bench.prompts",
    "outrider.measure.run": "outrider.bench.run",
    "outrider.measure.stats": "outrider.bench.stats",
    "outrider.models.toy": "outrider.testing.toy",
    "outrider.native": "outrider.kernels.cpu",
    "outrider.noise": "outrider.core.noise",
    "outrider.sampling": "outrider.core.sampling",
    "outrider.text": "outrider.core.stopping",
    "outrider.tree": "outrider.core.tree",
    "outrider.tune": "outrider.control",
    "outrider.types": "outrider.core.types",
}
"""Old module -> new module."""

NAMES = {
    "outrider.core.sampling": {
        "History": "SequenceState",
        "Laws": "LogitsDistribution",
        "Mask": "TokenMask",
        "Warp": "LogitsWarper",
    },
    "outrider.core.stopping": {"End": "FinishReason", "Ending": "StopChecker"},
    "outrider.core.types": {"Kept": "Commit"},
    "outrider.decode": {"Request": "Sequence", "Row": "Sequence"},
    "outrider.drafters": {
        "Batch": "DraftContext",
        "RecyclingDrafter": "TokenRecyclingDrafter",
        "SelfDrafter": "QuantizedSelfDrafter",
        "TranslatedDrafter": "CrossTokenizerDrafter",
    },
    "outrider.drafters.base": {
        "Batch": "DraftContext",
        "Echo": "outrider.drafters.stubs:Echo",
        "Noisy": "outrider.drafters.stubs:Noisy",
        "Wrong": "outrider.drafters.stubs:Wrong",
    },
    "outrider.drafters.lookup.token_recycling": {"RecyclingDrafter": "TokenRecyclingDrafter"},
    "outrider.drafters.model.cross_tokenizer": {"TranslatedDrafter": "CrossTokenizerDrafter"},
    "outrider.drafters.model.self_speculation": {"SelfDrafter": "QuantizedSelfDrafter"},
    "outrider.drafters.registry": {"Setting": "DrafterSetup"},
    "outrider.models.hf": {"HFModel": "outrider.models.hf.model:HFModel"},
    "outrider.verify": {"Table": "FixedDistribution", "Target": "TargetDistribution"},
}
"""New module -> {old name: new name, or "module:name" if it is in another module}."""


def renamed(module: str, level: int = 3) -> Callable[[str], Any]:
    """The `__getattr__` of a module with changed names. Its AttributeError is that of any module.

    level: the stack level of the warning; 4 if another `__getattr__` calls this one.
    """

    def find(name: str) -> Any:
        new = NAMES.get(module, {}).get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = new.rpartition(":")
        _warn(f"{module}.{name}", f"{home or module}.{new}", level)
        return getattr(importlib.import_module(home or module), new)

    return find


class _MovedModule(ModuleType):
    """A module under its old name. It looks each name up in the new module when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = MODULES[self.__name__]
        new = NAMES.get(module, {}).get(name, name)
        return getattr(importlib.import_module(module), new)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Importing `outrider.custom_generate` replaces the function of that name, so the module calls it."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _MovedFinder(MetaPathFinder, Loader):
    """Finds the modules of `MODULES`. Python asks it last, so it costs nothing for all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _warn(module.__name__, MODULES[module.__name__], 3)


def install() -> None:
    """Let Python find the old modules. Calling it again changes nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


def _warn(old: str, new: str, level: int) -> None:
    warnings.warn(f"{old} has moved: use {new}. The old name ends with the next release", DeprecationWarning, level)
