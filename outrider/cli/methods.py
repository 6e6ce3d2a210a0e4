"""`outrider methods`: how to draft. Imports nothing large."""

from __future__ import annotations

from outrider.cli.command import as_command
from outrider.cli.terminal import console
from outrider.drafters.method import METHODS, find, plugins


@as_command(
    "Look inside",
    "outrider methods",
)
def methods() -> None:
    """List the drafting methods: name, what it needs, what it is good for. Give one to --method, or several as JSON."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("needs", max_width=24)
    table.add_column("what it is, and where it helps")
    for method in (*METHODS.values(), *map(find, plugins())):
        table.add_row(method.name, method.needs, method.help)
    console().print(table)
    print('One: --method suffix\nSeveral: --speculative-config \'{"method": ["suffix", "draft_model"]}\'')
