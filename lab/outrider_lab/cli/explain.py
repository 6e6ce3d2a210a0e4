"""`outrider explain`. Imports nothing large until it runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.command import as_command
from outrider.cli.terminal import YELLOW, printable, say, working
from outrider.core.files import write_whole

if TYPE_CHECKING:
    from outrider_lab.pages.explained import ExplainedRun
    from outrider_lab.traces import Trace


@as_command(
    "Look inside",
    "outrider explain",
    'outrider generate "def f(x):" --trace run.jsonl && outrider explain run.jsonl',
    "outrider explain run.jsonl --recorded -o page.html",
)
def explain(
    trace: Path | None = None,
    *,
    out: Path | None = None,
    model: str | None = None,
    recorded: bool = False,
    no_open: bool = False,
) -> None:
    """Explain speculative decoding on a real run, as an interactive page in one file. The page needs no network.

    It shows the draft trees and verdicts step by step, why the text stays the same, when drafting helps, and when it does not.

    Args:
        trace (RUN.jsonl): A file that --trace has written; without it, a built-in run.
        out (FILE): The file for the page. Default: RUN.html, or outrider-explained.html.
        model: Where the model is now; without it, where the trace says.
        recorded: Show only what the trace holds, and do not load the model.
        no_open: Do not open the page in a browser.
    """
    if trace is None and (model is not None or recorded):
        raise ValueError("--model and --recorded belong to a trace; name one: outrider explain RUN.jsonl")
    with working(f"explaining {'a built-in run' if trace is None else trace}"):
        from dataclasses import replace

        from outrider_lab.explain import machine_curves
        from outrider_lab.pages.explained import builtin

        if trace is None:
            run = builtin()
            run = replace(run, costs=[*run.costs, *machine_curves()])
        else:
            run = _own(trace, model, recorded)
    if out is None:
        out = Path("outrider-explained.html") if trace is None else trace.with_suffix(".html")
    write_whole(out, run.page())
    for note in run.notes:
        say(f"note: {printable(note)}", YELLOW)
    opened = not no_open and webbrowser.open(out.resolve().as_uri())
    print(f"The page is {out}." + ("" if opened else " Open it in a browser."))


def _own(file: Path, model: str | None, recorded: bool) -> ExplainedRun:
    """The run of a trace, with what the model can tell if it is to be loaded."""
    from outrider.engine.trace import Detail
    from outrider_lab.explain import explained, with_model
    from outrider_lab.traces import read

    trace = read(file)
    if recorded or trace.header.detail is Detail.COUNTS:
        return explained(trace, None if trace.header.detail is Detail.COUNTS else _tokenizer(trace, model))
    llm = _model(trace, model)
    return with_model(explained(trace, llm.tokenizer), trace, llm)


def _tokenizer(trace: Trace, name: str | None) -> Any | None:
    """The tokenizer of the trace's model, if its files are here."""
    from outrider.models.load import tokenizer_named

    try:
        return tokenizer_named(name or trace.header.model)
    except (OSError, ValueError):
        return None


def _model(trace: Trace, name: str | None) -> Any:
    """The model of the trace, with its draft model. Raises ValueError with the way out if it cannot be loaded."""
    from outrider_lab.cli.replay import trace_model

    try:
        return trace_model(trace, name, drafts=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the model of this trace cannot be loaded ({error}); name it with --model, or show what the trace holds: "
            f"outrider explain {trace.path} --recorded"
        ) from error
