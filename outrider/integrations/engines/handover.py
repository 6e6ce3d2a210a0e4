"""A setting for one engine with everything that belongs to it: the head in its layout, and the draft model's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.drafters.config import SpeculativeConfig
from outrider.integrations.engines import EngineCommand, exports
from outrider.integrations.engines.heads import head_of, refusal, rewrite_reason, write_head
from outrider.integrations.engines.tokens import same_tokens


def hand_over(
    config: dict[str, Any] | SpeculativeConfig,
    engine: str,
    lengths: dict[int, int] | None = None,
    *,
    model: str | None = None,
    out: Path | None = None,
) -> EngineCommand:
    """The command and the files of a setting for an engine. Writes the head, if the engine reads another layout.

    engine: a name of `ENGINES`. model: the target. out: the folder for files and heads; without it, or without a model, no
    head is written, and a note says so. Raises ValueError for what `exports` refuses, and for a head that does not fit.
    """
    speculation, notes = SpeculativeConfig.of(config), list[str]()
    folder = None if out is None else str(out)
    if (head := head_of(speculation)) is not None:
        if refused := refusal(head, engine):
            [command] = exports(speculation, lengths, model=model, engines=[engine])
            return EngineCommand(command.engine, "", (refused,), supported=False)
        if reason := rewrite_reason(head, engine):
            if out is None or model is None:
                notes.append(f"head: {reason}; --out FOLDER and -m MODEL write it so")
            else:
                written = write_head(head, engine, model, out.absolute())
                speculation = speculation.model_copy(update={"model": str(written)})
    same: bool | None = True
    if "draft_model" in speculation.methods and model is not None:
        same = same_tokens(model, str(speculation.model))
        if same is None:
            notes.append(
                "tokens: those of the draft model and the target could not be compared here; they must be the same"
            )
    [command] = exports(speculation, lengths, model=model, engines=[engine], other_tokens=same is False, folder=folder)
    return replace(command, notes=(*command.notes, *notes)) if command.supported else command


def write_files(command: EngineCommand, out: Path) -> list[str]:
    """Write the files of a command. Returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in command.files.items():
        (out / name).write_text(text, encoding="utf-8")
    return list(command.files)
