"""Who guesses. Imports the kernel and the models; imported by the loop. One file per kind of drafter."""

from __future__ import annotations

from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, Echo, NoDraft, Noisy, Wrong, chains
from outrider.drafters.combine.router import DrafterRouter
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.lookup.suffix import SuffixDrafter
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.self_speculation import LayerSkipDrafter, QuantizedSelfDrafter
from outrider.drafters.registry import make_drafter

__all__ = [
    "BaseDrafter",
    "CrossTokenizerDrafter",
    "DraftContext",
    "Drafter",
    "DrafterRouter",
    "Echo",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "Noisy",
    "PredictionDrafter",
    "QuantizedSelfDrafter",
    "SuffixDrafter",
    "TokenRecyclingDrafter",
    "Wrong",
    "chains",
    "make_drafter",
]
