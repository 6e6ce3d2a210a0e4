"""Trains the head of a server on what the server writes, in idle time.

A child process trains at the lowest priority and is stopped while requests run. A new head takes over only if it drafts longer on
held-out texts than the one before. Drafts change speed only, so a bad head costs time and never a word.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

import numpy as np
import psutil

from outrider.core.files import read_settings, write_whole
from outrider.core.intervals import interval
from outrider.core.types import Step
from outrider.drafters.heads.files import head_of, open_head
from outrider.drafters.method import TRAINED
from outrider.drafters.registry import method_of
from outrider.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.request import Sequence as EngineSequence
from outrider.serve.learn.reservoir import Reservoir, ServedText

log = logging.getLogger("outrider.serve")
REST = 1.0  # seconds without a request before training goes on
LOOK, SLOW_LOOK = 0.02, 0.1  # seconds between two looks at the engine: while the child runs, and while it is stopped
NEW, HELD, SHORTEST = 32, 8, 8  # texts since the last training; held-out ones; tokens of a text that is kept
PASSES, MOST_TOKENS = 4, 400_000  # of a training: how often it reads each text, and its tokens at most
LENGTH = 768  # tokens of a text that are learnt
COMMAND = [sys.executable, "-m", "outrider.train.child"]


class Learner:
    """An observer of the engine that keeps texts and trains on them. `start` begins; `close` ends it.

    folder/texts.jsonl: the texts. folder/heads/: the head in use and the one before it. folder/training/: a training that runs or
    was cut off. folder/state.json: which head is in use. Each file is replaced whole, so a kill leaves the head in use whole.
    """

    def __init__(self, folder: Path, llm: LLM, engine: Engine, load: Mapping[str, Any], share: float) -> None:
        """load: how the child loads the model; arguments of `LLM`, with the model. share: of the idle time in which it trains.

        Raises ValueError for a server without a head that can be trained, and while another server uses the folder.
        """
        self._engine, self._llm, self._load, self._share = engine, llm, dict(load), share
        self.drafter, self._base, self._kind = _head(llm)
        self.folder = folder.expanduser().absolute()
        self.reservoir = Reservoir(self.folder / "texts.jsonl")
        self._state_file = self.folder / "state.json"
        self._state = self._read_state()
        self._finished = SimpleQueue[EngineSequence | threading.Event | None]()  # an event is set when its turn comes
        self._closed, self._busy, self._lock = threading.Event(), monotonic(), threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self.running = False
        self._forgot = False
        self._threads = [
            threading.Thread(target=target, name=f"outrider-{name}", daemon=True)
            for name, target in (("learner", self._learn), ("reservoir", self._keep))
        ]

    def start(self) -> None:
        """Draft with the head that was learnt last, and go on."""
        if self._state["current"]:
            try:
                self._adopt(self._head_folder)
            except ValueError as error:
                log.warning("the learnt head cannot be used, so the server begins with its first one: %s", error)
                self._state["current"] = ""
        self._engine.scheduler.watch(self)
        for thread in self._threads:
            thread.start()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        self._busy = monotonic()

    def finished(self, sequence: EngineSequence) -> None:
        """See `Observer.finished`."""
        self._busy = monotonic()
        if (
            sequence.finish is not None
            and sequence.finish.finish in ("stop", "length")
            and len(sequence.written) >= SHORTEST
        ):
            self._finished.put(sequence)

    def forget(self, owner: str) -> int:
        """Remove the texts of an owner, and every head that was trained on one of them. Returns the number of texts."""
        written = threading.Event()
        self._finished.put(written)
        while not self._closed.is_set() and not written.wait(REST):  # what has ended is kept first
            pass
        name = _hidden(owner)
        removed = self.reservoir.forget(name)
        with self._lock:
            if name in self._state["owners"]:
                self._stop_child()
                self._forgot = True
                self._state = {**_NEW, "rounds": self._state["rounds"], "base": str(self._base)}
                self._write_state()
                self._adopt(self._base)
                for gone in ("heads", "training"):
                    shutil.rmtree(self.folder / gone, ignore_errors=True)
        return removed

    def status(self) -> dict[str, Any]:
        """For the metrics and the dashboard. last: what `compared` found when a training ended last."""
        keep, state = self.reservoir, self._state
        return {
            "texts": keep.count,
            "new": keep.new,
            "training": self._child is not None,
            "running": self.running,
            "rounds": state["rounds"],
            "taken": state["taken"],
            "head": state["current"] or "the first one",
            "last": state["last"],
        }

    def close(self) -> None:
        """End the child and the threads. A training goes on after the next start."""
        self._closed.set()
        self._finished.put(None)
        self._engine.scheduler.unwatch(self)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.reservoir.close()

    @property
    def _head_folder(self) -> Path:
        return self.folder / "heads" / self._state["current"] if self._state["current"] else self._base

    def _keep(self) -> None:
        """Write finished texts to the reservoir."""
        while (sequence := self._finished.get()) is not None:
            if isinstance(sequence, threading.Event):
                sequence.set()
                continue
            request = sequence.request
            text = ServedText(
                [*request.prompt],
                [*sequence.written],
                request.params.temperature,
                request.workload,
                _hidden(request.owner),
                time(),
            )
            try:
                self.reservoir.add(text)
            except OSError as error:
                log.warning("a text is not kept to learn from: %s", error)

    def _learn(self) -> None:
        while not self._closed.wait(REST):
            keep = self.reservoir
            if self._state["asked"] or (keep.new >= NEW and keep.held >= HELD and keep.count > keep.held):
                try:
                    self._train()
                except Exception:
                    log.exception("the training on served texts failed; the head stays")
                    self._drop()

    def _train(self) -> None:
        """One training: the child, then the comparison."""
        training = self.folder / "training"
        with self._lock:
            self._forgot = False
            if not self._state["asked"]:
                shutil.rmtree(training, ignore_errors=True)
                self._state["asked"] = self._asked()
                self._write_state()
        done = self._run(self._state["asked"])
        if self._closed.is_set():
            return
        with self._lock:
            if self._forgot:
                return
            if not done:
                log.warning("the training on served texts failed, see %s; the head stays", self.folder / "training.log")
                self._drop()
                return
            curve = read_settings(training / "training" / "run.json")["curve"]
            found = compared(curve[0]["texts"], curve[-1]["texts"])
            self._state["last"] = {**found, "when": time()}
            if found["takes_over"]:
                self._take_over(training)
            else:
                self._drop()
            log.info("learnt: %s", found["why"])

    def _asked(self) -> dict[str, Any]:
        """What the child is asked. From here on the texts count as learnt from."""
        self.reservoir.taken()
        texts = self.folder / "texts.jsonl"
        owners, tokens = set(self._state["owners"]), 0
        for text in self.reservoir.texts():
            owners.add(text.owner)
            tokens += min(len(text.prompt), LENGTH // 2) + len(text.answer)
        self._state["owners"] = sorted(owners)
        settings = {"method": self._kind, "model": self._load["model"], "texts": str(texts), "length": LENGTH}
        read = min(PASSES * tokens, MOST_TOKENS)
        settings |= {
            "start": str(self._head_folder),
            "seed": self._state["rounds"],
            "keep_features": read >= 2 * tokens,
        }
        return {"settings": settings, "tokens": read, "out": str(self.folder / "training")}

    def _run(self, asked: Mapping[str, Any]) -> bool:
        """Run the child to its end, in idle time. Returns whether it ended well."""
        load = {name: value for name, value in self._load.items() if name != "model"}
        with (self.folder / "training.log").open("w") as told:
            child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=told,
                stderr=told,
                text=True,
                # in a group of its own, so that macOS ends it, stopped or not, when this process is gone; Linux: `main` there
                process_group=None if sys.platform == "win32" else 0,
            )
        self._child, self.running = child, True
        process = psutil.Process(child.pid)
        try:
            process.nice(psutil.IDLE_PRIORITY_CLASS if sys.platform == "win32" else 19)
            assert child.stdin is not None
            child.stdin.write(json.dumps({**asked, "load": load}) + "\n")
            child.stdin.flush()
            credit, before = REST, monotonic()
            while child.poll() is None and not self._closed.wait(LOOK if self.running else SLOW_LOOK):
                now = monotonic()
                if not self._engine.scheduler.idle:
                    self._busy = now
                idle = now - self._busy >= REST
                credit += (self._share - self.running) * (now - before) * idle
                credit, before = min(credit, REST), now
                wanted = idle and credit > (0 if self.running else REST / 2)
                if wanted != self.running:
                    (process.resume if wanted else process.suspend)()
                    self.running = wanted
            return child.poll() == 0
        except (OSError, psutil.Error):  # it ended meanwhile
            return child.wait() == 0
        finally:
            self._stop_child()

    def _stop_child(self) -> None:
        child, self._child, self.running = self._child, None, False
        if child is not None:
            with suppress(OSError):
                child.kill()
            child.wait()

    def _take_over(self, training: Path) -> None:
        """The trained head becomes the one in use. The one before it is kept."""
        state, number = self._state, self._state["rounds"] + 1
        name, heads = f"{number:04}", self.folder / "heads"
        shutil.rmtree(training / "training")  # texts are kept in one place only
        heads.mkdir(exist_ok=True)
        shutil.rmtree(heads / name, ignore_errors=True)
        os.replace(training, heads / name)
        previous, state["current"] = state["current"], name
        state |= {"asked": None, "rounds": number, "taken": state["taken"] + 1, "previous": previous}
        self._write_state()
        self._adopt(heads / name)
        for old in heads.iterdir():
            if old.name not in (name, previous):
                shutil.rmtree(old, ignore_errors=True)

    def _drop(self) -> None:
        """The head in use stays."""
        self._state |= {"asked": None, "rounds": self._state["rounds"] + 1}
        self._write_state()
        shutil.rmtree(self.folder / "training", ignore_errors=True)

    def _adopt(self, head: Path) -> None:
        self._engine.adopt(self.drafter, self._llm.runtime.remade(self.drafter, str(head)))

    def _read_state(self) -> dict[str, Any]:
        """What was learnt from the same first head; else nothing."""
        state = {**_NEW, "base": str(self._base)}
        with suppress(OSError, ValueError):
            known = read_settings(self._state_file)
            if known.get("base") == state["base"] and known.keys() == state.keys():
                return known
        return state

    def _write_state(self) -> None:
        write_whole(self._state_file, json.dumps(self._state, indent=1) + "\n")


_NEW = {
    "base": "", "current": "", "previous": "", "rounds": 0, "taken": 0, "owners": [], "asked": None, "last": None,
}  # fmt: skip
"""base: the head that the server was started with. current, previous: learnt heads, by folder. owners: of the texts that these
learnt from. asked: what a child was asked that has not ended."""


def compared(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Whether a head takes over from another, by the same held-out texts.

    before, after: (workload, places, tokens of their steps) of each text. It takes over if it drafts longer on all texts together
    and shorter on no workload, each by more than chance (95 %, see `interval`).
    """
    groups = dict[str, list[tuple[int, int]]]()
    for (workload, _, one), (_, _, other) in zip(before, after, strict=True):
        groups.setdefault(workload, []).append((other, one))
    whole = interval(np.array([pair for group in groups.values() for pair in group], dtype=float))
    each = {name: interval(np.array(group, dtype=float)) for name, group in groups.items()}
    worse = [name for name, found in each.items() if found.high < 1]
    takes = whole.low > 1 and not worse
    said = f"{whole.value:.3f} times as many tokens a step on {whole.groups} held-out texts ({whole.low:.3f} to {whole.high:.3f})"
    why = f"{said}: the new head takes over" if takes else f"{said}: the head stays"
    if whole.low > 1 and worse:
        why = f"{said}, but fewer for {worse[0]}: the head stays"
    gain = {"value": whole.value, "low": whole.low, "high": whole.high, "texts": whole.groups}
    return {
        "takes_over": takes,
        "why": why,
        "gain": gain,
        "workloads": {name: found.value for name, found in each.items()},
    }


def _head(llm: LLM) -> tuple[str, Path, str]:
    """(drafter, folder, kind) of the head that a server drafts with. Raises ValueError without one that can be trained."""
    for name in llm.drafters:
        method = method_of(name)
        if method is None or not method.heads or (folder := head_of(llm.config.model, llm.loaded.name)) is None:
            continue
        opened = open_head(folder)
        if opened.kind in TRAINED:
            return name, Path(opened.path), opened.kind
        raise ValueError(
            f"--learn trains heads of the kinds {', '.join(TRAINED)}, and {opened.path} is of the kind {opened.kind!r}"
        )
    raise ValueError(
        f"--learn trains a head, and this server drafts with {llm.method}; make a head first: outrider train {TRAINED[0]} "
        "-m MODEL -o HEAD, then: outrider serve MODEL --draft-model HEAD --learn DIR"
    )


def _hidden(owner: str) -> str:
    """An owner's name without the key that may be in it."""
    return sha256(owner.encode()).hexdigest()[:16] if owner else ""
