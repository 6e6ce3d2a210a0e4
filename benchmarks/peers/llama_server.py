"""llama.cpp's server as a process: prompts as token ids in, token ids and the server's own clock out.

The program is a `llama-server` of any build, or a Python that has the prebuilt package `xllamacpp` (xllamacpp_server.py
beside this file). Both take the same options here: all threads for the target and the draft, and no reuse of prompts. The
rest is llama.cpp's default: flash attention where it helps, repacked weights, a memory-mapped file.

Two more peers are asked the same way. ik_llama.cpp is a fork with options of its own: flash attention and repacked weights are
asked for. OpenVINO GenAI is a Python with that package (openvino_server.py).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks import ROOT, WORK
from benchmarks.machine import cores

PATIENCE = 300.0  # seconds until a server must be up, and until it must have answered
LLAMA, IK, OPENVINO = "llama.cpp", "ik_llama.cpp", "openvino"
PEERS = (LLAMA, IK, OPENVINO)
# A peer's module, for a Python that has its package, and how to get that package.
_MODULES = {
    LLAMA: ("xllamacpp_server", "pip install --no-deps xllamacpp"),
    OPENVINO: ("openvino_server", "pip install openvino-genai"),
}
# A peer's own best settings, and its drafter without a model.
_BEST = {LLAMA: ("--cache-ram", "0"), IK: ("--cache-ram", "0", "--flash-attn", "on", "--run-time-repack"), OPENVINO: ()}
LOOKUP = {IK: ("--spec-type", "ngram-mod:n_max=16,n_min=2,ngram_size_n=8"), OPENVINO: ("--lookup", "5")}
NEUTRAL = {
    "samplers": ["temperature"],
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
}  # nothing else costs time or changes a text


class Missing(RuntimeError):
    """This peer is not here; the message says how to get it."""


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def pinned(threads: int) -> dict[str, str]:
    """The environment of every side: this many threads.

    They are not bound to cores: a bound OpenMP leaves the thread that loads it, and every process it starts, on one core.
    """
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return count | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Answer:
    """One text.

    Args:
        tokens: none where the server tells only text.
        written: how many tokens.
        prompt_seconds: for the prompt, by the server's clock.
        seconds: from the first token to the last, by the same.
        drafted: draft tokens of the whole text.
        accepted: those of them that are in it.
    """

    tokens: list[int]
    written: int
    prompt_seconds: float
    seconds: float
    drafted: int
    accepted: int


def command(program: Path, peer: str = LLAMA) -> list[str]:
    """What starts a server. Raises Missing for a program that is not there."""
    module, install = _MODULES.get(peer, ("", "benchmarks/peers/build_ik_llama_cpp.sh"))
    if not program.is_file():
        raise Missing(f"there is no {program}; give a llama-server, or a Python with the package: {install}")
    if module and program.name.startswith("python"):
        return [str(program), "-m", f"benchmarks.peers.{module}"]
    return [str(program)]


def about(program: Path, peer: str = LLAMA) -> str:
    """Version and instruction sets, as the program tells them. Raises Missing."""
    done = subprocess.run([*command(program, peer), "--version"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{program} does not run: {done.stderr.strip()[-300:]}")
    return " ".join((done.stdout or done.stderr).split())


class LlamaServer:
    """A server with one model and one way of decoding. Use as a context manager.

    Raises Missing, or RuntimeError if it does not start.

    Args:
        program: that starts it.
        model: a file.
        draft: a draft model.
        longest: draft tokens of a step, at most.
        slots: requests side by side.
        length: tokens of each.
        options: further ones of llama-server.
        peer: whose program it is, one of `PEERS`.
    """

    def __init__(
        self,
        program: Path,
        model: str,
        draft: str | None = None,
        *,
        longest: int = 16,
        slots: int = 1,
        length: int = 2048,
        options: tuple[str, ...] = (),
        peer: str = LLAMA,
    ) -> None:
        port = free_port()
        flags = ["--model", model, "--ctx-size", str(slots * length), "--parallel", str(slots), *options]
        flags += ["--threads", str(cores()), *_BEST[peer], "--host", "127.0.0.1", "--port", str(port)]
        if draft is not None and peer == IK:
            flags += ["--model-draft", draft, "--spec-type", f"draft:n_max={longest}"]
        elif draft is not None:
            flags += ["--spec-type", "draft-simple", "--spec-draft-model", draft, "--spec-draft-n-max", str(longest)]
        self.url = f"http://127.0.0.1:{port}"
        WORK.joinpath("logs").mkdir(parents=True, exist_ok=True)
        with WORK.joinpath("logs", f"llama-server-{port}.log").open("w+") as log:
            self.process = subprocess.Popen(
                [*command(program, peer), *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, **pinned(cores())},
            )  # fmt: skip
            deadline = time.monotonic() + PATIENCE
            while not self._healthy():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    log.seek(0)
                    raise RuntimeError(f"{peer}'s server did not start for {model}:\n{log.read()[-1500:]}")
                time.sleep(0.02)

    def complete(
        self,
        prompt: list[int],
        tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        ignore_eos: bool = False,
        reuse: bool = False,
    ) -> Answer:
        """Write a text of at most so many tokens. reuse: what the last prompt began with is not read again."""
        body: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "temperature": temperature, "seed": seed}
        body |= {"ignore_eos": ignore_eos, "cache_prompt": reuse, "return_tokens": True, **NEUTRAL}
        time.sleep(0.03)  # the threads of the side that answered last fall asleep
        out = self._post("/completion", body)
        clock = out["timings"]
        return Answer(
            tokens=out.get("tokens", []),
            written=clock.get("predicted_n") or len(out["tokens"]),
            prompt_seconds=clock["prompt_ms"] / 1e3,
            seconds=clock["predicted_ms"] / 1e3,
            drafted=clock.get("draft_n", 0),
            accepted=clock.get("draft_n_accepted", 0),
        )

    def slot(self, action: str, name: str) -> None:
        """Save what the slot holds to a file of --slot-save-path, or restore it."""
        self._post(f"/slots/0?action={action}", {"filename": name})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
