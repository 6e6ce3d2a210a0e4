"""llama.cpp as a side: forwards through its library, texts through its server, one server for each method.

Built by `benchmarks/peers/build_llama_cpp.sh`. Weights are converted by llama.cpp's own script and kept beside the model
folder. The server's clock is used for texts: its `predicted_ms` runs from the first token to the last, as ours does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import PEERS
from benchmarks.pairs import drafts_of
from benchmarks.side import Missing, Run, refuse, serve

CONTEXT = 2048
TYPES = ("f32", "f16", "bf16", "q8_0")


def installed() -> Path:
    """The source tree that was built. Raises Missing."""
    tree = PEERS / "llama.cpp"
    if not (tree / "build" / "bin" / "llama-server").exists():
        raise Missing("llama.cpp is not built; run benchmarks/peers/build_llama_cpp.sh (10 to 30 minutes)")
    return tree.resolve()


def converted(model: Path, kind: str) -> Path:
    """The model as GGUF, converted when that has not been done."""
    if kind not in TYPES:
        raise ValueError(f"llama.cpp runs {', '.join(TYPES)} here, got {kind!r}")
    out = model / f"{kind}.gguf"
    if not out.exists() or out.stat().st_mtime < (model / "config.json").stat().st_mtime:
        tree, part = installed(), out.with_suffix(".part.gguf")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.peers.convert",
                str(tree),
                str(model),
                "--outtype",
                kind,
                "--outfile",
                str(part),
            ],
            check=True,
            stdout=sys.stderr,
        )
        part.rename(out)
    return out


class Library:
    """A model in this process, through the bindings that come with the source distribution."""

    def __init__(self, gguf: Path, threads: int) -> None:
        tree = installed()
        os.environ["LLAMA_CPP_LIB_PATH"] = str(tree / "build" / "bin")
        package = types.ModuleType("llama_cpp")  # the low-level bindings alone, without what __init__ imports
        package.__path__ = [str(tree.parent.parent / "llama_cpp")]
        sys.modules["llama_cpp"] = package
        self.c: Any = importlib.import_module("llama_cpp.llama_cpp")
        c = self.c
        self._log = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self._log, ctypes.c_void_p(0))
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(str(gguf).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = CONTEXT, threads, threads
        self.context = c.llama_init_from_model(self.model, params)
        self.memory = c.llama_get_memory(self.context)
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.length = 0
        self._batch = c.llama_batch_init(512, 0, 1)

    def feed(self, tokens: list[int], *, keep: bool) -> float:
        """Seconds to decode these tokens after the ones kept so far, logits of all of them wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, self.length + i, 1, 1
            batch.seq_id[i][0] = 0
        start = perf_counter()
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = self.c.llama_get_logits(self.context)  # waits for the result
        seconds = perf_counter() - start
        assert logits
        if keep:
            self.length += len(tokens)
        else:
            self.c.llama_memory_seq_rm(self.memory, 0, self.length, -1)
        return seconds

    def forward(self, rows: int, context: int, repeats: int) -> list[float]:
        draw = np.random.default_rng(rows)
        if self.length != context:
            self.c.llama_memory_seq_rm(self.memory, 0, 0, -1)
            self.length = 0
            self.feed(draw.integers(self.vocab, size=context).tolist(), keep=True)
        tokens = draw.integers(self.vocab, size=rows).tolist()
        return [self.feed(tokens, keep=False) for _ in range(repeats)]


class Server:
    """llama-server with one way of decoding."""

    def __init__(self, arguments: list[str], threads: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        binary = installed() / "build" / "bin" / "llama-server"
        self._process = subprocess.Popen(
            [str(binary), "--host", "127.0.0.1", "--port", str(self.port), "-c", str(CONTEXT), "-np", "1", "-t", str(threads),
             "--cache-ram", "0", *arguments],
            stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server {' '.join(arguments)} did not start (status {self._process.poll()})")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


class LlamaCpp:
    """A `Worker`. Methods: plain, draft:N, and the server's own n-gram modes by name (ngram-simple, ngram-mod, ...)."""

    def __init__(self, model: Path, drafts: dict[str, str], kind: str, threads: int) -> None:
        self.tree, self.kind, self.threads = installed(), kind, threads
        self.target = converted(model, kind)
        self.drafts = {name: converted(Path(folder), kind) for name, folder in drafts.items()}
        self._libraries: dict[str, Library] = {}
        self._servers: dict[str, Server] = {}

    def facts(self) -> dict[str, Any]:
        source = (PEERS / "llama.cpp.source").read_text().split() if (PEERS / "llama.cpp.source").exists() else []
        return {"version": source[-1] if source else "unknown", "weights": self.kind, "threads": self.threads}

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]:
        """which: target, or a method whose drafter is a model."""
        name = which.partition(":")[0]
        if name not in self._libraries:
            self._libraries[name] = Library(self.target if name == "target" else self.drafts[name], self.threads)
        return self._libraries[name].forward(rows, context, repeats)

    def server(self, method: str) -> Server:
        if method not in self._servers:
            name, _, length = method.partition(":")
            arguments = ["-m", str(self.target)]
            if name in self.drafts:
                arguments += [
                    "-md",
                    str(self.drafts[name]),
                    "--spec-type",
                    "draft-simple",
                    "--spec-draft-n-max",
                    length,
                ]
            elif name != "plain":
                arguments += ["--spec-type", name]
            self._servers[method] = Server(arguments, self.threads)
        return self._servers[method]

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run:
        sampling = {"samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature else {}
        out = self.server(method).complete(
            {"prompt": prompt, "n_predict": tokens, "temperature": temperature, "seed": seed, "ignore_eos": True,
             "cache_prompt": False, "return_tokens": True, **sampling}
        )  # fmt: skip
        clock = out["timings"]
        timed, accepted = clock["predicted_n"] - 1, clock.get("draft_n_accepted", 0)
        return Run(
            tokens=out["tokens"],
            timed=timed,
            seconds=clock["predicted_ms"] / 1e3,
            steps=timed - accepted,
            drafted=[clock["draft_n"]] if "draft_n" in clock else [],
            accepted=[accepted] if "draft_n" in clock else [],
        )

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--type", default="f32", choices=TYPES)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    try:
        worker = LlamaCpp(args.model, drafts_of(args.draft), args.type, args.threads)
    except Missing as error:
        refuse(str(error))
        return
    try:
        serve(worker)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
