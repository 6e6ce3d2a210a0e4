"""Whether a draft model and its target have the same tokens, without loading their weights."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.integrations.engines.setting import model_path


def same_tokens(target: str, draft: str) -> bool | None:
    """Whether two models, given by name, have the same tokens and vocabulary size. None if that cannot be known here.

    Engines with one vocabulary refuse a draft model with another size, even if only unused tokens differ.
    """
    from outrider.models.load import tokenizer_named

    if not all(
        model_path(name).endswith(".gguf") or Path(model_path(name)).expanduser().is_dir() for name in (target, draft)
    ):
        return None  # a name on the hub
    try:
        one, two = (tokenizer_named(model_path(name)).get_vocab() for name in (target, draft))
    except (OSError, ValueError):
        return None
    sizes = {size for name in (target, draft) if (size := _vocab_size(model_path(name)))}
    return one == two and len(sizes) < 2


def _vocab_size(path: str) -> int | None:
    """The vocabulary size that a folder's config.json says."""
    try:
        settings = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
