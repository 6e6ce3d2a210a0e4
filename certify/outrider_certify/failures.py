"""Engines that fail, and engines that refuse under speculation what they take without it: findings, not errors of ours."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.run import Record
from outrider_certify.subjects.base import Writing

_SHOWN = 3


def broken(texts: Sequence[Writing]) -> list[str]:
    """What the engine said where it failed, each message once."""
    return list(dict.fromkeys(t.error or "" for t in texts if t.broke))[:_SHOWN]


def add_failures(part: CertificatePart, records: Sequence[Record]) -> None:
    """Add to a part what its records say: `broke`, lines of an engine that failed; `refused`, why it refuses under speculation.

    A failure makes the conclusion `differs`, because plain decoding answers. A refusal is shown, and is no error.
    """
    failed = [r for r in records if r.get("broke")]
    refused = [r for r in records if r.get("refused")]
    if failed:
        names = list(dict.fromkeys(_name(r) for r in failed))
        part.findings.insert(
            0,
            Finding(
                title="the engine fails under speculation",
                cause=f"it fails where it is asked for {', '.join(names[:_SHOWN])}",
                where=f"{len(failed)} trials",
                evidence="\n".join(f"{r['key']}: {line}" for r in failed[:_SHOWN] for line in r["broke"]),
            ),
        )
        said = f"The engine fails under speculation: {', '.join(names)}."
        differs = part.conclusion is Conclusion.DIFFERS
        part.conclusion = Conclusion.DIFFERS
        part.sentence = (
            f"{part.sentence} {said}" if differs else f"Differs: {said[0].lower()}{said[1:]} {part.sentence}"
        )
    if refused:
        part.findings.append(
            Finding(
                title="speculation refuses what plain decoding takes",
                where=", ".join(dict.fromkeys(_name(r) for r in refused)),
                evidence="\n".join(dict.fromkeys(f"{_name(r)}: {r['refused']}" for r in refused)),
                error=False,
            )
        )


def _name(record: Record) -> str:
    return str(record.get("set") or record["key"])
