"""Who guesses. Imports the kernel and the models; imported by the loop. One file per kind of drafter."""

from __future__ import annotations

from outrider.drafters.base import BaseDrafter, Batch, Drafter, Echo, NoDraft, Noisy, Wrong, chains
from outrider.drafters.combine.router import Router
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.lookup.suffix import SuffixDrafter
from outrider.drafters.lookup.token_recycling import RecyclingDrafter
from outrider.drafters.model.cross_tokenizer import TranslatedDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.self_speculation import LayerSkipDrafter, SelfDrafter
from outrider.drafters.registry import make_drafter

__all__ = [
    "BaseDrafter",
    "Batch",
    "Drafter",
    "Echo",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "Noisy",
    "PredictionDrafter",
    "RecyclingDrafter",
    "Router",
    "SelfDrafter",
    "SuffixDrafter",
    "TranslatedDrafter",
    "Wrong",
    "chains",
    "make_drafter",
]
