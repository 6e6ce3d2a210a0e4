"""llama.cpp as a side: forwards through its library, texts through its server, one server for each method.

Built by `benchmarks/peers/build_llama_cpp.sh`. Weights are converted by llama.cpp's own script and kept beside the model
folder. The server's clock is used for texts: its `predicted_ms` runs from the first token to the last, as ours does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import PEERS
from benchmarks.pairs import drafts_of
from benchmarks.peers.llama_server import LlamaServer
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


class LlamaCpp:
    """A `Worker`. Methods: plain, draft:N, and the server's own n-gram modes by name (ngram-simple, ngram-mod, ...)."""

    def __init__(self, model: Path, drafts: dict[str, str], kind: str, threads: int) -> None:
        self.tree, self.kind, self.threads = installed(), kind, threads
        self.target = converted(model, kind)
        self.drafts = {name: converted(Path(folder), kind) for name, folder in drafts.items()}
        self._libraries: dict[str, Library] = {}
        self._servers: dict[str, LlamaServer] = {}

    def facts(self) -> dict[str, Any]:
        source = (PEERS / "llama.cpp.source").read_text().split() if (PEERS / "llama.cpp.source").exists() else []
        return {"version": source[-1] if source else "unknown", "weights": self.kind, "threads": self.threads}

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]:
        """which: target, or a method whose drafter is a model."""
        name = which.partition(":")[0]
        if name not in self._libraries:
            self._libraries[name] = Library(self.target if name == "target" else self.drafts[name], self.threads)
        return self._libraries[name].forward(rows, context, repeats)

    def server(self, method: str) -> LlamaServer:
        if method not in self._servers:
            name, _, length = method.partition(":")
            program, target = self.tree / "build" / "bin" / "llama-server", str(self.target)
            if name in self.drafts:
                made = LlamaServer(program, target, str(self.drafts[name]), longest=int(length), length=CONTEXT)
            else:
                options = () if name == "plain" else ("--spec-type", name)
                made = LlamaServer(program, target, length=CONTEXT, options=options)
            self._servers[method] = made
        return self._servers[method]

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run:
        out = self.server(method).complete(prompt, tokens, temperature, seed, ignore_eos=True)
        timed = len(out.tokens) - 1
        return Run(
            tokens=out.tokens,
            timed=timed,
            seconds=out.seconds,
            steps=timed - out.accepted,
            drafted=[out.drafted] if out.drafted else [],
            accepted=[out.accepted] if out.drafted else [],
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
