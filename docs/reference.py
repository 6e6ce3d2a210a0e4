"""Write docs/reference: the public docstrings of the package as pages. Static: no module is imported.

    python docs/reference.py [--check]

--check changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "reference"
# page -> (what it is about, its modules in reading order)
PAGES: dict[str, tuple[str, list[str]]] = {
    "api": (
        "load a model, sample, read outputs",
        ["engine.llm", "core.params", "drafters.config", "core.outputs", "integrations.transformers"],
    ),
    "loop": (
        "the loop, the planner and its costs",
        [
            "engine.decoder",
            "engine.runtime",
            "control.planner",
            "control.plan",
            "control.costs",
            "drafters.planned",
            "engine.calibrate",
        ],
    ),
    "core": ("records, trees, noise, sampling", ["core.types", "core.tree", "core.noise", "core.sampling"]),
    "verify": ("verifiers", ["verify", "verify.batched", "verify.reference"]),
    "drafters": (
        "the drafter seam and the built-in drafters",
        [
            "drafters.base",
            "drafters.method",
            "drafters.model.grower",
            "drafters.model.draft_model",
            "drafters.model.self_speculation",
            "drafters.model.cross_tokenizer",
            "drafters.lookup.ngram",
            "drafters.lookup.suffix",
            "drafters.lookup.prediction",
            "drafters.lookup.token_recycling",
        ],
    ),
    "models": (
        "models, caches, attention, loading",
        ["models.base", "models.cache", "models.attention", "models.load"],
    ),
    "engine": ("many requests at once", ["engine.engine"]),
    "trace": (
        "record, read, replay",
        [
            "engine.trace",
            "outrider_lab.traces",
            "outrider_lab.replay",
            "engine.fingerprint",
        ],
    ),
    "engines": ("exports to other engines", ["outrider_lab.handover"]),
    "certify": (
        "certificates of any engine: the package outrider-certify",
        ["outrider_certify.run", "outrider_certify.subject", "outrider_certify.certificate"],
    ),
    "testing": ("contract test, toy model, oracle", ["testing.contract", "testing.toy", "testing.oracle"]),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def full_name(module: str) -> str:
    """A module by its full name; those of outrider are named without it."""
    return module if module.startswith("outrider_") else f"outrider.{module}"


def path_of(module: str) -> Path:
    """The source file of a module."""
    name = full_name(module)
    base = ROOT / name.partition(".")[0].partition("_")[2] / Path(*name.split("."))  # certify/outrider_certify/...
    package = base / "__init__.py"  # a folder that git left behind has none
    return package if package.exists() else base.with_suffix(".py")


def prose(docstring: str | None) -> str:
    """A docstring as markdown. A line `name: meaning`, also under `Args:`, becomes a list item; indented lines become code."""
    lines: list[str] = []
    item = False
    text, _, listed = inspect.cleandoc(docstring or "").partition("\nArgs:\n")
    for line in (text + "\n" + inspect.cleandoc(listed)).rstrip().splitlines():
        if line.startswith("    ") and not item:
            lines.append(line)
            continue
        line = "".join(t if n % 2 else t.replace("<", "&lt;") for n, t in enumerate(re.split(r"(`[^`]*`)", line)))
        found = re.match(r"([a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*): +(?=\S)", line)
        if found:
            if not item and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{n}`" for n in found[1].split(", "))
            line = f"- {names}: {line[found.end() :]}"
        elif item and line:
            line = f"  {line.strip()}"
        item = bool(found) or (item and bool(line))
        lines.append(line)
    return "\n".join(lines).strip()


def signature(node: Function, name: str) -> str:
    """The head of a function, without `self`, on as many lines as it needs."""
    arguments = ast.parse(ast.unparse(node)).body[0].args  # type: ignore[attr-defined]
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in ("self", "cls"):
            group.pop(0)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    parts = [p for p in re.split(r", (?=\*|\w+:|\w+=|\w+$)", ast.unparse(arguments)) if p]
    parts = [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", part) for part in parts]
    one = f"{name}({', '.join(parts)}){result}"
    return one if len(one) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def documented(node: ast.stmt) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")


def is_property(node: Function) -> bool:
    return any(
        ast.unparse(d) in ("property", "cached_property", "functools.cached_property") for d in node.decorator_list
    )


def default(value: ast.expr | None) -> str:
    """A field's default as it is written: of `Field(default, ...)` the first argument, and nothing that is long."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field" and value.args:
        value = value.args[0]
    text = ast.unparse(value) if value else ""
    return text if len(text) < 60 else ""


