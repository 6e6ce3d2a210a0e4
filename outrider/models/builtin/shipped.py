"""The built-in models and heads. They are in the package `outrider-data`, because they are twenty times as large as the code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from outrider.core.extras import install

BUILTIN = {"builtin:code": "a small Python code model", "builtin:code-draft": "its draft model, distilled from it"}


def data_folder() -> Path | None:
    """The folder with the models and `heads`; None if `outrider-data` is not installed. Nothing of it is imported."""
    spec = find_spec("outrider_data")
    return next(map(Path, (spec.submodule_search_locations if spec else None) or ()), None)


def builtin_folder(name: str) -> Path:
    """The folder of a model in `BUILTIN`. Raises FileNotFoundError, with the line that installs it."""
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError(
            f"{name} is in the package outrider-data, which is not installed. Give a folder or a GGUF file of your own, or: "
            + install("data")
        )
    return folder / name.removeprefix("builtin:")
