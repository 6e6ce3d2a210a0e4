"""The texts that a server keeps to learn from: a file of JSON lines, bounded in bytes and in age."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from outrider.core.files import written_whole
from outrider.core.jsonl import JsonLines

LIMIT = 64 << 20  # bytes of all texts
DAYS = 30  # a text is kept
HELD_OUT = 8  # one prompt of so many measures and is never learnt
DAY = 86400.0


@dataclass(frozen=True)
class ServedText:
    """One text. prompt, answer: token ids. temperature: at which it was drawn. workload: texts of one kind share it. owner: whose
    it is. when: seconds since 1970. held_out: it measures the drafter and does not train it."""

    prompt: list[int]
    answer: list[int]
    temperature: float
    workload: str
    owner: str
    when: float

    @property
    def held_out(self) -> bool:
        """By the prompt alone, so that other answers to it are held out, too."""
        return int(sha256(json.dumps(self.prompt).encode()).hexdigest()[:8], 16) % HELD_OUT == 0


def kept_texts(path: Path) -> Iterator[ServedText]:
    """The texts of a file, in order of time. A line that a kill cut is left out.

    Raises FileNotFoundError, and ValueError for other lines.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield ServedText(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is no text that a server kept ({error}); give texts.jsonl of a --learn folder"
                ) from None


class Reservoir:
    """Keeps texts. Where it is full, the oldest of the workload with the most texts go first.

    Any thread may call it. count, held: texts, and those of them that are held out. new: texts since `taken` was called.
    """

    def __init__(
        self, path: Path, limit: int = LIMIT, days: float = DAYS, now: Callable[[], float] = time.time
    ) -> None:
        """limit: bytes. Raises ValueError while another server uses the file."""
        self.path, self._limit, self._days, self._now = path, limit, days, now
        self._lock, self.count, self.held, self.new = Lock(), 0, 0, 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is kept reveals what was asked
        self._open()
        self._keep(lambda text: True)

    def add(self, text: ServedText) -> None:
        """Keep a text."""
        line = _line(text)
        with self._lock:
            self._bytes = self._file.add(line) + len(line) + 1
            self.count, self.held, self.new = self.count + 1, self.held + text.held_out, self.new + 1
        if self._bytes > self._limit:
            self._keep(lambda text: True)

    def forget(self, owner: str) -> int:
        """Remove the texts of one owner. Returns how many there were."""
        before = self.count
        self._keep(lambda text: text.owner != owner)
        return before - self.count

    def texts(self) -> list[ServedText]:
        """All of them, in order of time."""
        with self._lock:
            return list(kept_texts(self.path))

    def taken(self) -> None:
        """The texts so far are learnt from now."""
        self._keep(lambda text: True)
        self.new = 0

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        try:
            self._file = JsonLines(self.path, alone=True)
        except BlockingIOError:
            raise ValueError(
                f"another server learns in {self.path.parent} now; stop it, or give another folder: --learn {self.path.parent}-2"
            ) from None
        self.path.chmod(0o600)
        self._bytes = max((line.end for line in self._file.whole()), default=0)

    def _keep(self, wanted: Callable[[ServedText], bool]) -> None:
        """Write the file again with the texts that are wanted, young enough, and fit."""
        with self._lock:
            oldest = self._now() - DAY * self._days
            texts = list(kept_texts(self.path))
            kept = _fitting([t for t in texts if wanted(t) and t.when >= oldest], self._limit)
            if len(kept) < len(texts):
                self._file.close()
                with written_whole(self.path) as partial, partial.open("wb") as opened:
                    opened.writelines(_line(text) + b"\n" for text in kept)
                self._open()
            self.count, self.held = len(kept), sum(text.held_out for text in kept)
            self.new = min(self.new, self.count)


def _fitting(texts: Sequence[ServedText], limit: int) -> list[ServedText]:
    """All texts if they fit; else three quarters of `limit`: the newest of each workload, workloads in turn."""
    sizes = [len(_line(text)) + 1 for text in texts]
    if sum(sizes) <= limit:
        return list(texts)
    groups, kept, room = defaultdict[str, list[int]](list), set[int](), limit * 3 // 4
    for at, text in enumerate(texts):
        groups[text.workload].append(at)
    while groups:
        for name in list(groups):
            at = groups[name].pop()
            if sizes[at] > room:
                return [text for at, text in enumerate(texts) if at in kept]
            room -= sizes[at]
            kept.add(at)
            if not groups[name]:
                del groups[name]
    return [text for at, text in enumerate(texts) if at in kept]


def _line(text: ServedText) -> bytes:
    return json.dumps(asdict(text), separators=(",", ":")).encode()
