"""One side of a comparison: a process that holds its models and answers one question at a time, as lines of JSON.

Every side answers the same three questions, so that one ruler measures all: `facts`, `forward` (times of a forward over M
tokens) and `generate` (one text). A side that cannot be had raises `Missing` with what would bring it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import ROOT, WORK


class Missing(RuntimeError):
    """This peer is not here; the message says how to get it."""


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass(frozen=True)
class Run:
    """One text. Time runs from the end of the first step to the end of the last, so prompts are not in it.

    tokens: the text. timed: how many of its tokens came after the first step, in `seconds`.
    drafted, accepted: guesses and accepted guesses of each timed step; one sum where the peer tells no more.
    parts: seconds of the timed steps by name (draft, target, verify, commit), where they are known.
    """

    tokens: list[int]
    timed: int
    seconds: float
    steps: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


class Worker(Protocol):
    """What runs inside the process of a side."""

    def facts(self) -> dict[str, Any]: ...

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]: ...

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float, seed: int) -> Run: ...


def pinned(threads: int) -> dict[str, str]:
    """The environment of every side: this many threads. They are not bound to cores: a bound OpenMP leaves the thread that
    loads it, and every process it starts, on one core (docs/log.md)."""
    n = str(threads)
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def serve(worker: Worker) -> None:
    """Answer questions until there are no more. Whatever a library prints goes to stderr, not between the answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: Any) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        say({"ready": worker.facts()})
        for line in sys.stdin:
            question = json.loads(line)
            what = question.pop("do")
            try:
                answer = getattr(worker, what)(**question)
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
                continue
            say({"answer": asdict(answer) if isinstance(answer, Run) else answer})


class Side:
    """The asking end. Use as a context manager; `facts` is what the side says of itself."""

    def __init__(self, name: str, module: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        logs = WORK / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{name.replace(' ', '-').replace('/', '-')}.log"
        with self._log.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
            )
        self.facts: dict[str, Any] = self._read()["ready"]

    def ask(self, do: str, **question: Any) -> Any:
        """Raises RuntimeError with what the side said when it cannot answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **question}) + "\n")
        self._process.stdin.flush()
        return self._read()["answer"]

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]:
        settle()
        return self.ask("forward", rows=rows, context=context, repeats=repeats, which=which)

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run:
        settle()
        return Run(
            **self.ask("generate", method=method, prompt=prompt, tokens=tokens, temperature=temperature, seed=seed)
        )

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-12:]
            raise RuntimeError(f"{self.name} ended (status {self._process.wait()}):\n" + "\n".join(tail))
        answer = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def settle() -> None:
    """Let the threads of the side that answered last fall asleep."""
    time.sleep(0.03)


def refuse(reason: str) -> None:
    """Said by a worker that cannot start: the asking end raises Missing."""
    print(json.dumps({"missing": reason}), flush=True)


def vocabulary(folder: Path) -> int:
    """The number of token ids that a model folder's config names."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])
