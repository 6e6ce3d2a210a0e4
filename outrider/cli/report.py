"""`outrider report`. Imports nothing heavy until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import Debug, option
from outrider.cli.terminal import DIM, GREEN, RED, YELLOW, paint, printable, readable

if TYPE_CHECKING:
    from outrider.bench.run import Run


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN.json", help="What outrider bench --json wrote.")],
    later: Annotated[
        Path | None, typer.Argument(metavar="LATER.json", help="A later run: the page is its, and says what moved.")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Output",
            "Where the page goes; RUN.html or RUN-LATER.html beside the last run if not given.",
            metavar="FILE",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """One page of HTML about a measurement: what to do and why, and everything behind it. No network is needed to see it.

    Of two runs it tells first what moved from the one to the other, and whether that is more than noise.
    """
    with readable(debug):
        from outrider.bench.report.page import write

        files = [run] if later is None else [run, later]
        runs = [_load(file) for file in files]
        path = out or files[-1].with_name("-".join(file.stem for file in files) + ".html")
        if path in files:
            raise ValueError(f"the page would overwrite the run {path}; name another file: --out page.html")
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.absolute().parent} to write {path.name} to")
        said = write(runs[-1], path, other=runs[0] if later else None)
        colour = {"keep": GREEN, "broken": RED}.get(said.kind, YELLOW)
        print(f"{paint(said.label, colour)}: {printable(said.headline)}")
        print(paint(f"The page is {path}.", DIM))


def _load(file: Path) -> Run:
    from outrider.bench.run import Run

    try:
        return Run.load(file)
    except UnicodeDecodeError:
        raise ValueError(
            f"{file} is no measurement, it is not even text; write one with: outrider bench --json RUN.json"
        ) from None
