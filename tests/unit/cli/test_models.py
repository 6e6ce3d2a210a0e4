"""`outrider list`, `pull` and `rm`: what is here, and nothing outside of the cache folders is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.models.builtin.download import DOWNLOADS
from outrider.models.packs.folder import MANIFEST

NAME = "builtin:smollm2-135m"


def run(*words: str, typed: str = ""):
    return CliRunner().invoke(app, [*words], input=typed, env={"COLUMNS": "80"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, with a model in outrider's cache and one in the hub's."""
    from huggingface_hub import constants

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    hub = tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    snapshot = hub / "models--ada--small" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (hub / "models--ada--small" / "refs").mkdir()
    (hub / "models--ada--small" / "refs" / "main").write_text("0" * 40)
    file = DOWNLOADS[NAME].cached
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(DOWNLOADS[NAME].size)
    return tmp_path


def test_each_path_has_a_line_of_its_own(home: Path) -> None:
    lines = run("list").stdout.splitlines()
    assert "  ~/.cache/outrider/models/SmolLM2-135M-Instruct.Q4_1.gguf" in lines
    assert "  ~/.cache/huggingface/hub/models--ada--small" in lines
    assert any(line.startswith(NAME) and "98.4 MB" in line for line in lines)


def test_a_pack_of_another_version_says_so(home: Path) -> None:
    folder = home / ".cache/outrider/packs/old-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text('{"source": "old.gguf", "weights": "gguf", "made_by": {}}')
    shown = run("list").stdout
    assert "old-0123456789abcdef" in shown
    assert "from another version of outrider, which alone can use it" in shown
    assert "?" not in shown
    assert run("rm", "old", "-y").exit_code == 2
    assert "removed old-0123456789abcdef" in run("rm", "old-0123456789abcdef", "-y").stdout
    assert not folder.exists()


def test_rm_asks_and_removes(home: Path) -> None:
    file = DOWNLOADS[NAME].cached
    assert run("rm", NAME, typed="n\n").exit_code == 1
    assert run("rm", NAME).exit_code == 130  # nobody answers
    assert file.exists()
    assert f"removed {NAME}" in run("rm", NAME, typed="y\n").stdout
    assert not file.exists()
    assert "not here; outrider pull" in run("list").stdout
    assert "removed ada/small" in run("rm", "ada/small", "-y").stdout
    assert not (home / ".cache/huggingface/hub/models--ada--small").exists()


def test_rm_all_leaves_the_cache_of_the_hub(home: Path) -> None:
    assert run("rm", "all", "-y").exit_code == 0
    assert not DOWNLOADS[NAME].cached.exists()
    assert (home / ".cache/huggingface/hub/models--ada--small").exists()


@pytest.mark.parametrize("name", ["builtin:code", "../../mine", "mine.gguf", "/etc/passwd", "."])
def test_rm_removes_nothing_outside_of_the_cache_folders(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "mine.gguf").write_bytes(b"x")
    before = sorted(home.rglob("*"))
    done = run("rm", name, "-y")
    assert (done.exit_code, "the caches hold no" in done.stderr) == (2, True)
    assert sorted(home.rglob("*")) == before


def test_pull_says_where_a_model_is_and_fetches_no_path(home: Path) -> None:
    assert run("pull", NAME).stdout.splitlines()[-1] == "  ~/.cache/outrider/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    for name in ("/etc/passwd", "builtin:nope", "./a/b", "a/b/c", "word"):
        assert "is no name to fetch" in run("pull", name).stderr
