"""A second start is quick: it imports nothing large, needs no module of transformers, and its pack was written behind the first
one. What is kept is whole or not there, however the first process ended."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, prompts, tiny
from crossed import crossed
from gguf_files import tokenizer_metadata, write_gguf
from patience import PATIENCE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.engine.llm import LLM
from outrider.kernels import cpu as native
from outrider.models import load as loading
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.reader import read
from outrider.models.gguf.tokenizer import tokenizer_of
from outrider.models.load import load, pack
from outrider.models.native.model import NativeModel, supports
from outrider.models.native.program import Program
from outrider.models.nodes import Nodes
from outrider.models.packs import folder as packs
from outrider.models.packs import store
from outrider.models.packs.folder import BadPack
from outrider.models.request import LoadRequest, ReadModel
from outrider.models.tokenizer import LazyTokenizer

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

NATIVE = [name for name in (*ARCHITECTURES, "qwen3_next", "deepseek_v3") if supports(tiny(name)) is None]
# What a start from a pack must not import: each takes from 50 ms to seconds.
LARGE = (
    "transformers", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton", "huggingface_hub", "httpx",
    "safetensors", "fastapi", "uvicorn", "jinja2", "sklearn", "matplotlib", "pandas",
)  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    return model.forward(Nodes(torch.tensor(prompts(9)), model.new_cache(1, 64), [0])).logits[0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache that keeps packs of any size, however quick the model was loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(store.LIMIT, "1")
    monkeypatch.setattr(loading, "_WORTH_BYTES", 0)
    monkeypatch.setattr(loading, "_WORTH_SECONDS", -1)
    yield tmp_path / "cache" / "outrider" / "packs"
    store.wait()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small model in GGUF with the tokenizer of builtin:code, and a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:code"))
    given = tokenizer_metadata(tokenizer, "gpt-2") | {"tokenizer.chat_template": "{{ messages[0]['content'] }}!"}
    write_gguf(
        tiny("qwen2", vocab_size=len(tokenizer), hidden_size=64), tmp_path / "model.gguf", "Q8_0", metadata=given
    )
    return tmp_path / "model.gguf"


# -- imports ---------------------------------------------------------------------------------------------------------------


def imported(code: str, *arguments: object) -> set[str]:
    """The large modules that a new process imports."""
    code += f"\nimport sys\nprint(','.join(m for m in {(*LARGE, 'torch', 'numpy', 'pydantic')} if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert not found.returncode, found.stderr
    return set(filter(None, found.stdout.splitlines()[-1].split(",")))


def test_the_package_imports_nothing_large() -> None:
    assert imported("import outrider") == set()
    code = "import sys, outrider; print(*sorted(name for name in sys.modules if name.startswith('outrider')))"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert own.split() == ["outrider", "outrider._version"]


def test_an_llm_is_imported_without_transformers() -> None:
    assert imported("import outrider.engine.llm") <= {"torch", "numpy", "pydantic"}


def test_a_second_start_imports_nothing_large(file: Path, cache: Path) -> None:
    command = """
import sys
from outrider import LLM
print(LLM(sys.argv[1], speculative_config={"method": "auto"}).generate("def f")[0].outputs[0].token_ids)
"""
    load(file)
    store.wait()
    small = {"torch", "numpy", "pydantic", "safetensors"}  # the last one takes a millisecond
    assert imported(command, file) <= small
    [kept] = store.packs()
    assert imported(command, cache / kept.name) <= small


def test_a_second_start_with_a_head_imports_nothing_large(file: Path, tmp_path: Path) -> None:
    from outrider.drafters.heads.eagle import EagleConfig
    from outrider_lab.heads.modules import Eagle, config_for
    from outrider_lab.heads.writers import write_eagle

    command = """
