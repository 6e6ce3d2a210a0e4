"""`outrider export`: a setting for other engines. Imports nothing large until it runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli.command import as_command
from outrider.cli.options import parse_speculative_config
from outrider.cli.terminal import DIM, command, loading, say, warn

if TYPE_CHECKING:
    from outrider_lab.handover import EngineCommand


@as_command(
    "Build",
    """outrider export '{"method": "suffix"}' --to vllm""",
    "outrider export speculative_config.json --to vllm --to sglang -m ./my-model --lengths 1:4,4:2,8:0 -o ./handover",
)
def export(
    setting: str,
    *,
    to: list[str] | None = None,
    model: str | None = None,
    lengths: str | None = None,
    out: Path | None = None,
    json_: bool = False,
) -> None:
    """Carry a setting to vLLM, SGLang, llama.cpp or TensorRT-LLM: the exact command line, and a configuration file.

    What the engine cannot do is named, with its effect. Exits with 1 if no engine can run the setting.

    Args:
        setting (JSON|FILE): A speculative_config, or the file that outrider tune wrote.
        to (ENGINE): vllm, sglang, llama.cpp or trt-llm. May be repeated. Default: all.
        model: The model that is served there; without it, commands say MODEL.
        lengths (PAIRS): Draft tokens by batch size, as outrider tune prints them: 1:4,4:2,8:0.
        out (FOLDER): Write configuration files, and heads in the engine's format.
        json_: Print JSON.
    """
    with loading("the export"):
        from outrider_lab.handover import exports

        config, pairs = parse_speculative_config(setting), parse_lengths(lengths)
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder for the files of the engines")
        commands = exports(config, pairs, model=model, engines=to, out=out)
    if json_:
        print(json.dumps([asdict(command) for command in commands], indent=1))
    else:
        show_commands(commands)
    if out is not None:
        names = [name for command in commands for name in command.files]
        warn(f"Written to {out}: {', '.join(names) or 'nothing'}", DIM)
    raise typer.Exit(0 if any(command.supported for command in commands) else 1)


def parse_lengths(text: str | None) -> dict[int, int]:
    """Draft tokens by batch size from "1:4,4:2". Raises ValueError for anything else."""
    pairs = [pair.partition(":") for pair in text.split(",")] if text else []
    lengths = {int(size): int(length) for size, _, length in pairs if size.isdecimal() and length.isdecimal()}
    if len(lengths) < len(pairs):
        raise ValueError(
            f"--lengths {text}: something is no pair, or its batch size comes twice; give pairs of batch size and draft tokens, "
            "such as 1:4,4:2,8:0"
        )
    return lengths


def show_commands(commands: list[EngineCommand]) -> None:
    """Print command lines, and what differs."""
    for one in commands:
        print("  " + command(f"{one.engine}:", *re.split(r" (?=-)", one.serve or "-")))
        for note in one.notes:
            say(f"    - {note}")
