"""`outrider calibrate`: what it prints and keeps, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.calibrate import WHOLE, all_stored

PAIR = '{"method": ["suffix", "draft_model"], "model": "builtin:code-draft"}'


def test_it_prints_and_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["calibrate", "builtin:code", "--speculative-config", PAIR])
    assert done.exit_code == 0, done.output
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("A plain step, which writes one token, takes ")
    assert [line.split()[2] for line in lines if line.startswith("  to check")] == [str(n - 1) for n in WHOLE[1:]]
    assert "draft_model drafts a token in" in lines[-1]
    assert str(tmp_path) in last
    [kept] = all_stored()
    assert tuple(sorted(kept.target)) == WHOLE


@pytest.mark.parametrize("config", ['{"method": "none"}', '{"method": "suffix", "controller": "fixed"}'])
def test_it_refuses_what_needs_no_costs(config: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", "builtin:code", "--speculative-config", config])
    assert done.exit_code == 2
    assert "uses no measured costs" in done.output + done.stderr


@pytest.mark.parametrize("old", ["calibrated", "optimal"])
def test_old_names_of_the_controller_work_and_warn(old: str) -> None:
    with pytest.warns(DeprecationWarning, match='is now "adaptive"'):
        config = SpeculativeConfig.of({"method": "suffix", "controller": old})
    assert config.controller == "adaptive"
