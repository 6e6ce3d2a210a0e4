"""What is exported, what comes out, and what the exports to all engines share; each is a `ForeignEngine`."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.config import EngineExport, SpeculativeConfig
from outrider.drafters.method import AUTO, find

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


class ForeignEngine:
    """An engine that settings are exported to. A subclass says how, and `export` puts it together.

    name: its key in `ENGINES`. title: its name for people. start: its server's command line. off: how plain decoding is said.
    plain: the values of plain decoding. methods: how it runs ours, by name. verifiers: what differs with a verifier, "" for
    nothing; otherwise: with all others. other_tokens: what becomes of a draft model with other tokens than the target.
    adaptive: what there is in place of draft lengths that follow the text. quantized: how to have a draft model with weights of
    8 or 4 bits. draft_key: the key of the draft model among the values, in an engine that reads folders only.
    """

    name = title = start = off = otherwise = other_tokens = draft_key = ""
    adaptive = "there they follow the batch size at most, so a text that is hard to draft gains less"
    plain: Mapping[str, Any] = {}
    methods: Mapping[str, EngineExport] = {}
    verifiers: Mapping[str, str] = {
        "match": "match: above temperature 0, texts there have the same distribution, but other tokens",
        "rejection": "",
    }
    quantized: Mapping[str, str] = dict.fromkeys(
        ("int8", "int4"), "give a checkpoint that is quantized to it, else a draft costs more"
    )

    def values(self, setting: ExportedSetting, rows: Sequence[EngineExport], notes: list[str]) -> dict[str, Any]:
        """The setting in the engine's own keys, or its flags. rows: of the methods. Adds to the notes what is its own."""
        raise NotImplementedError

    def written(self, setting: ExportedSetting, model: str, values: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """What to add to the command line, and the files, by name. values: as above; `plain` without draft tokens."""
        raise NotImplementedError

    def path(self, model: str) -> str:
        """A model's name there."""
        return model_path(model)

    def together(self, methods: Sequence[str]) -> bool:
        """Whether it runs these methods together."""
        return len(methods) == 1

    def trees(self, values: Mapping[str, Any]) -> bool:
        """Whether it drafts trees."""
        return False

    def verifier_note(self, verifier: str, values: Mapping[str, Any]) -> str:
        return self.verifiers.get(verifier, f"the verifier {verifier}: {self.otherwise}")

    def corpus_note(self, config: SpeculativeConfig) -> str:
        """Of a corpus that suffix decoding reads here."""
        return "corpus: not read there, so drafts come from prompts and answers only"

    def environment(self, config: SpeculativeConfig) -> dict[str, str]:
        """Variables that the server needs."""
        return {}

    def export(self, setting: ExportedSetting) -> EngineCommand:
        """The command line and the files of a setting, and what this engine cannot do of it."""
        config, model = setting.config, self.path(setting.model or "MODEL")
        start = f"{self.start} {shlex.quote(model)}"
        if not setting.enabled:
            command, files = self.written(setting, model, self.plain)
            note = f"{setting.reason}: {self.off}"
            return EngineCommand(self.title, command, (note,), f"{start} {command}".rstrip(), files=files)
        rows = [row for name in config.methods if (row := find(name).exports.get(self.name) or self.methods.get(name))]
        if len(rows) < len(config.methods) or not self.together(config.methods):
            return EngineCommand(self.title, "", (_missing(config.methods),), supported=False)
        notes = [note for row in rows for note in row.notes(config)]
        if "draft_model" in config.methods:
            notes += self._draft_notes(config)
        if config.corpus is not None:
            notes.append(self.corpus_note(config))
        values = self.values(setting, rows, notes)
        if note := self.verifier_note(config.verifier, values):
            notes.append(note)
        if config.budget.width > 1 and not self.trees(values):
            chain = f"this is a chain of {config.budget.depth}, and fewer tokens are accepted in a step"
            notes.append(f"trees: it drafts chains, so {chain}")
        if setting.other_tokens:
            notes.append(f"tokens: the draft model has others{self.other_tokens}")
        if config.adaptive and self.adaptive:
            notes.append(f"draft lengths that follow the text: {self.adaptive}")
        for path in (model, str(values.get(self.draft_key))) if self.draft_key else ():
            if path.endswith(".gguf"):
                notes.append(f"{path} is a GGUF file: give the folder that it was made from")
        command, files = self.written(setting, model, values)
        environment = self.environment(config)
        words = ["env", *(f"{key}={value}" for key, value in environment.items())] if environment else []
        return EngineCommand(self.title, command, tuple(notes), " ".join([*words, start, command]), environment, files)

    def _draft_notes(self, config: SpeculativeConfig) -> list[str]:
        """Of a draft model: weights of 8 or 4 bits, and a vocabulary of its own."""
        kind, notes = config.quantization, list[str]()
        if kind in self.quantized:
            notes.append(f"{kind} weights of the draft: {self.quantized[kind]}")
        if config.draft_vocab or config.draft_vocab_corpus or config.speculative_token_map:
            notes.append("draft vocabulary: the draft's output head keeps all tokens, so each draft token costs more")
        return notes


def _missing(methods: Sequence[str]) -> str:
    """Why an engine does not run these methods."""
    if [*methods] == [AUTO]:
        return "auto: this engine has no such method, and outrider tune prints the best single one as a line of outrider export"
    why = "this engine has no such method"
    if len(methods) > 1:
        why = "this engine does not run these together; export the one that matters most"
    return f"{'+'.join(methods)}: {why}"


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


def match_note(config: SpeculativeConfig, rule: str) -> str:
    return f"lookup of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens: {rule}"


def is_eagle1(config: SpeculativeConfig) -> bool:
    """Whether the head is one of EAGLE-1. A head that is not here is taken for EAGLE-3."""
    from outrider.drafters.heads.files import EAGLE1, head_kind

    return head_kind(named_model(config)) == EAGLE1
