"""The drafting methods: one row for each, and the way from a configuration to a drafter.

To add a method, write its drafter in one file and add one row to `METHODS`. The configuration, the help texts, `auto`,
`outrider tune` and the exports to other engines read the rows. A package can offer a method by an entry point (`find`).

It is longer than other files because a method stands here in one piece: its row, and the function that makes its drafter.
This module imports no torch: the command line lists the methods before anything large is loaded. The functions that make
drafters import what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from outrider.config import SpeculativeConfig
    from outrider.drafters.base import Drafter
    from outrider.models.base import LanguageModel
    from outrider.models.load import Loaded

HEADS = Path(__file__).resolve().parents[1] / "data" / "heads"
"""Trained heads of this package, in folders with the names of built-in models."""

PLUGINS = "outrider.drafters"
"""The entry point group in which other packages name their methods."""

LOWER_PRECISION = {
    "float32": ("int8", "int4"),
    "bfloat16": ("int8", "int4"),
    "float16": ("int8", "int4"),
    "int8": ("int4",),
    "gguf": ("int4",),  # files of 8 bits gain; those of 4 do not
}
"""Weights of a model -> the weights that are cheaper to read, and so can draft for it."""

QUANTIZED = ("int8", "int4")

NONE, AUTO = "none", "auto"
"""The two methods that stand for no drafter, and for all that help."""

Cost = Literal["lookup", "model", "self"]
"""What one level of a draft costs. lookup: no forward pass. model: a forward pass of other weights, a draft model or a
quantized copy. self: a forward pass through some of the target's own layers."""


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter is made for.

    rows: sequences in a batch, at most. max_length: tokens of a sequence, at most. device: "cpu", "cuda" or "auto".
    """

    config: SpeculativeConfig
    target: Loaded
    rows: int
    max_length: int
    device: str


@dataclass(frozen=True)
class TuneInputs:
    """What `outrider tune` was given. It decides which methods can be tried.

    weights: precision of the target's weights. draft: name of a draft model. layers: file of `outrider layers`.
    predictions: whether a prompt brings a prediction.
    """

    weights: str
    draft: str | None = None
    layers: str | None = None
    predictions: bool = False


@dataclass(frozen=True)
class EngineExport:
    """How another engine runs a method.

    flags: its settings for a configuration: keys of vLLM's `--speculative-config`, or command line flags. notes: what that
    engine does differently.
    """

    flags: Callable[[SpeculativeConfig], Mapping[str, Any]]
    notes: Callable[[SpeculativeConfig], Sequence[str]] = lambda config: ()


@dataclass(frozen=True)
class DraftMethod:
    """A drafting method: all that the other modules know about it.

    make: makes the drafter. Raises ValueError if the method cannot draft for the target.
    cost: what one level of a draft costs; None derives it from the drafter (`level_cost`).
    default_depth: draft tokens in a row where the user gives no number. tune_depth: the most that `outrider tune` tries.
    trees: whether a tree can accept more draft tokens than a chain.
    keys: the keys of `SpeculativeConfig` that only this method reads. A new method can read `options` and needs no key.
    needs_model: the key `model` must name its draft model. heads: the kinds of trained heads that it reads, as
    `outrider.drafters.heads.files` names them; then `model` names the folder of one.
    per_request: a request to a server can choose it, whatever the server's own method is.
    auto: whether the method "auto" uses it for this target; None if never.
    candidates: the configurations that `outrider tune` tries, by name. tune_hint: what it needs to try one.
    vllm, sglang, llama_cpp: how these engines run it; None if they cannot.
    """

    name: str
    help: str
    make: Callable[[DrafterSetup], Drafter]
    cost: Cost | None = None
    default_depth: int = 5
    tune_depth: int = 8
    trees: bool = True
    keys: tuple[str, ...] = ()
    needs_model: bool = False
    heads: tuple[str, ...] = ()
    per_request: bool = False
    auto: Callable[[DrafterSetup], bool] | None = None
    candidates: Callable[[TuneInputs], Mapping[str, dict[str, Any]]] | None = None
    tune_hint: str = ""
    vllm: EngineExport | None = None
    sglang: EngineExport | None = None
    llama_cpp: EngineExport | None = None

    def tune_candidates(self, inputs: TuneInputs) -> Mapping[str, dict[str, Any]]:
        """The configurations to try, by name."""
        return {self.name: {"method": self.name}} if self.candidates is None else self.candidates(inputs)


# -- from a configuration to a drafter ------------------------------------------------------------------------------------


def make_drafter(config: SpeculativeConfig, target: Loaded, *, rows: int, max_length: int, device: str) -> Drafter:
    """Make the drafter that a configuration names. Raises ValueError if it cannot draft for this target."""
    setup = DrafterSetup(config, target, rows, max_length, device)
    if not config.budget.max_nodes:
        return _none(setup)
    return find(config.methods[0]).make(setup) if len(config.methods) == 1 else _several(setup, config.methods)


def request_drafters(setup: DrafterSetup) -> dict[str, Drafter]:
    """Make the drafters that a request can choose on any server, by method name."""
    return {name: method.make(setup) for name, method in METHODS.items() if method.per_request}


def find(name: str) -> DraftMethod:
    """The method of that name, built in or offered by a package. Raises KeyError if there is none.

    An entry point names a `DraftMethod`, or a function `(setup, **options) -> Drafter`. One that cannot be imported is
    reported when the drafter is made.
    """
    if name in METHODS:
        return METHODS[name]
    entry = plugins()[name]
    try:
        loaded: Any = entry.load()
    except Exception as error:
        failed = error  # Python deletes `error` at the end of this block

        def fail(setup: DrafterSetup, **options: Any) -> Drafter:
            raise failed

        loaded = fail
    if isinstance(loaded, DraftMethod):
        return loaded
    return DraftMethod(name, f"from the package {entry.value}", lambda setup: _checked(entry, loaded, setup))


def plugins() -> dict[str, EntryPoint]:
    """The methods that installed packages offer: name -> entry point."""
    return {entry.name: entry for entry in entry_points(group=PLUGINS) if entry.name not in METHODS}


def owner(key: str) -> DraftMethod | None:
    """The built-in method that alone reads this key of the configuration."""
    return next((method for method in METHODS.values() if key in method.keys), None)


def prediction_method() -> str:
    """The method that drafts from the text that a request expects. A request with such a text alone means this method."""
    method = owner("prediction")
    assert method is not None
    return method.name


def model_method(model: Any = None) -> str:
    """The method that drafts with the model of the key `model`. A configuration with that key alone means this method.

    model: the value of the key. The folder of a trained head means the method that reads it, anything else a draft model."""
    if isinstance(model, (str, Path)) and (Path(model).expanduser() / "config.json").is_file():
        from outrider.drafters.heads.files import head_kind

        kind = head_kind(model)
        for name, method in METHODS.items():
            if kind in method.heads:
                return name
    return next(name for name, method in METHODS.items() if method.needs_model and not method.heads)


def level_cost(method: DraftMethod, drafter: Drafter, target: LanguageModel) -> float:
    """Cost of one draft level, in forward passes of the target. It follows from the number of weights and is never timed:
    the same request must use the same drafters every time."""
    model = getattr(drafter, "model", None)
    if method.cost == "lookup" or (method.cost is None and model is None):
        return 0.0
    if method.cost == "self":
        return len(drafter.layers) / target.num_layers  # pyright: ignore[reportAttributeAccessIssue]
    own, whole = getattr(model, "weight_bytes", 0), target.weight_bytes
    return own / whole if own and whole else 0.25


def require_lower_precision(target: Loaded, weights: str) -> None:
    """Raise ValueError if a copy with these weights is not cheaper to read than the target."""
    if weights not in LOWER_PRECISION.get(target.weights, ()):
        raise ValueError(
            f"a copy with {weights} weights would gain nothing for a target with {target.weights} weights; "
            'use {"method": "quantized_self", "quantization": "int4"}, or a target with 16 or 32 bit weights'
        )


def _checked(entry: EntryPoint, factory: Callable[..., Any], setup: DrafterSetup) -> Drafter:
    """Make a drafter of another package. Raises ValueError if that fails or gives no drafter."""
    from outrider.drafters.base import Drafter

    try:
        made = factory(setup, **setup.config.options)
    except Exception as error:
        raise ValueError(
            f"the drafter {entry.name!r} ({entry.value}) cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Drafter):
        raise ValueError(
            f"the drafter {entry.name!r} ({entry.value}) returned a {type(made).__name__}, which is not a drafter. Derive it "
            "from outrider.drafters.BaseDrafter and write `propose`"
        )
    return made


def _several(setup: DrafterSetup, names: Sequence[str]) -> Drafter:
    from outrider.drafters.combine.router import DrafterRouter

    methods = [find(name) for name in names]
    drafters = {method.name: method.make(setup) for method in methods}
    costs = {method.name: level_cost(method, drafters[method.name], setup.target.model) for method in methods}
    return DrafterRouter(drafters, costs)


# -- the makers -----------------------------------------------------------------------------------------------------------


def _none(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.base import NoDraft

    return NoDraft()


def _auto(setup: DrafterSetup) -> Drafter:
    """All lookups that say yes, and the first of the others: two models would read twice the weights."""
    possible = [method for method in METHODS.values() if method.auto is not None and method.auto(setup)]
    lookups = [method.name for method in possible if method.cost == "lookup"]
    models = [method.name for method in possible if method.cost != "lookup"]
    return _several(setup, lookups + models[:1])


def _draft_model(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.model.cross_tokenizer import from_draft_model
    from outrider.drafters.model.reduction import DraftReduction
    from outrider.models.load import load

    config = setup.config
    reduce = DraftReduction(
        config.quantization == "auto", config.draft_vocab, config.draft_vocab_corpus, config.speculative_token_map
    )
    given = config.quantization if config.quantization in QUANTIZED else None
    name = config.model or "builtin:code-draft"
    _refuse_head(name)
    chosen = reduce if reduce.may_leave_out(name) else None
    draft = load(name, device=setup.device, quantization=given, reduce=chosen)
    drafter = from_draft_model(draft, setup.target, setup.rows, setup.max_length)
    drafter.reduction = reduce.note
    return drafter


def _refuse_head(model: Any) -> None:
    """Raise ValueError for the folder of a trained head, which is no draft model."""
    from outrider.drafters.heads.files import head_kind, open_head

    if isinstance(model, (str, Path)) and head_kind(model) is not None:
        open_head(model)  # raises for one that cannot be run
        method = model_method(model)
        raise ValueError(f'{model} is a trained head, not a draft model: {{"method": "{method}", "model": "{model}"}}')


def _brings_draft(setup: DrafterSetup) -> bool:
    from outrider.models.load import SYNTHETIC

    if setup.config.model is not None:
        return model_method(setup.config.model) == "draft_model"
    return setup.target.name in ("builtin:code", *SYNTHETIC)


def _eagle(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.heads.eagle import EagleDrafter
    from outrider.drafters.heads.eagle_model import EagleModel
    from outrider.drafters.heads.reader import read_eagle
    from outrider.drafters.heads.selftest import examine
    from outrider.drafters.model.self_speculation import SAMPLE

    config, target = setup.config, setup.target
    head = _head_of(setup)
    model = EagleModel(read_eagle(head, target), target.model, setup.max_length, config.quantization)
    if target.tokenizer is not None:
        examine(model, target, target.tokenizer(SAMPLE)["input_ids"], head)
    return EagleDrafter(model, setup.rows, setup.max_length)


def _medusa(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.heads.medusa import MedusaDrafter, read_medusa

    _chains_only(setup, "medusa")
    config, target = setup.config, setup.target
    return MedusaDrafter(read_medusa(_head_of(setup), target), target.model, config.quantization)


def _block(name: str) -> Callable[[DrafterSetup], Drafter]:
    """The maker of a block drafter. name: the method, which is also the kind of its folder."""

    def make(setup: DrafterSetup) -> Drafter:
        from outrider.drafters.heads.block import BlockDrafter
        from outrider.drafters.heads.block_reader import read_block
        from outrider.drafters.heads.files import open_head

        _chains_only(setup, name)
        config, target = setup.config, setup.target
        opened = open_head(_head_of(setup))
        if opened.kind != name:
            raise ValueError(
                f'{opened.path} is a head of the kind {opened.kind!r}: {{"method": "{model_method(opened.path)}", ...}}'
            )
        return BlockDrafter(read_block(opened, target), target.model, setup.rows, setup.max_length, config.quantization)

    return make


def _chains_only(setup: DrafterSetup, method: str) -> None:
    """Raise ValueError for trees that heads of several positions do not draw."""
    from outrider.verify import VERIFIERS

    if setup.config.tree_width > 1 and VERIFIERS[setup.config.verifier].needs_probs:
        raise ValueError(
            f"{method} drafts chains for the verifier {setup.config.verifier}, not trees of width {setup.config.tree_width}; "
            'leave out tree_width, or use "verifier": "match"'
        )


def own_head(target: str) -> Path | None:
    """The folder of the trained head that this package has for a model; None if it has none.

    target: the name of a built-in model, or the path of a file with its content.
    """
    from outrider.models.builtin.download import name_of

    name = target if target.startswith("builtin:") else name_of(target)
    folder = HEADS / (name or "").removeprefix("builtin:")
    return folder if name and (folder / "config.json").is_file() else None


def _head_of(setup: DrafterSetup) -> Any:
    """The head's folder: the one that was given, or that of the package."""
    return setup.config.model if setup.config.model is not None else own_head(setup.target.name)


