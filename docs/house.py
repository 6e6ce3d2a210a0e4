"""Prints how large and how tangled the distributions are, with the goals: python docs/house.py [CHECKOUT] [--where].

--where prints the places that are counted, too. It reads the source as text and runs nothing of it. Exits with 1 if files of a
distribution import each other in a circle, or an import goes up.

isinstance of own types   `isinstance` with a class of the package: ask for a capability instead. A Protocol is a capability
writes to other objects   `x.name = ...`, where x is not the method's own object: an object should be whole when it is made.
                          C structs, objects of libraries and records of the same file count, too
of them, in other files   classes of other files have such an attribute, and none of this file: the owner could do it by a method.
                          Names are compared, not types, so some C structs and libraries' objects still count
modules with one importer `__init__` does not count, as a module or as an importer
circles of imports        groups of files that import each other, also for types only or inside of functions
imports that go up        against the layers of pyproject.toml; and one way between two folders that import each other, if none is
                          in the other
names that say nothing    places that store `found`, `own`, `made`, `given`, `known` or `kept`
attributes told in text   docstrings with a paragraph that explains four names or more: `Args:` has one name a line
drivers of the loop       places that call `Decoder.round` or `Decoder.step`
"""

from __future__ import annotations

import ast
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Modules = dict[str, ast.Module]
Figure = tuple[str, int | list[str], int | None]
"""A name, a number or the places that are counted, and the goal."""
PACKAGES = ("outrider", "lab/outrider_lab", "ray/outrider_ray", "certify/outrider_certify")
CIRCLES, UPWARD = "circles of imports at file level", "imports that go up"
EMPTY_NAMES = {"found", "own", "made", "given", "known", "kept"}


