"""GGUF files that are broken, of another kind, split or on the hub: an error that says what is wrong, never a crash."""

from __future__ import annotations

import contextlib
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from architectures import prompts, tiny
from gguf_files import write_file, write_gguf
from gguf_writer import write_toy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.models import checkpoint
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.files import gguf_files
from outrider.models.gguf import reader
from outrider.models.gguf.reader import read
from outrider.models.load import load
from outrider.models.nodes import Nodes

TOKENS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_toy(file, metadata={"general.name": "tiny"})
    return file


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copy(written, tmp_path / "model.gguf"))


def patch(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)


def replace(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))


def entry(file: Path, tensor: bytes) -> int:
    """Where the numbers of a tensor start in the header: its dimensions, type and offset."""
    return file.read_bytes().index(struct.pack("<Q", len(tensor)) + tensor) + 8 + len(tensor)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
    st.integers(0, 4000) | st.none(),
)
@example([(8, struct.pack("<Q", 2**63))], None)
@example([(16, struct.pack("<Q", 2**40))], None)
@example([(24, struct.pack("<Q", 2**62))], None)
def test_a_corrupt_header_is_a_value_error(written: Path, tmp_path: Path, changes: Any, cut: int | None) -> None:
    content = bytearray(written.read_bytes())
    for at, data in changes:
        content[at : at + len(data)] = data
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: len(content) if cut is None else cut])
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        found = read([broken])
        assert all(t.offset + t.bytes <= len(content) for t in found.tensors.values())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def at(file: Path, tensor: bytes, offset: int, form: str, value: int) -> None:
    """A number of a tensor's entry."""
    patch(file, entry(file, tensor) + offset, struct.pack(form, value))


def shortened(part: float) -> Callable[[Path], object]:
    def cut(file: Path) -> None:
        size = int(part * file.stat().st_size) if isinstance(part, float) else part
        file.write_bytes(file.read_bytes()[:size])

    return cut


def described(metadata: dict[str, Any], **model: Any) -> Callable[[Path], object]:
    """The file of a model with other metadata; of one small tensor without a model."""
    if model:
        return lambda file: write_gguf(tiny("llama"), file, metadata=metadata)
    tensors = {"x": (np.zeros((2, 32), np.float32), "F32")}
    return lambda file: write_file(file, {"general.architecture": "llama"} | metadata, tensors)


_Q = b"blk.0.attn_q.weight"
_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# What is done to a sound file, and what the error says.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"cut at {part}": (shortened(part), "download it again") for part in (0, 3, 8, 23, 24, 100, 500, 0.5, 0.99)},
    "another kind": (lambda f: f.write_bytes(b"PK\x03\x04" + bytes(100)), r"no GGUF file: it starts with b'PK"),
    "a pointer": (lambda f: f.write_text(_LFS), r"Git LFS pointer.*git lfs pull"),
    "big endian": (
        lambda f: patch(f, 4, struct.pack(">IQQ", 3, 1, 1)),
        r"model.gguf is a big-endian GGUF file.*little",
    ),
    **{f"version {n}": (lambda f, n=n: patch(f, 4, struct.pack("<I", n)), f"GGUF version {n}") for n in (1, 4)},
    "an unknown type": (lambda f: at(f, _Q, 20, "<I", 77), r"'blk.0.attn_q.weight' has type 77.*pip install -U gguf"),
    "a type of no matrix": (lambda f: at(f, _Q, 20, "<I", 9), r"blk.0.attn_q.weight has type Q8_1.*Q4_K"),
    "many dimensions": (lambda f: at(f, _Q, 0, "<I", 9), "has 9 dimensions"),
    "no dimensions": (lambda f: at(f, _Q, 0, "<I", 0), "has 0 dimensions"),
    "no columns": (lambda f: at(f, _Q, 4, "<Q", 0), "cannot be Q8_0"),
    "half a block": (lambda f: at(f, _Q, 4, "<Q", 33), "cannot be Q8_0"),
    "a large tensor": (lambda f: at(f, _Q, 4, "<Q", 2**40), "ends at byte"),
    "a tensor beyond the end": (lambda f: at(f, _Q, 24, "<Q", 2**40), "ends at byte"),
    "an odd place": (lambda f: at(f, _Q, 24, "<Q", 7), "no multiple of 32"),
    "another shape": (lambda f: at(f, _Q, 4, "<Q", 96), r"q_proj.weight is \[64, 96\].* asks for \[64, 64\]"),
    "a lost tensor": (lambda f: replace(f, b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"), "lacks blk.1.ffn_down"),
    "another family": (
        described({"general.architecture": "mamba"}),
        r"is a mamba, and outrider reads .* llama, qwen2.*olmo2",
    ),
    "a projector": (described({"general.architecture": "clip", "general.type": "mmproj"}), "projector"),
    "an adapter": (described({"general.type": "adapter", "adapter.type": "lora"}), r"adapter \(LoRA\)"),
    "an importance matrix": (described({"general.type": "imatrix"}), "importance matrix"),
    "a control vector": (described({"general.architecture": "controlvector"}), "control vector"),
    "a vocabulary": (
        lambda f: write_file(f, {"general.architecture": "llama"} | TOKENS, {}),
        "no tensors, only a vocab",
    ),
    "no layers": (described({"llama.block_count": None}, of="llama"), "llama.block_count is None"),
    "no heads": (described({"llama.attention.head_count": 0}, of="llama"), "llama.attention.head_count is 0"),
    "layers that differ": (
        described({"llama.feed_forward_length": [40, 80]}, of="llama"),
        "differs from layer to layer",
    ),
    "odd angles": (
        described({"llama.rope.scaling.type": "mystery", "llama.rope.scaling.factor": 2.0}, of="llama"),
        "rotary scaling 'mystery'",
    ),
    "other values": (described({"llama.attention.value_length": 3}, of="llama"), "another length than keys"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_or_one_of_another_kind_is_named(fault: str, file: Path) -> None:
    change, message = BROKEN[fault]
    if fault == "another shape":  # a shape that the native step does not know is left to transformers, which refuses it
        pytest.importorskip("torch")
    change(file)
    with pytest.raises((ValueError, UnsupportedModel), match=message):
        load(file)


def test_an_array_that_no_model_has_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LONGEST_ARRAY", 2)
    with pytest.raises(ValueError, match=r"its key 'tokenizer.ggml.tokens' has 384 entries"):
        read([file])


def test_tensors_of_another_family_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("qwen3", head_dim=8), file)
    content = file.read_bytes().replace(b"qwen3", b"qwen2")  # qwen2 has no norms of q and k, and qwen3 no biases
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"lacks blk.0.attn_q.bias"):
        load(file)
    file.write_bytes(content.replace(b"qwen2", b"llama"))
    with pytest.raises(UnsupportedModel, match=r"has blk.0.attn_k_norm.weight and 3 other tensors"):
        load(file)
    write_gguf(tiny("llama"), file, metadata={"llama.feed_forward_length": [40, 40]})
    load(file)  # settings of each layer may be lists


def test_memory_is_checked_before_anything_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "free_memory", lambda where: 20_000)
    with pytest.raises(MemoryError, match=r"needs .* as gguf"):
        load(file)


