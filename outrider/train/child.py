"""A training run in a process of its own, for a server that learns on the job. It ends with the process that began it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: what the kernel sends when the thread that made this process is gone


def main() -> None:
    """Read what to do from the first line of the standard input, and train. The end of the input ends the process."""
    if sys.platform == "linux":  # a process that is stopped sees no end of its input
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    asked: dict[str, Any] = json.loads(sys.stdin.readline())

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    from outrider.engine.llm import LLM
    from outrider.train.settings import TrainingSettings
    from outrider.train.trainer import SLOTS, TrainingBudget, train

    settings = TrainingSettings(**asked["settings"])
    llm = LLM(settings.model, max_num_seqs=SLOTS, **asked["load"])
    train(
        settings, TrainingBudget(tokens=asked["tokens"]), Path(asked["out"]), llm, lambda line: print(line, flush=True)
    )


if __name__ == "__main__":
    main()
