"""Drafters propose draft tokens. Imports the kernel and the models; the loop imports it.

`method` lists the drafting methods. `lookup/` holds drafters without a model, `model/` those with one, and
`planned` puts several together. Names are imported when they are first used: the command line reads the methods without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.drafters.base import BaseDrafter as BaseDrafter
    from outrider.drafters.base import DraftContext as DraftContext
    from outrider.drafters.base import Drafter as Drafter
    from outrider.drafters.base import NoDraft as NoDraft
    from outrider.drafters.base import TargetPass as TargetPass
    from outrider.drafters.base import chains as chains
    from outrider.drafters.config import make_drafters as make_drafters
    from outrider.drafters.lookup.ngram import NgramDrafter as NgramDrafter
    from outrider.drafters.lookup.prediction import PredictionDrafter as PredictionDrafter
    from outrider.drafters.lookup.suffix import SuffixDrafter as SuffixDrafter
    from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter as TokenRecyclingDrafter
    from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter as CrossTokenizerDrafter
    from outrider.drafters.model.draft_model import ModelDrafter as ModelDrafter
    from outrider.drafters.planned import PlannedDrafter as PlannedDrafter

_NAMES = {
    "base": "BaseDrafter DraftContext Drafter NoDraft TargetPass chains",
    "config": "make_drafters",
    "lookup.ngram": "NgramDrafter",
    "lookup.prediction": "PredictionDrafter",
    "lookup.suffix": "SuffixDrafter",
    "lookup.token_recycling": "TokenRecyclingDrafter",
    "model.cross_tokenizer": "CrossTokenizerDrafter",
    "model.draft_model": "ModelDrafter",
    "planned": "PlannedDrafter",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOME]
