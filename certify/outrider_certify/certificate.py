"""The certificate as data: what was tested, how much, what would have been found, and what was found. One JSON file."""

from __future__ import annotations

import hashlib
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Increase this when a field changes its meaning.
FORMAT = 1


class Conclusion(Enum):
    """What a part, or a whole certificate, says. The worst one of the parts is that of the certificate."""

    EXACT_TOKENS = "exact tokens"
    SAME_DISTRIBUTION = "same distribution"
    HOLDS = "holds"
    NOT_TESTED = "not tested"
    CANNOT_TELL = "cannot tell"
    DIFFERS = "differs"

    @property
    def colour(self) -> str:
        """good, unsure or bad."""
        return {Conclusion.DIFFERS: "bad", Conclusion.CANNOT_TELL: "unsure", Conclusion.NOT_TESTED: "unsure"}.get(
            self, "good"
        )

    @property
    def exit_code(self) -> int:
        """For a shell: 0 nothing is wrong, 1 something differs, 3 the budget was too small or nothing could be tested."""
        return {"good": 0, "bad": 1, "unsure": 3}[self.colour]


_RANK = list(Conclusion)


class CertificateRecord(BaseModel):
    """Base of all records of the file. An unknown field is an error, so that a misspelt name is not lost."""

    model_config = ConfigDict(extra="forbid")


class Finding(CertificateRecord):
    """Something that is wrong, or that a reader should know."""

    title: str  # one sentence
    cause: str = ""  # the mistake whose traces it has; "" if unknown
    where: str = ""  # prompt, seed, position
    evidence: str = ""  # lines that a person can check
    error: bool = True  # whether it makes the conclusion `differs`


class CertificatePart(CertificateRecord):
    """What one kind of test says."""

    kind: str  # exact, seeded, statistical or contract; or a part of the gate
    conclusion: Conclusion
    sentence: str  # the conclusion in plain words
    power: str = ""  # what would have been found
    tested: dict[str, str] = {}  # what, by name, for a table
    findings: list[Finding] = []
    skipped: list[str] = []  # what was not tested, and why
    figures: dict[str, Any] = {}  # the numbers behind the sentences
    seconds: float = 0.0

    @property
    def causes(self) -> list[str]:
        """The mistakes that its errors have the traces of, each once."""
        return list(dict.fromkeys(f.cause for f in self.findings if f.error and f.cause))


class Certificate(CertificateRecord):
    """All parts, and what they were made with."""

    format: int = FORMAT
    type: Literal["outrider-certificate"] = "outrider-certificate"
    subject: str  # its name
    properties: dict[str, str] = {}  # of the subject
    weights: dict[str, str] = {}  # sha256 of the weights, where they are at hand
    machine: dict[str, str] = {}
    versions: dict[str, str] = {}
    command: str = ""  # makes it again
    date: str = ""
    budget: float = 0.0  # seconds that were allowed
    confidence: float = 0.99
    complete: bool = False  # False while it is being made
    parts: list[CertificatePart] = Field(default_factory=list)
    digest: str = ""  # sha256 of all other fields, which `save` writes and `load` checks: a changed file is noticed

    def computed_digest(self) -> str:
        """The sha256 of all fields but `digest`, as 64 hexadecimal digits."""
        fields = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def conclusion(self) -> Conclusion:
        """The worst conclusion of the parts that tested something."""
        said = [p.conclusion for p in self.parts if p.conclusion is not Conclusion.NOT_TESTED]
        return max(said, key=_RANK.index) if said else Conclusion.NOT_TESTED

    @property
    def sentence(self) -> str:
        """The verdict in plain words: the sentences of the parts that decide it, or of all if nothing is wrong."""
        worst, good = self.conclusion, self.conclusion.colour == "good"
        said = [p.sentence for p in self.parts if p.conclusion is worst or (good and p.conclusion.colour == "good")]
        return " ".join(said) or "Nothing could be tested."

    @property
    def cause(self) -> str:
        """The mistake that it looks like most: the first that the parts name, in their order; "" if they name none."""
        return next((part.causes[0] for part in self.parts if part.causes), "")

    def part(self, kind: str) -> CertificatePart | None:
        """What a kind of test says; None if it was not asked."""
        return next((part for part in self.parts if part.kind == kind), None)

    def save(self, path: Path) -> None:
        """Write the file. It is replaced as a whole, so a reader never sees half of it."""
        self.digest = self.computed_digest()
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Certificate:
        """Read a file that `save` wrote. Raises ValueError for any other file, a changed one, and another format number."""
        try:
            certificate = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "it is not text"}
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} is not a certificate of this version ({where}: {first['msg']}). "
                "Make one with: outrider-certify URL -o certificate.html"
            ) from None
        if certificate.format != FORMAT:
            raise ValueError(
                f"{path} has format {certificate.format}. This version reads format {FORMAT}. Certify again."
            )
        if certificate.digest != certificate.computed_digest():
            raise ValueError(f"{path} was changed after it was written: its digest is another one. Certify again.")
        return certificate


def write_whole(path: Path, text: str) -> None:
    """Write a file beside `path`, which then takes its place."""
    part = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def compare(before: Certificate, after: Certificate) -> tuple[list[str], bool]:
    """What changed, one line each, and whether something is worse than before."""
    lines, worse = list[str](), False
    for name, old, new in (("subject", before.subject, after.subject), ("weights", before.weights, after.weights)):
        if old != new:
            lines.append(f"{name}: {old} before, {new} now")
    for name in sorted({*before.versions, *after.versions}):
        old, new = before.versions.get(name, "none"), after.versions.get(name, "none")
        if old != new:
            lines.append(f"version of {name}: {old} before, {new} now")
    parts = {p.kind: p for p in before.parts}
    for part in after.parts:
        old = parts.pop(part.kind, None)
        if old is None:
            lines.append(f"{part.kind}: tested now, not before. {part.sentence}")
            worse |= part.conclusion is Conclusion.DIFFERS
            continue
        if old.conclusion is not part.conclusion:
            lines.append(f"{part.kind}: {old.conclusion.value} before, {part.conclusion.value} now. {part.sentence}")
            worse |= _worse(old.conclusion, part.conclusion)
        errors_before = {(f.title, f.cause) for f in old.findings if f.error}
        errors = {(f.title, f.cause) for f in part.findings if f.error}
        for title, cause in sorted(errors - errors_before):
            lines.append(f"{part.kind}: new: {title}" + (f" ({cause})" if cause else ""))
            worse = True
        lines += [f"{part.kind}: gone: {title}" for title, _ in sorted(errors_before - errors)]
        if old.power != part.power:
            lines.append(f"{part.kind}: power before: {old.power} Now: {part.power}")
    lines += [f"{kind}: tested before, not now" for kind in parts]
    return lines, worse or bool(parts)


def _worse(before: Conclusion, after: Conclusion) -> bool:
    if after is Conclusion.NOT_TESTED:
        return True
    return before is not Conclusion.NOT_TESTED and _RANK.index(after) > _RANK.index(before)
