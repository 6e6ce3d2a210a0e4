"""Writes the table of docs/certificates/README.md from the JSON files beside it.

python docs/certificates.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from outrider_certify.certificate import Certificate, CertificatePart

FOLDER = Path(__file__).parent / "certificates"
HEAD = "| certificate | kind | verdict | amount | seen |\n|---|---|---|---|---|\n"


def table() -> str:
    """A row for each part of each certificate."""
    rows = list[str]()
    for path in sorted(FOLDER.glob("*.json")):
        certificate = Certificate.load(path)
        rows += [
            f"| [{path.stem}]({path.name}) | {p.kind} | **{p.conclusion.value}** | {_amount(p)} | {_seen(p)} |\n"
            for p in certificate.parts
        ]
    return HEAD + "".join(rows)


def _amount(part: CertificatePart) -> str:
    for name, what in (("tokens", "tokens"), ("checks", "checks"), ("toys", "toy models"), ("problems", "problems")):
        if name in part.figures:
            return f"{part.figures[name]:,} {what}"
    return ""


def _seen(part: CertificatePart) -> str:
    seen = [f"{part.figures['ties']} ties"] if part.figures.get("ties") else []
    if "tv_bound" in part.figures and not part.causes:
        seen.append(f"total variation at most {part.figures['tv_bound']:.2f}")
    seen += part.causes
    seen += [f"{f.title}: {f.where}" for f in part.findings if not f.error and "tie" not in f.title]
    return "; ".join(seen).replace("|", "/")


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
