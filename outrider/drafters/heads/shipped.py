"""The trained heads of this package, and which head a configuration means. No torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.drafters.method import DrafterSetup


def own_head(target: str) -> Path | None:
    """The folder of the trained head that the package outrider-data has for a model; None if it has none, or is not installed.

    target: the name of a built-in model, or the path of a file with its content.
    """
    from outrider.models.builtin.download import name_of
    from outrider.models.builtin.shipped import data_folder

    name = target if target.startswith("builtin:") else name_of(target)
    if name is None or (data := data_folder()) is None:
        return None
    folder = data / "heads" / name.removeprefix("builtin:")
    return folder if (folder / "config.json").is_file() else None


def head_of(setup: DrafterSetup) -> Any:
    """The head's folder: the one that was given, or that of the package."""
    return setup.config.model if setup.config.model is not None else own_head(setup.target.name)