# -- which files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    write_gguf(tiny("llama"), tmp_path / "m.gguf", "Q8_0", parts=3, metadata=TOKENS)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_of_a_split_model_loads_all(split: list[Path], tmp_path: Path) -> None:
    assert [p.name for p in split] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    write_gguf(tiny("llama"), tmp_path / "whole.gguf", "Q8_0")
    tokens = np.array(prompts(9))
    expected = [m.forward(Nodes(tokens, m.new_cache(1, 64), [0])).logits for m in [load(tmp_path / "whole.gguf").model]]
    for part in split:
        model = load(part).model
        assert np.array_equal(model.forward(Nodes(tokens, model.new_cache(1, 64), [0])).logits, expected[0])


def test_parts_that_are_missing_or_do_not_belong_together_are_named(split: list[Path], tmp_path: Path) -> None:
    assert gguf_files(str(tmp_path)) == tuple(split), "a folder with the parts of one model is that model"
    content = split[1].read_bytes()
    split[1].unlink()
    for part in split:
        with pytest.raises(FileNotFoundError, match=r"is one of 3 parts, and m-00002-of-00003.gguf is not in"):
            load(part)
    shutil.copy(split[0], split[1])
    with pytest.raises(ValueError, match=r"is part 1 \(from 0\) of 3 by its name, and 0 of 3 inside"):
        load(split[0])
    split[1].write_bytes(content)
    split[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ValueError, match=r"is part 1 of 3, and its name does not say which the others are"):
        load(tmp_path / "alone.gguf")


def test_a_folder_with_one_file_is_that_file(written: Path, tmp_path: Path) -> None:
    shutil.copy(written, tmp_path)
    assert load(tmp_path).weights == "gguf"
    shutil.copy(written, tmp_path / "other.gguf")
    with pytest.raises(ValueError, match=r"has 2 GGUF models; give one of them: model.gguf, other.gguf"):
        load(tmp_path)


def test_a_file_of_the_hub_is_downloaded(split: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(hub: str, file: str) -> str:
        asked.append((hub, file))
        return str(split[0].with_name(file))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("owner/name:m-00002-of-00003.gguf").weights == "gguf"
    assert asked == [("owner/name", p.name) for p in split]


def test_a_name_that_leads_to_no_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.gguf; give the path of a GGUF file"):
        load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="cannot be a name on the hub"):
        load("ow--ner/..name:m.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"hf download owner/name m.gguf"):
        load("owner/name:m.gguf")


def test_a_fingerprint_covers_every_part(split: list[Path]) -> None:
    before = checkpoint.fingerprint(split[0])
    assert before == checkpoint.fingerprint(str(split[2]))
    split[1].write_bytes(split[1].read_bytes() + b"\0")
    assert checkpoint.fingerprint(split[0]) != before
    folder = checkpoint.fingerprint(split[0].parent)
    split[1].write_bytes(split[1].read_bytes() + b"\0")
    assert checkpoint.fingerprint(split[0].parent) != folder
