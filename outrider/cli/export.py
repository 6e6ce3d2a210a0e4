"""`outrider export`: a setting for other engines. Imports nothing large until it runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import as_command
from outrider.cli.options import option, parse_speculative_config
from outrider.cli.terminal import DIM, command, loading, say, warn

if TYPE_CHECKING:
    from outrider.integrations.engines import EngineCommand

_LENGTHS = "give pairs of batch size and draft tokens, such as 1:4,4:2,8:0"


@as_command(
    "Build",
    """outrider export '{"method": "suffix"}' --to vllm""",
    "outrider export speculative_config.json --to vllm --to sglang -m ./my-model --lengths 1:4,4:2,8:0 -o ./handover",
)
def export(
    setting: Annotated[
        str, typer.Argument(metavar="JSON|FILE", help="A speculative_config, or the file that outrider tune wrote.")
    ],
    *,
    to: Annotated[
        list[str] | None,
        option("Engine", "vllm, sglang, llama.cpp or trt-llm. May be repeated. Default: all.", metavar="ENGINE"),
    ] = None,
    model: Annotated[
        str | None, option("Engine", "The model that is served there; without it, commands say MODEL.", "--model", "-m")
    ] = None,
    lengths: Annotated[
        str | None,
        option("Engine", "Draft tokens by batch size, as outrider tune prints them: 1:4,4:2,8:0.", metavar="PAIRS"),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Output", "Write configuration files, and heads in the engine's format.", "--out", "-o", metavar="FOLDER"
        ),
    ] = None,
    as_json: Annotated[bool, option("Output", "Print JSON.", "--json")] = False,
) -> None:
    """Carry a setting to vLLM, SGLang, llama.cpp or TensorRT-LLM: the exact command line, and a configuration file.

    What the engine cannot do is named, with its effect. Exits with 1 if no engine can run the setting.
    """
    with loading("the export"):
        from outrider.drafters.config import SpeculativeConfig
        from outrider.integrations.engines import ENGINES, named
        from outrider.integrations.engines.handover import hand_over, write_files

        engines = to or list(ENGINES)
        for engine in engines:
            named(engine)
        config, pairs = SpeculativeConfig.of(parse_speculative_config(setting)), parse_lengths(lengths)
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder for the files of the engines")
        found = [hand_over(config, engine, pairs, model=model, out=out) for engine in engines]
    if as_json:
        print(json.dumps([asdict(command) for command in found], indent=1))
    else:
        show_commands(found)
    if out is not None:
        names = [name for command in found for name in write_files(command, out)]
        warn(f"Written to {out}: {', '.join(names) or 'nothing'}", DIM)
    raise typer.Exit(0 if any(command.supported for command in found) else 1)


def parse_lengths(given: str | None) -> dict[int, int]:
    """Draft tokens by batch size from "1:4,4:2". Raises ValueError for anything else."""
    out = dict[int, int]()
    for pair in given.split(",") if given else ():
        size, colon, length = pair.partition(":")
        try:
            if not colon or int(size) in out:
                raise ValueError
            out[int(size)] = int(length)
        except ValueError:
            raise ValueError(
                f"--lengths {given}: {pair!r} is no pair, or its batch size comes twice; {_LENGTHS}"
            ) from None
    return out


def show_commands(commands: list[EngineCommand]) -> None:
    """Print command lines, and what differs."""
    for one in commands:
        print("  " + command(f"{one.engine}:", *re.split(r" (?=-)", one.serve or "-")))
        for note in one.notes:
            say(f"    - {note}")
