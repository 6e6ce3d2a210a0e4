"""What several commands of the laboratory take or show. Imports nothing large."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.options import SpeculationOptions

if TYPE_CHECKING:
    from rich.table import Table

# Options of `SpeculationOptions` that a command takes alone
DRAFT_MODEL: Any = SpeculationOptions.model_fields["draft_model"]
NUM_SPECULATIVE_TOKENS: Any = SpeculationOptions.model_fields["num_speculative_tokens"]


def program() -> str:
    """How a shell starts this outrider: by its name, if that is on PATH, else by its path."""
    ours, first = shutil.which("outrider", path=str(Path(sys.executable).parent)), shutil.which("outrider")
    if ours is None:
        return "outrider" if first else f"{shlex.quote(sys.executable)} -m outrider"
    if first and Path(first).samefile(ours):
        return "outrider"
    path = Path(ours)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def table(title: str | None, *heads: str) -> Table:
    """A table with columns of numbers, whose heads wrap. A head that begins with "<" is of a column of words, which do not."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        words = head.startswith("<")
        grid.add_column(head.removeprefix("<"), justify="left" if words else "right", no_wrap=words and head != "<")
    return grid
