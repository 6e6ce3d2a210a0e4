"""`SpeculativeConfig`: what a user asks of speculation, and the drafters that it asks for.

The keys have vLLM's names where vLLM has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.core.suggest import did_you_mean, faults
from outrider.drafters.method import (
    AUTO,
    METHODS,
    NONE,
    DraftMethod,
    brings,
    canonical,
    find,
    model_method,
    offered,
    owner,
    plugins,
)

if TYPE_CHECKING:
    from outrider.core.types import Budget
    from outrider.drafters.base import Drafter
    from outrider.drafters.lookup.memory import TextMemory
    from outrider.models.cache import SlotCache
    from outrider.models.load import Loaded

_KEYS = {"draft_model": "model", "speculative_model": "model"}
"""Names of options, and of vLLM's first configurations -> our key."""
_VLLM_RULES = {"standard": "rejection", "block": "block"}
"""vLLM's `rejection_sample_method` -> our verifier."""


class SpeculativeConfig(BaseModel):
    """How to speculate. Give it as a dict to `LLM(speculative_config=...)`, or as JSON on the command line.

    docs/guides/choose.md and docs/trees.md say when a method helps. Raises ValueError for an unknown key, method or verifier,
    with the nearest known name, and for keys that contradict each other. Whether a method can draft for a model shows only when
    the model is loaded.

    Args:
        method: How to draft: a name that `outrider methods` lists, FILE.py:NAME of your own, or a list of names.
        model: The draft model: a folder, a GGUF file, a hub name, a built-in model (builtin:...) or a loaded model; or the
            folder of a trained head.
        num_speculative_tokens: Draft tokens in a row, at most; without it, as many as help.
        controller: adaptive: as many draft tokens as are worth their time on this machine, none if drafting does not help.
            fixed: always the given number. Default: adaptive with the verifier match. With every other verifier it is fixed,
            because step times would change the text.
        tree_width: Children of a node in the draft tree, at most; 1 is a chain. Without it a draft is a chain, and its tokens
            get siblings where the planner finds that they pay.
        tree_nodes: Draft tokens in a step, at most; without it, depth times width.
        layers: For layer_skip: layer numbers, or a file that outrider layers wrote.
        options: Arguments for a method of another package.
        prompt_lookup_min: For ngram: shortest match, in tokens.
        prompt_lookup_max: For ngram: longest match, in tokens.
        prediction: For prediction: a text, or token ids, that each answer will mostly repeat; a request can bring its own.
        corpus: For suffix: a file, a folder, {"text": ...}, token ids, or a list of these.
        corpus_tokens: For suffix: tokens read from the corpus, at most.
        suffix_shared_tokens: For suffix: tokens of other answers to remember; 0: none.
        suffix_decoding_min_token_prob: For suffix: lowest estimated probability of a draft token.
        verifier: How draft tokens are checked. match: the same tokens as plain decoding. rejection, block, traversal: the same
            distribution of texts.
        rejection_sample_method: The acceptance rule by vLLM's name.
        quantization: Weights of the draft model, or of the copy of quantized_self. auto: int4 for a draft model with 16 or 32
            bit weights, unless it is small, and int8 for the copy. none: as they are.
        draft_vocab: For draft_model: tokens in its output head, the most frequent ones (FR-Spec). Without it, 32768 if
            draft_vocab_corpus is given, else all; 0: all.
        draft_vocab_corpus: For draft_model: texts like the answers, in which tokens are counted; given as the corpus is.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    method: str | list[str] = NONE
    model: Any = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=256)
    controller: Literal["adaptive", "fixed"] | None = None
    tree_width: int | None = Field(None, ge=1, le=64)
    tree_nodes: int | None = Field(None, ge=0, le=4095)
    layers: list[int] | str | None = None
    options: dict[str, Any] = {}
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    prediction: str | list[int] | None = None
    corpus: Any = None
    corpus_tokens: int = Field(2**22, ge=1)
    suffix_shared_tokens: int = Field(2**18, ge=0)
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)
    verifier: str = "match"
    rejection_sample_method: Literal["standard", "block"] | None = None
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    draft_vocab: int | None = Field(None, ge=0)
    draft_vocab_corpus: Any = None

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            raw, data = data, {_KEYS.get(name := key.replace("-", "_"), name): raw for key, raw in data.items()}
            if data.get("quantization", "") is None:
                data["quantization"] = "auto"
            if len(data) < len(raw):
                raise ValueError(f"speculative_config has a key twice, under two names: {', '.join(raw)}")
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(f"speculative_config has no {key!r}{did_you_mean(key, cls.model_fields)}")
            if "method" not in data and data.get("model") is not None:
                data = {**data, "method": model_method(data["model"])}
            if named := data.get("method"):
                data = {**data, "method": canonical(named) if isinstance(named, str) else [*map(canonical, named)]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        from outrider.verify import VERIFIERS  # imports numpy, which the command line does not need for its help

        for method in self.methods:
            if method not in METHODS and offered(method) is None:
                names = [*METHODS, *plugins()]
                raise ValueError(f"unknown method {method!r}{did_you_mean(method, names)}; known: {', '.join(names)}")
        if isinstance(self.method, list) and ({NONE, AUTO} & set(self.method) or not self.method):
            raise ValueError(f'a list of methods names drafters, such as ["suffix", "draft_model"], got {self.method}')
        if self.rejection_sample_method:
            self.verifier = _VLLM_RULES[self.rejection_sample_method]
        if self.verifier not in VERIFIERS:
            raise ValueError(
                f"unknown verifier {self.verifier!r}{did_you_mean(self.verifier, VERIFIERS)}; known: {', '.join(VERIFIERS)}"
            )
        if self.budget.width > 1 and not VERIFIERS[self.verifier].trees:
            raise ValueError(
                f'the verifier "{self.verifier}" takes chains only, and tree_width is {self.tree_width}; leave it out, or '
                'take "verifier": "traversal", the same rule for trees'
            )
        for method in self.methods:
            # for a head, the package may have one for the model, which is not known here
            if find(method).needs_model and not find(method).heads and self.model is None:
                raise ValueError(
                    f'method "{method}" needs a model: {{"method": "{method}", "model": "builtin:code-draft"}}'
                )
        for key, about in type(self).model_fields.items():
            only = owner(key) if about.default is None and getattr(self, key) is not None else None
            if only and only.name not in self.methods and not (only.auto and AUTO in self.methods):
                raise ValueError(
                    f'{key} is for the method "{only.name}", got "{self.method}": '
                    f'{{"method": "{only.name}", "{key}": ...}}'
                )
        if self.draft_vocab == 0 and self.draft_vocab_corpus is not None:
            raise ValueError("draft_vocab=0 keeps all tokens, so no corpus is counted; leave one of the two out")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self

    @property
    def methods(self) -> list[str]:
        """The names of the methods, one or several."""
        return [self.method] if isinstance(self.method, str) else self.method

    @property
    def enabled(self) -> bool:
        """Whether there are draft tokens at all. False is plain decoding."""
        return self.method != NONE and self.budget.max_nodes > 0

    @property
    def budget(self) -> Budget:
        """What a draft may have, at most."""
        from outrider.core.types import Budget  # imports numpy, which the command line does not need for its help

        depth = self.num_speculative_tokens
        if depth is None:
            depth = max(find(method).default_depth for method in self.methods)
        return Budget(depth, self.tree_width or 1, self.tree_nodes)

    @property
    def copy_weights(self) -> str:
        """The weights of a model's copy that drafts for it."""
        return "int8" if self.quantization == "auto" else self.quantization

    @property
    def adaptive(self) -> bool:
        """Whether measured step times may shorten drafts. With `match` that never changes a text."""
        return self.verifier == "match" if self.controller is None else self.controller != "fixed"

    @classmethod
    def of(cls, given: SpeculativeConfig | dict[str, Any] | None) -> SpeculativeConfig:
        """Validate what a user gave. Raises ValueError with one readable sentence per mistake."""
        try:
            return cls.model_validate({} if given is None else given)
        except ValidationError as error:
            raise ValueError("speculative_config: " + "; ".join(faults(error))) from None


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter is made for."""

    config: SpeculativeConfig  # what the user asks for
    target: Loaded  # the model that it drafts for
    num_slots: int  # sequences that decode concurrently, at most
    max_length: int  # tokens of a sequence, at most
    device: str  # "cpu", "cuda" or "auto"
    text_memory: TextMemory | None = None  # texts of earlier requests to draft from; None has none
    # makes the store of prefixes that a draft model has read; None keeps none
    prefixes: Callable[[Loaded], Prefixes] | None = None


class Prefixes(Protocol):
    """A store of prefixes, which a model need not read again: what `outrider.engine.prefix_cache.PrefixCache` has."""

    def fetch(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> Any: ...

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> Any: ...

    def chunk_end(self, cache: SlotCache, tokens: Sequence[int], start: int, end: int) -> int: ...


def make_drafters(setup: DrafterSetup) -> dict[str, Drafter]:
    """Make the drafters that a configuration names, by name; none for plain decoding.

    Raises ValueError if one cannot draft for this target.
    """
    config = setup.config
    if not config.budget.max_nodes or config.method == NONE:
        return {}
    names = _fitting(setup) if config.method == AUTO else config.methods
    return {name: _made(find(name), setup) for name in names}


def request_drafters(setup: DrafterSetup) -> dict[str, Drafter]:
    """Make the drafters that a request can choose on any server, by method name."""
    return {name: method.make(setup) for name, method in METHODS.items() if method.per_request}


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
    if model is None and method.heads and not brings(method.name, setup):
        raise ValueError(
            f'method "{method.name}" needs the folder of a trained head, {{"method": "{method.name}", "model": "FOLDER"}}: '
            f"this package has none for {setup.target.name}"
        )
    return method.make(setup)


def _fitting(setup: DrafterSetup) -> list[str]:
    """What "auto" means here: all lookups that say yes, and the first of the others; two models would read twice the weights."""
    possible = [method for method in METHODS.values() if method.auto is not None and method.auto(setup)]
    lookups = [method.name for method in possible if method.cost == "lookup"]
    return lookups + [method.name for method in possible if method.cost != "lookup"][:1]
