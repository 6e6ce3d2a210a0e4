"""Saved packed weights: a model from a pack gives the bits of the model that was packed. A pack that is damaged, older or only
half written is never used."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import prompts, tiny
from gguf_files import write_gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from outrider.core.files import disk_bytes
from outrider.core.store import PACKS, Store
from outrider.kernels import cpu as native
from outrider.models import load as loading
from outrider.models.base import LanguageModel
from outrider.models.load import Loaded, Reduction, pack
from outrider.models.native import families
from outrider.models.nodes import Nodes
from outrider.models.packs import folder as packs
from outrider.models.packs import store
from outrider.models.packs.folder import MANIFEST, WEIGHTS, BadPack

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


def load(*given: Any, **more: Any) -> Loaded:
    """`loading.load`, and what it keeps is written."""
    found = loading.load(*given, **more)
    store.wait()
    return found


def logits(model: LanguageModel) -> torch.Tensor:
    return model.forward(Nodes(torch.tensor(prompts(9)), model.new_cache(1, 64), [0])).logits[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that keeps packs of any size, however quick the model was loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(store.LIMIT, "1")
    monkeypatch.setattr(loading, "_WORTH_BYTES", 0)
    monkeypatch.setattr(loading, "_WORTH_SECONDS", -1)
    return tmp_path / "cache" / "outrider" / "packs"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a tiny Llama in bfloat16, with a tokenizer."""
    raw = tiny("llama").bfloat16()
    raw.generation_config.eos_token_id = [5, 7]  # pyright: ignore[reportOptionalMemberAccess]
    raw.save_pretrained(tmp_path / "llama")
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the matrices that are packed."""
    counted: list[int] = []
    init = native.Packed.__init__
    native.library()
    packs.kernel_layout()
    monkeypatch.setattr(native.Packed, "__init__", lambda self, *a, **k: (counted.append(1), init(self, *a, **k))[1])
    return counted


# -- the folder -----------------------------------------------------------------------------------------------------------


def test_a_model_of_the_general_path_has_no_pack(tmp_path: Path) -> None:
    tiny("gpt_neox").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"modelling code of transformers.*load it as it is"):
        pack(tmp_path / "model", tmp_path / "packed", quantization="int8")
    assert not (tmp_path / "packed").exists()
    load(tmp_path / "model", quantization="int8")
    assert store.packs() == []


def test_the_modules_of_a_pack_are_those_of_its_source(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", quantization="int8")
    loaded = load(tmp_path / "packed")
    made, wanted = loading.modules(loaded).state_dict(), loading.modules(load(source)).state_dict()
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    shutil.rmtree(source)
    with pytest.raises(ValueError, match="no modules of transformers"):
        loading.modules(loaded)


def test_another_way_to_pack_is_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = packs.kernel_layout()
    packs.kernel_layout.cache_clear()
    state = native.Packed.state

    def other(self: native.Packed):
        settings, buffers = state(self)
        return settings, {n: t.roll(1) for n, t in buffers.items()}

    monkeypatch.setattr(native.Packed, "state", other)
    assert packs.kernel_layout() != before
    packs.kernel_layout.cache_clear()


# -- outrider models pack, and -m FOLDER -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_folder_loads_as_any_model(
    source: Path, tmp_path: Path, quantization: str | None, quantised: list[int]
) -> None:
    size = pack(source, tmp_path / "packed", quantization=quantization)
    assert size == disk_bytes(tmp_path / "packed") > 1000
    expected = load(source, quantization=quantization)
    quantised.clear()
    found = load(tmp_path / "packed")
    assert not quantised
    assert (found.weights, found.end_ids) == (expected.weights, (5, 7))
    assert found.tokenizer("w3 w4")["input_ids"] == [3, 4]  # pyright: ignore[reportOptionalCall]
    assert torch.equal(logits(found.model), logits(expected.model))


def test_a_pack_has_one_precision(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", quantization="int8")
    assert load(tmp_path / "packed", quantization="int8").weights == "int8"
    with pytest.raises(ValueError, match="packed in int8, not in int4"):
        load(tmp_path / "packed", quantization="int4")
    with pytest.raises(ValueError, match="packed in int8, not in float32"):
        load(tmp_path / "packed", dtype="float32")


def test_only_a_pack_or_nothing_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="no pack"):
        pack(source, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    for quantization in ("int8", "int4"):
        pack(source, tmp_path / "empty", quantization=quantization)
        assert load(tmp_path / "empty").weights == quantization
    assert not [*tmp_path.glob("*.partial")]


def test_a_full_disk_leaves_no_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with (folder / WEIGHTS).open("r+b") as f:
        f.seek(-100, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-100, os.SEEK_END)
        f.write(bytes([byte ^ 4]))


def lose(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def forget(folder: Path) -> None:
    (folder / "config.json").unlink()


def scribble(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])


def change(key: str, value: object):
    def write(folder: Path) -> None:
        given = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**given, key: value}))

    write.__name__ = f"another_{key}"
    return write


def fewer(folder: Path) -> None:
    given = json.loads((folder / MANIFEST).read_text())
    given["native"]["config"]["num_hidden_layers"] -= 1
    (folder / MANIFEST).write_text(json.dumps(given))


DAMAGE = [
    fewer,
    cut,
    flip,
    lose,
    forget,
    scribble,
    change("made_by", {"layout": 0}),
    change("sums", {}),
    change("matrices", {}),
]


def test_a_pack_whose_family_has_another_program_now_is_not_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that got a family since would stay without it, and a changed family would keep its old settings."""
    pack(source, tmp_path / "packed", quantization="int8")
    packs.manifest(tmp_path / "packed")
    monkeypatch.setattr(families, "digest", lambda: "another")
    with pytest.raises(packs.BadPack, match="packed with another version"):
        packs.manifest(tmp_path / "packed")


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_or_older_pack_falls_back_to_its_source(source: Path, tmp_path: Path, damage) -> None:
    folder = tmp_path / "packed"
    pack(source, folder, quantization="int8")
    damage(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((RuntimeWarning, ValueError)):
            load(folder)
    if damage is scribble:  # it does not say any more what it was made of
        with pytest.raises(ValueError, match=r"cannot be read.*outrider models pack MODEL -o"):
            load(folder)
        return
    with pytest.warns(RuntimeWarning, match=r"in its place.*outrider models pack"):
        found = load(folder)
    assert found.weights == "int8"
    assert torch.equal(logits(found.model), logits(load(source, quantization="int8").model))
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"outrider models pack MODEL -o"):
        load(folder)


