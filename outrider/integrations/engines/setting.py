"""What is exported, what comes out, and what the exports to all engines share."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.method import AUTO, EngineExport
from outrider.drafters.registry import find

LARGEST_BATCH = 4096
"""The last batch size of a schedule."""
_LONGEST = 4096


@dataclass(frozen=True)
class ExportedSetting:
    """A configuration on its way to another engine.

    lengths: the best number of draft tokens by batch size; 0 means no draft tokens. model: the target, as the user names it.
    other_tokens: the draft model has other tokens than the target. folder: where the files will be, for commands that name one.

    Raises ValueError for lengths that are no batch sizes or no numbers of draft tokens.
    """

    config: SpeculativeConfig
    lengths: dict[int, int] = field(default_factory=dict)
    model: str | None = None
    other_tokens: bool = False
    folder: str | None = None

    def __post_init__(self) -> None:
        for size, length in self.lengths.items():
            if size < 1 or not 0 <= length <= _LONGEST:
                raise ValueError(
                    f"the lengths say {length} draft tokens for {size} texts; give 1 text or more, and 0 to {_LONGEST} draft "
                    "tokens, such as 1:4,4:2,8:0"
                )

    @property
    def enabled(self) -> bool:
        """Whether there are draft tokens at any batch size."""
        return self.config.enabled and (not self.lengths or any(self.lengths.values()))

    @property
    def reason(self) -> str:
        """Why it is plain decoding."""
        return "no batch size gains from draft tokens" if self.config.enabled else "the setting is plain decoding"

    def rows(self, engine: str, methods: Mapping[str, EngineExport]) -> list[EngineExport] | None:
        """How an engine runs each method; None if it lacks one. methods: how it runs ours, by name."""
        rows = [find(name).exports.get(engine) or methods.get(name) for name in self.config.methods]
        return None if None in rows else [row for row in rows if row is not None]

    def file(self, name: str) -> str:
        """The path of a file for a command line."""
        return name if self.folder is None else f"{self.folder.rstrip('/')}/{name}"

    def schedule(self) -> list[list[int]]:
        """[first batch size, last batch size, length] for neighbouring batch sizes with the same length, from 1 on.

        Batch sizes below the first that was measured take its length."""
        sizes = sorted(self.lengths)
        starts = [1, *sizes[1:]] if sizes else []
        ends = [*(following - 1 for following in starts[1:]), LARGEST_BATCH]
        runs = itertools.groupby(
            zip(sizes, starts, ends, strict=True) if sizes else (), key=lambda r: self.lengths[r[0]]
        )
        out = []
        for length, run in runs:
            some = list(run)
            out.append([some[0][1], some[-1][2], length])
        return out

    def changes(self) -> bool:
        """Whether the length depends on the batch size, or differs from the configuration's."""
        return any(length != self.config.budget.depth for _, _, length in self.schedule())


@dataclass(frozen=True)
class EngineCommand:
    """A setting for one engine.

    command: what to add to the engine's command line; "" for plain decoding, and if it cannot run this method.
    serve: the whole command line. environment: variables that it needs. files: name -> text, of the configuration that says
    the same. notes: what differs there, and its effect. supported: whether the engine can run the setting.
    """

    engine: str
    command: str
    notes: tuple[str, ...] = ()
    serve: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    supported: bool = True


def unsupported(engine: str, setting: ExportedSetting) -> EngineCommand:
    """The answer of an engine that lacks the method."""
    if setting.config.methods == [AUTO]:
        return EngineCommand(
            engine,
            "",
            (
                "auto: this engine has no such method; outrider tune finds the single method that is best, so export its answer",
            ),
            supported=False,
        )
    names = "+".join(setting.config.methods)
    if len(setting.config.methods) > 1:
        missing = f"{names}: this engine does not run these together; export the one that matters most"
    else:
        missing = f"{names}: this engine has no such method"
    return EngineCommand(engine, "", (missing,), supported=False)


def flags_line(flags: Mapping[str, Any]) -> str:
    """Command line flags. A value of None is a flag without one."""
    words = (word for name, value in flags.items() for word in ((name,) if value is None else (name, str(value))))
    return shlex.join(words)


def yaml_text(values: Mapping[str, Any]) -> str:
    """A YAML file with these keys. A value is written as JSON, which is YAML too, but with whole numbers as keys where it
    has them."""
    return "".join(f"{name}: {_flow(value)}\n" for name, value in values.items())


def _flow(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(k)}: {_flow(v)}" for k, v in value.items()) + "}"


def method_notes(setting: ExportedSetting, rows: Sequence[EngineExport]) -> list[str]:
    return [note for row in rows for note in row.notes(setting.config)]


def verifier_notes(config: SpeculativeConfig, known: Mapping[str, str], otherwise: str) -> list[str]:
    """The note for the verifier. known: by verifier, the note, "" for none. otherwise: what the engine does instead."""
    if config.verifier in known:
        return [known[config.verifier]] if known[config.verifier] else []
    return [f"the verifier {config.verifier}: {otherwise}"]


def chain_notes(config: SpeculativeConfig) -> list[str]:
    """The note for trees in an engine without them."""
    if config.tree_width == 1:
        return []
    return [
        f"trees: it drafts chains, so this is a chain of {config.budget.depth}, and fewer tokens are accepted in a step"
    ]


def adaptive_notes(config: SpeculativeConfig, what: str) -> list[str]:
    """The note for a controller that follows the text. what: what there is instead."""
    return [f"draft lengths that follow the text: {what}"] if config.adaptive else []


def only_folders(setting: ExportedSetting, *models: str | None) -> list[str]:
    """The note for an engine that reads no GGUF files."""
    files = [path for name in models if name is not None and (path := model_path(name)).endswith(".gguf")]
    return [f"{name} is a GGUF file: give the folder that it was made from" for name in files]


def named_model(config: SpeculativeConfig) -> str:
    """The draft model for another engine. A built-in model is a folder of this package, or the file that was fetched."""
    return model_path(str(config.model))


def model_path(name: str) -> str:
    """A model's name for another engine."""
    if not name.startswith("builtin:"):
        return name
    from outrider.models.builtin.download import DOWNLOADS
    from outrider.models.builtin.shipped import builtin_folder

    return str(DOWNLOADS[name].cached) if name in DOWNLOADS else str(builtin_folder(name))


def copies_notes(config: SpeculativeConfig, how: Mapping[str, str]) -> list[str]:
    """A note for a draft model with weights of 8 or 4 bits. how: what to do there, by our name."""
    return (
        [f"{config.quantization} weights of the draft: {how[config.quantization]}"]
        if config.quantization in how
        else []
    )


def vocab_notes(config: SpeculativeConfig) -> list[str]:
    if config.draft_vocab is None and config.draft_vocab_corpus is None and config.speculative_token_map is None:
        return []
    return ["draft vocabulary: the draft's output head keeps all tokens, so each draft token costs more"]


def corpus_notes(config: SpeculativeConfig) -> list[str]:
    """A note for a corpus that an engine cannot read."""
    return [] if config.corpus is None else ["corpus: not read there, so drafts come from prompts and answers only"]


def match_note(config: SpeculativeConfig, rule: str) -> str:
    return f"lookup of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens: {rule}"


def is_eagle1(config: SpeculativeConfig) -> bool:
    """Whether the head is one of EAGLE-1. A head that is not here is taken for EAGLE-3."""
    from outrider.drafters.heads.files import EAGLE1, head_kind

    return head_kind(named_model(config)) == EAGLE1
