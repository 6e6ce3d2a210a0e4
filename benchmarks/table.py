"""Put the tables of the newest result files into the documents that have markers for them.

    python -m benchmarks.table [--check]

A marker is a line `<!-- table: KIND FILE -->`, closed by `<!-- /table -->`; KIND is one of `KINDS`, FILE the result's name
without its date (as in benchmarks/results). --check fails when a document is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT, headline, never_slower, quality, replays, trees, tuned, workloads
from benchmarks.figures import HEAD, figures
from benchmarks.real import report as real
from benchmarks.report import decode_rows, forward_rows, markdown

LISTS = {  # a module that measures, and where its result holds the records
    "trees": (trees.table, "trees"),
    "never_slower": (never_slower.table, "cases"),
    "tuned": (tuned.table, "workloads"),
    "replays": (replays.table, "records"),
    "quality": (quality.table, "records"),
}
WHOLE = {"real": real.tables, "real_short": real.short, "real_machine": real.conditions}  # of a result as it is
KINDS = ("figures", "forward", "decode", "machine", "identity", "workloads", *LISTS, *WHOLE)
DOCUMENT, TREES, README = ROOT / "docs" / "performance.md", ROOT / "docs" / "trees.md", ROOT / "README.md"
MARKER = re.compile(r"(<!-- table: (\w+) ([\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def newest(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The latest result of this name, or None."""
    files = sorted(folder.glob(f"????-??-??-{name}.json"))
    return json.loads(files[-1].read_text()) if files else None


def machine_lines(result: dict[str, Any]) -> str:
    m = result["machine"]
    read = m.get("read_gb_per_second") or {}
    lines = [
        f"- {m['cpu']} ({m['cores']} cores, {', '.join(m['isa']) or 'no vector extensions named'}), {m['memory_gib']} GiB, "
        f"{m['system']}",
        f"- Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, outrider {m['outrider']} at commit "
        f"{m['commit']}, {m['date']}",
        *([f"- `{result['command']}`"] if "command" in result else []),
    ]
    if read:
        lines.insert(1, f"- reads {read['one']} GB/s on one core, {read['all']} on all ({read['how']})")
    return "\n".join(lines)


def render(kind: str, result: dict[str, Any], identity: dict[str, Any] | None) -> str:
    """The text between two markers."""
    if kind == "machine":
        return machine_lines(result)
    if kind == "figures":
        return markdown(HEAD, figures(result, identity))
    if kind == "identity":
        rows = [[u["weights"], u["drafter"], f"{u['tokens']:,}", str(u["differing"])] for u in result["units"]]
        return markdown(["weights", "drafter", "tokens", "differing"], rows)
    if kind in WHOLE:
        return WHOLE[kind](result)
    if kind in LISTS:
        made, where = LISTS[kind]
        return made(result[where])
    if kind == "workloads":
        parts = [(title, workloads.table(records)) for title, records in result["targets"].items()]
        return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts)
    if kind == "forward":
        parts = [(f"{f['size']} {f['precision']}", forward_rows(f["records"])) for f in result["forward"]]
    elif kind == "decode":
        parts = [
            (f"{d['size']} {d['precision']}, {d['kind']}, temperature {d['temperature']:g}", decode_rows(d["records"]))
            for d in result["decode"]
        ]
    else:
        raise ValueError(f"unknown table {kind!r}; there are {', '.join(KINDS)}")
    return "\n\n".join(f"**{title}**\n\n{markdown(*rows)}" for title, rows in parts)


def fill(text: str, folder: Path = RESULTS) -> str:
    """The document with every marked table made anew. A result that is not there leaves its table as it is."""
    identity = newest("identity", folder)

    def table(found: re.Match[str]) -> str:
        opening, kind, name, closing = found.groups()
        result = newest(name, folder)
        return found[0] if result is None else f"{opening}\n{render(kind, result, identity)}\n\n{closing}"

    return MARKER.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=headline(__doc__))
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the document is out of date")
    args = parser.parse_args()
    for document in (DOCUMENT, TREES, README):
        old = document.read_text(encoding="utf-8")
        new = fill(old)
        if args.check and old != new:
            sys.exit(f"{document.name} is out of date; run python -m benchmarks.table")
        if not args.check:
            document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