def read(package: Path) -> Modules:
    """Module name -> its syntax tree."""
    names = {path: path.relative_to(package.parent).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    return {".".join(name).removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}


def walk(modules: Modules, *kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """(module, node) for all nodes of some kinds."""
    return ((module, node) for module, tree in modules.items() for node in ast.walk(tree) if isinstance(node, kinds))


def twice(modules: Modules) -> list[str]:
    """Names of more than one class. `_Line` beside `Line` confuses, too."""
    names = Counter(node.name.lstrip("_") for _, node in walk(modules, ast.ClassDef))
    return [name for name, count in names.items() if count > 1]


def own_checks(modules: Modules) -> list[str]:
    """Places that ask whether an object is of a class of the package."""
    own = {c.name for _, c in walk(modules, ast.ClassDef) if "Protocol" not in map(ast.unparse, c.bases)}
    package, places = next(iter(modules)).partition(".")[0], list[str]()
    for module, tree in modules.items():
        imported = [
            node for _, node in walk({module: tree}, ast.ImportFrom) if not str(node.module).startswith(package)
        ]
        foreign = {alias.asname or alias.name for node in imported for alias in node.names}
        for _, node in walk({module: tree}, ast.Call):
            if ast.unparse(node.func) == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                places += [f"{module}:{node.lineno} {name}" for name in sorted(names & own - foreign)]
    return places


def writes(modules: Modules) -> list[str]:
    """Places that set an attribute of an object other than the method's own."""
    return [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, node in walk(modules, ast.Attribute)
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) not in ("self", "cls")
    ]


def foreign_writes(modules: Modules) -> list[str]:
    """Those of `writes` whose attribute classes of other files have, and none of this file."""
    owners = dict[str, set[str]]()
    for module, node in walk(modules, ast.ClassDef):
        declared = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        for name in (*declared, *(n.attr for n in stored if ast.unparse(n.value) == "self")):
            owners.setdefault(name, set()).add(module)
    attributes = ((place, place.split(":")[0], place.rsplit(".", 1)[1]) for place in writes(modules))
    return [place for place, module, name in attributes if name in owners and module not in owners[name]]


def imports(modules: Modules) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports anywhere in its file."""

    def named(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    part = f"{node.module}.{alias.name}"
                    yield part if part in modules else node.module

    return {module: set(named(tree)) & modules.keys() - {module} for module, tree in modules.items()}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            new = arrows[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {module: reached(module) for module in arrows}
    groups = {frozenset(other for other in reach[m] if m in reach[other]) for m in arrows if m in reach[m]}
    return sorted(map(sorted, groups))


def single_importers(arrows: dict[str, set[str]], rooms: set[str]) -> list[str]:
    """Modules that exactly one other module imports. rooms: the packages."""
    importers = {m: [other for other in arrows if m in arrows[other] and other not in rooms] for m in arrows}
    return [f"{m} <- {others[0]}" for m, others in importers.items() if m not in rooms and len(others) == 1]


def upward(arrows: dict[str, set[str]], rooms: set[str], layers: list[str]) -> list[str]:
    """Imports that go up. layers: the names of each floor, the highest first, as the import contract has them."""
    floors = {name.strip(): -floor for floor, names in enumerate(layers) for name in names.split("|")}

    def floor(module: str) -> float:
        while module and module not in floors:
            module = module.rpartition(".")[0]
        return floors.get(module, math.nan)

    def room(module: str) -> str:
        return module if module in rooms else module.rpartition(".")[0]

    pairs = [(a, b) for a in arrows for b in arrows[a]]
    against = [f"{a} -> {b}" for a, b in pairs if floor(a) < floor(b)]
    ways = Counter((room(a), room(b)) for a, b in pairs)
    both = [(a, b) for a, b in ways if a < b and (b, a) in ways and not b.startswith(f"{a}.")]
    return against + [f"{a} -> {b}" if ways[a, b] <= ways[b, a] else f"{b} -> {a}" for a, b in both]


def inheritance(modules: Modules, root: str) -> list[str]:
    """The longest chain of classes that ends with `root`."""
    bases = {
        node.name: {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases} - {node.name}
        for _, node in walk(modules, ast.ClassDef)
    }

    def chain(name: str, below: tuple[str, ...] = ()) -> list[str]:
        above = [chain(base, (*below, name)) for base in sorted(bases.get(name, set())) if base not in below]
        longest = max(above, key=len, default=[])
        return [name, *longest] if longest or name == root else []

    return max(map(chain, bases), key=len, default=[])


def empty_names(modules: Modules) -> list[str]:
    """Places that store something under a name that says nothing of it."""
    stored = ((module, node) for module, node in walk(modules, ast.Name) if isinstance(node.ctx, ast.Store))
    return [f"{module}:{node.lineno} {node.id}" for module, node in stored if node.id in EMPTY_NAMES]


def told_attributes(modules: Modules) -> list[str]:
    """Docstrings with a paragraph that explains four names or more, `Args:` and `Attributes:` not counted."""
    names = re.compile(r"(?:^|[.;:] |\n)\s*([a-z_]\w*(?:, [a-z_]\w*)*): ")

    def told(text: str) -> bool:
        parts = [part for part in re.split(r"\n\s*\n", text) if not part.lstrip().startswith(("Args:", "Attributes:"))]
        return any(sum(len(some.split(", ")) for some in names.findall(part)) > 3 for part in parts)

    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [(f"{m} {getattr(node, 'name', '')}", ast.get_docstring(node) or "") for m, node in walk(modules, *kinds)]
    return [place for place, text in docs if told(text)]


def calls(modules: Modules, pattern: str) -> list[str]:
    """Places with a call whose text has the pattern at its beginning."""
    return [f"{m}:{node.lineno}" for m, node in walk(modules, ast.Call) if re.match(pattern, ast.unparse(node))]


def constants(modules: Modules, room: str) -> list[str]:
    """Statements that make constants of a room's modules."""
    return [
        f"{module}:{node.lineno}"
        for module, tree in modules.items()
        for node in tree.body
        if f"{module}.".startswith(f"{room}.") and isinstance(node, (ast.Assign, ast.AnnAssign))
        if re.match(r"\(?_?[A-Z][A-Z_]*\b", ast.unparse(node))
    ]


def own_commands(checkout: Path, modules: Modules) -> list[str]:
    """Commands that the engine brings: all, less those that come by an entry point."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text()).get("project", {})
    others = project.get("entry-points", {}).get("outrider.commands", {})
    functions = [(node, " ".join(map(ast.unparse, node.decorator_list))) for _, node in walk(modules, ast.FunctionDef)]
    names = [node.name for node, text in functions if "as_command(" in text and "to=" not in text]
    main = {module: tree for module, tree in modules.items() if module == "outrider.cli.main"}
    names += [
        ast.unparse(c.args[1]) for _, c in walk(main, ast.Call) if ast.unparse(c.func) == "add" and len(c.args) > 1
    ]
    return [name for name in names if name.rstrip("_") not in others]


def lines(folder: Path) -> int:
    """Lines of Python in a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def of_package(package: Path, layers: list[str]) -> list[Figure]:
    """The figures of a distribution."""
    modules, engine = read(package), package.name == "outrider"
    rooms = {".".join(path.parent.relative_to(package.parent).parts) for path in package.rglob("__init__.py")}
    arrows = imports(modules)

    def goal(number: int) -> int | None:
        return number if engine else None

    return [
        (
            "lines of Python",
            lines(package),
            {"outrider": 35_000, "outrider_lab": 8_200, "outrider_ray": 1_500}.get(package.name),
        ),
        ("modules", len(modules), goal(215)),
        (CIRCLES, [" ".join(circle) for circle in circles(arrows)], 0),
        (UPWARD, upward(arrows, rooms, layers), 0),
        ("isinstance of own types", own_checks(modules), goal(15)),
        ("writes to other objects' attributes", writes(modules), None),
        ("of them, to attributes that only classes of other files have", foreign_writes(modules), goal(45)),
        ("class names used twice", twice(modules), goal(0)),
        ("modules with exactly one importer", single_importers(arrows, rooms), goal(30)),
        ("stores to found, own, made, given, known, kept", empty_names(modules), goal(100)),
        ("docstrings with attributes told in text", told_attributes(modules), goal(0)),
    ]


def of_project(checkout: Path) -> list[Figure]:
    """The figures of the engine's parts, and of what is beside the packages."""
    modules, tests, benchmarks = read(checkout / "outrider"), checkout / "tests", checkout / "benchmarks"
    engine, docs = ("engine", "drafters", "verify", "models", "serve"), checkout / "docs"
    private = [
        f"{path.relative_to(checkout)}:{at}"
        for path in sorted((tests / "unit").rglob("*.py"))
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\._[a-z]", line) and not re.search(r"self\._|_replace|_asdict", line)
    ]
    return [
        ("lines of " + ", ".join(engine), sum(lines(checkout / "outrider" / room) for room in engine), 27_500),
        ("longest chain of drafters' classes", inheritance(modules, "BaseDrafter"), 2),
        ("places that make a Decoder", calls(modules, r"Decoder\("), 1),
        ("drivers of the loop", calls(modules, r"[\w.]+\.round\([^)]|([\w.]+\.)?decoder\.step\("), 1),
        ("module constants of control", constants(modules, "outrider.control"), 35),
        ("declarations of options", calls(modules, r"(setting|option)\("), 110),
        ("commands of the engine", own_commands(checkout, modules), 12),
        ("lines of tests", lines(tests), 33_000),
        ("private names in tests/unit", private, 0),
        ("lines of benchmarks", lines(benchmarks), 7_000),
        ("modules of benchmarks", len([*benchmarks.rglob("*.py")]), 45),
        ("words of docs", sum(len(path.read_text(encoding="utf-8").split()) for path in docs.rglob("*.md")), 75_000),
        ("certificates in docs", [path.name for path in (docs / "certificates").glob("*")], 3),
    ]


def layers_of(project: Path) -> list[str]:
    """The floors of a package, as its import contract has them."""
    contracts = tomllib.loads(project.read_text()).get("tool", {}).get("importlinter", {}).get("contracts", [])
    return [layer for contract in contracts for layer in contract.get("layers", [])]


def main(words: list[str]) -> int:
    folders = [Path(word) for word in words if word != "--where"]
    checkout, wrong = folders[0] if folders else Path(__file__).parents[1], 0
    packages = [checkout / name for name in PACKAGES if (checkout / name).is_dir()]
    figures = [(str(p.relative_to(checkout)), of_package(p, layers_of(p.parent / "pyproject.toml"))) for p in packages]
    for title, some in [*figures, ("the project", of_project(checkout))]:
        print(title)
        for name, value, goal in some:
            count = len(value) if isinstance(value, list) else value
            print(f"{count:>9,}  {name}" + ("" if goal is None else f"  (goal {goal:,})"))
            for place in value if "--where" in words and isinstance(value, list) else ():
                print(f"           {place}")
            wrong += count if name in (CIRCLES, UPWARD) else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
