"""What needs torch and transformers, and what must not: `make light` runs the suite where neither is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

ROOT = Path(__file__).parents[2]
TORCH = (
    "outrider/kernels/gpu/",
    "outrider/models/gpu/",
    "outrider/models/hf/",
    "outrider/integrations/transformers.py",
    "lab/outrider_lab/heads/modules.py",
    "lab/outrider_lab/train/",
)
"""Files and folders whose modules import torch, transformers or triton when they are imported."""
HAS_RAY = bool(
    entry_points(group="outrider.commands", name="deploy")
)  # the folder of the checkout is imported without it, too
_TESTS = ("tests/", "lab/tests/", "ray/tests/", "certify/tests/")


class Late:
    """A package that is imported when something of it is used: a file may have tests that need it beside tests that do not."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


torch: Any = Late("torch")
transformers: Any = Late("transformers")


def absent(error: BaseException | None) -> str | None:
    """The package that a test needs and that is not installed; None for other errors. A module of `TORCH` may need one, too."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if (
            isinstance(error, ModuleNotFoundError)
            and name
            and not name.startswith("outrider")
            and find_spec(name) is None
        ):
            files = [
                Path(frame.filename) for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<")
            ]
            asks = files[-1] if files else ROOT
            if not asks.is_relative_to(ROOT) or ".venv" in asks.relative_to(ROOT).parts[0]:
                return name  # a package that was imported asks for another
            return name if asks.relative_to(ROOT).as_posix().startswith((*_TESTS, *TORCH)) else None
        error = error.__cause__
    return None
