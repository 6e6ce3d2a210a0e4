"""What a user may say about speculation: `speculative_config`, with the names vLLM's users know."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.core.types import Budget
from outrider.methods import DEPTHS, METHODS, PLUGINS
from outrider.verify import VERIFIERS


class SpeculativeConfig(BaseModel):
    """How to speculate. Give it as a dict to `LLM(speculative_config=...)` or as JSON on the command line.

    Names are vLLM's where it has one; every field says what it is (`SpeculativeConfig.model_fields`), docs/drafters.md and
    docs/trees.md when it pays. Raises ValueError, naming the nearest, for a field, method or verifier that is not there, and
    for settings that contradict each other. Which methods can draft for a model is seen when that is loaded.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    method: str | list[str] = Field("none", description="who guesses, one or several: " + ", ".join(METHODS))
    model: Any = Field(None, description="the draft model: a folder, a hub name, builtin:..., or a loaded model")
    num_speculative_tokens: int | None = Field(
        None, ge=0, le=256, description="guesses per step, one behind the other, at most; as many as pay if not given"
    )
    controller: Literal["adaptive", "calibrated", "fixed"] | None = Field(
        None,
        description="adaptive: as many draft tokens as pay by the clock, none where none do; calibrated: the same with "
        "costs that are measured once and kept, and it compares chains with trees; fixed: always as many as given. "
        "Not given: adaptive with the verifier match, fixed with every other verifier",
    )
    tree_width: int = Field(1, ge=1, le=64, description="guesses side by side at a node; 1 is a chain")
    tree_nodes: int | None = Field(None, ge=0, le=4095, description="guesses per step in all; None: depth times width")
    layers: list[int] | str | None = Field(
        None, description="for layer_skip: layer numbers, or a file of outrider layers"
    )
    assistant_early_exit: int | None = Field(None, ge=1, description="for layer_skip: draft with so many first layers")
    options: dict[str, Any] = Field({}, description="arguments for a drafter of your own")
    prompt_lookup_min: int = Field(2, ge=1, description="shortest n-gram that counts as a match")
    prompt_lookup_max: int = Field(5, ge=1, description="longest n-gram that is looked up")
    prediction: str | list[int] | None = Field(
        None, description="a text, or token ids, that most of each answer will repeat; a request may name its own"
    )
    corpus: Any = Field(
        None,
        description='texts for suffix: a file, a folder, a saved corpus, {"text": ...}, token ids, or a list of these',
    )
    corpus_tokens: int = Field(2**22, ge=1, description="tokens that are read of the corpus at most")
    suffix_shared_tokens: int = Field(2**18, ge=0, description="tokens of other answers that suffix remembers; 0: none")
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1, description="estimated chance of a guess, at least")
    verifier: str = Field("match", description="the rule: " + ", ".join(VERIFIERS))
    rejection_sample_method: Literal["standard", "block"] | None = Field(None, description="vLLM's name for the rule")
    quantization: Literal["int8", "int4"] | None = Field(
        None, description="precision of quantized_self, or of the draft"
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(f"speculative_config has no {key!r}{nearest(key, list(cls.model_fields))}")
            if data.get("controller") == "optimal":
                warnings.warn(
                    '"controller": "optimal" has a new name: write "controller": "calibrated"',
                    DeprecationWarning,
                    stacklevel=2,
                )
                data = {**data, "controller": "calibrated"}
            if "method" not in data and data.get("model") is not None:
                data = {**data, "method": "draft_model"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        known = [*METHODS, *plugins()]
        for method in self.methods:
            if method not in known:
                raise ValueError(f"unknown method {method!r}{nearest(method, known)}; known: {', '.join(known)}")
        if isinstance(self.method, list) and ({"none", "auto"} & set(self.method) or not self.method):
            raise ValueError(f'a list of methods names drafters, such as ["suffix", "draft_model"], got {self.method}')
        if self.rejection_sample_method:
            self.verifier = {"standard": "rejection", "block": "block"}[self.rejection_sample_method]
        if self.verifier not in VERIFIERS:
            raise ValueError(f"unknown verifier {self.verifier!r}{nearest(self.verifier, list(VERIFIERS))}")
        if "draft_model" in self.methods and self.model is None:
            raise ValueError(
                'method "draft_model" needs a model: {"method": "draft_model", "model": "builtin:code-draft"}'
            )
        for key, method, *others in (
            ("prediction", "prediction", "auto"),
            ("corpus", "suffix", "auto"),
            ("layers", "layer_skip"),
            ("assistant_early_exit", "layer_skip"),
        ):
            if getattr(self, key) is not None and not {method, *others} & set(self.methods):
                raise ValueError(
                    f'{key} is for the method "{method}", got "{self.method}": {{"method": "{method}", "{key}": ...}}'
                )
        if self.layers is not None and self.assistant_early_exit is not None:
            raise ValueError("layers and assistant_early_exit both say which layers draft; give one of them")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self

    @property
    def methods(self) -> list[str]:
        """The methods by name, one or several."""
        return [self.method] if isinstance(self.method, str) else self.method

    @property
    def budget(self) -> Budget:
        """What a drafter may spend in a step, at most."""
        usual = max(DEPTHS.get(method, 5) for method in self.methods)
        depth = usual if self.num_speculative_tokens is None else self.num_speculative_tokens
        return Budget(depth, self.tree_width, self.tree_nodes)

    @property
    def adaptive(self) -> bool:
        """Whether the clock may shorten drafts. Under `match` that never changes a text."""
        return self.verifier == "match" if self.controller is None else self.controller != "fixed"

    @classmethod
    def of(cls, given: SpeculativeConfig | dict[str, Any] | None) -> SpeculativeConfig:
        """Validate what a user gave. Raises ValueError with one readable line per mistake."""
        if isinstance(given, SpeculativeConfig):
            return given
        try:
            return cls.model_validate({} if given is None else dict(given))
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(p) for p in e['loc']) + ': ' if e['loc'] else ''}{e['msg'].removeprefix('Value error, ')}"
                for e in error.errors()
            ]
            raise ValueError("speculative_config: " + "; ".join(lines)) from None


def plugins() -> dict[str, Any]:
    """Drafters that installed packages offer: name -> entry point."""
    return {entry.name: entry for entry in entry_points(group=PLUGINS) if entry.name not in METHODS}


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' when something known is close, else nothing."""
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
