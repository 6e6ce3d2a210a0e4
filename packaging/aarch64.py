"""Run Python with the wheel for Linux on ARM, on an emulated processor. It shows texts and bits, and never a speed.

    make dist                                                               # the wheel
    .venv-dist/bin/python packaging/aarch64.py FOLDER                       # a system for it, in FOLDER: 0.5 GB
    python -m benchmarks.instruction_sets FILE.gguf --record texts.json     # on this machine
    .venv-dist/bin/python packaging/aarch64.py FOLDER -m benchmarks.instruction_sets FILE.gguf --against texts.json

Needs `apt-get install debootstrap qemu-user`, and root to make the system. What follows FOLDER goes to Python, with this folder's
benchmarks. The packs of this machine are used, so run the same here first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "python3.11,libgomp1"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def make(folder: Path) -> None:
    """Debian's Python for ARM, unpacked without running any of it, and the wheel with what it needs."""
    chosen = ["--foreign", "--arch=arm64", "--variant=minbase", f"--include={SYSTEM}"]
    subprocess.run(["debootstrap", *chosen, "bookworm", str(folder)], check=True)
    for file in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(file), str(folder)], check=True)
    install(folder)


def install(folder: Path) -> None:
    """The packages that the wheel needs, for ARM."""
    wheels = [*(ROOT / "dist").glob("outrider-*manylinux_2_28_aarch64.whl")]
    if len(wheels) != 1:
        sys.exit(
            f"{ROOT / 'dist'} has {len(wheels)} wheels for Linux on ARM, and one is needed: remove them, then `make dist`"
        )
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip = [sys.executable, "-m", "pip", "install", "--target", str(folder / "opt/site"), "--upgrade", "--no-compile"]
    pip += ["--only-binary=:all:", "--python-version=3.11", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*pip, *needed], check=True)
    subprocess.run([*pip, "--no-deps", str(wheels[0])], check=True)


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, rest = Path(sys.argv[1]).resolve(), sys.argv[2:]
    python = folder / "usr/bin/python3.11"
    if not rest:
        install(folder) if python.exists() else make(folder)
        return 0
    # the wheel's package before that of this folder
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'opt/site'}:{ROOT}", "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        ["qemu-aarch64", "-L", str(folder), str(python), *rest], env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
