"""Rules of the project that no other test would see broken."""

import ast
import importlib
import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[2]


def test_hypothesis_has_no_deadline() -> None:
    assert hypothesis.settings().deadline is None
    assert hypothesis.settings().print_blob


def test_no_test_sets_its_own_deadline_or_asserts_a_speed() -> None:
    """A test that fails on a busy machine says nothing about the code."""
    wrong = list[str]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if not re.search("deadline|perf_counter|monotonic", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("settings", "quick"):
                wrong += [f"{path}:{node.lineno}: use the profile" for word in node.keywords if word.arg == "deadline"]
            if isinstance(node, ast.Assert):
                names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)}
                if names & {"perf_counter", "monotonic"}:
                    wrong.append(f"{path}:{node.lineno}: asserts a speed")
    assert not wrong


def test_tests_wait_long() -> None:
    """A wait for a page, a process, a thread or an answer is `PATIENCE`. A shorter one fails on a busy machine."""
    wrong = list[str]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == "attack.py" or "foreign" in path.parts:  # these run beside the suite, and measure
            continue
        for call in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            waits = name.rpartition(".")[2] in ("wait", "join", "result") and "." in name
            given = [word.value for word in call.keywords if word.arg == "timeout" and "Options" not in name]
            for value in given + (call.args if waits else []):
                if isinstance(value, ast.Constant) and type(value.value) in (int, float) and 10 <= value.value < 600:
                    wrong.append(f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert not wrong


def test_every_path_that_pyright_checks_strictly_exists() -> None:
    """A file that is moved must not leave strict mode in silence."""
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    for pattern in pyright["strict"]:
        assert list(ROOT.glob(pattern)), f"{pattern} names no file"


@pytest.fixture(scope="module")
def house() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "house.py"))


@pytest.fixture(scope="module")
def modules(house: dict[str, Any]) -> dict[str, ast.Module]:
    return house["read"](ROOT / "outrider")


def test_class_names_are_unique_in_the_package(house: dict[str, Any], modules: dict[str, ast.Module]) -> None:
    assert len(modules) > 100
    assert not house["twice"](modules)


def test_no_files_import_each_other(house: dict[str, Any], modules: dict[str, ast.Module]) -> None:
    """Not for types only either: two files in a circle can only be read together."""
    assert not house["circles"](house["imports"](modules))


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "packaging", "recipes"])
def test_scripts_import_what_the_packages_have(folder: str) -> None:
    """Most scripts are not run by the suite, so an import of a module that moved would be found by a user."""
    wrong = list[str]()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] not in ("outrider", "outrider_certify"):
                continue
            names = [alias.name for alias in node.names]  # type: ignore[union-attr]
            try:
                there = importlib.import_module(module)
                missing = [n for n in names if not hasattr(there, n) and not find_spec(f"{module}.{n}")]
            except ModuleNotFoundError as error:
                missing = [str(error)]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {module}: {name}" for name in missing]
    assert not wrong
