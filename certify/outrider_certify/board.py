"""Many certificates on one page: a row for each, a column for each kind, and each cell leads to its certificate."""

from __future__ import annotations

from pathlib import Path

from outrider_certify.certificate import Certificate, CertificatePart, write_whole
from outrider_certify.page import TITLES, rendered, words


def certificates_in(folder: Path) -> list[tuple[str, Certificate]]:
    """The name and the certificate of each JSON file of a folder, by name.

    Raises FileNotFoundError for a folder without any, and what `Certificate.load` raises.
    """
    certificates = [(path.stem, Certificate.load(path)) for path in sorted(folder.glob("*.json"))]
    if not certificates:
        raise FileNotFoundError(
            f"{folder} has no certificate. Make one there: outrider-certify URL -o {folder}/NAME.html"
        )
    return certificates


def write_board(folder: Path) -> Path:
    """Write the page `index.html` into a folder of certificates. Returns its path."""
    certificates, path = certificates_in(folder), folder / "index.html"
    kinds = [kind for kind in TITLES if any(c.part(kind) for _, c in certificates)]
    shown = {"amount": amount, "seen": seen, "words": words, "origin": origin}
    write_whole(path, rendered("board.html", certificates=certificates, kinds=kinds, **shown))
    return path


def origin(certificate: Certificate) -> str:
    """The engine of a server and its version, and the day."""
    engine, version = certificate.properties.get("engine", ""), certificate.versions.get("server", "")
    told = version if engine in version else f"{engine} {version}"
    return f"{told}, {certificate.date[:10]}" if version else certificate.date[:10]


def amount(part: CertificatePart) -> str:
    """How much was tested."""
    for name, what in (("tokens", "tokens"), ("checks", "checks"), ("toys", "toy models"), ("problems", "problems")):
        if name in part.figures:
            return f"{part.figures[name]:,} {what if part.figures[name] != 1 else what.removesuffix('s')}"
    return ""


def seen(part: CertificatePart) -> str:
    """The bound, the mistakes that errors look like, and what is no error."""
    told = [f"{part.figures['ties']} ties"] if part.figures.get("ties") else []
    if "tv_bound" in part.figures and not part.causes:
        told.append(f"total variation at most {part.figures['tv_bound']:.2f}")
    told += part.causes
    told += [f"{f.title}: {f.where}" for f in part.findings if not f.error and "tie" not in f.title]
    return "; ".join(told)
