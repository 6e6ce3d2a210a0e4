"""A second start is quick: it imports nothing large, and its tokenizer needs transformers only for what is asked rarely."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from architectures import tiny
from gguf_files import tokenizer_metadata, write_gguf
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.drafters.heads.eagle import EagleConfig
from outrider.engine.llm import LLM
from outrider.kernels import cpu as native
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.reader import read
from outrider.models.gguf.tokenizer import tokenizer_of
from outrider.models.load import load, pack
from outrider.models.tokenizer import LazyTokenizer
from outrider_lab.heads.modules import Eagle, config_for
from outrider_lab.heads.writers import write_eagle

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

# What a start from a pack must not import: each takes from 50 ms to seconds.
LARGE = (
    "transformers", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton", "huggingface_hub", "httpx",
    "fastapi", "uvicorn", "jinja2", "sklearn", "matplotlib", "pandas",
)  # fmt: skip
SECOND_START = """
import sys
from outrider import LLM
head = {"method": "eagle3", "model": sys.argv[2]}
for config in ({"method": "auto"}, head):
    print(LLM(sys.argv[1], speculative_config=config).generate("def f")[0].outputs[0].token_ids)
"""
TEXTS = [
    "def f(x):\n    return x", "", " ", "  two", "é 日本語 🙂 \u200b", "a<|endoftext|>b", "\x00", "x" * 300,
    *Path(__file__).read_text(encoding="utf-8").splitlines(),
]  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in GGUF with the tokenizer of builtin:code, and a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:code"))
    given = tokenizer_metadata(tokenizer, "gpt-2") | {"tokenizer.chat_template": "{{ messages[0]['content'] }}!"}
    out = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(tiny("qwen2", vocab_size=len(tokenizer), hidden_size=64), out, "Q8_0", metadata=given)
    return out


@pytest.fixture(scope="module")
def packed(file: Path) -> Path:
    pack(file, file.with_name("packed"))
    return file.with_name("packed")


@pytest.fixture
def both(file: Path, packed: Path) -> tuple[PreTrainedTokenizerFast, LazyTokenizer]:
    """The tokenizer of the file, and that of its pack."""
    first, lazy = tokenizer_of(read([file])), load(packed).tokenizer
    assert isinstance(lazy, LazyTokenizer)
    assert first is not None
    return first.complete, lazy


def imported(code: str, *arguments: object) -> set[str]:
    """The modules of outrider, and the large ones, that a new process imports."""
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert not done.returncode, done.stderr
    return {
        name
        for name in done.stdout.splitlines()[-1].split()
        if name.startswith("outrider") or name in (*LARGE, "torch")
    }


def test_the_package_imports_nothing_large() -> None:
    assert imported("import outrider") == {"outrider", "outrider._version"}


def test_a_second_start_imports_nothing_large_with_a_head_or_without(packed: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path / "head", Eagle(config_for(EagleConfig, load(packed).config)).weights())
    found = imported(SECOND_START, packed, tmp_path / "head")
    assert {name for name in found if not name.startswith("outrider")} == {"torch"}


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
    before = lazy("one two three")["input_ids"]
    assert lazy("def f", return_offsets_mapping=True).encodings[0].offsets == whole("def f").encodings[0].offsets
    assert lazy(["a", "b c"])["input_ids"] == whole(["a", "b c"])["input_ids"]
    assert lazy.decode(torch.tensor([3, 4])) == whole.decode(torch.tensor([3, 4]))
    assert (lazy.eos_token_id, lazy.all_special_tokens) == (whole.eos_token_id, whole.all_special_tokens)
    assert lazy.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello!"
    with pytest.raises(AttributeError):
        lazy.no_such_thing  # noqa: B018
    assert lazy("one two three", truncation=True, max_length=2)["input_ids"] == before[:2]
    assert lazy("one two three")["input_ids"] == before, "a call with a limit does not limit the next"


def test_a_change_of_it_counts_at_once(both: tuple[PreTrainedTokenizerFast, LazyTokenizer]) -> None:
    _, lazy = both
    before = lazy("one <new> token")["input_ids"]
    lazy.complete.add_tokens(["<new>"])
    after = lazy("one <new> token")["input_ids"]
    assert len(after) < len(before)
    assert lazy.decode(after) == "one <new> token"


def test_an_llm_gives_out_the_tokenizer_of_transformers(packed: Path) -> None:
    llm = LLM(str(packed), max_model_len=64)
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
        assert all(pool.map(use, range(200)))
