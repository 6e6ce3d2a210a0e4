"""Drafters propose draft tokens. Imports the kernel and the models; the loop imports it.

`registry` lists the drafting methods. `lookup/` holds drafters without a model, `model/` those with one, and
`planned` puts several together. Names are imported when they are first used: the command line reads the registry without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider.drafters import registry as registry  # fills the table of methods, without torch

if TYPE_CHECKING:
    from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, NoDraft, TargetPass, chains
    from outrider.drafters.lookup.ngram import NgramDrafter
    from outrider.drafters.lookup.prediction import PredictionDrafter
    from outrider.drafters.lookup.suffix import SuffixDrafter
    from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
    from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter
    from outrider.drafters.model.draft_model import ModelDrafter
    from outrider.drafters.planned import PlannedDrafter
    from outrider.drafters.registry import make_drafters

_NAMES = {
    "base": "BaseDrafter DraftContext Drafter NoDraft TargetPass chains",
    "planned": "PlannedDrafter",
    "lookup.ngram": "NgramDrafter",
    "lookup.prediction": "PredictionDrafter",
    "lookup.suffix": "SuffixDrafter",
    "lookup.token_recycling": "TokenRecyclingDrafter",
    "model.cross_tokenizer": "CrossTokenizerDrafter",
    "model.draft_model": "ModelDrafter",
    "registry": "make_drafters",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BaseDrafter",
    "CrossTokenizerDrafter",
    "DraftContext",
    "Drafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "PlannedDrafter",
    "PredictionDrafter",
    "SuffixDrafter",
    "TargetPass",
    "TokenRecyclingDrafter",
    "chains",
    "make_drafters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"outrider.drafters.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
