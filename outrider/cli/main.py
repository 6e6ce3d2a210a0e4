"""The command line: the commands of the engine, and those that other packages bring. Imports torch only when a command runs."""

from __future__ import annotations

import ast
import atexit
import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from outrider._version import __version__
from outrider.cli.terminal import readable, show_warnings
from outrider.core.docstrings import summary
from outrider.core.extras import install

# Variables that libraries read when they are imported. Values of the user stay.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that spin slow every other program on the same core
    "OPENBLAS_THREAD_TIMEOUT": "4",  # and those of numpy's library, which spin for 20 ms at its import
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # to find them, it reads a file of every installed package
}

GROUP = "outrider.commands"
"""The entry point group in which packages name their commands. Each is a `typer.Typer`; see `outrider.cli.command`."""

ENGINE = ("run", "generate", "serve", "batch", "models", "methods", "doctor")
SHORTER = ("list", "pull", "rm")
"""Commands of `outrider models` that may stand alone, as users of Ollama type them. The list of commands has them not."""

EXTRAS = {"deploy": "ray"} | dict.fromkeys(
    ("bench", "certify", "demo", "explain", "export", "layers", "replay", "train", "tune"), "lab"
)
"""The command of another package -> the extra that brings it."""


class CommandTable(Mapping[str, Any]):
    """The commands by name, those of the engine first. One is imported when it is looked up. Raises KeyError for no command."""

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Where each command is. It looks into every installed package."""
        engine = {name: _engine(name) for name in ENGINE}
        for entry in entry_points(group=GROUP):
            engine.setdefault(entry.name, entry)
        return engine

    def __getitem__(self, name: str) -> Any:
        if name in SHORTER:
            return self["models"].commands[name]
        if name in ENGINE:
            return typer.main.get_command(_engine(name).load())
        entry = self.entries.get(name)
        if entry is None:
            return typer.main.get_command(_absent(name, f"outrider-{EXTRAS[name]}", EXTRAS[name]))
        try:
            return typer.main.get_command(entry.load())
        except ModuleNotFoundError as error:
            if name not in EXTRAS or error.name is None or error.name.startswith("outrider."):
                raise
            extra = "certify" if error.name.startswith("outrider_certify") else EXTRAS[name]
            return typer.main.get_command(_absent(name, error.name, extra))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _engine(name: str) -> EntryPoint:
    return EntryPoint(name, f"outrider.cli.{name}:{name}", GROUP)


def _absent(name: str, package: str, extra: str) -> typer.Typer:
    """What stands for a command whose package is not installed. extra: brings it."""
    app = typer.Typer(add_completion=False)

    @app.command(name, context_settings={"ignore_unknown_options": True, "help_option_names": []})
    def say(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        """It is not installed."""
        with readable(False):
            raise ValueError(f"outrider {name} needs {package}, which is not installed: {install(extra)}")

    return app


class Commands(TyperGroup):
    """The command line, with the commands of `CommandTable`."""

    def __init__(self, **attributes: Any) -> None:
        table: Any = CommandTable()
        super().__init__(**attributes | {"commands": table})

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands. It imports none."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the list of commands. It imports none that says in its source what it does."""
        page, table = copy(self), self.commands
        page.commands = {name: in_list(name, table) for name in table}
        super(Commands, page).format_help(ctx, formatter)


def in_list(name: str, table: Any) -> Any:
    """A command as the list of commands shows it: its heading, and the docstring of the first function that is a command."""
    try:
        entry = table.entries[name]
        source = Path(str(cast("Any", find_spec(entry.module)).origin)).read_text(encoding="utf-8")
        head: Any = re.search(r'^@(as_command|\w+\.callback)\(.*?^def .*?""".*?"""', source, re.MULTILINE | re.DOTALL)
        function: Any = ast.parse(head[0]).body[0]
        called = function.decorator_list[0]
        words = [*called.args, *(k.value for k in called.keywords if k.arg == "rich_help_panel")]
        return TyperCommand(name, help=summary(ast.get_docstring(function)), rich_help_panel=words[0].value)
    except (AttributeError, ImportError, LookupError, OSError, SyntaxError, TypeError):
        return table[name]


app = typer.Typer(
    name="outrider",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Start here[/bold]\noutrider demo\n"
    'outrider run smollm2 "Why is the sky blue?"\n'
    "outrider serve smollm2\n"
    "outrider serve --help",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: language models generate faster, and the text stays the same.

    A small drafter proposes the next tokens. The model checks them all in one pass, so the text is always the model's own.
    """


def main() -> None:
    """The entry point of the `outrider` command."""
    # Registered first, so it runs last: libraries in C++ then list what they never free, and a person can do nothing about it.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    show_warnings()  # also of what runs behind a command
    # What is imported stays. To look through it for garbage takes time at a start, and again at the end.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    app()
