"""The fastest setting of another engine: its server is started for each candidate, measured, and stopped.

Two servers would share the machine, so candidates cannot take turns. Plain decoding is measured first and last: the difference
of the two is the drift that a gain must exceed. A server is a process: started on a port, waited for, and stopped with all its
children.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import IO, Any

import httpx
import psutil

from outrider.drafters.config import SpeculativeConfig
from outrider.integrations.engines import exports
from outrider.lab.bench import stats
from outrider.lab.bench.prompts import Prompt
from outrider.lab.bench.remote import Remote
from outrider.lab.bench.run import Setting
from outrider.lab.bench.schedule import groups
from outrider.lab.tune.race import Candidate

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
            raise ServerFailed(f"there is no program {self.words[0]}; give its path in --command")
        if taken(self.port):
            raise ServerFailed(
                f"port {self.port} is taken by another process; stop it, or leave --port out of --command"
            )
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
        raise ServerFailed(self.failure(f"the server did not answer in {self.ready:g} s; --ready-timeout allows more"))


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


PLAIN, AGAIN = "plain", "plain again"
LONGEST = 32
"""Draft tokens, at most."""
_WARM = "A short text before the measurement:"
_COUNTERS = re.compile(
    r"^\S*spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(eq=False)
class EngineTrial(Candidate):
    """A setting of a server, and what the server gave. options: words of the engine's command line. dropped: why there is no
    measurement.

    drafted, accepted: draft tokens by the engine's own counters; None if it tells none. by_position: the share of drafts whose
    first 1, 2, ... tokens were accepted; empty if it tells none. start: seconds until the server answered.
    """

    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    drafted: int | None = None
    accepted: int | None = None
    by_position: list[float] = field(default_factory=list)
    start: float = 0.0

    @property
    def depth(self) -> int:
        return SpeculativeConfig.of(self.config).budget.depth

    @property
    def told(self) -> dict[str, Any]:
        if not self.by_position:
            return {}
        return {
            "spec_decode_draft_tokens": self.drafted,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": self.by_position,
        }


@dataclass(eq=False)
class EngineSearch:
    """Finds the fastest setting of an engine for some prompts. `run` yields a line of progress now and then.

    engine: a name of `ENGINES`. command: its server's command line; the port and the options of a setting are added, or put
    where it says {port} and {options}. configs: names and configurations of the methods. sampling: fields of each request.
    logs: the folder for the servers' logs. seconds: to measure for at most, without the starts. ready: seconds for a start.

    A method is measured with its own length. The best method is then measured with half and with twice its length, as long as
    that is faster. Raises ValueError for a command without words, or with a port that is no number.
    """

    engine: str
    command: str
    prompts: Sequence[Prompt]
    configs: Sequence[tuple[str, dict[str, Any]]]
    sampling: dict[str, Any]
    logs: Path
    model: str | None = None
    concurrency: int = 1
    seconds: float = 120.0
    ready: float = 600.0
    timeout: float = 600.0
    api_key: str | None = None
    notes: dict[str, None] = field(default_factory=dict)
    measured: float = 0.0

    def __post_init__(self) -> None:
        try:
            self.words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"--command {self.command!r} cannot be split into words: {error}") from None
        if not self.words:
            raise ValueError("--command is empty; give the command that starts the server, such as 'vllm serve MODEL'")
        self.port = _given_port(self.words)
        self.trials = [self._trial(PLAIN, {"method": "none"})]
        self.methods = [self._trial(name, config) for name, config in self.configs]

    @property
    def plain(self) -> EngineTrial:
        return self.trials[0]

    @property
    def again(self) -> EngineTrial | None:
        return next((t for t in self.trials if t.name == AGAIN), None)

    @property
    def candidates(self) -> list[EngineTrial]:
        """The settings that speculate."""
        return [t for t in self.trials if t.name not in (PLAIN, AGAIN)]

    @property
    def best(self) -> EngineTrial | None:
        """The fastest setting that speculates; None if none was measured."""
        return max((t for t in self.candidates if t.answered), key=lambda t: t.speed, default=None)

    @property
    def drift(self) -> float:
        """Speed of plain decoding at the end over that at the beginning; 1 if it was not measured again."""
        again = self.again
        return again.speed / self.plain.speed if again is not None and again.answered and self.plain.speed else 1.0

    @property
    def answer(self) -> EngineTrial:
        """The best setting, if it is clearly faster than plain decoding, at both its measurements. Otherwise plain decoding."""
        best, again = self.best, self.again
        if best is None:
            return self.plain
        gains = [best.gain(self.plain), best.gain(again) if again is not None and again.answered else None]
        return best if all(gain is None or gain.low > 1 for gain in gains) and gains[0] is not None else self.plain

    def same_texts(self, trial: EngineTrial) -> tuple[int, int]:
        """Texts that equal those of plain decoding, and texts that were compared."""
        different, compared = stats.differing(trial.answered, self.plain.answered)
        return compared - len(different), compared

    def run(self) -> Iterator[str]:
        yield from self._measured(self.plain)
        if not self.plain.answered:
            return
        for trial in self.methods:
            self.trials.append(trial)
            yield from self._measured(trial)
        yield from self._lengths()
        self.trials.append(self._trial(AGAIN, {"method": "none"}))
        yield from self._measured(self.trials[-1], always=True)

    def _lengths(self) -> Iterator[str]:
        """Half and twice the length of the best method, and on in a direction that is faster."""
        best = self.best
        if best is None:
            return
        for longer in (False, True):
            last = best
            while True:
                depth = last.depth * 2 if longer else last.depth // 2
                if not 1 <= depth <= LONGEST or depth == last.depth:
                    break
                config = {**best.config, "num_speculative_tokens": depth}
                trial = self._trial(f"{best.name.partition(' k=')[0]} k={depth}", config)
                self.trials.append(trial)
                yield from self._measured(trial)
                if trial.speed <= last.speed:
                    break
                last = trial

    def _trial(self, name: str, config: dict[str, Any]) -> EngineTrial:
        [command] = exports(config, engines=[self.engine], folder=str(self.logs / re.sub(r"\W+", "-", name)))
        words, environment = shlex.split(command.command), dict(command.environment)
        trial = EngineTrial(name, config, options=words, environment=environment)
        if not command.supported:
            trial.drop(command.notes[0])
        for file, text in command.files.items():
            if any(file in word for word in trial.options):
                path = self.logs / re.sub(r"\W+", "-", name) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        return trial

    def _measured(self, trial: EngineTrial, *, always: bool = False) -> Iterator[str]:
        """Start the server, measure, and stop it. always: whatever the time."""
        try:
            if not trial.dropped:
                yield from self._served(trial, always)
        except ServerFailed as error:
            trial.drop(str(error))
        if trial.dropped:
            yield f"{trial.name}: {trial.dropped}"

    def _served(self, trial: EngineTrial, always: bool) -> Iterator[str]:
        if self.measured > self.seconds and not always:
            raise ServerFailed("not measured: the time was over, --seconds allows more")
        port = self.port or free_port()
        log = self.logs / f"{len(self.trials) - 1}-{re.sub(r'[^0-9A-Za-z]+', '-', trial.name)}.log"
        words = command_words(self.words, port, trial.options)
        yield f"{trial.name}: starting {shlex.join(words)}"
        with EngineServer(words, port, log, ready=self.ready, environment=trial.environment) as server:
            trial.start = server.start_seconds
            yield f"{trial.name}: ready after {trial.start:.0f} s"
            yield from self._answers(trial, server)

    def _answers(self, trial: EngineTrial, server: EngineServer) -> Iterator[str]:
        setting = Setting(name=trial.name, base_url=server.url, speculative_config={})
        try:
            remote = Remote([setting], self.model, self.sampling, api_key=self.api_key, timeout=self.timeout)
        except (ConnectionError, httpx.HTTPError) as error:
            raise ServerFailed(server.failure(f"the server cannot be measured: {error}")) from error
        try:
            chat = not isinstance(self.prompts[0].content, str)
            warm = Prompt("warm-up", "", [{"role": "user", "content": _WARM}] if chat else _WARM)
            remote.warm(setting, [warm])
            before, start = engine_counters(server.url), perf_counter()
            for turn, together in enumerate(groups(self.prompts, self.concurrency)):
                trial.samples.extend(remote.answer(setting, together, 0, turn))
                yield f"{trial.name}: {trial.speed:.0f} tokens/s, {len(trial.samples)} of {len(self.prompts)} texts"
                if server.ended:
                    break
            self.measured += perf_counter() - start
            self._count(trial, before, engine_counters(server.url), remote)
            if trial.drafted and trial.name in (PLAIN, AGAIN):
                self.notes[
                    f"{self.engine} drafts tokens in plain decoding too, so the gains are not those of speculation; "
                    "leave its speculative options out of --command"
                ] = None
            self.notes |= {note.replace(server.url, trial.name): None for note in remote.notes}
        finally:
            remote.close()
        failed = [s.error for s in trial.samples if s.error is not None]
        if failed:
            raise ServerFailed(server.failure(f"{len(failed)} of {len(self.prompts)} requests failed: {failed[0]}"))

    def _count(self, trial: EngineTrial, before: dict[str, float], after: dict[str, float], remote: Remote) -> None:
        """Draft tokens by the engine's metrics, or by the requests' own numbers."""
        new = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if "draft_tokens" in new:
            trial.drafted, trial.accepted = int(new["draft_tokens"]), int(new["accepted_tokens"])
            if drafts := new.get("drafts"):
                places = itertools.takewhile(new.__contains__, (f"accepted_tokens.{j}" for j in itertools.count()))
                trial.by_position = [new[place] / drafts for place in places]
        elif (found := stats.acceptance(trial.answered)) is not None:
            trial.drafted, trial.accepted = found.drafted, found.accepted
        elif remote.draft_totals:
            trial.drafted, trial.accepted = (sum(column) for column in zip(*remote.draft_totals, strict=True))


def command_words(words: Sequence[str], port: int, options: Sequence[str]) -> list[str]:
    """The command line of a server. The port and the options stand where {port} and {options} are, or at the end."""
    out = list[str]()
    for word in words:
        if word == "{options}":
            out += options
        else:
            out.append(word.replace("{port}", str(port)))
    if "{options}" not in words:
        out += options
    if _given_port(out) is None and not any("{port}" in word for word in words):
        out += ["--port", str(port)]
    if not any(word == "--host" or word.startswith("--host=") for word in out):
        out += ["--host", "127.0.0.1"]  # vLLM listens on every address otherwise
    return out


def _given_port(words: Sequence[str]) -> int | None:
    """The port that a command line names. Raises ValueError if it is no number."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", nargs="?")
    given = parser.parse_known_args(words)[0].port
    if given in (None, "{port}"):
        return None
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise ValueError(f"--command says --port {given}, which is no port; leave it out, and a free one is taken")
    return int(given)


def engine_counters(url: str) -> dict[str, float]:
    """Sums of an engine's counters on `/metrics`: drafts, draft_tokens, accepted_tokens, and the last one also by position, as
    accepted_tokens.0 and so on; empty if it tells none."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False).text
    except httpx.HTTPError:
        return {}
    out: dict[str, float] = {}
    for name, labels, value in _COUNTERS.findall(text):
        if name.endswith("_per_pos"):
            position = _POSITION.search(labels)
            name = f"accepted_tokens.{position[1] if position else 0}"
        out[name] = out.get(name, 0.0) + float(value)
    return out
