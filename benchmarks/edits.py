"""Edits of real files: the prompt holds a file and asks for it with one change, so most of the answer is in the prompt.

The files are parts of the modules of this Python's own standard library.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "bisect", "heapq", "textwrap", "shlex", "fnmatch", "string", "colorsys", "sched", "queue", "copy", "contextlib",
    "calendar", "statistics", "difflib", "csv", "configparser", "getopt", "glob", "gettext", "linecache", "netrc",
    "pprint", "reprlib", "shelve", "stat", "tabnanny", "timeit", "tokenize", "zipapp",
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """A change of a file.

    Args:
        kind: rename, insert or delete.
        before: the file.
        after: the file with the change.
        asked: the instruction.
    """

    kind: str
    before: str
    after: str
    asked: str

    @property
    def prompt(self) -> str:
        return f"{self.before}\n\n# {self.asked} The whole file after the change:\n\n"


def make_edit(kind: str, source: str, draw: random.Random) -> Edit | None:
    """One change of a source, None where it offers no place for it."""
    lines, parsed = source.splitlines(keepends=True), ast.parse(source)
    functions = [n for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef) and n.end_lineno]
    if kind == "rename":
        names = {n.id for n in ast.walk(parsed) if isinstance(n, ast.Name)} | {f.name for f in functions}
        often = sorted(n for n in names if len(n) > 3 and 3 <= len(re.findall(rf"\b{n}\b", source)) <= 12)
        if not often:
            return None
        name = draw.choice(often)
        new = draw.choice(["current", "item_list", "payload", "new_value"])
        return Edit(kind, source, re.sub(rf"\b{name}\b", new, source), f"Rename {name} to {new}.")
    if not functions:
        return None
    f = draw.choice(functions)
    if kind == "delete":
        first = min([f.lineno, *(d.lineno for d in f.decorator_list)]) - 1
        after = "".join(lines[:first] + lines[f.end_lineno :])
        return Edit(kind, source, after, f"Delete the function {f.name}.") if len(functions) > 1 else None
    at, indent = f.body[0].lineno - 1, " " * f.body[0].col_offset
    new = f"{indent}logger.debug('entering {f.name}')\n"
    return Edit(kind, source, "".join([*lines[:at], new, *lines[at:]]), f"Log when {f.name} is entered.")


def part_of_file(module: str, size: int, draw: random.Random) -> str | None:
    """Whole definitions of a module that follow each other, about `size` characters."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    body = [n for n in ast.parse(text).body if n.end_lineno]
    first = draw.randrange(len(body))
    start, end = body[first].lineno - 1, 0
    lines = text.splitlines(keepends=True)
    for node in body[first:]:
        if len("".join(lines[start : node.end_lineno])) > 1.3 * size:
            break
        end = node.end_lineno or end
    part = "".join(lines[start:end])
    return part if len(part) > 0.6 * size and not part.lstrip().startswith("@") else None


def edits(count: int, seed: int = 0, size: int = 1400) -> list[Edit]:
    """Edits in turn of each kind, of files of about `size` characters. The same for the same Python and seed."""
    draw, out, seen = random.Random(seed), list[Edit](), set[str]()
    kinds = ("rename", "insert", "delete")
    while len(out) < count:
        source = part_of_file(draw.choice(MODULES), size, draw)
        if source is None or source in seen:
            continue
        try:
            edit = make_edit(kinds[len(out) % 3], source, draw)
        except SyntaxError:
            continue
        if edit is not None and edit.before != edit.after and 2 * len(edit.after) > len(edit.before):
            seen.add(source)
            out.append(edit)
    return out
