"""The page of a plan: one HTML file that needs no network. It is put together as the page of `outrider explain`."""

from __future__ import annotations

from pathlib import Path

from outrider.core.files import written_whole
from outrider.lab.plan.answer import PlanAnswer
from outrider.pages.page import assemble

ASSETS = Path(__file__).parent / "assets"


def render(found: PlanAnswer) -> str:
    """The page. Texts of the plan are data, never markup."""
    return assemble(ASSETS / "plan.html", ASSETS / "plan.css", ASSETS / "plan.js", found.to_json())


def write(found: PlanAnswer, path: Path) -> None:
    """Write the page. The file is replaced as a whole."""
    with written_whole(path) as part:
        part.write_text(render(found), encoding="utf-8")


__all__ = ["render", "write"]
