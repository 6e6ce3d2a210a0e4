"""Saved packed weights: a model from a pack gives the bits of the model that was packed. A pack that is damaged, older or only
half written is never used, and the cache of packs keeps its bounds."""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import prompts, tiny
from crossed import crossed
from gguf_files import write_gguf
from ml_dtypes import bfloat16
from patience import PATIENCE
from plain import write_checkpoint
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from outrider.core.files import disk_bytes
from outrider.core.store import PACKS, Store
from outrider.kernels import cpu as native
from outrider.models import load as loading
from outrider.models.base import LanguageModel
from outrider.models.checkpoint import LoadRequest, ReadModel
from outrider.models.load import Loaded, Reduction, pack
from outrider.models.native import families
from outrider.models.native.model import NativeModel
from outrider.models.native.program import Program
from outrider.models.nodes import Nodes
from outrider.models.packs import folder as packs
from outrider.models.packs import store
from outrider.models.packs.folder import MANIFEST, WEIGHTS, BadPack

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")
# One of each kind of matrix and parameter: tied, joined, biased, with sinks, experts, latents and states.
KINDS = ["llama", "phi3", "qwen2", "gpt_oss", "qwen2_moe", "deepseek_v3", "qwen3_next"]


def load(*given: Any, **more: Any) -> Loaded:
    """`loading.load`, and what it keeps is written."""
    found = loading.load(*given, **more)
    store.wait()
    return found


def quiet(source: Path, **more: Any) -> Loaded:
    """In int8, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "keeping the packed weights")
        return load(source, quantization="int8", **more)


def logits(model: LanguageModel) -> np.ndarray:
    return model.forward(Nodes(np.array(prompts(9)), model.new_cache(1, 64), [0])).logits[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache that keeps packs of any size, however quick the model was loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(store.LIMIT, "1")
    monkeypatch.setattr(loading, "WORTH_BYTES", 0)
    monkeypatch.setattr(loading, "WORTH_SECONDS", -1)
    yield tmp_path / "cache" / "outrider" / "packs"
    store.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in bfloat16, with a tokenizer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "llama", dtype=bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    """A copy, whose files may be changed."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


@pytest.fixture(scope="module")
def whole(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its pack in int8, which names the saved folder as its source."""
    out = tmp_path_factory.mktemp("packed") / "pack"
    pack(saved, out, quantization="int8")
    return out


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the matrices that are packed."""
    counted, init = list[int](), native.Packed.__init__
    monkeypatch.setattr(native.Packed, "__init__", lambda self, *a, **k: (counted.append(1), init(self, *a, **k))[1])
    return counted


# -- one pack --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weights"), crossed(KINDS, ["bfloat16", "int8", "int4"], share=0.1))
def test_a_model_from_a_pack_gives_the_same_bits(name: str, weights: str, tmp_path: Path) -> None:
    raw = tiny(name).bfloat16()
    made = NativeModel(raw, weights=weights)
    given = ReadModel(made.program, None, weights, (5, 7), raw.config)
    packs.contents(given, made.program, weights, name).write(tmp_path)
    found = packs.read(tmp_path, LoadRequest(name, tokenizer=False)).model
    assert isinstance(found, Program)
    again = NativeModel(found)
    assert np.array_equal(logits(made), logits(again))
    assert again.program.facts == made.program.facts
    assert (again.weight_bytes, again.num_layers, again.max_length) == (
        made.weight_bytes, made.num_layers, made.max_length,
    )  # fmt: skip
    assert np.array_equal(logits(made.layer_subset([0])), logits(again.layer_subset([0])))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_folder_loads_as_any_model_of_its_one_precision(
    source: Path, tmp_path: Path, quantization: str | None, quantised: list[int]
) -> None:
    size, expected = (
        pack(source, tmp_path / "packed", quantization=quantization),
        load(source, quantization=quantization),
    )
    assert size == disk_bytes(tmp_path / "packed") > 1000
    quantised.clear()
    found = load(tmp_path / "packed", quantization=quantization)
    assert not quantised
    assert (found.weights, found.end_ids) == (expected.weights, (5, 7))
    assert found.tokenizer("w3 w4")["input_ids"] == [3, 4]  # pyright: ignore[reportOptionalCall]
    assert np.array_equal(logits(found.model), logits(expected.model))
    for option, other in (("quantization", "int4" if quantization == "int8" else "int8"), ("dtype", "float32")):
        with pytest.raises(ValueError, match=f"packed in {expected.weights}, not in {other}"):
            load(tmp_path / "packed", **{option: other})


def test_a_pack_of_a_pack_is_the_same_pack(whole: Path, tmp_path: Path) -> None:
    pack(whole, tmp_path / "two")
    one, two = packs.manifest(whole), packs.manifest(tmp_path / "two")
    assert (two.native, two.sums) == (one.native, one.sums)


def test_a_model_of_the_general_path_has_no_pack(tmp_path: Path) -> None:
    tiny("gpt_neox").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"modelling code of transformers.*load it as it is"):
        pack(tmp_path / "model", tmp_path / "packed", quantization="int8")
    assert not (tmp_path / "packed").exists()
    load(tmp_path / "model", quantization="int8")
    assert store.packs() == []


