"""Files of recorded texts: compressed JSON lines, one for each text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider_lab.tune.recorded import RecordedDraft, RecordedText


def save(texts: Sequence[RecordedText], path: Path) -> None:
    """Write texts as compressed JSON lines. Chances are kept to a thousandth."""
    lines = list[str]()
    for text in texts:
        drafts = {
            name: [[d.accepted, d.match, d.length, *(round(1000 * c) for c in d.chances)] for d in every]
            for name, every in text.drafts.items()
        }
        lines.append(json.dumps({**vars(text), "drafts": drafts}, separators=(",", ":")))
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def read(path: Path) -> list[RecordedText]:
    """Read what `save` wrote."""
    found = list[RecordedText]()
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        given: dict[str, Any] = json.loads(line)
        drafts = {
            name: [RecordedDraft(a, m, [min(c / 1000, 0.9999) for c in stated], n) for a, m, n, *stated in every]
            for name, every in given.pop("drafts").items()
        }
        found.append(RecordedText(**given, drafts=drafts))
    return found
