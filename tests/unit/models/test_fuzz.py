"""Broken files of every kind are read, or refused with a documented error. None ends the process, takes long, or much memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forked import Forked

from outrider.kernels import cpu as native

PROGRAM = (Path(__file__).parents[2] / "support" / "fuzz.py").read_text()
KINDS = ("safetensors", "gguf", "tokenizer", "pack", "head", "block", "journal", "trace")


pytest.importorskip("torch", reason="makes its models")
pytestmark = pytest.mark.skipif(not native.available(), reason="packs need the native kernels")


def fuzz(folder: Path, count: int, seed: int, *kinds: str) -> Path:
    """Read so many broken files of each kind. Returns the folder of what was found."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "OUTRIDER_PACK_CACHE_GB": "0"}
    words = str(count), str(seed), str(folder), *kinds
    with Forked(*words, code=PROGRAM, environment={**os.environ, **own}) as process:
        assert process.wait(len(kinds) * (60 + 10 * count)) == 0, process.said[-3000:]
    return folder


def check(folder: Path, kind: str, count: int) -> None:
    case, result = folder / kind / "case", folder / kind / "found"
    assert result.exists(), (
        f"{case.read_text() if case.exists() else kind} ended the process:\n"
        f"{(folder / kind / 'stderr').read_text(errors='replace')[-3000:]}"
    )
    found = json.loads(result.read_text())
    assert not found["bad"]
    assert found["read"] + found["refused"] == count
    assert kind == "trace" or found["refused"] > count // 10


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz(tmp_path_factory.mktemp("fuzz"), 30, 1, *KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_refused(kind: str, few: Path) -> None:
    check(few, kind, 30)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_broken_files_are_refused(kind: str, tmp_path: Path) -> None:
    check(fuzz(tmp_path, 10_000, 2, kind), kind, 10_000)