# -- the cache ------------------------------------------------------------------------------------------------------------


def loaded(source: Path, **more) -> Loaded:
    """In int8, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "keeping the packed weights")
        return load(source, quantization="int8", **more)


def test_a_second_start_quantises_nothing(source: Path, cache: Path, quantised: list[int]) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"keeping the packed weights.*`outrider rm llama-.*OUTRIDER_PACK_CACHE_GB=0"
    ):
        first = load(source, quantization="int8")
    assert quantised
    quantised.clear()
    second = loaded(source)
    assert not quantised
    assert torch.equal(logits(first.model), logits(second.model))
    assert (second.end_ids, second.weights, second.source) == (first.end_ids, first.weights, source)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()  # pyright: ignore[reportOptionalMemberAccess]
    [kept] = store.packs()
    assert kept.name.startswith("llama-")
    assert (kept.weights, kept.source, kept.bytes) == ("int8", str(source), disk_bytes(cache / kept.name))
    load(source, quantization="int4")
    assert len(store.packs()) == 2, "another precision is another pack"


def test_a_changed_source_is_packed_anew(source: Path) -> None:
    loaded(source)
    for file in ("model.safetensors", "config.json", "tokenizer_config.json"):
        stat = (source / file).stat()
        os.utime(source / file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        before = len(store.packs())
        loaded(source)
        assert len(store.packs()) == before + 1
    raw = bytearray((source / "model.safetensors").read_bytes())
    stat = (source / "model.safetensors").stat()
    raw[-50] ^= 1
    (source / "model.safetensors").write_bytes(raw)
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only the content differs
    loaded(source)
    assert len(store.packs()) == 5
    (source / "README.md").write_text("nothing that a model is made of")
    loaded(source)
    assert len(store.packs()) == 5


def test_what_is_not_quantised_is_not_kept(source: Path) -> None:
    load(source)
    load(source, dtype="float32")
    load(tiny("llama"), quantization="int8")
    assert store.packs() == []


def test_a_given_tokenizer_is_used_and_not_kept(source: Path) -> None:
    class Mine:
        eos_token_id = 3

    assert isinstance(loaded(source, tokenizer=Mine()).tokenizer, Mine)
    assert store.packs() == []
    loaded(source)
    assert isinstance(loaded(source, tokenizer=Mine()).tokenizer, Mine)


def test_it_can_be_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.LIMIT, "0")
    loaded(source)
    assert store.packs() == []
    monkeypatch.setenv(store.LIMIT, "much")
    with pytest.raises(ValueError, match=r"OUTRIDER_PACK_CACHE_GB.*'much'"):
        loaded(source)


def test_small_and_quick_models_are_not_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_WORTH_BYTES", 1e6)
    loaded(source)
    monkeypatch.setattr(loading, "_WORTH_BYTES", 0)
    monkeypatch.setattr(loading, "_WORTH_SECONDS", 1e6)
    loaded(source)
    assert store.packs() == []


@pytest.mark.parametrize("damage", [cut, scribble], ids=lambda f: f.__name__)
def test_a_damaged_pack_is_removed_and_made_again(source: Path, cache: Path, damage) -> None:
    expected = logits(loaded(source).model)
    [kept] = store.packs()
    damage(cache / kept.name)
    with pytest.warns(RuntimeWarning, match="removed, and the model is packed again"):
        assert torch.equal(logits(load(source, quantization="int8").model), expected)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [kept.name]
    assert torch.equal(logits(loaded(source).model), expected)
    store.remove(kept.name)
    store.remove(kept.name)  # it is gone already
    assert store.packs() == []


def test_the_pack_that_was_not_used_for_the_longest_time_makes_room(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(source)
    [first] = store.packs()
    load(source, quantization="int4")
    second = next(p for p in store.packs() if p != first)
    for name, age in ((first.name, 200), (second.name, 100)):
        os.utime(cache / name, (age, age))
    loaded(source)  # used again
    (source / "config.json").touch()
    monkeypatch.setenv(store.LIMIT, str((first.bytes + 1.2 * second.bytes) / 1e9))
    load(source, quantization="int4")
    assert len(store.packs()) == 2
    assert second.name not in [p.name for p in store.packs()]
    monkeypatch.setenv(store.LIMIT, str(0.5 * first.bytes / 1e9))
    load(source, quantization="int4", dtype="float32")
    assert len(store.packs()) == 2, "too large for the cache: nothing is removed"


def test_a_full_disk_does_no_harm(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packs, "save", no_space)
        with pytest.warns(RuntimeWarning, match=r"were not kept.*No space left"):
            found = load(source, quantization="int8")
        assert [p.name for p in cache.iterdir() if p.is_dir()] == []
    assert torch.equal(logits(found.model), logits(loaded(source).model))
    assert len(store.packs()) == 1


def test_another_process_that_packs_is_not_waited_for(source: Path, cache: Path) -> None:
    with Store(cache, 0, PACKS).turn():
        loaded(source)
    assert store.packs() == []
    loaded(source)
    assert len(store.packs()) == 1


def test_threads_pack_the_same_model(source: Path, cache: Path) -> None:
    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("ignore")
        models = list(pool.map(lambda _: load(source, quantization="int8").model, range(6)))
    texts = [logits(model) for model in models]
    assert all(torch.equal(t, texts[0]) for t in texts)
    assert len(store.packs()) == 1
    assert torch.equal(logits(loaded(source).model), texts[0])


def test_a_pack_that_vanishes_is_no_error(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes room between the look and the reading."""
    expected = logits(loaded(source).model)

    def vanish(folder: Path, request: object) -> None:
        store.remove(folder.name)
        raise BadPack("gone")

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", vanish)
        found = loaded(source)
    assert torch.equal(logits(found.model), expected)