def _brings(method: str) -> Callable[[DrafterSetup], bool]:
    """Whether there is a head of this method for the target."""

    def brings(setup: DrafterSetup) -> bool:
        head = _head_of(setup)
        return head is not None and model_method(head) == method

    return brings


def _with_model(method: str) -> Callable[[TuneInputs], Mapping[str, dict[str, Any]]]:
    """The candidate of a method that needs a model, if the model that was given is one of its own."""

    def candidates(inputs: TuneInputs) -> Mapping[str, dict[str, Any]]:
        fits = inputs.draft is not None and model_method(inputs.draft) == method
        return {method: {"method": method, "model": inputs.draft}} if fits else {}

    return candidates


def _quantized_self(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.model.self_speculation import QuantizedSelfDrafter
    from outrider.models.load import load

    weights = _copy_weights(setup.config)
    require_lower_precision(setup.target, weights)
    own = load(setup.target.source, setup.target.tokenizer, device="cpu", quantization=weights)
    return QuantizedSelfDrafter(own.model)


def _copy_weights(config: SpeculativeConfig) -> str:
    return "int8" if config.quantization == "auto" else config.quantization


def _has_lower_precision(setup: DrafterSetup) -> bool:
    lower = LOWER_PRECISION.get(setup.target.weights, ())
    return _copy_weights(setup.config) in lower and setup.target.model.device.type == "cpu"


def _layer_skip(setup: DrafterSetup) -> Drafter:
    """Use the layers that are given or saved. Without them, search on a sample text, which takes a while."""
    from outrider.drafters.model.self_speculation import SAMPLE, LayerSearch, LayerSkipDrafter, search_layers

    config, target = setup.config, setup.target
    if isinstance(config.layers, str):
        return LayerSkipDrafter(target.model, LayerSearch.load(config.layers).layers)
    if config.layers is not None:
        return LayerSkipDrafter(target.model, config.layers)
    if config.assistant_early_exit is not None:
        count = target.model.num_layers
        if config.assistant_early_exit > count:
            raise ValueError(
                f"assistant_early_exit is {config.assistant_early_exit}, and {target.name} has {count} layers; "
                f"use {count} at most"
            )
        return LayerSkipDrafter(target.model, range(config.assistant_early_exit))
    if target.tokenizer is None:
        raise ValueError(
            f"{target.name} has no tokenizer, so no layers can be searched; name them: "
            '{"method": "layer_skip", "layers": [0, 2, ...]}'
        )
    found = search_layers(target.model, [target.tokenizer(SAMPLE)["input_ids"]])
    return LayerSkipDrafter(target.model, found.layers)


def _prediction(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.lookup.prediction import PredictionDrafter

    given, target = setup.config.prediction, setup.target
    if isinstance(given, str):
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; give the prediction as token ids")
        return PredictionDrafter(target.tokenizer(given, add_special_tokens=False)["input_ids"])
    wrong = [token for token in given or () if not 0 <= token < target.model.vocab_size]
    if wrong:
        raise ValueError(
            f"the prediction contains token {wrong[0]}, outside {target.name}'s {target.model.vocab_size} tokens"
        )
    return PredictionDrafter(given or ())


def _suffix(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.lookup.documents import read_corpus
    from outrider.drafters.lookup.suffix import SuffixDrafter

    config, target = setup.config, setup.target
    corpus = None
    if config.corpus is not None:
        corpus = read_corpus(config.corpus, target.tokenizer, target.model.vocab_size, config.corpus_tokens)
    return SuffixDrafter(corpus, config.suffix_shared_tokens, least=config.suffix_decoding_min_token_prob)


def _ngram(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.lookup.ngram import NgramDrafter

    return NgramDrafter(setup.config.prompt_lookup_min, setup.config.prompt_lookup_max)


def _token_recycling(setup: DrafterSetup) -> Drafter:
    from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter

    return TokenRecyclingDrafter(setup.target.model.vocab_size)


# -- the rows -------------------------------------------------------------------------------------------------------------


def _folder(config: SpeculativeConfig) -> str:
    """The draft model for another engine: a built-in model is a folder of this package."""
    from outrider.models.load import DATA

    name = str(config.model)
    return str(Path(DATA) / name.removeprefix("builtin:")) if name.startswith("builtin:") else name


def _sglang_ngram(config: SpeculativeConfig) -> dict[str, Any]:
    return {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": config.budget.max_nodes + 1,
        "--speculative-ngram-max-bfs-breadth": config.tree_width,
    }


def _llama_cpp_ngram(config: SpeculativeConfig) -> dict[str, Any]:
    return {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-m": config.budget.depth}


_NEEDS_CUDA = EngineExport(_sglang_ngram, lambda c: ["NGRAM needs CUDA"])

_ROWS = (
    DraftMethod(
        NONE,
        "plain decoding, without draft tokens",
        _none,
        candidates=lambda i: {},
        tune_hint="the others are compared with it",
    ),
    DraftMethod(
        AUTO,
        "the methods that fit this model, chosen at each step; start with this one",
        _auto,
        default_depth=16,
        candidates=lambda i: {},
        tune_hint="it is made of the others",
    ),
    DraftMethod(
        "draft_model",
        "a smaller model of the same family; helps any text if it is ten times smaller and often right",
        _draft_model,
        cost="model",
        needs_model=True,
        keys=("draft_vocab", "draft_vocab_corpus", "speculative_token_map"),
        auto=_brings_draft,
        candidates=_with_model("draft_model"),
        vllm=EngineExport(
            lambda c: {"model": _folder(c), "draft_sample_method": "probabilistic"},
            lambda c: (
                [f"{c.quantization} for the draft: give a checkpoint quantized to it"]
                if c.quantization in QUANTIZED
                else []
            ),
        ),
        sglang=EngineExport(
            lambda c: {
                "--speculative-algorithm": "STANDALONE",
                "--speculative-draft-model-path": _folder(c),
                "--speculative-num-steps": c.budget.depth,
                "--speculative-eagle-topk": c.tree_width,
                "--speculative-num-draft-tokens": c.budget.max_nodes + 1,  # SGLang counts the root
            }
        ),
        llama_cpp=EngineExport(
            lambda c: {
                "--spec-type": "draft-simple",
                "--spec-draft-model": f"{_folder(c)}.gguf",
                "--spec-draft-n-max": c.budget.depth,
            },
            lambda c: ["models: llama.cpp reads GGUF files; convert_hf_to_gguf.py makes them"],
        ),
    ),
    DraftMethod(
        "eagle",
        "a trained EAGLE-3 or EAGLE-1 head, which reads the model's own layers; helps any text at a few percent of a step",
        _eagle,
        cost="model",
        needs_model=True,
        heads=("eagle3", "eagle1"),
        tune_depth=7,
        auto=_brings("eagle"),
        candidates=_with_model("eagle"),
        tune_hint="name the folder of a head, --draft-model FOLDER",
        vllm=EngineExport(lambda c: {"method": "eagle3", "model": str(c.model)}),
        sglang=EngineExport(
            lambda c: {
                "--speculative-algorithm": "EAGLE3",
                "--speculative-draft-model-path": str(c.model),
                "--speculative-num-steps": c.budget.depth,
                "--speculative-eagle-topk": c.tree_width,
                "--speculative-num-draft-tokens": c.budget.max_nodes + 1,  # SGLang counts the root
            },
            lambda c: ["the folder: SGLang reads the flat layout, not that of speculators"],
        ),
    ),
    DraftMethod(
        "medusa",
        "trained Medusa heads: each predicts one later token from the model's last state; cheap, and right less often",
        _medusa,
        cost="model",
        needs_model=True,
        heads=("medusa",),
        tune_depth=4,
        auto=_brings("medusa"),
        candidates=_with_model("medusa"),
        tune_hint="name the folder of Medusa heads, --draft-model FOLDER",
        vllm=EngineExport(lambda c: {"model": str(c.model)}),
    ),
    *(
        DraftMethod(
            name,
            about,
            _block(name),
            cost="model",
            needs_model=True,
            heads=(name,),
            default_depth=7,
            auto=_brings(name),
            candidates=_with_model(name),
            tune_hint="name the folder of a block drafter, --draft-model FOLDER",
            vllm=EngineExport(lambda c: {"model": str(c.model)}, notes),
        )
        for name, about, notes in (
            ("dflash", "a trained DFlash drafter, which drafts a block of tokens in one forward pass", lambda c: ()),
            (
                "dspark",
                "a trained DSpark drafter: a block in one pass, then each token corrected by the one before it",
                lambda c: ["DSpark needs vLLM's second model runner, VLLM_USE_V2_MODEL_RUNNER=1"],
            ),
        )
    ),
    DraftMethod(
        "quantized_self",
        "an int8 or int4 copy of the model itself; helps without a second model where memory bandwidth is the limit",
        _quantized_self,
        cost="model",
        tune_depth=4,  # a level costs about half a forward pass of the target
        auto=_has_lower_precision,
        candidates=lambda i: {
            f"quantized_self-{weights}": {"method": "quantized_self", "quantization": weights}
            for weights in LOWER_PRECISION.get(i.weights, ())
        },
        tune_hint="no weights are cheaper to read than the model's own",
    ),
    DraftMethod(
        "layer_skip",
        "some of the model's own layers; helps where a search finds layers that the model can skip (outrider layers)",
        _layer_skip,
        cost="self",
        keys=("layers", "assistant_early_exit"),
        candidates=lambda i: {"layer_skip": {"method": "layer_skip", "layers": i.layers}} if i.layers else {},
        tune_hint="name the layers, --layers FILE",
    ),
    DraftMethod(
        "prediction",
        "a text that you expect the answer to repeat; helps edits of a file",
        _prediction,
        cost="lookup",
        default_depth=16,
        tune_depth=16,
        trees=False,
        keys=("prediction",),
        per_request=True,
        auto=lambda setup: True,
        candidates=lambda i: {"prediction": {"method": "prediction"}} if i.predictions else {},
        tune_hint="no prompt has a prediction",
    ),
    DraftMethod(
        "suffix",
        "text seen before: in this text, in other answers or in a corpus; helps edits, agents and structured output",
        _suffix,
        cost="lookup",
        default_depth=16,
        tune_depth=16,
        keys=("corpus", "corpus_tokens", "suffix_shared_tokens", "suffix_decoding_min_token_prob"),
        per_request=True,
        auto=lambda setup: True,
        vllm=EngineExport(
            lambda c: {"suffix_decoding_min_token_prob": c.suffix_decoding_min_token_prob},
            lambda c: [] if c.corpus is None else ["corpus: suffix decoding there reads prompts and answers only"],
        ),
        sglang=_NEEDS_CUDA,
        llama_cpp=EngineExport(
            _llama_cpp_ngram,
            lambda c: ["suffix: ngram-simple is the nearest; it uses one length, the last match and one text"],
        ),
    ),
    DraftMethod(
        "ngram",
        "prompt lookup; helps where the answer quotes its prompt",
        _ngram,
        cost="lookup",
        default_depth=10,
        tune_depth=16,
        keys=("prompt_lookup_min", "prompt_lookup_max"),
        per_request=True,
        vllm=EngineExport(
            lambda c: {"prompt_lookup_min": c.prompt_lookup_min, "prompt_lookup_max": c.prompt_lookup_max}
        ),
        sglang=_NEEDS_CUDA,
        llama_cpp=EngineExport(lambda c: {**_llama_cpp_ngram(c), "--spec-ngram-simple-size-n": c.prompt_lookup_min}),
    ),
    DraftMethod(
        "token_recycling",
        "likely successors of each token so far; helps any text a little, without a second model",
        _token_recycling,
        cost="lookup",
    ),
)

METHODS: dict[str, DraftMethod] = {row.name: row for row in _ROWS}
"""The built-in methods by name, in the order in which they are listed."""
