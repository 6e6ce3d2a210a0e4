"""Quality: the share of HumanEval's problems that greedy texts solve, with speculation and without.

A problem's program runs in a process of its own, without network where the system allows that, with little memory and time, in an
empty folder. That protects against mistakes of a model. It is no protection against an attacker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outrider_certify import bounds
from outrider_certify.certificate import CertificatePart, Conclusion, Finding
from outrider_certify.lines import read_lines
from outrider_certify.subject import SamplingParams, Subject, TextRequest, Unsupported
from outrider_certify.trials import CertificateKind, CertifyTrial, Record

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(")
_SECONDS, _BYTES, _FILE = 8, 2**30, 2**20
_LIMITED = sys.platform == "linux"  # macOS does not obey a limit of memory, and Windows has none
_STEP = 0.02  # seconds between two looks at the memory of a program without a limit
# Runs before the program: limits of this process and, on Linux, a network of its own, which leads nowhere.
_GUARD = """
import builtins, ctypes, os, sys
limits = {limits!r}
def _limit(*names):
    if os.name == "posix":
        import resource
        for name in names:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limits[name], limits[name]))
_limit("CPU", "FSIZE", "CORE", *(["AS"] if {limited} else []))
try:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER, CLONE_NEWNET
except Exception:
    pass
_limit("NPROC")
def _refused(*given, **more):
    raise PermissionError("not in the sandbox")
for name in ("system", "fork", "forkpty", "kill", "killpg", "popen", "execv", "execve", "posix_spawn", "chmod", "chown"):
    if hasattr(os, name):
        setattr(os, name, _refused)
import socket, subprocess
socket.socket = subprocess.Popen = _refused
builtins.input = _refused
"""


def solves(problem: dict[str, Any], text: str, *, seconds: float = _SECONDS) -> bool:
    """Whether a continuation of the problem's prompt passes its tests. problem: a line of HumanEval."""
    limits = {"CPU": int(seconds) + 1, "AS": _BYTES, "FSIZE": _FILE, "CORE": 0, "NPROC": 1}
    guard = _GUARD.format(limits=limits, limited=_LIMITED)
    ending = f"\nprint('solved', {problem['task_id']!r})\n"
    program = "\n".join([problem["prompt"] + text, problem["test"], f"check({problem['entry_point']})", ending])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(guard + "exec(compile(" + repr(program) + ", 'program', 'exec'), {'__name__': 'program'})\n")
        environment = {"PATH": os.defpath} | {k: os.environ[k] for k in ("SYSTEMROOT",) if k in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-I", str(path)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        printed = _printed(process, seconds)
    return process.returncode == 0 and printed.decode(errors="replace").endswith(
        ending.split("'")[1] + f" {problem['task_id']}\n"
    )


def _printed(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """What a program prints. It is ended after so many seconds, and if it takes too much memory that no system limits."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and (_LIMITED or _resident(process.pid) < _BYTES):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=left if _LIMITED else min(left, _STEP))[0]
    process.kill()
    return process.communicate()[0]


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory. 0 if it has ended."""
    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


def read_problems(path: Path) -> list[dict[str, Any]]:
    """The problems of a file in HumanEval's format, compressed by gzip or not. Raises ValueError for another file."""

    def parse(line: str) -> dict[str, Any]:
        problem = json.loads(line)
        if missing := sorted({"task_id", "prompt", "test", "entry_point"} - set(problem)):
            raise ValueError(f"{', '.join(missing)} is missing; problems are in HumanEval's format")
        return problem

    return read_lines(
        path, parse, '{"task_id": "A/1", "prompt": "...", "test": "def check(f): ...", "entry_point": "f"}'
    )


class Quality(CertificateKind):
    """The kind `quality`. problems: of HumanEval. length: tokens of a solution, at most."""

    name, share = "quality", 3.0

    def __init__(self, subject: Subject, problems: Sequence[dict[str, Any]], *, length: int = 200) -> None:
        self.subject, self.problems, self.length = subject, problems, length

    def trials(self) -> Iterator[CertifyTrial]:
        for problem in self.problems:
            yield (str(problem["task_id"]), lambda p=problem: self._trial(p))

    def _trial(self, problem: dict[str, Any]) -> Record:
        params = SamplingParams(temperature=0, max_tokens=self.length, stop=STOPS)
        request = TextRequest(problem["prompt"], params)
        record: Record = {"with": None, "without": None, "same": None, "error": ""}
        try:
            [text] = self.subject.generate([request], self.subject.variants()[0])
            record["error"] = text.error or ""
            record["with"] = None if text.error else solves(problem, cut(text.text))
            [plain] = self.subject.plain([request])
            record["without"] = None if plain.error else solves(problem, cut(plain.text))
            record["same"] = text.text == plain.text
        except Unsupported as why:
            record["error"] = str(why)
        return record

    def judge(self, records: Sequence[Record]) -> CertificatePart:
        ours = [r["with"] for r in records if r["with"] is not None]
        plain = [r["without"] for r in records if r["without"] is not None]
        both = [(r["with"], r["without"]) for r in records if r["with"] is not None and r["without"] is not None]
        lost, won = sum(b and not a for a, b in both), sum(a and not b for a, b in both)
        p = bounds.sign_p_value(lost, won)
        part = CertificatePart(
            kind=self.name,
            conclusion=Conclusion.HOLDS if ours else Conclusion.CANNOT_TELL,
            sentence=f"Solved with speculation: {_share(ours)}." if ours else "Cannot tell: no problem was tried.",
            tested={"problems": str(len(ours))},
            figures={"problems": len(ours), "with": sum(ours), "without": sum(plain)},
        )
        if errors := [r["error"] for r in records if r["error"]]:
            part.skipped = [f"{len(errors)} problems: {errors[0]}"]
        if both:
            part.sentence = f"Solved with speculation: {_share(ours)}; without: {_share(plain)}."
            part.power = (
                f"{lost} problems were solved only without, {won} only with (McNemar's exact test: p = {p:.2g})."
            )
            part.tested["texts that are the same"] = f"{sum(bool(r['same']) for r in records)} of {len(both)}"
            part.figures |= {"lost": lost, "won": won, "p_value": p}
        if p < 0.01 and lost > won:
            part.conclusion = Conclusion.DIFFERS
            part.findings.append(Finding(title="speculation loses quality", evidence=part.power))
            part.sentence += " Differs: fewer problems are solved with speculation."
        return part


def cut(text: str) -> str:
    """A solution up to the first line after its function, for subjects that do not stop there."""
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def _share(solved: Sequence[bool]) -> str:
    low, high = bounds.share_interval(sum(solved), len(solved))
    return f"{sum(solved)} of {len(solved)} problems ({100 * low:.0f} to {100 * high:.0f} % with 95 % confidence)"