# -- GGUF files, and drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("llama", False), ("gemma2", True), ("phi3", False)])
def test_a_pack_of_a_gguf_file(name: str, tied: bool, tmp_path: Path, quantised: list[int]) -> None:
    """Blocks of several formats side by side, and an embedding in blocks."""
    file = tmp_path / "model.gguf"
    changes = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": tied}
    write_gguf(tiny(name, **changes), file, "Q4_0")
    expected = load(file)
    assert quantised
    quantised.clear()
    again = load(file)
    assert not quantised
    assert [p.weights for p in store.packs()] == ["gguf"]
    assert torch.equal(logits(again.model), logits(expected.model))
    assert (again.end_ids, again.weights) == (expected.end_ids, expected.weights)


def test_a_packed_draft_model_is_kept_as_it_is(source: Path, tmp_path: Path) -> None:
    """Neither its precision nor its head can be reduced any more."""
    pack(source, tmp_path / "packed", quantization="int8")

    def reduce(contents: object) -> Reduction:
        return "int4", torch.tensor([1, 2, 3])

    found = load(tmp_path / "packed", reduce=reduce)
    assert found.weights == "int8"
    assert bool(logits(found.model).isfinite().all())
    assert load(source, reduce=reduce).weights == "int4"
    assert store.packs() == []
