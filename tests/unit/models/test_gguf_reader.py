"""GGUF files that are broken, of another kind, split or on the hub: an error that says what is wrong, never a crash."""

from __future__ import annotations

import contextlib
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from architectures import prompts, tiny
from gguf_files import write_file, write_gguf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.models import checkpoint
from outrider.models.gguf import reader
from outrider.models.gguf.files import gguf_files
from outrider.models.gguf.reader import read
from outrider.models.hf.hooks import UnsupportedModel
from outrider.models.load import load
from outrider.models.nodes import Nodes

TOKENS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(tiny("llama"), file, "Q8_0", metadata={"general.name": "tiny"} | TOKENS)
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


def header_length(file: Path) -> int:
    return min(t.offset for t in read([file]).tensors.values())


@pytest.mark.parametrize("part", [0, 3, 8, 23, 24, 100, 500, 0.5, 0.99])
def test_a_truncated_file_is_refused(file: Path, part: float) -> None:
    size = int(part * file.stat().st_size) if isinstance(part, float) else part
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="download it again"):
        load(file)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_an_array_that_no_model_has_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LONGEST_ARRAY", 2)
    with pytest.raises(ValueError, match=r"its key 'tokenizer.ggml.tokens' has 3 entries"):
        read([file])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"no GGUF file: it starts with b'PK"):
        load(file)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        load(file)


def test_a_big_endian_file_is_named(file: Path) -> None:
    patch(file, 4, struct.pack(">IQQ", 3, 1, 1))
    with pytest.raises(ValueError, match=r"model.gguf is a big-endian GGUF file.*little"):
        load(file)


@pytest.mark.parametrize("version", [1, 4])
def test_another_version_is_named(file: Path, version: int) -> None:
    patch(file, 4, struct.pack("<I", version))
    with pytest.raises(ValueError, match=f"GGUF version {version}"):
        load(file)


def test_an_unknown_type_of_tensor_is_named(file: Path) -> None:
    at = entry(file, b"blk.0.attn_q.weight")
    patch(file, at + 4 + 16, struct.pack("<I", 77))
    with pytest.raises(ValueError, match=r"'blk.0.attn_q.weight' has type 77.*pip install -U gguf"):
        load(file)


def test_a_type_that_nobody_reads_is_named(file: Path) -> None:
    patch(file, entry(file, b"blk.0.attn_q.weight") + 4 + 16, struct.pack("<I", 9))
    with pytest.raises(UnsupportedModel, match=r"blk.0.attn_q.weight has type Q8_1.*Q4_K"):
        load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, struct.pack("<I", 9)), "has 9 dimensions"),
        ((0, struct.pack("<I", 0)), "has 0 dimensions"),
        ((4, struct.pack("<Q", 0)), "cannot be Q8_0"),
        ((4, struct.pack("<Q", 33)), "cannot be Q8_0"),
        ((4, struct.pack("<Q", 2**40)), "ends at byte"),
        ((24, struct.pack("<Q", 2**40)), "ends at byte"),
        ((24, struct.pack("<Q", 7)), "no multiple of 32"),
        ((4, struct.pack("<Q", 64)), "has shape"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(file: Path, change: tuple[int, bytes], message: str) -> None:
    patch(file, entry(file, b"blk.0.attn_q.weight") + change[0], change[1])
    with pytest.raises(ValueError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"is a mamba, and outrider reads GGUF files of llama, qwen2.*olmo2"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, "projector"),
        ({"general.type": "adapter", "adapter.type": "lora"}, r"adapter \(LoRA\)"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.architecture": "controlvector"}, "control vector"),
    ],
)
def test_a_file_that_is_no_language_model_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    file = tmp_path / "model.gguf"
    write_file(file, {"general.architecture": "llama"} | metadata, {"x": (np.zeros((2, 32), np.float32), "F32")})
    with pytest.raises(UnsupportedModel, match=message):
        load(file)


def test_a_vocabulary_without_weights_is_named(tmp_path: Path) -> None:
    file = tmp_path / "vocab.gguf"
    write_file(file, {"general.architecture": "llama"} | TOKENS, {})
    with pytest.raises(UnsupportedModel, match="no tensors, only a vocabulary"):
        load(file)


