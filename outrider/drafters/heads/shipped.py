"""The trained heads of this package, and which head a configuration means. No torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.drafters.method import DrafterSetup

HEADS = Path(__file__).resolve().parents[2] / "data" / "heads"
"""Trained heads of this package, in folders with the names of built-in models."""


def own_head(target: str) -> Path | None:
    """The folder of the trained head that this package has for a model; None if it has none.

    target: the name of a built-in model, or the path of a file with its content.
    """
    from outrider.models.builtin.download import name_of

    name = target if target.startswith("builtin:") else name_of(target)
    folder = HEADS / (name or "").removeprefix("builtin:")
    return folder if name and (folder / "config.json").is_file() else None


def head_of(setup: DrafterSetup) -> Any:
    """The head's folder: the one that was given, or that of the package."""
    return setup.config.model if setup.config.model is not None else own_head(setup.target.name)
