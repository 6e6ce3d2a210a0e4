"""A server of another engine for the time of a `with` block, and what its counters say."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import IO

import httpx
import psutil

_POLL = 0.2
_STOP = 20.0  # seconds that a server has to stop by itself
_LAST_LINES = 12


class ServerFailed(Exception):
    """The server of an engine did not start, or ended. The message says why, with the end of its log."""


class EngineServer:
    """A server for the time of a `with` block.

    words: the command line, without a shell. port: where it will listen. log: the file for its output. ready: seconds until
    it must answer. environment: variables to add.

    Entering raises ServerFailed if the program does not exist, ends before it answers, or takes longer than `ready`. Leaving
    stops the process and every process that it started in its session.
    """

    def __init__(
        self,
        words: Sequence[str],
        port: int,
        log: Path,
        *,
        ready: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.words, self.port, self.log, self.ready = list(words), port, log, ready
        self.environment = {**os.environ, **(environment or {})}
        self.url = f"http://127.0.0.1:{port}"
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> EngineServer:
        if shutil.which(self.words[0], path=self.environment.get("PATH")) is None:
            raise ServerFailed(f"there is no program {self.words[0]}; give its path")
        if taken(self.port):
            raise ServerFailed(f"port {self.port} is taken by another process")
        start = monotonic()
        self._output = self.log.open("wb")
        try:
            self._process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,  # so that Ctrl-C reaches this process alone, and all children can be found
            )
            self._wait(start + self.ready)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ServerFailed(f"{self.words[0]} cannot be started ({error.strerror})") from error
            raise
        self.start_seconds = monotonic() - start
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def failure(self, what: str) -> str:
        """A message with the end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        return f"{what}. The log is {self.log}" + "".join(f"\n    {line[:200]}" for line in lines)

    def stop(self) -> None:
        """Stop the process and its children: first politely, then by force. Does nothing if it does not run."""
        if self._process is not None:
            session = self._process.pid
            for act in (psutil.Process.terminate, psutil.Process.kill):
                for process in members(session):
                    with contextlib.suppress(psutil.Error):
                        act(process)
                deadline = monotonic() + _STOP
                while (self._process.poll() is None or members(session)) and monotonic() < deadline:
                    sleep(_POLL / 4)
                if self._process.poll() is not None and not members(session):
                    break
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _wait(self, deadline: float) -> None:
        """Wait until the server answers."""
        assert self._process is not None
        with httpx.Client(base_url=self.url, timeout=2.0, trust_env=False) as client:
            while monotonic() < deadline:
                if (status := self._process.poll()) is not None:
                    raise ServerFailed(self.failure(f"the server ended with status {status} before it answered"))
                try:
                    if client.get("/health").status_code == 200 and client.get("/v1/models").status_code in (200, 401):
                        return
                except httpx.HTTPError:
                    pass
                sleep(_POLL)
        raise ServerFailed(self.failure(f"the server did not answer in {self.ready:g} s"))


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def taken(port: int) -> bool:
    """Whether a process listens on a port of this machine."""
    with socket.socket() as one:
        one.settimeout(1.0)
        return one.connect_ex(("127.0.0.1", port)) == 0


def members(session: int) -> list[psutil.Process]:
    """The processes of a session that still run, without zombies. session: the process that leads it.

    Windows has no sessions. There it is this process and all below it.
    """
    out = list[psutil.Process]()
    if not hasattr(os, "getsid"):
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(session)
            out += [leader, *leader.children(recursive=True)]
        return out
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                out.append(process)
    return out


_COUNTERS = re.compile(
    r"^\S*spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\S+)$", re.MULTILINE
)


def engine_counters(url: str) -> dict[str, float]:
    """Sums of an engine's counters on `/metrics`: drafts, draft_tokens and accepted_tokens; empty if it tells none."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False).text
    except httpx.HTTPError:
        return {}
    out: dict[str, float] = {}
    for name, value in _COUNTERS.findall(text):
        out[name] = out.get(name, 0.0) + float(value)
    return out
