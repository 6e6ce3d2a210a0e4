"""A certificate as one HTML page. It needs no network and no scripts. Texts of models are always shown as text."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider_certify.certificate import Certificate, write_whole

TITLES = {
    "exact": "The verifier, by enumeration",
    "seeded": "Tokens: the same texts as plain decoding",
    "statistical": "Distribution: tokens drawn from the target's own",
    "contract": "Contract: parameters and bookkeeping",
    "quality": "Quality: answers that are well formed",
    "server": "The server itself",
    "equality": "Equality: the same answers from both servers",
    "tool calls": "Tool calls, field by field",
    "latency": "Latency",
}
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]")


def render(certificate: Certificate) -> str:
    """The page."""
    return rendered("certificate.html", c=certificate, subject=words(certificate.subject), titles=TITLES)


def rendered(template: str, **values: object) -> str:
    """A page of a template."""
    folder = FileSystemLoader(Path(__file__).parent / "template")
    env = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return visible(env.get_template(template).render(values))


def visible(text: str) -> str:
    """Characters that are interpreted instead of shown become visible symbols. Line ends and tabs stay."""
    return _HIDDEN.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 32 else f"⟨{ord(m[0]):04X}⟩", text)


def words(subject: str) -> str:
    """The name of a subject, without the JSON that may stand at its end: `{"k": 4}` becomes `k 4`."""
    name, brace, rest = subject.partition("{")
    try:
        options = json.loads(brace + rest) if brace else {}
    except ValueError:
        return subject
    return name + ", ".join(f"{key} {value}" for key, value in options.items())


def write(certificate: Certificate, path: Path) -> None:
    """Write the page. The file is replaced as a whole."""
    write_whole(path, render(certificate))
