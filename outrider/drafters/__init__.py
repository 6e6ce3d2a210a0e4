"""Who guesses. Imports the kernel and the models; imported by the loop. One file per kind of drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.drafters.base import BaseDrafter, Batch, Drafter, Echo, NoDraft, Noisy, Wrong, chains
from outrider.drafters.documents import read_corpus
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.recycling import RecyclingDrafter
from outrider.drafters.suffix import SuffixDrafter

if TYPE_CHECKING:
    from outrider.config import SpeculativeConfig
    from outrider.models.load import Loaded


def make_drafter(config: SpeculativeConfig, target: Loaded, *, rows: int, max_length: int, device: str) -> Drafter:
    """The drafter a configuration asks for. Raises ValueError when it cannot draft for this target."""
    from outrider.models.load import load

    if config.method == "none" or config.num_speculative_tokens == 0:
        return NoDraft()
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        vocab, limit = target.model.vocab_size, config.corpus_tokens
        corpus = None if config.corpus is None else read_corpus(config.corpus, target.tokenizer, vocab, limit)
        return SuffixDrafter(corpus, config.suffix_shared_tokens, least=config.suffix_decoding_min_token_prob)
    if config.method == "prediction":
        return PredictionDrafter(_encoded(config.prediction, target))
    if config.method == "token_recycling":
        return RecyclingDrafter(target.model.vocab_size)
    if config.method == "quantized_self":
        return ModelDrafter(_quantized(target, config.quantization or "int8").model, rows, max_length)
    draft = load(config.model, device=device, quantization=config.quantization)
    if draft.model.vocab_size != target.model.vocab_size:
        raise ValueError(
            f"the draft {draft.name} has a vocabulary of {draft.model.vocab_size} tokens and the target {target.name} one "
            f"of {target.model.vocab_size}; they must share it. Use a draft of the same family, or a method that needs "
            'none: {"method": "suffix"}. Drafts with another tokenizer are planned'
        )
    return ModelDrafter(draft.model, rows, max_length)


def _encoded(prediction: str | Sequence[int] | None, target: Loaded) -> Sequence[int]:
    """The token ids of a configured prediction. Raises ValueError for ids that the target does not have."""
    if isinstance(prediction, str):
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; give the prediction as token ids")
        return target.tokenizer(prediction, add_special_tokens=False)["input_ids"]
    wrong = [t for t in prediction or () if not 0 <= t < target.model.vocab_size]
    if wrong:
        raise ValueError(
            f"the prediction holds token {wrong[0]}, outside {target.name}'s {target.model.vocab_size} tokens"
        )
    return prediction or ()


def _quantized(target: Loaded, weights: str) -> Loaded:
    """The target's own function with coarser weights. Raises ValueError where they would not be coarser."""
    from outrider.models.load import load

    coarser = {"int8": ("float32", "float16", "bfloat16"), "int4": ("float32", "float16", "bfloat16", "int8")}
    if target.weights not in coarser[weights]:
        raise ValueError(
            f"quantized_self with {weights} weights would draft for a target of {target.weights} weights and gain nothing; "
            'use {"method": "quantized_self", "quantization": "int4"}, or a target of 16 or 32 bit'
        )
    return load(target.source, target.tokenizer, device="cpu", quantization=weights)


__all__ = [
    "BaseDrafter",
    "Batch",
    "Drafter",
    "Echo",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "Noisy",
    "PredictionDrafter",
    "RecyclingDrafter",
    "SuffixDrafter",
    "Wrong",
    "chains",
    "make_drafter",
]
