"""What was measured so far: a file of JSON lines. Each finished measurement is a line, so a run may end at any time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from outrider.core.files import public_name, sha256, written_whole
from outrider.models.files import weight_files

# Measurements with another of these cannot be compared with those of the file.
SAME = ("cpu", "family", "cores", "isa", "torch", "transformers")


class Journal:
    """The lines of a file. The first one tells the machine. An incomplete last line, of a run that was killed, is dropped.

    Raises ValueError for a file of another machine or other versions.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.machine = path, facts()
        lines = list(_read(path))
        if not lines:
            lines = [{"kind": "machine", **self.machine}]
        for name in SAME:
            if lines[0].get(name) != self.machine[name]:
                raise ValueError(
                    f"{path} was measured with {name} {lines[0].get(name)}, and here it is {self.machine[name]}; "
                    "give another file: --journal FILE"
                )
        self.lines = lines
        with written_whole(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All measurements of a kind: round, start or served."""
        return [line for line in self.lines if line["kind"] == kind]

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Whether there is a measurement with all these fields."""
        return any(all(line.get(k) == v for k, v in key.items()) for line in self.of(kind))

    def add(self, kind: str, key: dict[str, Any], figures: dict[str, Any]) -> None:
        """Append a measurement. The commit is recorded with it."""
        line = {"kind": kind, **key, **figures, "commit": self.machine["commit"]}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def identity(model: str) -> dict[str, Any]:
    """A model's name, bytes and sha256: of the contents of its files, one after the other."""
    files = weight_files(model)
    facts = {"bytes": sum(f.stat().st_size for f in files), "sha256": sha256(files)} if files else {}
    return {"name": public_name(model), **facts}
