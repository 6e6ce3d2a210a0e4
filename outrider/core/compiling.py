"""A process that compiles grammars, and that is ended when one takes too long or too much memory.

xgrammar compiles in native code that nothing can stop. A few letters of a pattern keep it busy for hours. The child needs the
compiler of xgrammar only. Without torch it starts in less than a second and takes 50 MB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

START_SECONDS = 120.0  # for a child on a busy machine
MEMORY = 1 << 30  # bytes that a child may take for a grammar
MAX_COMPILED = 64 << 20  # bytes of one compiled grammar


class TooSlow(ValueError):
    """A grammar was not compiled in time."""


class CompilerProcess:
    """Compiles one grammar after the other in a child. The child starts at the first one, and anew after it was ended.

    info: the tokenizer, as `TokenizerInfo.serialize_json` writes it. One thread may use it.
    """

    def __init__(self, info: str) -> None:
        self._info = info
        self._child: subprocess.Popen[str] | None = None
        self._ready = self._closed = False
        self._late = threading.Event()

    def compile(self, method: str, arguments: list[str], seconds: float) -> str:
        """The grammar that a method of xgrammar's compiler makes, as `CompiledGrammar.serialize_json` writes it.

        seconds: from the moment when the child begins. Raises TooSlow after them, ValueError for a grammar that is not valid
        or needs too much memory, and ChildProcessError if the child cannot start.
        """
        if not self._ready and not self._closed:
            self._start()
            if self._ask(self._info, START_SECONDS) is None:
                raise ChildProcessError("the process that compiles grammars did not start")
            self._ready = True
        answer = self._ask([method, arguments, seconds], seconds)
        if answer is None:
            self._ready = False
            if self._closed:
                raise ChildProcessError("the process that compiles grammars has ended")
            self._start()  # so that the next grammar need not wait for it
            if self._late.is_set():
                raise TooSlow(f"it needs more than {seconds:g} s to compile; make it smaller")
            raise ValueError(f"it needs more than {MEMORY >> 20} MB to compile; make it smaller")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["made"]

    def close(self) -> None:
        """End the child, also in the middle of a grammar."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _start(self) -> None:
        if self._child is not None:
            if self._child.poll() is None and not self._ready:
                return  # it was started ahead
            self._end()
        code = f"import sys; sys.path[:] = {sys.path!r}; from outrider.core.compiling import serve; serve()"
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # xgrammar writes warnings of schemas there
            encoding="utf-8",
        )

    def _ask(self, question: Any, seconds: float) -> dict[str, Any] | None:
        """What the child answers; None if it ended, and it is ended after so many seconds."""
        child = self._child
        if child is None:
            return None
        assert child.stdin is not None
        assert child.stdout is not None
        late = self._late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        clock = threading.Timer(seconds, end)
        clock.daemon = True
        clock.start()
        answer = ""
        with suppress(OSError):
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        clock.cancel()
        clock.join()
        if answer.endswith("\n") and not late.is_set():
            return json.loads(answer)
        self._end()
        return None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError):
                child.communicate()


def serve() -> None:
    """The child: reads the tokenizer, then grammars, a line each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    xgrammar = _compiler_alone()
    info = xgrammar.tokenizer_info.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    compiler = xgrammar.compiler.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _bound_memory()
    _say(answers, {})
    for line in sys.stdin:
        method, arguments, seconds = json.loads(line)
        _bound_time(seconds)
        try:
            made = getattr(compiler, method)(*arguments)
            large = made.memory_size_bytes > MAX_COMPILED
            answer = {"error": "it is too large once compiled"} if large else {"made": made.serialize_json()}
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                os._exit(1)
            answer = {"error": str(error)}
        _say(answers, answer)


def _say(answers: Any, answer: dict[str, str]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _compiler_alone() -> Any:
    """xgrammar without the parts that import torch and transformers. The whole package, should its parts ever move."""
    found = importlib.util.find_spec("xgrammar")
    assert found is not None
    bare, names = ModuleType("xgrammar"), ModuleType("transformers")
    bare.__path__ = list(found.submodule_search_locations or ())
    names.PreTrainedTokenizerBase = names.PreTrainedTokenizerFast = object  # pyright: ignore[reportAttributeAccessIssue]
    stand_ins = {
        "torch": cast(ModuleType, None),
        "transformers": names,
        "xgrammar": bare,
    }  # None: it cannot be imported
    sys.modules.update(stand_ins)
    try:
        for part in ("load_binding", "tokenizer_info", "compiler"):
            importlib.import_module(f"xgrammar.{part}")
        return bare
    except (ImportError, AttributeError):
        for name in [n for n in sys.modules if n in stand_ins or n.startswith("xgrammar.")]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")


def _bound_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # systems other than Linux have less of this
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def _bound_time(seconds: float) -> None:
    """Should nobody be left to end this process, the system does."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft = int(time.process_time() + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
