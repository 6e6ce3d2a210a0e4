"""Who guesses. Imports the kernel and the models; imported by the loop. One file per kind of drafter."""

from __future__ import annotations

from outrider.drafters.base import BaseDrafter, Batch, Drafter, Echo, NoDraft, Noisy, Wrong, chains
from outrider.drafters.make import make_drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.recycling import RecyclingDrafter
from outrider.drafters.router import Router
from outrider.drafters.skip import LayerSkipDrafter, SelfDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.translated import TranslatedDrafter

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