def test_a_missing_tensor_is_named(file: Path) -> None:
    replace(file, b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight")
    with pytest.raises(ValueError, match=r"lacks blk.1.ffn_down.weight"):
        load(file)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    raw = tiny("qwen3", head_dim=8)
    write_gguf(raw, file)
    replace(file, b"general.architecture", b"general.architecture")
    content = file.read_bytes().replace(b"qwen3", b"qwen2")  # qwen2 has no norms of q and k, and qwen3 no biases
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"lacks blk.0.attn_q.bias"):
        load(file)
    file.write_bytes(content.replace(b"qwen2", b"llama"))
    with pytest.raises(UnsupportedModel, match=r"has blk.0.attn_k_norm.weight and 3 other tensors"):
        load(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.feed_forward_length": [40, 80]}, "differs from layer to layer"),
        ({"llama.rope.scaling.type": "mystery", "llama.rope.scaling.factor": 2.0}, "rotary scaling 'mystery'"),
        ({"llama.attention.value_length": 3}, "another length than keys"),
    ],
)
def test_metadata_that_does_not_fit_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), file, metadata=metadata)
    with pytest.raises((ValueError, UnsupportedModel), match=message):
        load(file)


def test_settings_of_each_layer_may_be_lists(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), file, metadata={"llama.feed_forward_length": [40, 40]})
    load(file)


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
    tokens = torch.tensor(prompts(9))
    expected = [m.forward(Nodes(tokens, m.new_cache(1, 64), [0])).logits for m in [load(tmp_path / "whole.gguf").model]]
    for part in split:
        model = load(part).model
        assert torch.equal(model.forward(Nodes(tokens, model.new_cache(1, 64), [0])).logits, expected[0])


def test_missing_parts_are_named(split: list[Path]) -> None:
    split[1].unlink()
    for part in (split[0], split[1], split[2]):
        with pytest.raises(FileNotFoundError, match=r"is one of 3 parts, and m-00002-of-00003.gguf is not in"):
            load(part)


def test_parts_that_do_not_belong_together_are_refused(split: list[Path]) -> None:
    shutil.copy(split[0], split[1])
    with pytest.raises(ValueError, match=r"is part 1 \(from 0\) of 3 by its name, and 0 of 3 inside"):
        load(split[0])


def test_a_part_under_another_name_is_refused(split: list[Path], tmp_path: Path) -> None:
    split[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ValueError, match=r"is part 1 of 3, and its name does not say which the others are"):
        load(tmp_path / "alone.gguf")


def test_a_folder_with_one_file_is_that_file(written: Path, tmp_path: Path) -> None:
    shutil.copy(written, tmp_path)
    assert load(tmp_path).weights == "gguf"
    shutil.copy(written, tmp_path / "other.gguf")
    with pytest.raises(ValueError, match=r"has 2 GGUF models; give one of them: model.gguf, other.gguf"):
        load(tmp_path)


def test_a_folder_with_the_parts_of_one_model_is_that_model(split: list[Path], tmp_path: Path) -> None:
    assert gguf_files(str(tmp_path)) == tuple(split)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.gguf; give the path of a GGUF file"):
        load(tmp_path / "none.gguf")


def test_a_file_of_the_hub_is_downloaded(split: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(hub: str, file: str) -> str:
        asked.append((hub, file))
        return str(split[0].with_name(file))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("owner/name:m-00002-of-00003.gguf").weights == "gguf"
    assert asked == [("owner/name", p.name) for p in split]


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"hf download owner/name m.gguf"):
        load("owner/name:m.gguf")


def test_a_wrong_name_of_the_hub_is_named() -> None:
    with pytest.raises(ValueError, match="cannot be a name on the hub"):
        load("ow--ner/..name:m.gguf")


def test_a_fingerprint_covers_every_part(split: list[Path]) -> None:
    before = checkpoint.fingerprint(split[0])
    assert before == checkpoint.fingerprint(str(split[2]))
    split[1].write_bytes(split[1].read_bytes() + b"\0")
    assert checkpoint.fingerprint(split[0]) != before
    folder = checkpoint.fingerprint(split[0].parent)
    split[1].write_bytes(split[1].read_bytes() + b"\0")
    assert checkpoint.fingerprint(split[0].parent) != folder
