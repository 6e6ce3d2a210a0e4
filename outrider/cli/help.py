"""The help page of a command with many options: the options that people use, on one screen; `--help-all` shows the others."""

from __future__ import annotations

from copy import copy
from typing import Any

import typer
from typer.core import TyperCommand


class BriefCommand(TyperCommand):
    """A command whose `--help` shows its arguments and the options of `usual`. The page has at most 45 lines of 80 columns."""

    usual: tuple[str, ...] = ()
    """The options to show, by any of their names, in the order of the page."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line. `--help-all` among them shows all options and ends."""
        if "--help-all" in args:
            super().format_help(ctx, formatter := ctx.make_formatter())
            typer.echo(formatter.getvalue(), nl=False)
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page. Raises KeyError if `usual` names no option."""
        page, options = copy(self), [p for p in self.params if p.param_type_name == "option"]
        named = {name: option for option in options for name in option.opts}
        page.add_help_option = False
        page.params = [p for p in self.params if p not in options] + [_row(named[name]) for name in self.usual]
        page.help = (self.help or "").partition("\n\n")[0]
        examples = "\n".join((self.epilog or "").splitlines()[:4])  # the heading and three
        page.epilog = f"{examples}\n\n[bold]--help-all[/bold] shows all {len(options)} options"
        TyperCommand.format_help(page, ctx, formatter)


def brief(*usual: str) -> type[BriefCommand]:
    """The kind of command whose page shows these options."""
    return type("Brief", (BriefCommand,), {"usual": usual})


def _row(option: Any) -> Any:
    """The same option in two columns: its names and the text. Headings, types and ranges take the width of the text."""
    row, shown = copy(option), option.default
    row.rich_help_panel = row.min = row.max = None
    metavar = "" if (option.metavar or "<").startswith("<") else option.metavar
    row.opts, row.metavar = [" ".join([*sorted(option.opts, key=len), metavar]).strip()], ""
    row.required = row.show_default = False
    if option.required:
        row.help += " Required."
    if isinstance(shown, (int, float, str)) and not isinstance(shown, bool) and "efault" not in row.help:
        row.help += f" Default: {shown}."
    return row
