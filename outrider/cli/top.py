"""`outrider top`: the dashboard of a server in a terminal. Imports nothing large until it runs."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.http_client import Client
from outrider.cli.options import ApiKey, Debug, option
from outrider.cli.terminal import console, plain, printable, readable

if TYPE_CHECKING:
    from rich.console import RenderableType

KEPT = 600  # ticks


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a server listens.")] = "http://127.0.0.1:8000",
    window: Annotated[float, option("Output", "Seconds that the figures are means over.", min=1.0)] = 10.0,
    once: Annotated[bool, option("Output", "Print the figures of the first window, and end.", "--once")] = False,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Watch a server: tokens per second, acceptance, draft length, phases, queue and memory. Ctrl-C ends."""
    with readable(debug):
        import sys

        from rich.live import Live

        from outrider.serve.figures import outlook

        ticks, hello = deque[dict[str, Any]](maxlen=KEPT), dict[str, Any]()
        live = None if once or plain(sys.stdout) else Live(console=console(), auto_refresh=False)
        with closing(Client(url, api_key, 30).events("GET", "/dashboard/events")) as events:
            try:
                if live:
                    live.start()
                for event in events:
                    if "elapsed" not in event:
                        hello = event
                        continue
                    ticks.append(event)
                    if live:
                        live.update(_screen(hello, event, outlook(ticks, event, window)), refresh=True)
                    elif sum(tick["elapsed"] for tick in ticks) >= window:
                        console().print(_screen(hello, event, outlook(ticks, event, window)))
                        if once:
                            return
                        ticks.clear()
            finally:
                if live:
                    live.stop()
        raise ConnectionError(f"the server at {url} has ended the stream; it stops, or it has too many viewers")


def _weighed(one: dict[str, Any]) -> str:
    """A drafter as a plan weighed it; the words are those of `outrider.control.planner.Weighed`."""
    return printable(
        f"{one['name']} {one['tokens']:.2f} tokens for {1000 * one['seconds']:.1f} ms = {one['value']:+.2f}, {one['verdict']}"
    )


def _screen(hello: dict[str, Any], tick: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    """The figures as a table."""
    from rich.box import SIMPLE
    from rich.table import Table

    def known(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    engine, phases = tick["engine"], now["phases"]
    inside = sum(phases.values()) or 1.0
    shares = "  ".join(f"{name} {part / inside:.0%}" for name, part in phases.items())
    table = Table(
        box=SIMPLE, show_header=False, title=printable(f"{hello['model']}: {hello['method']}"), title_justify="left"
    )
    table.add_column(style="dim")
    table.add_column()
    rows = {
        "does it help now?": printable(now["answer"]),
        **{name.lower(): printable(text) for name, text in now["sources"].items()},
        "tokens/s": known(now["rate"], ".1f"),
        "tokens per request and step": known(now["length"], ".2f"),
        "draft tokens accepted": known(now["acceptance"], ".0%"),
        "survival by depth": "  ".join(f"{j}: {s:.0%}" for j, s in enumerate(now["survival"], 1)) or "-",
        "draft length": f"{known(now['depth'], '.1f')}: {tick['why'] or 'no step yet'}",
        "steps by drafter": "  ".join(f"{printable(name)} {share:.0%}" for name, share in now["plans"].items()) or "-",
        "weighed last": "\n".join(map(_weighed, now["weighed"].values())) or "-",
        "taken over measured": "  ".join(f"{printable(name)} {x:.2f}" for name, x in tick["drift"].items()) or "-",
        "time": shares,
        "requests": f"{engine['running']} running of {hello['slots']}, {engine['waiting']} waiting",
        "keys and values": f"{(engine['kv_bytes'] + engine['prefix_bytes']) / 2**20:.1f} MiB, {engine['kv_tokens']} tokens",
        "problem": printable(tick["problem"] or "none"),
    }
    if "replicas" in tick:  # sums over them
        rows["replicas"] = f"{len(tick['replicas'])}: {printable(', '.join(tick['replicas']))}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


__all__ = ["top"]