def described(node: ast.ClassDef) -> str:
    """A table of the fields that say what they are: `Field(..., description="...")`."""
    rows = []
    for s in node.body:
        if isinstance(s, ast.AnnAssign) and isinstance(s.value, ast.Call):
            text = next((k.value for k in s.value.keywords if k.arg == "description"), None)
            while isinstance(text, ast.BinOp):  # a text, and names that are added to it
                text = text.left
            if isinstance(text, ast.Constant):
                rows.append(f"| `{ast.unparse(s.target)}` | {str(text.value).rstrip(': ')} |")
    return "\n".join(["| field | meaning |", "|---|---|", *rows]) if rows else ""


def fields(node: ast.ClassDef) -> list[str]:
    """The annotated attributes of a record, as they are written."""
    found = []
    for s in node.body:
        if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and not s.target.id.startswith("_"):
            value = default(s.value)
            about = f"  # {note}" if (note := getattr(s, "type_comment", "")) else ""
            found.append(f"{s.target.id}: {ast.unparse(s.annotation)}{f' = {value}' if value else ''}{about}")
        elif isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and s.targets[0].id.isupper():
            found.append(ast.unparse(s))
    return found


def render_class(node: ast.ClassDef) -> list[str]:
    bases = ", ".join(ast.unparse(b) for b in node.bases)
    made = next((m for m in node.body if isinstance(m, Function) and m.name == "__init__"), None)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    code = [head, *(f"    {f}" for f in fields(node))]
    parts = [
        f"### {node.name}",
        "```text\n" + "\n".join(code) + "\n```",
        prose(ast.get_docstring(node)),
        described(node),
    ]
    if made:
        parts += [f"```text\n{signature(made, node.name)}\n```", prose(ast.get_docstring(made))]
    for method in node.body:
        if not isinstance(method, Function) or method.name.startswith("_") or not ast.get_docstring(method):
            continue
        name = method.name if is_property(method) else signature(method, method.name)
        if is_property(method) and method.returns:
            name += f": {ast.unparse(method.returns)}"
        parts += [f"```text\n{name}\n```", prose(ast.get_docstring(method))]
    return [p for p in parts if p]


def render(page: str) -> str:
    about, modules = PAGES[page]
    parts = [f"# Reference: {page}", f"{about[0].upper()}{about[1:]}. [All pages](index.md)."]
    for module in modules:
        text = path_of(module).read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        for field in (node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)):
            last, above = lines[(field.end_lineno or 1) - 1], lines[field.lineno - 2].strip()
            field.type_comment = last.partition("  # ")[2] or above.removeprefix("# ") * above.startswith("# ")  # type: ignore[attr-defined]
        parts += [f"## {full_name(module)}", prose(ast.get_docstring(tree))]
        for node in tree.body:
            if not documented(node) or not ast.get_docstring(node):  # type: ignore[arg-type]
                continue
            if isinstance(node, ast.ClassDef):
                parts += render_class(node)
            elif isinstance(node, Function):
                parts += [
                    f"### {node.name}",
                    f"```text\n{signature(node, node.name)}\n```",
                    prose(ast.get_docstring(node)),
                ]
    return "\n\n".join(p for p in parts if p) + "\n"


def pages() -> dict[Path, str]:
    """Every page of the reference and its text."""
    lines = ["# API reference", "The public docstrings. `python docs/reference.py` writes these pages from the source."]
    rows = ["| page | about | modules |", "|---|---|---|"]
    for page, (about, modules) in PAGES.items():
        rows.append(f"| [{page}]({page}.md) | {about} | {', '.join(f'`{full_name(m)}`' for m in modules)} |")
    found = {OUT / "index.md": "\n\n".join([*lines, "\n".join(rows)]) + "\n"}
    return found | {OUT / f"{page}.md": render(page) for page in PAGES}


def main() -> None:
    found = pages()
    old = {file: file.read_text(encoding="utf-8") if file.exists() else "" for file in found}
    if "--check" in sys.argv[1:]:
        if late := [file.name for file, text in found.items() if old[file] != text]:
            sys.exit(f"docs/reference is out of date ({', '.join(late)}); run python docs/reference.py")
        return
    OUT.mkdir(exist_ok=True)
    for file in OUT.glob("*.md"):
        if file not in found:
            file.unlink()
    for file, text in found.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
