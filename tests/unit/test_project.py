"""Rules of the project that no other test would see broken."""

import ast
import importlib
import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import hypothesis
import pytest
from light import absent

ROOT = Path(__file__).parents[2]
TESTS = sorted(path for room in ("", "lab", "ray", "certify") for path in (ROOT / room / "tests").rglob("*.py"))


def test_hypothesis_has_no_deadline() -> None:
    assert hypothesis.settings().deadline is None
    assert hypothesis.settings().print_blob


def test_no_test_sets_its_own_deadline_or_asserts_a_speed() -> None:
    """A test that fails on a busy machine says nothing about the code."""
    wrong = list[str]()
    for path in TESTS:
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
    for path in TESTS:
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


@pytest.mark.parametrize("package", ["outrider", "certify/outrider_certify"])
def test_no_files_import_each_other(house: dict[str, Any], package: str) -> None:
    """Not for types only either: two files in a circle can only be read together. And class names are unique."""
    modules = house["read"](ROOT / package)
    assert len(modules) > 20
    assert not house["circles"](house["imports"](modules))
    assert not house["twice"](modules)


PLANTED = {
    "pyproject.toml": """
        [project.entry-points."outrider.commands"]
        away = "outrider.cli.main:away"
        [[tool.importlinter.contracts]]
        type = "layers"
        layers = ["outrider.cli", "outrider.engine | outrider.serve", "outrider.control"]
    """,
    "outrider/__init__.py": "",
    "outrider/control/__init__.py": "",
    "outrider/control/rates.py": """
        from outrider.engine.loop import Loop
        _HIGH, _LOW = 1, 2
        RATE: float = 0.5
        rate = 1
    """,
    "outrider/engine/__init__.py": "",
    "outrider/engine/loop.py": """
        from outrider.serve import app
        class Loop:
            '''A loop. first: one. second, third: two. fourth: four.'''
            state: int = 0
            def run(self):
                found = self.decoder.round([self.row])
                decoder.step()
                return Decoder(found)
        class Other:
            '''Another. one: a. two, three: b.

            Args:
                first: One.
                second: Two.
                third: Three.
                fourth: Four.
            '''
    """,
    "outrider/serve/__init__.py": "",
    "outrider/serve/app.py": """
        from outrider.engine.loop import Loop
        class _Loop(BaseDrafter): ...
        class BaseDrafter: ...
        class Last(_Loop): ...
        def ask(x, call):
            x.state = 1
            return isinstance(x, Loop)
    """,
    "outrider/cli/__init__.py": "",
    "outrider/cli/main.py": """
        import outrider.control.rates
        import outrider.engine.loop
        def here(name=option("Use", "A name.")): ...
        def away(): ...
        add("Use", here)
        add("Use", away)
    """,
    "tests/unit/test_loop.py": "assert Loop()._state\nassert self._state",
    "docs/index.md": "four words of text",
    "docs/certificates/one.html": "",
}


def test_each_figure_of_the_house_counts_what_is_planted(house: dict[str, Any], tmp_path: Path) -> None:
    for name, text in PLANTED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    figures = [
        *house["of_package"](tmp_path / "outrider", house["layers_of"](tmp_path / "pyproject.toml")),
        *house["of_project"](tmp_path),
    ]
    counts = {name: len(value) if isinstance(value, list) else value for name, value, _ in figures}
    assert counts == {
        "lines of Python": 38,
        "modules": 9,
        "circles of imports at file level": 1,
        "imports that go up": 2,  # control to engine against the layers, and engine and serve import each other
        "isinstance of own types": 1,
        "writes to other objects' attributes": 1,
        "of them, to attributes that only classes of other files have": 1,
        "class names used twice": 1,
        "modules with exactly one importer": 2,
        "stores to found, own, made, given, known, kept": 1,
        "docstrings with attributes told in text": 1,
        "lines of engine, drafters, verify, models, serve": 26,
        "longest chain of drafters' classes": 3,
        "places that make a Decoder": 1,
        "drivers of the loop": 2,
        "module constants of control": 2,
        "declarations of options": 1,
        "commands of the engine": 1,
        "lines of tests": 2,
        "private names in tests/unit": 1,
        "lines of benchmarks": 0,
        "modules of benchmarks": 0,
        "words of docs": 4,
        "certificates in docs": 1,
    }
    assert house["main"]([str(tmp_path)]) == 1


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
                missing = [] if absent(error) else [str(error)]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {module}: {name}" for name in missing]
    assert not wrong
