"""`outrider report`. Imports nothing large until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Debug, option
from outrider.cli.terminal import GREEN, RED, YELLOW, check_folders, paint, printable, readable, say


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="A file of outrider bench --json.")],
    later: Annotated[
        Path | None, typer.Argument(metavar="LATER.json", help="A later run. The page shows it, and what changed.")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Output",
            "The file for the page. Default: RUN.html or RUN-LATER.html, next to the last run.",
            metavar="FILE",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make an HTML page of a measurement: what to do, why, and all the numbers. The page needs no network.

    With two runs it begins with what changed between them, and if that is more than noise.
    """
    with readable(debug):
        from outrider.lab.bench.report.page import write
        from outrider.lab.bench.run import Run

        files = [run] if later is None else [run, later]
        runs = [Run.load(file) for file in files]
        path = out or files[-1].with_name("-".join(file.stem for file in files) + ".html")
        if path in files:
            raise ValueError(f"the page would overwrite the run {path}. Name another file: --out page.html")
        check_folders(path)
        recommendation = write(runs[-1], path, other=runs[0] if later else None)
        colour = {"keep": GREEN, "broken": RED}.get(recommendation.kind, YELLOW)
        print(f"{paint(recommendation.label, colour)}: {printable(recommendation.headline)}")
        say(f"The page is {path}.")
