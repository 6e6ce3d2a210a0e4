"""What action.yml runs: the command with the inputs of the action, its verdict, and a summary for the page of the run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from outrider_certify.board import amount, seen
from outrider_certify.certificate import Certificate

_PAGE = Path("certificate.html")
_INCONCLUSIVE = 3


def main() -> int:
    """Read the inputs from the environment, certify, and tell GitHub. Returns the exit code of the step."""
    inputs = os.environ
    words = [inputs["SUBJECT"], *shlex.split(inputs.get("OPTIONS", "")), "--budget", inputs.get("BUDGET", "10m")]
    command = [sys.executable, "-c", "from outrider_certify.cli import main; main()", *words, "-o", str(_PAGE)]
    code = subprocess.run(command, check=False).returncode
    data = _PAGE.with_suffix(".json")
    if data.exists():
        certificate = Certificate.load(data)
        _tell("GITHUB_OUTPUT", f"verdict={certificate.conclusion.value}\n")
        _tell("GITHUB_STEP_SUMMARY", summary(certificate))
    return 0 if code == _INCONCLUSIVE and inputs.get("STRICT") != "true" else code


def summary(certificate: Certificate) -> str:
    """The certificate as a table of Markdown."""
    rows = [
        f"| {p.kind} | **{p.conclusion.value}** | {amount(p)} | {_cell(seen(p) or p.sentence)} |"
        for p in certificate.parts
    ]
    head = [
        f"## {_cell(certificate.subject)}: {certificate.conclusion.value}",
        "",
        "| kind | verdict | amount | seen |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _cell(text: str) -> str:
    """A text that is shown, and not read as Markdown or HTML."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


def _tell(file: str, text: str) -> None:
    if path := os.environ.get(file):
        with open(path, "a", encoding="utf-8") as out:
            out.write(text)


if __name__ == "__main__":
    sys.exit(main())
