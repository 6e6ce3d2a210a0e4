"""The models of a comparison, made once and kept under work/bench: a big target and the drafts that fit it.

`own` is the small model the target was made of, so that it guesses by the target's very function; `draft` is the same with
noise, right with a wanted probability. With builtin:code as the source, builtin:code-draft is a draft as trained.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, WORK
from outrider.models.builtin.shipped import builtin_folder

PRECISIONS: dict[str, dict[str, Any]] = {
    # what each side is told; stored: the precision of the folder that all of them read
    "float32": {
        "stored": "float32",
        "dtype": "float32",
        "quantization": None,
        "transformers": "float32",
        "gguf": "f32",
    },
    "bfloat16": {
        "stored": "bfloat16",
        "dtype": "auto",
        "quantization": None,
        "transformers": "bfloat16",
        "gguf": "f16",
    },
    "int8": {"stored": "bfloat16", "dtype": "auto", "quantization": "int8", "transformers": None, "gguf": "q8_0"},
}
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}


@dataclass(frozen=True)
class Pair:
    """A target folder, and draft folders by the name that methods call them (draft:4 uses drafts["draft"])."""

    target: Path
    drafts: dict[str, Path]

    def arguments(self) -> list[str]:
        """For the processes of the sides."""
        return ["--model", str(self.target), *(x for n, p in self.drafts.items() for x in ("--draft", f"{n}={p}"))]


def drafts_of(given: list[str]) -> dict[str, str]:
    """Folders by name from NAME=FOLDER; a folder alone is named draft."""
    pairs: list[list[str]] = [g.split("=", 1) if "=" in g else ["draft", g] for g in given]
    return {p[0]: p[1] for p in pairs}


def source_folder(name: str) -> Path:
    return builtin_folder(name) if name.startswith("builtin:") else Path(name)


def fingerprint(name: str) -> str:
    """Changes when the source is trained anew. name: a built-in name, a folder or a GGUF file."""
    weights = Path(name) if Path(name).is_file() else source_folder(name) / "model.safetensors"
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def made(name: str, source: str, *arguments: str) -> Path:
    """The folder that `benchmarks.inflate source arguments` writes, made now unless it is there already."""
    folder, mark = WORK / "models" / name, fingerprint(source)
    stamp = folder / "source.json"
    if not (stamp.exists() and json.loads(stamp.read_text()) == [mark, *arguments]):
        print(f"making {name} of {source}", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.inflate", source, "--out", str(folder), *arguments],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for stale in folder.glob("*.gguf"):
            stale.unlink()
        stamp.write_text(json.dumps([mark, *arguments]))
    return folder


def synthetic(size: str, stored: str = "bfloat16") -> Path:
    """The built-in code model at the cost of a larger one."""
    return made(f"code-{size}-{stored}", "builtin:code", "--size", size, "--dtype", stored)


def pair(size: str, stored: str, source: str, rate: float = 0.8, trained: str | None = None) -> Pair:
    """The target of this size and its drafts. size: 1.1B; or 1.1B:6, that shape with six layers. trained: another small
    model that shares the vocabulary, named so."""
    short, d = source.removeprefix("builtin:").replace("/", "-"), ["--dtype", stored]
    shape, _, layers = size.partition(":")
    shaped = ["--size", shape, *(["--layers", layers] if layers else [])]
    target = made(f"{short}-{size.replace(':', 'x')}-{stored}", source, *shaped, *d)
    drafts = {
        "draft": made(f"{short}-noise{rate}-{stored}", source, "--noise", str(rate), *d),
        "own": made(f"{short}-{stored}", source, *d),
    }
    if trained is not None:
        drafts["trained"] = made(f"{trained.removeprefix('builtin:')}-{stored}", trained, *d)
    return Pair(target, drafts)


def weight_count(folder: Path) -> int:
    """Weights that a forward reads: every matrix but the embedding, of which it reads a row a token."""
    c = json.loads((folder / "config.json").read_text())
    attention = c["hidden_size"] * c["head_dim"] * 2 * (c["num_attention_heads"] + c["num_key_value_heads"])
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
    return c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]
