"""The drafting methods: one row for each, and the way from a configuration to a drafter.

To add a method, write its drafter in one file, with a function `from_setup` that makes it, and add one row to `METHODS`. The
configuration, the help texts and `auto` read the rows. A package can offer a method by an entry point (`find`).

This module imports no torch: the command line lists the methods before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.method import (
    AUTO,
    LOWER_PRECISION,
    METHODS,
    NONE,
    PREDICTION,
    DraftMethod,
    find,
    made_by,
    model_method,
    offered,
)

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.drafters.config import DrafterSetup, Prefixes, SpeculativeConfig
    from outrider.drafters.lookup.memory import TextMemory
    from outrider.models.base import LanguageModel
    from outrider.models.load import Loaded

# -- from a configuration to a drafter ------------------------------------------------------------------------------------


def make_drafters(
    config: SpeculativeConfig,
    target: Loaded,
    *,
    num_slots: int,
    max_length: int,
    device: str,
    text_memory: TextMemory | None = None,
    prefixes: Callable[[Loaded], Prefixes] | None = None,
) -> dict[str, Drafter]:
    """Make the drafters that a configuration names, by name; none for plain decoding. The others are fields of `DrafterSetup`.

    Raises ValueError if one cannot draft for this target.
    """
    from outrider.drafters.config import DrafterSetup

    setup = DrafterSetup(config, target, num_slots, max_length, device, text_memory, prefixes)
    if not config.budget.max_nodes or config.method == NONE:
        return {}
    names = _fitting(setup) if config.method == AUTO else config.methods
    return {name: _made(find(name), setup) for name in names}


def request_drafters(setup: DrafterSetup) -> dict[str, Drafter]:
    """Make the drafters that a request can choose on any server, by method name."""
    return {name: method.make(setup) for name, method in METHODS.items() if method.per_request}


def method_of(drafter: str) -> DraftMethod | None:
    """The method of a drafter that `make_drafters` named; None for a drafter of the caller."""
    return find(drafter) if drafter in METHODS or offered(drafter) else None


def lookup_names(drafters: Iterable[str]) -> list[str]:
    """The drafters that propose at next to no cost."""
    return [name for name in drafters if (method := method_of(name)) is not None and method.cost == "lookup"]


def level_cost(name: str, drafter: Drafter, target: LanguageModel) -> float:
    """Cost of one draft level, in forward passes of the target, from the number of weights: until it is measured."""
    method, model = method_of(name), drafter.resources().model
    if method is not None and (method.cost == "lookup" or (method.cost is None and model is None)):
        return 0.0
    if method is not None and method.cost == "self":
        return model.num_layers / target.num_layers
    draft, whole = getattr(model, "weight_bytes", 0), target.weight_bytes
    return draft / whole if draft and whole else 0.25


def _made(method: DraftMethod, setup: DrafterSetup) -> Drafter:
    """Make a drafter of one method. Raises ValueError if the key `model` names something that the method does not read."""
    model = setup.config.model
    if method.needs_model and isinstance(model, (str, Path)):
        from outrider.drafters.heads.files import head_kind, open_head

        kind = head_kind(model)
        if kind is not None and kind not in method.heads:
            open_head(model)  # raises for a kind that cannot be run
            what = f"a head of the kind {kind!r}" if method.heads else "a trained head, not a draft model"
            raise ValueError(f'{model} is {what}: {{"method": "{model_method(model)}", "model": "{model}"}}')
    if model is None and method.heads and not _brings(method.name, setup):
        raise ValueError(
            f'method "{method.name}" needs the folder of a trained head, {{"method": "{method.name}", "model": "FOLDER"}}: '
            f"this package has none for {setup.target.name}"
        )
    return method.make(setup)


def _fitting(setup: DrafterSetup) -> list[str]:
    """What "auto" means here: all lookups that say yes, and the first of the others; two models would read twice the weights."""
    possible = [method for method in METHODS.values() if method.auto is not None and method.auto(setup)]
    lookups = [method.name for method in possible if method.cost == "lookup"]
    models = [method.name for method in possible if method.cost != "lookup"]
    return lookups + models[:1]


# -- what the rows ask ----------------------------------------------------------------------------------------------------


def _none(setup: DrafterSetup) -> Drafter:
    raise ValueError(f"{setup.config.method!r} is no drafter")


def _brings_draft(setup: DrafterSetup) -> bool:
    if setup.config.model is not None:
        return model_method(setup.config.model) == "draft_model"
    return setup.target.name == "builtin:code"


def _brings(method: str, setup: DrafterSetup) -> bool:
    """Whether there is a head of this method for the target."""
    from outrider.drafters.heads.files import head_of

    head = head_of(setup.config.model, setup.target.name)
    return head is not None and model_method(head) == method


def _has_lower_precision(setup: DrafterSetup) -> bool:
    from outrider.kernels import cpu as native

    lower = LOWER_PRECISION.get(setup.target.weights, ())
    return setup.config.copy_weights in lower and setup.target.model.device == "cpu" and native.available()


def _head(
    name: str, text: str, file: str = "", maker: str = "from_setup", heads: tuple[str, ...] = (), **more: Any
) -> DraftMethod:
    """The row of a method with a trained head. heads: kinds that it reads, if not its name alone."""
    return DraftMethod(
        name,
        text,
        made_by(f"heads.{file or name}", maker),
        cost="model",
        needs_model=True,
        heads=heads or (name,),
        auto=partial(_brings, name),
        **more,
    )


# -- the rows -------------------------------------------------------------------------------------------------------------


_ROWS = (
    DraftMethod(NONE, "plain decoding, without draft tokens", _none),
    DraftMethod(
        AUTO,
        "the methods that fit this model, chosen at each step; start with this one",
        _none,
        default_depth=16,
    ),
    DraftMethod(
        "draft_model",
        "a smaller model of the same family; helps any text if it is ten times smaller and often right",
        made_by("model.cross_tokenizer"),
        cost="model",
        needs_model=True,
        keys=("draft_vocab", "draft_vocab_corpus"),
        auto=_brings_draft,
    ),
    _head(
        "eagle",
        "a trained EAGLE-3 or EAGLE-1 head, which reads the model's own layers; helps any text at a few percent of a step",
        heads=("eagle3", "eagle1"),
    ),
    _head(
        "peagle",
        "a trained P-EAGLE head, which drafts all tokens of a step in one forward pass",
        file="eagle",
        maker="parallel_from_setup",
    ),
    DraftMethod(
        "mtp",
        "the MTP layer of the model's own files (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5); nothing else is needed",
        made_by("heads.mtp"),
        cost="model",
        auto=lambda setup: setup.config.model is None and setup.target.has_mtp,
        requires="an MTP layer in the model's files",
    ),
    _head(
        "medusa",
        "trained Medusa heads: each predicts one later token from the model's last state; cheap, and right less often",
    ),
    _head(
        "dflash",
        "a trained DFlash or DFlash2 drafter, which drafts a block of tokens in one forward pass",
        file="block",
        heads=("dflash", "dflash2"),
        default_depth=7,
    ),
    _head(
        "dspark",
        "a trained DSpark drafter: a block in one pass, then each token corrected by the one before it",
        file="block",
        default_depth=7,
    ),
    DraftMethod(
        "quantized_self",
        "an int8 or int4 copy of the model itself; helps without a second model where memory bandwidth is the limit",
        made_by("model.self_speculation", "quantized_from_setup"),
        cost="model",
        auto=_has_lower_precision,
        requires="a CPU, and weights of more than 4 bits",
    ),
    DraftMethod(
        "layer_skip",
        "some of the model's own layers; helps where a search finds layers that the model can skip (outrider layers)",
        made_by("model.self_speculation", "layer_skip_from_setup"),
        cost="self",
        keys=("layers",),
        requires='"layers", as outrider layers finds them',
    ),
    DraftMethod(
        PREDICTION,
        "a text that you expect the answer to repeat; helps edits of a file",
        made_by("lookup.prediction"),
        cost="lookup",
        default_depth=16,
        keys=("prediction",),
        per_request=True,
        auto=lambda setup: True,
        requires="--prediction FILE, or one in each request",
    ),
    DraftMethod(
        "suffix",
        "text seen before: in this text, in other answers or in a corpus; helps edits, agents and structured output",
        made_by("lookup.suffix"),
        cost="lookup",
        default_depth=16,
        keys=("corpus", "corpus_tokens", "suffix_shared_tokens", "suffix_decoding_min_token_prob"),
        per_request=True,
        auto=lambda setup: True,
    ),
    DraftMethod(
        "ngram",
        "prompt lookup; helps where the answer quotes its prompt",
        made_by("lookup.ngram"),
        cost="lookup",
        default_depth=10,
        keys=("prompt_lookup_min", "prompt_lookup_max"),
        per_request=True,
    ),
    DraftMethod(
        "token_recycling",
        "likely successors of each token so far; helps any text a little, without a second model",
        made_by("lookup.token_recycling"),
        cost="lookup",
    ),
)

METHODS.update({row.name: row for row in _ROWS})
