"""A certificate as one HTML page. It needs no network and no scripts. Texts of models are always shown as text."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.core.files import written_whole
from outrider.lab.bench.report.page import visible
from outrider_certify.certificate import Certificate, Conclusion

COLOURS = {
    Conclusion.EXACT_TOKENS: "good",
    Conclusion.SAME_DISTRIBUTION: "good",
    Conclusion.HOLDS: "good",
    Conclusion.CANNOT_TELL: "unsure",
    Conclusion.NOT_TESTED: "unsure",
    Conclusion.DIFFERS: "bad",
}
TITLES = {
    "exact": "The verifier, by enumeration",
    "seeded": "Tokens: the same texts as plain decoding",
    "statistical": "Distribution: tokens drawn from the target's own",
    "contract": "Contract: parameters and bookkeeping",
    "quality": "Quality: problems solved",
}


def render(certificate: Certificate, changes: list[str] | None = None) -> str:
    """The page. changes: what is different from an earlier certificate; None without one."""
    folder = FileSystemLoader(Path(__file__).parent / "template")
    env = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("certificate.html").render(
        c=certificate, subject=words(certificate.subject), colours=COLOURS, titles=TITLES, changes=changes
    )
    return visible(html)


def words(subject: str) -> str:
    """The name of a subject, without the JSON that may stand at its end: `{"k": 4}` becomes `k 4`."""
    name, brace, rest = subject.partition("{")
    try:
        given = json.loads(brace + rest) if brace else {}
    except ValueError:
        return subject
    return name + ", ".join(f"{key} {value}" for key, value in given.items())


def write(certificate: Certificate, path: Path, changes: list[str] | None = None) -> None:
    """Write the page. The file is replaced as a whole."""
    with written_whole(path) as part:
        part.write_text(render(certificate, changes), encoding="utf-8", errors="replace")
