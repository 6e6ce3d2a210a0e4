"""From a configuration to a drafter. One function per method; a package of your own adds one by an entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import SpeculativeConfig, plugins
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.combine.router import DrafterRouter
from outrider.drafters.lookup.documents import read_corpus
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.lookup.suffix import SuffixDrafter
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.drafters.model.cross_tokenizer import from_draft_model
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.self_speculation import (
    SAMPLE,
    LayerSearch,
    LayerSkipDrafter,
    QuantizedSelfDrafter,
    search_layers,
)
from outrider.models.load import SYNTHETIC, load

if TYPE_CHECKING:
    from outrider.models.base import LanguageModel
    from outrider.models.load import Loaded


@dataclass(frozen=True)
class Setting:
    """What a drafter is made for. rows, max_length: of the caches."""

    config: SpeculativeConfig
    target: Loaded
    rows: int
    max_length: int
    device: str


def make_drafter(config: SpeculativeConfig, target: Loaded, *, rows: int, max_length: int, device: str) -> Drafter:
    """The drafter a configuration asks for. Raises ValueError when it cannot draft for this target."""
    if config.method == "none" or not config.budget.max_nodes:
        return NoDraft()
    setting = Setting(config, target, rows, max_length, device)
    if config.method == "auto":
        return _several(setting, _possible(setting))
    return _one(setting, config.methods[0]) if len(config.methods) == 1 else _several(setting, config.methods)


def _one(setting: Setting, method: str) -> Drafter:
    if method in _MAKERS:
        return _MAKERS[method](setting)
    entry: Any = plugins()[method]
    try:
        made = entry.load()(setting, **setting.config.options)
    except Exception as error:
        raise ValueError(
            f"the drafter {method!r} ({entry.value}) cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Drafter):
        raise ValueError(
            f"the drafter {method!r} ({entry.value}) made a {type(made).__name__}, which is none: a drafter has taps, propose, "
            "update and release; outrider.drafters.BaseDrafter has all but propose"
        )
    return made


def _several(setting: Setting, methods: Sequence[str]) -> Drafter:
    drafters = {method: _one(setting, method) for method in methods}
    return DrafterRouter(drafters, {name: _cost(d, setting.target.model) for name, d in drafters.items()})


def _possible(setting: Setting) -> list[str]:
    """What `auto` puts together: texts always, and one model: the one that is given, the built-in pair's draft, or the
    target's own coarser copy where there is one."""
    config, target = setting.config, setting.target
    methods = ["prediction", "suffix"]
    if config.model is not None or target.name in ("builtin:code", *SYNTHETIC):
        return [*methods, "draft_model"]
    try:
        require_lower_precision(target, config.quantization or "int8")
    except ValueError:
        return methods
    return [*methods, "quantized_self"] if target.model.device.type == "cpu" else methods


def _cost(drafter: Drafter, target: LanguageModel) -> float:
    """Forwards of the target that a drafted level costs, by the bytes of the weights; 0 for drafters without a model. Not
    timed, so that the same request takes the same way every time."""
    if isinstance(drafter, LayerSkipDrafter):
        return len(drafter.layers) / int(target.layers)  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(drafter, ModelDrafter):
        return 0.0
    own, whole = (getattr(m, "bytes", 0) for m in (drafter.model, target))
    return own / whole if own and whole else 0.25


def _suffix(setting: Setting) -> Drafter:
    config, target = setting.config, setting.target
    corpus = None
    if config.corpus is not None:
        corpus = read_corpus(config.corpus, target.tokenizer, target.model.vocab_size, config.corpus_tokens)
    return SuffixDrafter(corpus, config.suffix_shared_tokens, least=config.suffix_decoding_min_token_prob)


def _draft_model(setting: Setting) -> Drafter:
    config, target = setting.config, setting.target
    draft = load(config.model or "builtin:code-draft", device=setting.device, quantization=config.quantization)
    return from_draft_model(draft, target, setting.rows, setting.max_length)


def _layer_skip(setting: Setting) -> Drafter:
    """The layers named, or loaded; or those that a search on a sample text finds now, which takes a while."""
    config, target = setting.config, setting.target
    if isinstance(config.layers, str):
        return LayerSkipDrafter(target.model, LayerSearch.load(config.layers).layers)
    if config.layers is not None:
        return LayerSkipDrafter(target.model, config.layers)
    if config.assistant_early_exit is not None:
        count = int(getattr(target.model, "layers", config.assistant_early_exit))
        if config.assistant_early_exit > count:
            raise ValueError(
                f"assistant_early_exit is {config.assistant_early_exit}, and {target.name} has {count} layers; "
                f"use {count} at most"
            )
        return LayerSkipDrafter(target.model, range(config.assistant_early_exit))
    if target.tokenizer is None:
        raise ValueError('layer_skip needs to know which layers: {"method": "layer_skip", "layers": [0, 2, ...]}')
    found = search_layers(target.model, [target.tokenizer(SAMPLE)["input_ids"]])
    return LayerSkipDrafter(target.model, found.layers)


def _quantized_self(setting: Setting) -> Drafter:
    weights = setting.config.quantization or "int8"
    require_lower_precision(setting.target, weights)
    own = load(setting.target.source, setting.target.tokenizer, device="cpu", quantization=weights)
    return QuantizedSelfDrafter(own.model)


def require_lower_precision(target: Loaded, weights: str) -> None:
    """Raise ValueError where these weights would not be coarser than the target's."""
    finer = {"int8": ("float32", "float16", "bfloat16"), "int4": ("float32", "float16", "bfloat16", "int8")}
    if target.weights not in finer[weights]:
        raise ValueError(
            f"quantized_self with {weights} weights would draft for a target of {target.weights} weights and gain nothing; "
            'use {"method": "quantized_self", "quantization": "int4"}, or a target of 16 or 32 bit'
        )


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


_MAKERS: dict[str, Callable[[Setting], Drafter]] = {
    "draft_model": _draft_model,
    "quantized_self": _quantized_self,
    "layer_skip": _layer_skip,
    "suffix": _suffix,
    "ngram": lambda s: NgramDrafter(s.config.prompt_lookup_min, s.config.prompt_lookup_max),
    "prediction": lambda s: PredictionDrafter(_encoded(s.config.prediction, s.target)),
    "token_recycling": lambda s: TokenRecyclingDrafter(s.target.model.vocab_size),
}
