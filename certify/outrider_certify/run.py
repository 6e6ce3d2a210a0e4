"""Runs the kinds of a certificate within a budget, keeps what is done, and goes on where an earlier run stopped.

A kind makes trials. A trial is a name and a function that gives a JSON record. Each record is written to a journal as soon as
it is there. The same command reads the journal and runs only the trials that it lacks. A kind judges records only, so a judgement
can be made again from the journal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from outrider.core.jsonl import JsonLines
from outrider_certify.certificate import CertificatePart

Record = dict[str, Any]


@dataclass(frozen=True)
class CertifyTrial:
    """One piece of work. key: its name, unique in its kind and the same in every run. run: gives its record."""

    key: str
    run: Callable[[], Record]


class CertificateKind(Protocol):
    """One kind of test.

    name: as in `--kind`. share: its part of the time, as a weight.
    """

    name: str
    share: float

    def trials(self) -> Iterator[CertifyTrial]:
        """The trials, in order; may be endless. Raises `subjects.base.Unsupported` if the subject cannot be tested so."""
        ...

    def done(self, records: Sequence[Record]) -> bool:
        """Whether more trials would change nothing. Asked after each."""
        ...

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        """The part of the certificate, from the records of the trials so far."""
        ...


class TrialJournal:
    """The records of a certificate that is being made, a line each. path: None keeps them in memory only.

    identity: what the records depend on. A journal of another identity is started anew.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        mark = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path, self._file = path, None if path is None else JsonLines(path)
        self.records: dict[tuple[str, str], Record] = {}
        if self._file is not None:
            lines = [*takewhile(lambda line: isinstance(line.value, dict), self._file.lines())]
            if lines and lines[0].value == {"certificate": mark}:
                self.records = {(line.value["kind"], line.value["key"]): line.value for line in lines[1:]}
                self._file.cut(lines[-1].end)
            else:
                self._file.cut(0)
                self._file.add(json.dumps({"certificate": mark}).encode())
        self.resumed = len(self.records)

    def add(self, kind: str, key: str, record: Record, seconds: float) -> Record:
        """Keep a record. It comes back as it would be read again."""
        line = json.dumps({**record, "kind": kind, "key": key, "seconds": seconds})
        if self._file is not None:
            self._file.add(line.encode())
        self.records[kind, key] = json.loads(line)
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

    seconds: for all kinds, work of earlier runs included. What a kind leaves goes to the later ones. A kind has at least one
    trial. most: trials of a kind, at most; None for as many as the time allows. ready: why the subject can be asked nothing more,
    "" if it can. Then a kind is judged by what it has.
    """
    spent = 0.0
    for number, kind in enumerate(kinds):
        left = max(seconds - spent, 0.0)
        allowed = left * kind.share / sum(k.share for k in kinds[number:])
        used, count, records, why = 0.0, 0, list[Record](), ""
        for trial in kind.trials():
            if count and (used >= allowed or (most is not None and count >= most)):
                break
            record = journal.records.get((kind.name, trial.key))
            if record is None and (why := ready()):
                break
            if record is None:
                start = clock()
                found = trial.run()
                record = journal.add(kind.name, trial.key, found, clock() - start)
            used, count = used + record["seconds"], count + 1
            records.append(record)
            progress(f"{kind.name}: {trial.key} ({used:.0f} of {allowed:.0f} s)")
            if kind.done(records):
                break
        spent += used
        part = kind.judge(records)
        if why:
            part.skipped.append(f"what was left: {why}")
        part.seconds = round(used, 1)
        yield part
