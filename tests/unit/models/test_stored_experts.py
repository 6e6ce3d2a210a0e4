"""Experts of a GGUF file are packed when a token first needs them: the same bits, and the pages of the file are given back."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from architectures import prompts, tiny
from gguf_files import write_gguf

from outrider.kernels import cpu as native
from outrider.kernels.cpu import Packed
from outrider.models import load as loading
from outrider.models.gguf.reader import read
from outrider.models.load import load, pack
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider.models.packs import store

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.why())),
    pytest.mark.filterwarnings("ignore:keeping the packed weights"),
]

_SHAPE = {"hidden_size": 64, "intermediate_size": 96}
[IDS] = prompts(12)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, which keeps a pack however small it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(store.LIMIT, "1")
    monkeypatch.setattr(loading, "WORTH_BYTES", 0)
    monkeypatch.setattr(loading, "WORTH_SECONDS", -1)


def written(tmp_path: Path, kind: str = "qwen3_moe", form: str = "Q4_0") -> Path:
    file = tmp_path / "model.gguf"
    changes = {"moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    write_gguf(tiny(kind, **_SHAPE | changes), file, form)
    return file


def experts(model: object) -> list[Packed]:
    assert isinstance(model, NativeModel)
    return [m for op in model.program.ops if op.kind == "experts" for m in op.matrices]


def logits(model: object, ids: list[int]) -> np.ndarray:
    assert isinstance(model, NativeModel)
    return model.forward(Nodes(np.array([ids]), model.new_cache(1, 64), [0])).logits[0]


@pytest.mark.parametrize(
    ("kind", "form"),
    [("qwen3_moe", "Q4_0"), ("gpt_oss", "MXFP4"), ("gpt_oss", lambda name: "Q5_0" if "up_exps" in name else "Q4_0")],
)
def test_only_experts_that_a_token_needs_are_packed(kind: str, form: str, tmp_path: Path) -> None:
    """gpt-oss has biases. The last form has gate and up in different formats."""
    file = written(tmp_path, kind, form)
    first, second = load(file).model, load(file).model
    store.wait()
    assert not any(m.is_complete for m in experts(first))
    alone = logits(first, IDS[:1])
    chosen = sum(m.is_complete for m in experts(first))
    assert 0 < chosen < len(experts(first))
    for m in experts(second):
        m.state()
    assert all(m.is_complete for m in experts(second))
    assert np.array_equal(alone, logits(second, IDS[:1]))
    assert np.array_equal(logits(first, IDS), logits(second, IDS))
    assert sum(m.is_complete for m in experts(first)) > chosen


def test_the_matrices_are_those_that_are_packed_at_once(tmp_path: Path) -> None:
    whole, name = read([written(tmp_path)]), "blk.0.ffn_{}_exps.weight"
    gate, up, down = (whole.floats(name.format(part)) for part in ("gate", "up", "down"))
    found = experts(load(whole.paths[0]).model)
    for i, (pair, last) in enumerate(zip(found[::2][: len(gate)], found[1::2], strict=False)):
        alternate = pair.dense().reshape(-1, 2, 16, gate.shape[2]).swapaxes(0, 1).reshape(2, -1, gate.shape[2])
        assert np.array_equal(alternate[0], gate[i])
        assert np.array_equal(alternate[1], up[i])
        assert np.array_equal(last.dense(), down[i])


def test_threads_that_need_the_same_experts(tmp_path: Path) -> None:
    file = written(tmp_path)
    expected, model = logits(load(file).model, IDS), load(file).model
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda part: logits(part, IDS), [model.layer_subset([0, 1]) for _ in range(4)])]
    assert all(np.array_equal(f, expected) for f in found)


def test_a_kept_pack_leaves_the_experts_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path)
    expected = logits(load(file).model, IDS)
    store.wait()
    (kept,) = store.packs()
    whole = pack(file, tmp_path / "packed")
    again = load(file).model
    rest = whole - sum(m.bytes for m in experts(again))
    assert kept.bytes < rest
    assert not any(m.is_complete for m in experts(again))
    assert np.array_equal(logits(again, IDS), expected)
    moved = file.rename(tmp_path / "other.gguf")
    store.remove(kept.name)
    monkeypatch.setenv(store.LIMIT, str(rest / 1e9))  # there is room for it without the experts
    for _ in range(2):
        assert np.array_equal(logits(load(moved).model, IDS), expected)
        store.wait()
        assert len(store.packs()) == 1


def test_a_pack_of_a_folder_has_everything(tmp_path: Path) -> None:
    file = written(tmp_path)
    expected = logits(load(file).model, IDS)
    pack(file, tmp_path / "packed")
    file.unlink()
    assert np.array_equal(logits(load(tmp_path / "packed").model, IDS), expected)


def test_other_precisions_are_packed_at_once_and_kept(tmp_path: Path) -> None:
    file, found = written(tmp_path), list[np.ndarray]()
    for _ in range(2):
        model = load(file, quantization="int8").model
        assert all(m.is_complete for m in experts(model))
        found.append(logits(model, IDS))
        store.wait()
    assert np.array_equal(*found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_file_are_given_back(tmp_path: Path) -> None:
    def mapped() -> int:
        """kB of the file that are in the memory of this process."""
        text = Path("/proc/self/smaps").read_text(encoding="utf-8")
        return sum(int(n) for n in re.findall(r"model\.gguf\n(?:\w+:.*\n)*?Rss: +(\d+) kB", text))

    file = tmp_path / "model.gguf"
    write_gguf(tiny("qwen3_moe", hidden_size=512, moe_intermediate_size=1024), file, "Q8_0")
    model = load(file).model
    for m in experts(model):
        m.state()
    assert "model.gguf" in Path("/proc/self/smaps").read_text(encoding="utf-8")
    assert mapped() < 0.3 * file.stat().st_size / 1000  # the system maps some pages around each one that is read
