"""Broken files of every kind are read, or refused with a documented error. None ends the process, takes long, or much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels import cpu as native

SUPPORT = Path(__file__).parents[2] / "support"
KINDS = ("safetensors", "gguf", "tokenizer", "pack", "head", "block", "journal", "trace")


def fuzz(kind: str, count: int, seed: int, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OUTRIDER_PACK_CACHE_GB": "0"}
    command = [sys.executable, str(SUPPORT / "fuzz.py"), kind, str(count), str(seed), str(tmp_path)]
    run = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=60 + 10 * count)
    case = tmp_path / "case"
    assert run.returncode == 0, (
        f"{case.read_text() if case.exists() else kind} ended the process:\n{run.stderr[-3000:]}"
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert not found["bad"]
    assert found["read"] + found["refused"] == count
    assert found["refused"] > (0 if kind == "trace" else count // 10)


@pytest.mark.skipif(not native.available(), reason="packs need the native kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_refused(kind: str, tmp_path: Path) -> None:
    fuzz(kind, 60, 1, tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not native.available(), reason="packs need the native kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_broken_files_are_refused(kind: str, tmp_path: Path) -> None:
    fuzz(kind, 10_000, 2, tmp_path)