import sys
from outrider import LLM
head = {"method": "eagle3", "model": sys.argv[2]}
print(LLM(sys.argv[1], speculative_config=head).generate("def f")[0].outputs[0].token_ids)
"""
    write_eagle(tmp_path / "head", Eagle(config_for(EagleConfig, load(file).config)).weights())
    store.wait()
    assert imported(command, file, tmp_path / "head") <= {"torch", "numpy", "pydantic", "safetensors"}


# -- the same model without modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weights"), crossed(NATIVE, ["bfloat16", "int8", "int4"], share=0.1))
def test_a_model_from_a_pack_gives_the_same_bits(name: str, weights: str, tmp_path: Path) -> None:
    raw = tiny(name).bfloat16()
    made = NativeModel(raw, weights=weights, own=True)
    given = ReadModel(made.program, None, weights, (5, 7), raw.config)
    packs.contents(given, made.program, weights, name).write(tmp_path)
    found = packs.read(tmp_path, LoadRequest(name, tokenizer=False)).model
    assert isinstance(found, Program)
    again = NativeModel(found)
    assert torch.equal(logits(made), logits(again))
    assert again.program.facts == made.program.facts
    assert (again.weight_bytes, again.num_layers, again.max_length) == (
        made.weight_bytes, made.num_layers, made.max_length,
    )  # fmt: skip
    assert torch.equal(logits(made.layer_subset([0])), logits(again.layer_subset([0])))


def test_a_system_that_reads_less_than_was_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(load(file).model)
    store.wait()

    def short(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return real(descriptor, [buffers[0][:1000]], at)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", short)
    warnings.simplefilter("error")
    assert torch.equal(logits(load(file).model), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_a_gguf_file(tied: bool, tmp_path: Path) -> None:
    write_gguf(tiny("llama", hidden_size=64, tie_word_embeddings=tied), tmp_path / "model.gguf", "Q4_0")
    first = load(tmp_path / "model.gguf")
    store.wait()
    second = load(tmp_path / "model.gguf")
    assert isinstance(second.model, NativeModel)
    assert torch.equal(logits(first.model), logits(second.model))
    weights = second.model.program
    assert (weights.table is weights.head) == tied


def test_a_pack_of_a_pack_keeps_its_way_to_start(file: Path, tmp_path: Path) -> None:
    pack(file, tmp_path / "one")
    pack(tmp_path / "one", tmp_path / "two")
    one, two = (packs.manifest(tmp_path / name) for name in ("one", "two"))
    assert one.native is not None
    assert (two.native, two.tokenizer, two.sums) == (one.native, one.tokenizer, one.sums)
    assert torch.equal(logits(load(tmp_path / "one").model), logits(load(tmp_path / "two").model))


def test_end_tokens_and_precision_are_those_of_the_first_start(file: Path) -> None:
    first = load(file)
    store.wait()
    second = load(file)
    assert second.config.to_dict() == first.config.to_dict()
    assert (second.end_ids, second.weights, second.name, second.source) == (
        first.end_ids, first.weights, first.name, first.source,
    )  # fmt: skip


# -- the tokenizer -----------------------------------------------------------------------------------------------------------

TEXTS = [
    "def f(x):\n    return x", "", " ", "  two", "é 日本語 🙂 \u200b", "a<|endoftext|>b", "\x00", "x" * 300,
    *Path(__file__).read_text(encoding="utf-8").splitlines(),
]  # fmt: skip


@pytest.fixture
def both(file: Path, tmp_path: Path) -> tuple[PreTrainedTokenizerFast, LazyTokenizer]:
    """The tokenizer of the file, and that of its pack."""
    pack(file, tmp_path / "packed")
    first, lazy = tokenizer_of(read([file])), load(tmp_path / "packed").tokenizer
    assert isinstance(lazy, LazyTokenizer)
    assert first is not None
    return first.complete, lazy


def test_it_encodes_and_decodes_the_same(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    whole, lazy = both
    for text in TEXTS:
        for special in (True, False):
            ids = whole(text, add_special_tokens=special)["input_ids"]
            assert lazy(text, add_special_tokens=special)["input_ids"] == ids
            for skip in (True, False):
                assert lazy.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
    assert lazy.get_vocab() == whole.get_vocab()
    assert len(lazy) == len(whole)


def test_what_is_asked_rarely_is_transformers_own(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    whole, lazy = both
    assert lazy("def f", return_offsets_mapping=True).encodings[0].offsets == whole("def f").encodings[0].offsets
    assert lazy(["a", "b c"])["input_ids"] == whole(["a", "b c"])["input_ids"]
    assert lazy.decode(torch.tensor([3, 4])) == whole.decode(torch.tensor([3, 4]))
    assert (lazy.eos_token_id, lazy.all_special_tokens) == (whole.eos_token_id, whole.all_special_tokens)
    message = [{"role": "user", "content": "hello"}]
    assert lazy.apply_chat_template(message, tokenize=False) == "hello!"
    with pytest.raises(AttributeError):
        lazy.no_such_thing  # noqa: B018


def test_a_change_of_it_counts_at_once(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    _, lazy = both
    before = lazy("one <new> token")["input_ids"]
    lazy.complete.add_tokens(["<new>"])
    after = lazy("one <new> token")["input_ids"]
    assert len(after) < len(before)
    assert lazy.decode(after) == "one <new> token"


def test_a_call_with_a_limit_does_not_limit_the_next(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    _, lazy = both
    before = lazy("one two three")["input_ids"]
    assert lazy("one two three", truncation=True, max_length=2)["input_ids"] == before[:2]
    assert lazy("one two three")["input_ids"] == before


def test_an_llm_gives_out_the_tokenizer_of_transformers(file: Path) -> None:
    load(file)
    store.wait()
    llm = LLM(str(file), max_model_len=64)
    assert isinstance(llm.loaded.tokenizer, LazyTokenizer)
    assert isinstance(llm.tokenizer, PreTrainedTokenizerFast)
    assert llm.encode([{"role": "user", "content": "hi"}]) == llm.encode("hi!")


def test_threads_share_it(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    whole, lazy = both
    expected = [whole(text)["input_ids"] for text in TEXTS[:40]]

    def use(i: int) -> bool:
        if i % 7 == 3:
            assert lazy.complete.eos_token_id == whole.eos_token_id
        return lazy(TEXTS[i % 40])["input_ids"] == expected[i % 40]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))


def test_a_damaged_tokenizer_is_no_start(file: Path, cache: Path) -> None:
    load(file)
    store.wait()
    [kept] = store.packs()
    (cache / kept.name / "tokenizer.json").write_text("{")
    with pytest.raises(BadPack, match=r"tokenizer\.json cannot be read"):
        packs.read(cache / kept.name, LoadRequest(kept.name))
    with pytest.warns(RuntimeWarning, match="removed, and the model is packed again"):
        assert load(file).tokenizer("def")["input_ids"]  # pyright: ignore[reportOptionalCall]


# -- written behind ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes no tensor before the event is set."""
    ready, save = threading.Event(), packs.save
    monkeypatch.setattr(packs, "save", lambda *given: (ready.wait(PATIENCE), save(*given)))
    yield ready
    ready.set()
    store.wait()


def test_the_model_runs_while_its_pack_is_written(file: Path, slow: threading.Event) -> None:
    with pytest.warns(RuntimeWarning, match="keeping the packed weights"):
        found = load(file)
    expected = logits(found.model)
    assert store.packs() == []
    assert load(file, tokenizer=found.tokenizer) is not None, "another load does not wait"
    slow.set()
    store.wait()
    assert len(store.packs()) == 1
    assert torch.equal(logits(load(file).model), expected)


def test_packs_of_one_process_are_written_one_after_another(file: Path, tmp_path: Path, slow: threading.Event) -> None:
    other = tmp_path / "other.gguf"
    write_gguf(tiny("llama"), other)
    for name in (file, other, file):
        load(name)
    slow.set()
    store.wait()
    assert sorted(p.name.split("-")[0] for p in store.packs()) == ["model", "other"]


def test_the_memory_of_a_model_is_not_kept_after_its_pack(file: Path) -> None:
    found = load(file)
    assert isinstance(found.model, NativeModel)
    _, buffers = found.model.program.matrices[3].state()
    matrix = weakref.ref(buffers["data"])
    del found, buffers
    while matrix() is not None:  # nobody waits for the pack
        time.sleep(0.05)
        gc.collect()
