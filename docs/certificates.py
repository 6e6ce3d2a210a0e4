"""Writes the table of docs/certificates/README.md, and the page index.html, from the JSON files beside them.

python docs/certificates.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from outrider_certify.board import amount, certificates_in, seen, write_board

FOLDER = Path(__file__).parent / "certificates"
HEAD = "| certificate | kind | verdict | amount | seen |\n|---|---|---|---|---|\n"


def table() -> str:
    """A row for each part of each certificate."""
    rows = list[str]()
    for name, certificate in certificates_in(FOLDER):
        rows += [
            f"| [{name}]({name}.json) | {p.kind} | **{p.conclusion.value}** | {amount(p)} | {_cell(seen(p))} |\n"
            for p in certificate.parts
        ]
    return HEAD + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "/")


def page(text: str) -> str:
    """A page with its table made anew."""
    start = text.index(HEAD)
    end = text.index("\n\n", start) + 1
    return text[:start] + table() + text[end:]


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    new = page(readme.read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        sys.exit(new != readme.read_text(encoding="utf-8"))
    readme.write_text(new, encoding="utf-8")
    write_board(FOLDER)