def test_the_tensors_of_a_pack_are_those_of_its_source(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", quantization="int8")
    loaded = load(tmp_path / "packed")
    made, wanted = loading.tensors(loaded), loading.tensors(load(source))
    assert all(np.array_equal(made.get(name), wanted.get(name)) for name in load_file(source / "model.safetensors"))
    shutil.rmtree(source)
    with pytest.raises(ValueError, match="has packed weights alone"):
        loading.tensors(loaded)


def test_only_a_pack_or_nothing_is_replaced(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="no pack"):
        pack(source, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    for quantization in ("int8", "int4"):
        pack(source, tmp_path / "empty", quantization=quantization)
        assert load(tmp_path / "empty").weights == quantization
    monkeypatch.setattr(packs, "save", no_space)
    with pytest.raises(OSError, match="No space left"):
        pack(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert not [*tmp_path.glob("*.partial")]


def no_space(tensors: object, file: Path) -> None:
    file.write_bytes(b"a part")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


def flip(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-100] ^= 4
    (folder / WEIGHTS).write_bytes(raw)


def scribble(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])


def change(**values: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        given = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(given | values))

    return write


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "flipped": flip,
    "lost": lambda folder: (folder / WEIGHTS).unlink(),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "another layout": change(made_by={"layout": 0}),
    "no sums": change(sums={}),
    "no matrices": change(matrices={}),
    "no source": scribble,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_older_pack_falls_back_to_its_source(
    whole: Path, saved: Path, tmp_path: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "packed"))
    DAMAGE[damage](folder)
    if damage == "no source":  # it does not say any more what it was made of
        with pytest.raises(ValueError, match=r"cannot be read.*outrider models pack MODEL -o"):
            load(folder)
        return
    with pytest.warns(RuntimeWarning, match=r"in its place.*outrider models pack"):
        found = load(folder)
    assert found.weights == "int8"
    assert np.array_equal(logits(found.model), logits(load(saved, quantization="int8").model))
    if damage == "cut":
        text = (folder / MANIFEST).read_text().replace(str(saved), str(tmp_path / "elsewhere"))
        (folder / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=r"outrider models pack MODEL -o"):
            load(folder)


def test_a_pack_of_other_code_is_not_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that got a family since would stay without it, and a changed family would keep its old settings."""
    packs.manifest(whole)
    with monkeypatch.context() as patch:
        patch.setattr(families, "digest", lambda: "another")
        with pytest.raises(BadPack, match="packed with another version"):
            packs.manifest(whole)
    packs.manifest(whole)
    monkeypatch.setattr(native, "build", lambda: "another library")
    with pytest.raises(BadPack, match="packed with another version"):
        packs.manifest(whole)


def test_a_system_that_reads_less_than_was_asked(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real = logits(load(whole).model), os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: real(descriptor, [buffers[0][:1000]], at))
    warnings.simplefilter("error")
    assert np.array_equal(logits(load(whole).model), expected)


def test_a_pack_in_large_pages_is_mapped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the bits of one that is read, nothing can change it, and its damage is seen, too."""
    expected = logits(load(whole).model)
    with monkeypatch.context() as patch:
        patch.setattr(packs, "_MOSTLY", -1.0)  # a system may have the file in small pages
        found = load(whole).model
        assert np.array_equal(logits(found), expected)
        assert isinstance(found, NativeModel)
        writeable = [m.state()[1]["data"].flags.writeable for m in found.program.matrices]
        assert set(writeable) == {not hasattr(mmap, "MADV_HUGEPAGE")}
        folder = Path(shutil.copytree(whole, tmp_path / "packed"))
        flip(folder)
        with pytest.warns(RuntimeWarning, match="has another checksum"):
            load(folder)


def test_a_packed_draft_model_is_kept_as_it_is(whole: Path, source: Path) -> None:
    """Neither its precision nor its head can be reduced any more."""

    def reduce(contents: object) -> Reduction:
        return "int4", np.array([1, 2, 3])

    found = load(whole, reduce=reduce)
    assert found.weights == "int8"
    assert np.isfinite(logits(found.model)).all()
    assert load(source, reduce=reduce).weights == "int4"
    assert store.packs() == []


# -- the cache ------------------------------------------------------------------------------------------------------------


def test_a_second_start_quantises_nothing(source: Path, cache: Path, quantised: list[int]) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"keeping the packed weights.*`outrider rm llama-.*OUTRIDER_PACK_CACHE_GB=0"
    ):
        first = load(source, quantization="int8")
    assert quantised
    quantised.clear()
    second = quiet(source)
    assert not quantised
    assert np.array_equal(logits(first.model), logits(second.model))
    assert (second.end_ids, second.weights, second.name, second.source) == (
        first.end_ids, first.weights, first.name, source,
    )  # fmt: skip
    assert second.config.to_dict() == first.config.to_dict()
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()  # pyright: ignore[reportOptionalMemberAccess]
    [kept] = store.packs()
    assert kept.name.startswith("llama-")
    assert (kept.weights, kept.source, kept.bytes) == ("int8", str(source), disk_bytes(cache / kept.name))
    load(source, quantization="int4")
    assert len(store.packs()) == 2, "another precision is another pack"


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("phi3", False)])
def test_a_second_start_of_a_gguf_file(name: str, tied: bool, tmp_path: Path, quantised: list[int]) -> None:
    """Blocks of several formats side by side, and an embedding in blocks."""
    file = tmp_path / "model.gguf"
    write_gguf(tiny(name, hidden_size=64, intermediate_size=64, tie_word_embeddings=tied), file, "Q4_0")
    expected = load(file)
    assert quantised
    quantised.clear()
    again = load(file)
    assert not quantised
    assert [p.weights for p in store.packs()] == ["gguf"]
    assert np.array_equal(logits(again.model), logits(expected.model))
    assert isinstance(again.model, NativeModel)
    assert (again.model.program.table is again.model.program.head) == tied


