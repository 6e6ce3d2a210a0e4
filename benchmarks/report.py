"""Records as tables: on the terminal with rich, in documents as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 132)
ROWS = ("2", "4", "8", "16")


def show(value: Any, digits: int = 2) -> str:
    """A number as it is printed; an absent one is a dash."""
    if value is None or value == "":
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def forward_rows(records: Iterable[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    head = ["side", "ms at M=1", *(f"M={m}" for m in ROWS), "GB/s", "of read bandwidth"]
    body = []
    for r in records:
        ratio = {str(k): v for k, v in r["ratio"].items()}
        body.append(
            [
                r["side"],
                show(r["ms"], 1),
                *(show(ratio.get(m)) for m in ROWS),
                show(r["gb_per_second"], 1),
                show(r.get("share")),
            ]
        )
    return head, body


def decode_rows(records: Iterable[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    head = [
        "side", "method", "tokens/s", "spread", "speedup", "acceptance length", "accepted/drafted", "right when judged",
        "draft share", "overhead share", "allowed", "efficiency", "identical texts",
    ]  # fmt: skip
    body = []
    for r in records:
        low, high = r["spread"]
        body.append(
            [r["side"], r["method"], show(r["tokens_per_second"], 1), f"{low:.1f}-{high:.1f}", show(r["speedup"]),
             show(r["acceptance_length"]), show(r["acceptance_rate"]), show(r["conditional_rate"]), show(r["draft_share"]),
             show(r["overhead_share"]), show(r.get("allowed_speedup")), show(r.get("efficiency")),
             f"{r['identical_texts']}/{r['texts']}"]
        )  # fmt: skip
    return head, body


SHORT = {
    "acceptance length": "length", "accepted/drafted": "accepted", "right when judged": "right", "draft share": "draft",
    "overhead share": "overhead", "identical texts": "same text", "of read bandwidth": "of read",
}  # fmt: skip


def rich_table(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for i, name in enumerate(head):
        table.add_column(SHORT.get(name, name), justify="left" if i < 2 else "right")
    for row in body:
        table.add_row(*row)
    return table


def forward_table(title: str, records: Sequence[dict[str, Any]]) -> Table:
    return rich_table(title, *forward_rows(records))


def decode_table(title: str, records: Sequence[dict[str, Any]]) -> Table:
    return rich_table(title, *decode_rows(records))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
