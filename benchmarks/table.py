"""Put the tables of the newest result files into the documents that have markers for them.

    python -m benchmarks.table [--check]

A marker is a line `<!-- table: KIND FILE -->`, closed by `<!-- /table -->`. KIND is one of `LISTS` or `WHOLE`. FILE is the
result's name without its date (as in benchmarks/results). --check fails when a document is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT, identity, never_slower, quality, replays, trees
from benchmarks.real import report as real
from benchmarks.ruler import parser

LISTS = {  # a module that measures, and where its result holds the records
    "trees": (trees.table, "trees"),
    "never_slower": (never_slower.table, "cases"),
    "replays": (replays.table, "records"),
    "quality": (quality.table, "records"),
    "identity": (identity.table, "units"),
}
DOCUMENT, TREES, README = ROOT / "docs" / "performance.md", ROOT / "docs" / "trees.md", ROOT / "README.md"
MARKER = re.compile(r"(<!-- table: (\w+) ([\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def newest(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The latest result of this name, or None."""
    files = sorted(folder.glob(f"????-??-??-{name}.json"))
    return json.loads(files[-1].read_text()) if files else None


def machine_lines(result: dict[str, Any]) -> str:
    """Markdown: machine, versions and command."""
    m = result["machine"]
    lines = [
        f"- {m['cpu']} ({m['cores']} cores, {', '.join(m['isa']) or 'no vector extensions named'}), {m['memory_gib']} GiB, "
        f"{m['system']}",
        f"- Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, outrider {m['outrider']} at commit "
        f"{m['commit']}, {m['date']}",
        *([f"- `{result['command']}`"] if "command" in result else []),
    ]
    return "\n".join(lines)


# Of a result as it is.
WHOLE = {"real": real.tables, "real_short": real.short, "real_machine": real.conditions, "machine": machine_lines}


def render(kind: str, result: dict[str, Any]) -> str:
    """The text between two markers."""
    if kind in WHOLE:
        return WHOLE[kind](result)
    rows, where = LISTS[kind]
    return rows(result[where])


def fill(text: str, folder: Path = RESULTS) -> str:
    """The document with every marked table made anew. A result that is not there leaves its table as it is."""

    def table(marker: re.Match[str]) -> str:
        opening, kind, name, closing = marker.groups()
        result = newest(name, folder)
        return marker[0] if result is None else f"{opening}\n{render(kind, result)}\n\n{closing}"

    return MARKER.sub(table, text)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="change nothing; fail when a document is out of date")
    args = options.parse_args()
    for document in (DOCUMENT, TREES, README):
        old = document.read_text(encoding="utf-8")
        new = fill(old)
        if args.check and old != new:
            sys.exit(f"{document.name} is out of date; run python -m benchmarks.table")
        if not args.check:
            document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
