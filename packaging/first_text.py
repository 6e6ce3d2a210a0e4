"""From nothing to the first token: how long an installation takes, and then the first text of the built-in model.

    make dist                                                    # the wheels
    .venv-dist/bin/python packaging/first_text.py FOLDER         # all ways; FOLDER keeps the dependencies
    .venv-dist/bin/python packaging/first_text.py FOLDER --prepare
    .venv-dist/bin/python packaging/first_text.py FOLDER --ways pip

Every way has a new environment, without a compiler, and downloads nothing. pip finds the wheels in a folder, and uv has them
unpacked in its cache. A line has the seconds of a clock, and of processors in the program and in the system. The first text
compiles what it imports, the second does not.
"""

from __future__ import annotations

import argparse
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("pip", "uv")
UV = str(Path(sys.executable).with_name("uv"))
TEXT = ["generate", "def f(x):", "-n", "1", "-t", "0"]


def wheels() -> list[str]:
    """Those of this machine. Raises SystemExit if `make dist` made none."""
    found = [*ROOT.glob(f"dist/outrider-*linux*{platform.machine()}.whl"), *ROOT.glob("dist/outrider_data-*.whl")]
    if len(found) != 2:
        sys.exit(f"dist/ has {len(found)} of the two wheels of this machine; make them: make dist")
    return [*map(str, found)]


def timed(what: str, command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command and print how long it took. Raises SystemExit with what it printed if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    took, after = perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    program, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    print(f"{what:32} {took:5.1f} s, processors {program:5.1f} and {system:4.1f}", flush=True)


def installer(way: str, folder: Path, python: Path) -> list[str]:
    """The command that installs packages into the environment of this Python."""
    if way == "uv":
        return [UV, "pip", "install", "-q", "--offline", "--python", str(python), "--cache-dir", str(folder / "uv"),
                "--no-index", "--find-links", str(folder / "cached")]  # fmt: skip
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    return [*pip, "--no-index", "--find-links", str(folder / "cached")]


def prepare(folder: Path) -> None:
    """Fetch what the wheels need, and let uv unpack it."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", str(folder / "cached")]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *wheels()], check=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        venv.create(name)
        subprocess.run([*installer("uv", folder, Path(name, "bin/python")), *wheels()], check=True)


def measured(way: str, folder: Path) -> None:
    """Install in this way and write two texts."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = Path(name, "env")
        venv.create(made, with_pip=way != "uv")
        command = installer(way, folder, made / "bin/python")
        timed(f"{way}: install", [*command, *wheels()])
        alone = {"PATH": str(made / "bin"), "HOME": name, "XDG_CACHE_HOME": f"{name}/cache"}  # no compiler is found
        program = [str(made / "bin/outrider"), *TEXT]
        timed(f"{way}: first token", program, alone)
        timed(f"{way}: again", program, alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="keeps the dependencies; on the same disk as the environments")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--prepare", action="store_true", help="fetch the dependencies only; else, if they are missing")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.prepare or not (folder / "uv").exists():
        shutil.rmtree(folder / "uv", ignore_errors=True)
        prepare(folder)
    if not arguments.prepare:
        for way in arguments.ways:
            measured(way, folder)


if __name__ == "__main__":
    main()
