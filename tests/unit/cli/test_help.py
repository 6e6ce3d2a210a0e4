"""The help pages: one screen for a command with many options, and all of them with --help-all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from light import HAS_RAY
from typer.testing import CliRunner

from outrider.cli.main import SHORTER, CommandTable, app, in_list
from outrider_lab.train.settings import TRAINED

GROUP = typer.main.get_command(app)
COMMANDS = dict(GROUP.commands)  # pyright: ignore[reportAttributeAccessIssue]
COMMANDS |= {f"models {name}": one for name, one in COMMANDS.pop("models").commands.items()}
LINES, COLUMNS = 45, 80


def page(*words: str) -> list[str]:
    """The lines that a terminal of 80 columns shows."""
    shown = CliRunner().invoke(app, [*words], env={"COLUMNS": str(COLUMNS), "TERMINAL_WIDTH": str(COLUMNS)})
    assert shown.exit_code == 0, shown.output
    return shown.stdout.splitlines()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_page_is_one_screen_of_one_layout(command: str) -> None:
    """Two columns, names and text: no types, one box for the options, however many there are."""
    lines = page(*command.split(), "--help")
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert sum(line.startswith("╭") for line in lines) == 1 + any("Arguments" in line for line in lines)
    assert not any("<bool>" in line for line in lines)


@pytest.mark.parametrize("command", [name for name, one in COMMANDS.items() if one.usual])
def test_the_last_line_leads_to_all_options(command: str) -> None:
    options = [p for p in COMMANDS[command].params if p.param_type_name == "option"]
    assert (
        " ".join(page(*command.split(), "--help")).split()[-5:]
        == f"--help-all shows all {len(options)} options".split()
    )
    words = set(" ".join(page(*command.split(), "--help-all")).replace(",", " ").split())
    assert words >= {name for option in options for name in option.opts}


def test_the_list_of_methods_is_not_in_a_help_page() -> None:
    assert "token_recycling" not in " ".join(page("generate", "--help-all"))


def test_the_kinds_of_heads_are_in_the_help_page() -> None:
    assert all(kind in " ".join(page("train", "--help")) for kind in TRAINED)


def test_the_list_of_commands_has_a_heading_for_each_purpose() -> None:
    headings = [line.split()[1:-1] for line in page("--help") if line.startswith("╭")]
    assert [" ".join(word for word in words if word.strip("─╮")) for words in headings] == [
        *("Options", "Use", "Models", "Look inside", "Measure", "Build"),
    ]
    assert next(iter(COMMANDS)) == "run"


def test_the_list_says_of_each_command_what_its_page_says_and_imports_none() -> None:
    shown = "import sys; from outrider.cli.main import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown, "--help"], capture_output=True, text=True, check=True)
    modules = {
        name for name in done.stdout.splitlines()[-1].split() if name.startswith(("outrider", "pydantic", "numpy"))
    }
    assert modules == {"outrider", "outrider._version", "outrider.cli", "outrider.cli.main", "outrider.cli.terminal"} | {
        "outrider.core", "outrider.core.docstrings", "outrider.core.extras", "outrider.core.suggest", "outrider_lab",
        "outrider_lab.cli", *["outrider_ray"] * HAS_RAY,
    }  # fmt: skip
    for name in GROUP.commands:  # pyright: ignore[reportAttributeAccessIssue]
        listed, real = in_list(name, CommandTable()), CommandTable()[name]
        assert (listed.help, listed.rich_help_panel) == (real.help, real.rich_help_panel)
        assert type(listed) is not type(real)


def test_what_users_of_ollama_type_is_short_for_a_command_of_models() -> None:
    shown = " ".join(page("--help"))
    for name in SHORTER:
        assert f"│ {name} " not in shown
        assert page(name, "--help")[2:] == page("models", name, "--help")[2:]
