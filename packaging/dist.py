"""Make the wheels of every platform on one Linux machine, test what can be tested here, and say what could not be.

    make dist                                        # everything, into dist/
    .venv-dist/bin/python packaging/dist.py --only win_amd64 --no-tests

zig compiles for each platform, with the oldest system library that its tag promises. A failed build of the native library fails
the wheel. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = {  # tag of the wheel: target of zig
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
    "win_arm64": "aarch64-windows-gnu",
}
PURE = ("data", "certify", "lab", "ray")  # packages without native code: a wheel for all platforms
SOURCES = ("outrider", "setup.py", "pyproject.toml", "README.md", "LICENSE")
LARGEST = 2.5e6  # bytes of a wheel of the code
X86 = ("Nehalem", "SandyBridge", "Haswell")
ARM = ("cortex-a53", "neoverse-n1", "max")
# What zig's linker cannot hide on macOS: new and delete, which are malloc and free.
APPLE = ("_Zn", "_Zd", "__dso_handle", "_mh_dylib_header")
ISAS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "neon")


class NotHere(Exception):
    """A test cannot be run on this machine."""


def output(command: list[str], **options: object) -> str:
    """What a command prints. Raises SystemExit with the output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def zig(target: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++", "-target", target]


def tool(name: str) -> str:
    """The path of a program. Raises NotHere."""
    found = shutil.which(name)
    if found is None:
        raise NotHere(f"{name} is not installed")
    return found


def wheel(folder: Path, into: Path, environment: dict[str, str] | None = None) -> Path:
    """Build the wheel of a package. Only its tracked files are used."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        parts = SOURCES if folder == ROOT else (".",)
        tracked = output(["git", "-C", str(folder), "ls-files", *parts]).split("\n")
        for file in filter(None, tracked):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / file, copy / file)
        made = copy / "wheels"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        output([*pip, "--no-build-isolation", "-w", str(made), str(copy)], env={**os.environ, **(environment or {})})
        [file] = made.glob("*.whl")
        into.mkdir(exist_ok=True)
        return Path(shutil.move(file, into / file.name))


def checked(file: Path, tag: str) -> str:
    """What the wheel holds. Raises SystemExit for a wheel that must not be published."""
    size = file.stat().st_size
    if not file.name.endswith(f"-py3-none-{tag}.whl") or size > LARGEST:
        sys.exit(f"{file.name}: {size / 1e6:.1f} MB, expected py3-none-{tag} and at most {LARGEST / 1e6} MB")
    names = zipfile.ZipFile(file).namelist()
    libraries = [name for name in names if "/_kernels." in name]
    if len(libraries) != 1 or any(name.endswith((".safetensors", ".o")) for name in names):
        sys.exit(f"{file.name} has the libraries {libraries}, and must have one, and no weights")
    if "linux" in tag:
        shown = output([sys.executable, "-m", "auditwheel", "show", str(file)])
        version = tuple(map(int, tag.split("_")[1:3]))
        tags = [part for part in shown.replace('"', " ").split() if part.startswith("manylinux_")]
        if not any(tuple(map(int, part.split("_")[1:3])) <= version for part in tags):
            sys.exit(f"{file.name} needs a newer system than {tag}:\n{shown}")
    return f"{size / 1e6:.2f} MB"


def library(file: Path, folder: Path) -> Path:
    """The native library of a wheel, in a folder."""
    with zipfile.ZipFile(file) as archive:
        [name] = [name for name in archive.namelist() if "/_kernels." in name]
        return Path(archive.extract(name, folder))


def exports(file: Path, folder: Path) -> str:
    """Which functions the library shows to others: ours, and nothing else."""
    found = str(library(file, folder))
    if "win" in file.name.rpartition("-")[2]:
        lines = output([tool("llvm-readobj"), "--coff-exports", found]).splitlines()
        names = [line.split()[-1] for line in lines if line.strip().startswith("Name: ")]
    else:
        dynamic = [] if "macosx" in file.name else ["-D"]
        lines = output([tool("llvm-nm"), *dynamic, "--defined-only", "--extern-only", found]).splitlines()
        names = [line.split()[-1].removeprefix("_" if "macosx" in file.name else "") for line in lines]
    own = [name for name in names if name.startswith("outrider_")]
    left = [name for name in names if "macosx" in file.name and name.startswith(APPLE)]
    if other := set(names) - set(own) - set(left):
        sys.exit(f"{file.name} also shows {', '.join(sorted(other)[:5])}")
    if not own:
        sys.exit(f"{file.name} shows no function")
    return f"{len(own)} functions named outrider_, {len(left)} of the C++ runtime, and no other"


def witness(target: str, found: Path) -> Path:
    """tests/native/witness.cpp for a platform, with the library of the wheel."""
    made = found.with_name(f"witness{'.exe' if 'windows' in target else ''}")
    flags = ["-std=c++20", "-O1", f"-I{ROOT / 'outrider/kernels/cpu/src'}"]
    flags += [f"-Wl,-rpath,{found.parent}"] if "linux" in target else []
    output([*zig(target), *flags, str(ROOT / "tests/native/witness.cpp"), str(found), "-o", str(made)])
    return made


def emulated(tag: str, file: Path, folder: Path) -> str:
    """The library on emulated processors: which sets each one has. With each, every function gives the recorded hash."""
    target, found = PLATFORMS[tag], library(file, folder)
    runs = dict[str, list[str]]()
    if tag == "manylinux_2_28_x86_64":
        runs["this processor"] = []
        runs |= {cpu: [tool("qemu-x86_64"), "-cpu", cpu] for cpu in X86}
    elif tag == "manylinux_2_28_aarch64":
        root = "/usr/aarch64-linux-gnu"
        if not Path(root).exists():
            raise NotHere(f"{root} is missing; install g++-aarch64-linux-gnu")
        runs |= {cpu: [tool("qemu-aarch64"), "-L", root, "-cpu", cpu] for cpu in ARM}
    elif tag == "win_amd64":
        runs["wine"] = [tool("wine")]
    else:
        raise NotHere("no machine and no emulator for it")
    program, expected = witness(target, found), (ROOT / "tests/native/witness.txt").read_text().splitlines()
    environment, had = {**os.environ, "WINEDEBUG": "-all"}, list[str]()
    for name, command in runs.items():
        sets = list[str]()
        for isa in ("", *ISAS):  # the processor's own choice first
            call = [*command, str(program), *filter(None, [isa])]
            done = subprocess.run(call, capture_output=True, text=True, env=environment)
            if done.returncode == 2:
                continue  # it lacks this one
            if done.returncode or done.stdout.splitlines() != expected:
                sys.exit(
                    f"{tag}, {name}, {isa or 'chosen'}: not the hashes of witness.txt\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
                )
            sets.append(next(line for line in reversed(done.stderr.splitlines()) if not line.startswith("qemu-")))
        had.append(f"{name} gets {sets[0]} and has {', '.join(sets[1:])}")
    return f"{'; '.join(had)}; each gives the {len(expected)} hashes of the witness"


def installed(files: list[Path], folder: Path) -> str:
    """The wheel of this machine in a new environment without a compiler: a text, the kernels, and a part of the tests.

    Nothing brings torch there. Among the tests are those that write the recorded texts again.
    """
    venv.create(folder / "env", with_pip=True)
    bin_ = folder / "env" / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    began = perf_counter()
    output([*pip, "--no-compile", "-c", str(ROOT / "constraints.txt"), *map(str, files)])
    ready = perf_counter()
    alone = {"PATH": str(bin_), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}  # no compiler is found
    text = output([str(bin_ / "outrider"), "generate", "def f(x):", "-n", "16", "-t", "0"], env=alone)
    took = f"pip took {ready - began:.0f} s with its downloads, the first text {perf_counter() - ready:.0f} s"
    if not text.strip():
        sys.exit("the installed command wrote no text")
    asked = [str(bin_ / "python"), "-c", "from outrider.kernels import cpu; print(cpu.isa())"]
    isa = output(asked, env=alone, cwd=folder).strip()  # not the checkout's package
    if isa == "portable":
        sys.exit("the installed library has chosen the portable instruction set on this machine")
    output([*pip, "pytest", "hypothesis"])
    away = folder / "away"
    for name in ("tests", "lab/tests"):
        shutil.copytree(ROOT / name, away / name)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy2(ROOT / name, away)
    parts = ("tests/unit/kernels", "tests/exact/test_recorded.py", "tests/unit/models/test_untrusted.py")
    parts += ("lab/tests/test_fingerprints.py",)
    printed = output([str(bin_ / "python"), "-m", "pytest", *parts], env=alone, cwd=away)
    last = next(line for line in reversed(printed.splitlines()) if " passed" in line)
    return f"kernels {isa}; {took}; tests of the installed package: {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PLATFORMS, action="append", help="a platform; may be given again")
    parser.add_argument("--no-tests", action="store_true", help="build and check the wheels, run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    made, untested = dict[str, Path](), list[str]()
    for tag in arguments.only or PLATFORMS:
        environment = {"CXX": " ".join(zig(PLATFORMS[tag])), "OUTRIDER_PLATFORM": tag}
        made[tag] = wheel(ROOT, arguments.out, environment)
        print(f"{tag}: {checked(made[tag], tag)}", flush=True)
    pure = [wheel(ROOT / name, arguments.out) for name in PURE]
    print(*(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB" for file in pure), sep="\n", flush=True)
    if arguments.no_tests:
        return

    def test(what: str, run: Callable[[Path], str]) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{what}: {run(Path(folder))}", flush=True)
        except NotHere as reason:
            untested.append(f"{what}: {reason}")

    for tag, file in made.items():
        test(f"{tag}, functions", lambda folder, file=file: exports(file, folder))
        test(f"{tag}, library", lambda folder, tag=tag, file=file: emulated(tag, file, folder))
    here = "manylinux_2_28_x86_64"
    if here in made:
        test(f"{here}, installed", lambda folder: installed([made[here], *pure], folder))
    for tag in made:
        if tag != here:
            untested.append(f"{tag}, installed: it needs such a machine (.github/workflows/wheels.yml)")
    print("\nNot tested here:", *untested, sep="\n  ")


if __name__ == "__main__":
    main()
