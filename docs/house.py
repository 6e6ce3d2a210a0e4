"""Prints how large and how tangled the package is: python docs/house.py [CHECKOUT] [--where].

--where prints the places that are counted, too. It reads the source as text and runs nothing of it.

isinstance of own types   `isinstance` with a class of the package: ask for a capability instead. A Protocol is a capability
writes to other objects   `x.name = ...`, where x is not the method's own object: an object should be whole when it is made.
                          C structs, objects of libraries and records of the same file count, too
of them, in other files   classes of other files have such an attribute, and none of this file: the owner could do it by a method.
                          Names are compared, not types, so some C structs and libraries' objects still count
modules with one importer `__init__` does not count, as a module or as an importer
circles of imports        groups of files that import each other, also for types only or inside of functions
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

Modules = dict[str, ast.Module]


def read(package: Path) -> Modules:
    """Module name -> its syntax tree."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted(package.rglob("*.py"))
    }


def classes(modules: Modules) -> list[str]:
    """The name of each class."""
    return [n.name for tree in modules.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def twice(modules: Modules) -> list[str]:
    """Names of more than one class. `_Line` beside `Line` confuses, too."""
    return [name for name, count in Counter(name.lstrip("_") for name in classes(modules)).items() if count > 1]


def protocols(modules: Modules) -> list[str]:
    """The name of each Protocol: it says what an object can do, and not what it is."""
    return [
        n.name
        for tree in modules.values()
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Protocol" for b in n.bases)
    ]


def own_checks(modules: Modules) -> list[str]:
    """Places that ask whether an object is of a class of the package."""
    own = {*classes(modules)} - {*protocols(modules)}
    found = list[str]()
    for module, tree in modules.items():
        foreign = {alias.asname or alias.name for node in ast.walk(tree) if _is_foreign(node) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                found += [f"{module}:{node.lineno} {name}" for name in sorted(named & own - foreign)]
    return found


def _is_foreign(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and not str(node.module).startswith("outrider")


def writes(modules: Modules) -> list[str]:
    """Places that set an attribute of an object other than the method's own."""
    return [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def foreign_writes(modules: Modules) -> list[str]:
    """Those of `writes` whose attribute classes of other files have, and none of this file."""
    owners = dict[str, set[str]]()
    for module, tree in modules.items():
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
            for attribute in _attributes([node]):
                owners.setdefault(attribute, set()).add(module)
    found = ((place, place.split(":")[0], place.rsplit(".", 1)[1]) for place in writes(modules))
    return [place for place, module, name in found if name in owners and module not in owners[name]]


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


def fields(modules: Modules, name: str) -> list[str]:
    """What the objects of a class hold."""
    own = [
        node
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return _attributes(own)


def _attributes(own: list[ast.ClassDef]) -> list[str]:
    declared = [
        n.target.id for c in own for n in c.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    stored = [n for c in own for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return list(
        dict.fromkeys([*declared, *(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self")])
    )


def figures(checkout: Path) -> dict[str, int | list[str]]:
    """A figure, or the places that it counts, by name."""
    package = checkout / "outrider"
    modules = read(package)
    rooms = {".".join(path.parent.relative_to(checkout).parts) for path in package.rglob("__init__.py")}
    arrows = imports(modules)
    return {
        "lines of Python": sum(len(path.read_text().splitlines()) for path in package.rglob("*.py")),
        "modules": len(modules),
        "isinstance of own types": own_checks(modules),
        "writes to other objects' attributes": writes(modules),
        "of them, to attributes that only classes of other files have": foreign_writes(modules),
        "class names used twice": twice(modules),
        "modules with exactly one importer": single_importers(arrows, rooms),
        "circles of imports at file level": [" ".join(circle) for circle in circles(arrows)],
        "fields of Request": fields(modules, "Request"),
        "fields of Sequence": fields(modules, "Sequence"),
    }


if __name__ == "__main__":
    where = "--where" in sys.argv
    folders = [Path(word) for word in sys.argv[1:] if word != "--where"]
    for name, value in figures(folders[0] if folders else Path(__file__).parents[1]).items():
        print(f"{len(value) if isinstance(value, list) else value:>7,}  {name}")
        for place in value if where and isinstance(value, list) else ():
            print(f"         {place}")