def test_a_changed_source_is_packed_anew(source: Path) -> None:
    quiet(source)
    for file in ("model.safetensors", "config.json", "tokenizer_config.json"):
        stat = (source / file).stat()
        os.utime(source / file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        before = len(store.packs())
        quiet(source)
        assert len(store.packs()) == before + 1
    raw, stat = bytearray((source / "model.safetensors").read_bytes()), (source / "model.safetensors").stat()
    raw[-50] ^= 1
    (source / "model.safetensors").write_bytes(raw)
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only the content differs
    (source / "README.md").write_text("nothing that a model is made of")
    for _ in range(2):
        quiet(source)
        assert len(store.packs()) == 5


def test_what_is_not_worth_a_pack_is_not_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        eos_token_id = 3

    load(source)
    load(source, dtype="float32")
    load(tiny("llama"), quantization="int8")
    assert isinstance(quiet(source, tokenizer=Mine()).tokenizer, Mine)
    for name, most in (("WORTH_BYTES", 1e6), ("WORTH_SECONDS", 1e6)):
        with monkeypatch.context() as patch:
            patch.setattr(loading, name, most)
            quiet(source)
    monkeypatch.setenv(store.LIMIT, "0")
    quiet(source)
    monkeypatch.setenv(store.LIMIT, "much")
    with pytest.raises(ValueError, match=r"OUTRIDER_PACK_CACHE_GB.*'much'"):
        quiet(source)
    monkeypatch.setenv(store.LIMIT, "1")
    assert store.packs() == []
    quiet(source)
    assert isinstance(quiet(source, tokenizer=Mine()).tokenizer, Mine)
    assert len(store.packs()) == 1


@pytest.mark.parametrize("damage", ["cut", "no source", "tokenizer"])
def test_a_damaged_pack_is_removed_and_made_again(source: Path, cache: Path, damage: str) -> None:
    expected = logits(quiet(source).model)
    [kept] = store.packs()
    if damage == "tokenizer":
        settings = json.loads((cache / kept.name / MANIFEST).read_text()) | {"tokenizer": {}}
        (cache / kept.name / MANIFEST).write_text(json.dumps(settings))
        (cache / kept.name / "tokenizer.json").write_text("{")
    else:
        DAMAGE[damage](cache / kept.name)
    with pytest.warns(RuntimeWarning, match="removed, and the model is packed again"):
        assert np.array_equal(logits(load(source, quantization="int8").model), expected)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [kept.name]
    assert np.array_equal(logits(quiet(source).model), expected)
    for _ in range(2):  # the second time it is gone already
        store.remove(kept.name)
    assert store.packs() == []


def test_the_pack_that_was_not_used_for_the_longest_time_makes_room(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(source)
    [first] = store.packs()
    load(source, quantization="int4")
    second = next(p for p in store.packs() if p != first)
    for name, age in ((first.name, 200), (second.name, 100)):
        os.utime(cache / name, (age, age))
    quiet(source)  # used again
    (source / "config.json").touch()
    monkeypatch.setenv(store.LIMIT, str((first.bytes + 1.2 * second.bytes) / 1e9))
    load(source, quantization="int4")
    assert len(store.packs()) == 2
    assert second.name not in [p.name for p in store.packs()]
    monkeypatch.setenv(store.LIMIT, str(0.5 * first.bytes / 1e9))
    load(source, quantization="int4", dtype="float32")
    assert len(store.packs()) == 2, "too large for the cache: nothing is removed"


def test_a_disk_or_a_process_in_the_way_does_no_harm(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(cache, 0, PACKS).turn():  # another process packs, and is not waited for
        quiet(source)
    with monkeypatch.context() as patch:
        patch.setattr(packs, "save", no_space)
        with pytest.warns(RuntimeWarning, match=r"were not kept.*No space left"):
            expected = logits(load(source, quantization="int8").model)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == []
    assert np.array_equal(logits(quiet(source).model), expected)
    assert len(store.packs()) == 1

    def vanish(folder: Path, request: object) -> None:
        """Another process makes room between the look and the reading."""
        store.remove(folder.name)
        raise BadPack("gone")

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", vanish)
        assert np.array_equal(logits(quiet(source).model), expected)


def test_threads_pack_the_same_model(source: Path) -> None:
    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("ignore")
        models = list(pool.map(lambda _: load(source, quantization="int8").model, range(4)))
    texts = [logits(model) for model in models]
    assert all(np.array_equal(t, texts[0]) for t in texts)
    assert len(store.packs()) == 1


# -- written behind ----------------------------------------------------------------------------------------------------------


def test_models_run_while_their_packs_are_written_one_after_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, save, other = threading.Event(), packs.save, Path(shutil.copytree(source, tmp_path / "other"))
    monkeypatch.setattr(packs, "save", lambda *given: (ready.wait(PATIENCE), save(*given)))
    try:
        with pytest.warns(RuntimeWarning, match="keeping the packed weights"):
            found = loading.load(source, quantization="int8")
        expected = logits(found.model)
        assert store.packs() == []
        for name in (other, source):  # another load does not wait
            loading.load(name, quantization="int8")
    finally:
        ready.set()
    store.wait()
    assert sorted(p.name.split("-")[0] for p in store.packs()) == ["llama", "other"]
    assert np.array_equal(logits(quiet(source).model), expected)


def test_the_memory_of_a_model_is_not_kept_after_its_pack(source: Path) -> None:
    found = loading.load(source, quantization="int8")
    assert isinstance(found.model, NativeModel)
    _, buffers = found.model.program.matrices[3].state()
    matrix = weakref.ref(buffers["data"])
    del found, buffers
    while matrix() is not None:  # nobody waits for the pack
        time.sleep(0.05)
        gc.collect()
