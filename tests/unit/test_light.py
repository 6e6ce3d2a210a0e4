"""A model that native code runs needs neither torch nor transformers, from its first start on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_writer import write_toy
from light import ROOT, TORCH

from outrider.kernels import cpu
from outrider.models.builtin.shipped import builtin_folder

LARGE = ("torch", "transformers", "triton")
FILES = [
    file for folder in ("outrider", "lab/outrider_lab", "ray/outrider_ray") for file in (ROOT / folder).rglob("*.py")
]
needs_kernels = pytest.mark.skipif(not cpu.available(), reason="needs the native kernels")

ADVICE = "What runs natively needs none of these packages: import them in files of TORCH (see light.py)"

# What a user does with a model: a first start, a second one, drafts, a chat, a schema.
USE = """
import sys
from outrider import LLM, SamplingParams
params, texts = SamplingParams(max_tokens=12, temperature=0), []
for config in (None, {"method": "auto"}, {"method": "suffix"}):
    llm = LLM(sys.argv[1], speculative_config=config)
    texts.append(llm.generate("def f", params)[0].outputs[0].token_ids)
assert texts[0] == texts[1] == texts[2], texts
llm.generate("x", SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, seed=3, repetition_penalty=1.1))
"""
COMMAND = """
import sys
from outrider.cli.main import main
sys.argv = ["outrider", "generate", "def f", "-m", sys.argv[1], "--max-tokens", "3"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


def imported(code: str, *arguments: object, blocked: bool = False) -> set[str]:
    """The modules that a new process has imported in the end. blocked: those of `LARGE` cannot be."""
    block = f"import sys; sys.modules.update(dict.fromkeys({LARGE}))\n" if blocked else ""
    code = f"{block}{code}\nimport sys\nprint(*(name for name, module in sys.modules.items() if module))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert not done.returncode, f"{done.stderr}{ADVICE if blocked else ''}"
    return {*done.stdout.splitlines()[-1].split()}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "toy.gguf"
    write_toy(file)
    return file


@needs_kernels
@pytest.mark.parametrize("code", [USE, COMMAND], ids=["library", "command"])
@pytest.mark.parametrize("source", ["file", "folder"])
def test_a_model_of_native_code_imports_neither_torch_nor_transformers(source: str, code: str, toy: Path) -> None:
    model = toy if source == "file" else builtin_folder("builtin:code")
    assert not imported(code, model, blocked=True) & {*LARGE}  # first: a failure names the line of the import
    found = imported(code, model)
    assert "outrider.models.native.model" in found
    assert not {*LARGE} & found, ADVICE


def test_a_conversation_needs_nothing_of_the_server() -> None:
    """`pip install outrider` has `outrider run`, and no FastAPI."""
    block = 'import sys\nsys.modules.update(dict.fromkeys(["fastapi", "starlette", "uvicorn", "prometheus_client"]))\n'
    talk = COMMAND.replace('"generate", "def f", "-m", sys.argv[1]', '"run", sys.argv[1], "def f"')
    assert "outrider.cli.run" in imported(block + talk, "builtin:code")


def test_other_modules_than_those_of_the_table_are_imported_without_it() -> None:
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        .removeprefix("lab.")
        .removeprefix("ray.")
        .removesuffix(".__init__")
        for file in FILES
        if not file.relative_to(ROOT).as_posix().startswith((*TORCH, "ray/")) and file.name != "__main__.py"
    ]
    imported(f"for name in {names}: __import__(name)", blocked=True)


def test_the_table_has_no_file_that_does_without() -> None:
    def asks(file: Path) -> bool:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        return any(
            (isinstance(node, ast.Import) and any(alias.name.split(".")[0] in LARGE for alias in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LARGE)
            for node in tree.body
        )

    found = {file.relative_to(ROOT).as_posix() for file in FILES if asks(file)}
    assert not {file for file in found if not file.startswith(TORCH)}
    assert not {entry for entry in TORCH if not any(file.startswith(entry) for file in found)}
