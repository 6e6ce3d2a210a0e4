"""Runs the kinds of a certificate within a budget, keeps what is done, and goes on where an earlier run stopped.

A kind makes trials. A trial is a name and a function that gives a JSON record. Each record is written to a journal as soon as
it is there. The same command reads the journal and runs only the trials that it lacks. A kind judges records only, so a judgement
can be made again from the journal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.subject import GeneratedText, Subject, TextRequest, Unsupported

Record = dict[str, Any]
_SHOWN = 3
ENDED = "then the server was gone"  # in the message of a server that a request ended


# One piece of work: its name, unique in its kind and the same in every run, and the function that gives its record. A record may
# have `broke`, lines of an engine that failed, and `refused`, why it refuses under speculation.
CertifyTrial = tuple[str, Callable[[], Record]]


class CertificateKind:
    """Base of the kinds of test."""

    name: str  # as in `--kind`
    share: float = 1.0  # its part of the time, as a weight

    def trials(self) -> Iterator[CertifyTrial]:
        """The trials, in order; may be endless."""
        raise NotImplementedError

    def checks_by_name(self) -> Sequence[str]:
        """The checks that are judged each on its own, by the `set` or the `key` of their records; empty if there are none."""
        return ()

    def done(self, records: Sequence[Record]) -> bool:
        """Whether more trials would change nothing. Asked after each."""
        return False

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        """The part of the certificate, from the records of the trials so far."""
        raise NotImplementedError


@runtime_checkable
class OwnKinds(Protocol):
    """A subject that is no engine: it brings the kinds of test that suit it, by name, in the order in which they run."""

    def kinds(self) -> dict[str, CertificateKind]: ...


class TrialJournal:
    """The records of a certificate that is being made, a line of JSON each.

    A line is in the file before the next trial begins. Half of a line, which a kill leaves, is cut off.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        """Read the records so far.

        Args:
            path: None keeps the records in memory only.
            identity: What the records depend on. A journal of another identity is started anew.
        """
        mark = {"certificate": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]}
        self.path, self._file = path, None if path is None else path.open("a+b")
        self.records: dict[tuple[str, str], Record] = {}
        if self._file is not None:
            self._file.seek(0)
            end, marked = 0, False  # marked: the line with the identity was read
            for line in self._file:
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    break
                marked = marked or record == mark
                if not isinstance(record, dict) or not marked:
                    break
                if record != mark:
                    self.records[record["kind"], record["key"]] = record
                end += len(line)
            self._file.truncate(end)
            if not marked:
                self._append(mark)
        self.resumed = len(self.records)

    def _append(self, record: Record) -> Record:
        """Write a line. The record comes back as it would be read again."""
        line = json.dumps(record)
        if self._file is not None:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        return json.loads(line)

    def add(self, kind: str, key: str, record: Record, seconds: float) -> Record:
        """Keep a record. It comes back as it would be read again."""
        self.records[kind, key] = self._append({**record, "kind": kind, "key": key, "seconds": seconds})
        return self.records[kind, key]

    def of(self, kind: str) -> list[Record]:
        return [record for (name, _), record in self.records.items() if name == kind]

    def remove(self) -> None:
        """Delete the file: the certificate is complete."""
        if self.path is not None and self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


def run_kinds(
    kinds: Sequence[CertificateKind],
    journal: TrialJournal,
    seconds: float,
    *,
    most: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    ready: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = perf_counter,
) -> Iterator[CertificatePart]:
    """Run the kinds one after the other and yield the part of each.

    What a kind leaves of the time goes to the later ones. A kind has at least one trial.

    Args:
        seconds: For all kinds, work of earlier runs included.
        most: Trials of a kind, at most. None for as many as the time allows.
        ready: Why the subject can be asked nothing more, "" if it can. Then a kind is judged by what it has.
    """
    spent = 0.0
    for number, kind in enumerate(kinds):
        left = max(seconds - spent, 0.0)
        allowed = left * kind.share / sum(k.share for k in kinds[number:])
        used, records, why = 0.0, list[Record](), ""
        for key, trial in kind.trials():
            if records and (used >= allowed or (most is not None and len(records) >= most)):
                break
            record = journal.records.get((kind.name, key))
            if record is None and (why := ready()):
                break
            if record is None:
                start = clock()
                result = trial()
                record = journal.add(kind.name, key, result, clock() - start)
            used += record["seconds"]
            records.append(record)
            progress(f"{kind.name}: {key} ({used:.0f} of {allowed:.0f} s)")
            if kind.done(records):
                break
        spent += used
        part = judged(kind, records)
        if why:
            part.skipped.append(f"what was left: {why}")
        part.seconds = round(used, 1)
        yield part


def judged(kind: CertificateKind, records: Sequence[Record]) -> CertificatePart:
    """The part of a kind, with what its records say of an engine that fails, and of one that refuses under speculation.

    A failure makes the conclusion `differs`, because plain decoding answers. A refusal is shown, and is no error.
    """
    part = kind.judge(records)
    failures = [r for r in records if r.get("broke")]
    refused = [r for r in records if r.get("refused")]
    if failures:
        names = list(dict.fromkeys(map(_name, failures)))
        part.findings.insert(
            0,
            Finding(
                title="the engine fails under speculation",
                cause=f"it fails where it is asked for {', '.join(names[:_SHOWN])}",
                where=f"{len(failures)} trials",
                evidence="\n".join(f"{r['key']}: {line}" for r in failures[:_SHOWN] for line in r["broke"]),
            ),
        )
        said = f"he engine fails under speculation: {', '.join(names)}."
        differs = part.conclusion is Conclusion.DIFFERS
        part.sentence = f"{part.sentence} T{said}" if differs else f"Differs: t{said} {part.sentence}"
        part.conclusion = Conclusion.DIFFERS
    if refused:
        part.findings.append(
            Finding(
                title="speculation refuses what plain decoding takes",
                where=", ".join(dict.fromkeys(map(_name, refused))),
                evidence="\n".join(dict.fromkeys(f"{_name(r)}: {r['refused']}" for r in refused)),
                error=False,
            )
        )
    return part


def broken(texts: Sequence[GeneratedText]) -> list[str]:
    """What the engine said where it failed, each message once."""
    return list(dict.fromkeys(t.error or "" for t in texts if t.broke))[:_SHOWN]


def confirmed(subject: Subject, requests: Sequence[TextRequest], lines: list[str]) -> list[str]:
    """The failures of `broken`, but none if plain decoding fails at such a request too. A server that ended is not asked."""
    if not lines or any(ENDED in line for line in lines):
        return lines
    try:
        return [] if any(text.error for text in subject.plain(requests[:1])) else lines
    except Unsupported:
        return lines


def _name(record: Record) -> str:
    return str(record.get("set") or record["key"])


def counted(n: int, noun: str) -> str:
    """A number and its noun: 1 check, 2 checks."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
