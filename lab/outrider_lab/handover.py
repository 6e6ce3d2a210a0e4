"""A setting in the terms of vLLM, SGLang, llama.cpp and TensorRT-LLM, and what of it these engines cannot do.

`handover.toml` has their flags and notes. This file writes them, for `outrider export` and for `outrider tune`.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.files import write_whole
from outrider.core.suggest import did_you_mean
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.files import EAGLE1, MEDUSA, HeadFolder, head_kind, open_head
from outrider.drafters.method import AUTO, find
from outrider.models.builtin.download import DOWNLOADS
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.load import load, tokenizer_named

LARGEST_BATCH = LONGEST_DRAFT = 4096
TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""What handover.toml says. A package with a method of its own adds the name to `methods`, and rows."""
ENGINES = [name for name in TABLES if name != "all"]
"""Names on the command line."""


@dataclass(frozen=True)
class EngineCommand:
    """A setting for one engine.

    Args:
        engine: The engine's name for people.
        command: What to add to its command line. "" for plain decoding, and if it cannot run this method.
        notes: What differs there, and its effect.
        serve: The whole command line.
        environment: Variables that the server needs.
        files: Name -> text, of the configuration that says the same.
        supported: Whether the engine can run the setting.
    """

    engine: str
    command: str
    notes: tuple[str, ...] = ()
    serve: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    supported: bool = True


def exports(
    config: dict[str, Any] | SpeculativeConfig,
    lengths: Mapping[int, int] | None = None,
    *,
    model: str | None = None,
    engines: Sequence[str] | None = None,
    other_tokens: bool | None = None,
    out: Path | None = None,
) -> list[EngineCommand]:
    """The same setting for other engines.

    Args:
        lengths: The best number of draft tokens by batch size; 0 means no draft tokens.
        model: The target. Without it, commands say MODEL.
        engines: Names of `ENGINES`. Without it, all.
        other_tokens: Whether the draft model has other tokens than the target. Without it, the two are compared.
        out: Where files are written, and a head that an engine reads in another layout only. Without it, none are.

    Raises ValueError for a wrong configuration, an unknown engine, lengths that are no batch sizes, and a head that does not fit.
    """
    config, lengths = SpeculativeConfig.of(config), lengths or {}
    if unknown := [engine for engine in engines or () if engine not in ENGINES]:
        near = did_you_mean(unknown[0], ENGINES)
        raise ValueError(f"there is no export to {unknown[0]!r}{near}; there are {', '.join(ENGINES)}")
    if wrong := [pair for pair in lengths.items() if pair[0] < 1 or not 0 <= pair[1] <= LONGEST_DRAFT]:
        raise ValueError(
            f"the lengths say {wrong[0][1]} draft tokens for {wrong[0][0]} texts; give 1 text or more, and 0 to "
            f"{LONGEST_DRAFT} draft tokens, such as 1:4,4:2,8:0"
        )
    if other_tokens is not None or model is None or "draft_model" not in config.methods:
        same: bool | None = not other_tokens
    else:
        same = same_tokens(model, str(config.model))
    facts = _facts(config, lengths, model, out) | {"other_tokens": same is False, "unknown_tokens": same is None}
    return [_export(engine, config, facts, out) for engine in (ENGINES if engines is None else engines)]


