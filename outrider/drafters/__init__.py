"""Drafters propose draft tokens. Imports the kernel and the models; the loop imports it.

`registry` lists the drafting methods. `lookup/` holds drafters without a model, `model/` those with one, and `combine/`
puts several together. Names are imported when they are first used: the command line reads the registry without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider._deprecated import renamed

if TYPE_CHECKING:
    from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, NoDraft, TargetPass, chains
    from outrider.drafters.combine.planned import PlannedDrafter
    from outrider.drafters.lookup.ngram import NgramDrafter
    from outrider.drafters.lookup.prediction import PredictionDrafter
    from outrider.drafters.lookup.suffix import SuffixDrafter
    from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
    from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter
    from outrider.drafters.model.draft_model import ModelDrafter
    from outrider.drafters.model.self_speculation import LayerSkipDrafter, QuantizedSelfDrafter
    from outrider.drafters.registry import make_drafter, make_drafters
    from outrider.drafters.stubs import Echo, Noisy, Tapped, Wrong

_HOME = {
    "BaseDrafter": "base",
    "CrossTokenizerDrafter": "model.cross_tokenizer",
    "DraftContext": "base",
    "Drafter": "base",
    "Echo": "stubs",
    "LayerSkipDrafter": "model.self_speculation",
    "ModelDrafter": "model.draft_model",
    "NgramDrafter": "lookup.ngram",
    "NoDraft": "base",
    "Noisy": "stubs",
    "PlannedDrafter": "combine.planned",
    "PredictionDrafter": "lookup.prediction",
    "QuantizedSelfDrafter": "model.self_speculation",
    "SuffixDrafter": "lookup.suffix",
    "Tapped": "stubs",
    "TargetPass": "base",
    "TokenRecyclingDrafter": "lookup.token_recycling",
    "Wrong": "stubs",
    "chains": "base",
    "make_drafter": "registry",
    "make_drafters": "registry",
}

__all__ = [
    "BaseDrafter",
    "CrossTokenizerDrafter",
    "DraftContext",
    "Drafter",
    "Echo",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "Noisy",
    "PlannedDrafter",
    "PredictionDrafter",
    "QuantizedSelfDrafter",
    "SuffixDrafter",
    "Tapped",
    "TargetPass",
    "TokenRecyclingDrafter",
    "Wrong",
    "chains",
    "make_drafter",
    "make_drafters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        return renamed(__name__, 4)(name)
    return getattr(importlib.import_module(f"outrider.drafters.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
