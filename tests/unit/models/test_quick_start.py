"""A second start is quick: it imports nothing large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_writer import write_toy
from light import Late

from outrider.drafters.heads.eagle import EagleConfig
from outrider.engine.llm import LLM
from outrider.kernels import cpu as native
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.load import load, pack
from outrider.models.tokenizer import FastTokenizer
from outrider_lab.heads.writers import write_eagle

head_modules = Late("outrider_lab.heads.modules")

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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in GGUF with the tokenizer of builtin:code, and a chat template."""
    tokenizer = FastTokenizer.of_folder(Path(builtin_folder("builtin:code")))
    out = tmp_path_factory.mktemp("model") / "model.gguf"
    write_toy(out, tokenizer=tokenizer, metadata={"tokenizer.chat_template": "{{ messages[0]['content'] }}!"})
    return out


@pytest.fixture(scope="module")
def packed(file: Path) -> Path:
    pack(file, file.with_name("packed"))
    return file.with_name("packed")


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
    write_eagle(
        tmp_path / "head", head_modules.Eagle(head_modules.config_for(EagleConfig, load(packed).config)).weights()
    )
    found = imported(SECOND_START, packed, tmp_path / "head")
    assert {name for name in found if not name.startswith("outrider")} == set()


def test_a_pack_keeps_the_tokenizer_of_its_file(file: Path, packed: Path) -> None:
    first, again = load(file).tokenizer, LLM(str(packed), max_model_len=64).tokenizer
    for made in (first, again):
        assert isinstance(made, FastTokenizer)
        assert made.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
        assert (made.special_tokens_map, made.chat_template) == (first.special_tokens_map, first.chat_template)
    llm = LLM(str(packed), max_model_len=64)
    assert llm.encode([{"role": "user", "content": "hi"}]) == llm.encode("hi!")