def _facts(
    config: SpeculativeConfig, lengths: Mapping[int, int], model: str | None, out: Path | None
) -> dict[str, Any]:
    """What the tables ask for and write. The fields of the configuration are among it."""
    methods, depth, width, nodes = config.methods, config.budget.depth, config.budget.width, config.budget.max_nodes
    head, draft, target = head_of(config), model_path(str(config.model)), model_path(model or "MODEL")
    ranges = schedule(lengths)
    changes = any(length != depth for _, _, length in ranges)
    longest = max(length for _, _, length in ranges) if changes else depth
    eagle1 = "eagle" in methods and head is not None and head.kind == EAGLE1
    longest_first = changes and ranges[0][2] == longest
    return {name: name in methods for engine in ENGINES for name in TABLES[engine]["methods"]} | {
        **dict(config),
        "adaptive": config.adaptive,
        "depth": depth,
        "width": width,
        "nodes": nodes,
        "half": max(1, nodes // 2),
        "tree_tokens": min(nodes, width * (longest if longest_first else depth)),
        "path": (config.prompt_lookup_max if config.method == "ngram" else 16) + depth,
        "suffix_depth": max(24, depth + 8),
        "lookup_range": config.prompt_lookup_max > config.prompt_lookup_min,
        "jsonl": isinstance(config.corpus, (str, Path)) and str(config.corpus).endswith(".jsonl"),
        "lengths": changes and lengths,
        "longest": longest,
        "longest_first": longest_first,
        "schedule": ranges,
        "ranges": {last: length for _, last, length in ranges if length},
        "plain": not config.enabled or (bool(lengths) and not any(lengths.values())),
        "head": head,
        "eagle1": eagle1,
        "eagle3": "eagle" in methods and not eagle1,
        "head_speculators": head is not None and "speculators_model_type" in head.settings,
        "head_fasterdecoding": head is not None and head.kind == MEDUSA and "num_heads" not in head.settings,
        "reads_model": any(find(method).needs_model for method in methods),
        "model": model,
        "draft": draft,
        "draft_gguf": f"{draft.removesuffix('.gguf').rstrip('/')}.gguf",
        "draft_file": draft.endswith(".gguf"),
        "target": target,
        "target_gguf": f"{target.removesuffix('.gguf').rstrip('/')}.gguf",
        "target_file": target.endswith(".gguf"),
        "target_folder": model is not None and not target.endswith(".gguf"),
        "folder": "" if out is None else f"{out}/",
    }


def schedule(lengths: Mapping[int, int]) -> list[list[int]]:
    """[first batch size, last batch size, length] for neighbours with the same length. The first starts at 1."""
    ranges: list[list[int]] = []
    for size in sorted(lengths):
        if not ranges or ranges[-1][2] != lengths[size]:
            if ranges:
                ranges[-1][1] = size - 1
            ranges.append([size if ranges else 1, LARGEST_BATCH, lengths[size]])
    return ranges


def _rows(rows: Sequence[list[Any]], facts: Mapping[str, Any]) -> Iterator[list[Any]]:
    """What the rows say whose words hold."""

    def holds(word: str) -> bool:
        name, equals, value = word.lstrip("!").partition("=")
        return (str(facts[name]) == value if equals else bool(facts[name])) != word.startswith("!")

    return (row[1:] for row in rows if all(any(map(holds, words.split("|"))) for words in row[0].split()))


def _filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """A value of a row, with the facts in it. A fact alone keeps its type."""
    if isinstance(value, dict):
        return {name: _filled(one, facts) for name, one in value.items()}
    alone = re.fullmatch(r"\{(\w+)(\+1)?\}", str(value))
    if alone:
        return facts[alone[1]] + 1 if alone[2] else facts[alone[1]]
    return value.format(**facts) if isinstance(value, str) else value


def _export(engine: str, config: SpeculativeConfig, facts: dict[str, Any], out: Path | None) -> EngineCommand:
    """The command for one engine: the rows that hold, written out."""
    table, methods, notes, flags = TABLES[engine], config.methods, list[str](), dict[str, Any]()
    joined, names = table.get("joined", ""), table["methods"]
    there = [names.get("eagle1" if facts["eagle1"] else method, names.get(method)) for method in methods]
    facts = facts | {"engine": engine, "type": ",".join(dict.fromkeys(map(str, there)))}
    refused = [why.format(**facts) for [why] in _rows(table.get("refused", ()), facts)]
    if [*methods] == [AUTO]:
        missing = "auto: this engine has no such method"
        refused = [f"{missing}, and outrider tune prints the best single one as a line of outrider export"]
    elif len(methods) > 1 and (None in there or joined not in ("*", " ".join(sorted(methods)))):
        refused = [f"{'+'.join(methods)}: this engine does not run these together; export the one that matters most"]
    elif None in there:
        refused = [f"{methods[0]}: this engine has no such method"]
    if facts["plain"]:
        why = "no batch size gains from draft tokens" if config.enabled else "the setting is plain decoding"
        flags, notes = table.get("plain", {}), [f"{why}: {table['off']}"]
    elif refused:
        return EngineCommand(table["title"], "", tuple(refused), supported=False)
    else:
        for [reason] in _rows(table.get("rewritten", ()), facts):
            if out is None or facts["model"] is None:
                notes.append(f"head: {reason}; --out FOLDER and -m MODEL write it so")
            else:
                facts["draft"] = str(write_head(facts["head"], engine, facts["model"], out.absolute()))
        for sets, *told in _rows((*table["rows"], *TABLES["all"]["rows"]), facts):
            flags |= _filled(sets, facts)
            notes += [note.format(**facts) for note in told]
    served = facts["target_gguf" if engine == "llama.cpp" else "target"]
    command, files = _written(engine, served, flags, facts)
    for name, text in files.items() if out is not None else ():
        write_whole(Path(facts["folder"]) / name, text)
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if engine == "vllm" and facts["dspark"] and flags else {}
    words = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    serve = " ".join([*words, table["start"], shlex.quote(served), command]).rstrip()
    return EngineCommand(table["title"], command, tuple(notes), serve, variables, files)


def _written(engine: str, model: str, flags: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """What to add to the command line, and the files, by name."""
    if engine == "vllm":
        command = f"--speculative-config {shlex.quote(json.dumps(flags))}" if flags else ""
        return command, {"vllm.yaml": _yaml({"model": model, **({"speculative-config": flags} if flags else {})})}
    if engine == "trt-llm":
        # the documentation of these two methods asks for it
        alone = flags.get("decoding_type") in ("Draft_Target", "NGram")
        whole = {"backend": "pytorch"} | ({"disable_overlap_scheduler": True} if alone else {})
        command = f"--config {shlex.quote(facts['folder'] + 'trt-llm.yaml')}"
        return (command, {"trt-llm.yaml": _yaml({**whole, "speculative_config": flags})}) if flags else ("", {})
    command = shlex.join(word for k, v in flags.items() for word in ((k,) if v is True else (k, str(v))))
    keys = {name.removeprefix("--"): value for name, value in flags.items()}
    if engine == "llama.cpp":
        section = re.sub(r"[^\w.-]", "-", model.rpartition("/")[2].removesuffix(".gguf"))
        lines = ["version = 1", "", f"[{section}]", f"model = {model}", *(f"{k} = {v}" for k, v in keys.items())]
        return command, {"llama.cpp.ini": "\n".join(lines) + "\n"}
    files = {"sglang.yaml": _yaml({"model-path": model, **keys})}
    if "speculative-adaptive" in keys:
        # the candidates by batch size; --speculative-num-steps must be one of them
        pairs = sorted(facts["lengths"].items())
        steps = {size: {"candidate_steps": sorted({0, 1, k} if k < 2 else {1, k})} for size, k in pairs}
        files["sglang-adaptive.json"] = json.dumps(steps, indent=1) + "\n"
    return command, files


def _yaml(values: Mapping[str, Any]) -> str:
    """A YAML file. A value is written as JSON, which is YAML too, but with whole numbers as keys where it has them."""
    return "".join(re.sub(r'"(\d+)":', r"\1:", f"{name}: {json.dumps(value)}\n") for name, value in values.items())


def model_path(name: str) -> str:
    """A model's name for another engine. A built-in model is a folder of this package, or the file that was fetched."""
    if not name.startswith("builtin:"):
        return name
    return str(DOWNLOADS[name].cached) if name in DOWNLOADS else str(builtin_folder(name))


def head_of(config: SpeculativeConfig) -> HeadFolder | None:
    """The head of a setting, if its method reads one and its folder is here. Raises ValueError for a damaged folder."""
    heads = any(find(name).heads for name in config.methods)
    if not heads or not isinstance(config.model, (str, Path)) or not Path(config.model).expanduser().exists():
        return None
    return open_head(config.model)


def write_head(head: HeadFolder, engine: str, target: str, folder: Path) -> Path:
    """Write a head in the layout that an engine reads. Returns its new folder, in `folder`.

    Args:
        target: The model that it drafts for.

    Raises ValueError if head and target do not fit, or if the layout cannot say it.
    """
    from outrider.drafters.heads.eagle import read_eagle
    from outrider.drafters.heads.medusa import read_medusa
    from outrider_lab.heads.writers import write_eagle, write_medusa

    out = folder / f"head-{engine}"
    if head_kind(out) is not None and out.resolve() == head.path.resolve():
        raise ValueError(f"{out} is the head itself; write to another folder")
    loaded = load(target, device="cpu")
    dtype = next((t.dtype.name for t in head.tensors.values() if t.dtype.kind not in "ib"), "bfloat16")
    if head.kind == MEDUSA:
        return write_medusa(out, read_medusa(head.path, loaded), "vllm", dtype=dtype)
    return write_eagle(out, read_eagle(head.path, loaded), "flat", dtype=dtype)


def same_tokens(target: str, draft: str) -> bool | None:
    """Whether two models, given by name, have the same tokens and vocabulary size. None if that cannot be known here.

    Engines with one vocabulary refuse a draft model with another size, even if only unused tokens differ.
    """
    paths = [Path(model_path(name)).expanduser() for name in (target, draft)]
    if not all(path.suffix == ".gguf" or path.is_dir() for path in paths):
        return None  # a name on the hub
    sizes = set[int]()
    try:
        one, two = (tokenizer_named(str(path)).get_vocab() for path in paths)
        for file in (path / "config.json" for path in paths if path.is_dir()):
            settings = json.loads(file.read_text(encoding="utf-8"))
            sizes |= {settings.get("vocab_size") or settings["text_config"]["vocab_size"]}
    except (OSError, ValueError, LookupError):
        return None
    return one == two and len(sizes) < 2
